"""How every figure looks, in light and in dark.

Knows matplotlib, which is an extra, and nothing of what is drawn.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftproof.errors import BadInput

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = (".png", ".svg", ".pdf")
"""Kinds of file that a figure can be written to."""
DARK = "-dark"
"""A figure whose file name ends with this, before the suffix, is drawn for dark pages."""


@dataclass(frozen=True)
class Theme:
    """Colours of a figure; those of the series are told apart by colour-blind readers, too."""

    background: str
    text: str
    faint: str
    grid: str
    series: tuple[str, ...]

    def color(self, place: int) -> str:
        """Of the series at this place; 0 is plain decoding."""
        return self.series[0] if place == 0 else self.series[1 + (place - 1) % 6]


LIGHT_THEME = Theme("#ffffff", "#1f2328", "#59636e", "#e3e6ea",
                    ("#8b949e", "#1f6fb4", "#c8501e", "#23875a", "#8a4baf", "#a67c00", "#c2397b"))
DARK_THEME = Theme("#0d1117", "#e6edf3", "#9198a1", "#2b3139",
                   ("#8b949e", "#58a6ff", "#ff9d6b", "#56d39b", "#cf9bff", "#e3b341", "#ff8fc0"))


def theme_of(file: Path) -> Theme:
    """Dark for a file whose name ends in -dark, such as speed-dark.png."""
    return DARK_THEME if file.stem.endswith(DARK) else LIGHT_THEME


def can_plot() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def check_plot_file(file: Path | None) -> None:
    """Refuse a figure that could not be written at the end, before the work.

    Args:
        file: Where it will be written; None is no figure.

    Raises:
        BadInput: matplotlib is missing, or the suffix names no format of figures.
    """
    if file is None:
        return
    if file.suffix.lower() not in FORMATS:
        raise BadInput(f"{file.name} is no picture; name a file that ends in {', '.join(FORMATS)}")
    if not can_plot():
        raise BadInput("pictures are drawn by matplotlib, which is not installed: "
                       "pip install matplotlib")


def new_figure(theme: Theme, width: float, height: float) -> Figure:
    """An empty figure, in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), facecolor=theme.background, layout="constrained")


def dress(axes: Axes, theme: Theme, *, title: str = "", x: str = "", y: str = "",
          grid: str = "y") -> None:  # fmt: skip
    """Give axes the look of the theme, their labels, and grid lines across one axis."""
    axes.set_facecolor(theme.background)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(theme.faint)
    axes.tick_params(colors=theme.faint, labelcolor=theme.text, labelsize=10.5)
    axes.grid(axis=grid, color=theme.grid, linewidth=0.8)   # type: ignore[arg-type]
    axes.set_axisbelow(True)
    axes.set_title(title, color=theme.text, fontsize=11.5, loc="left")
    axes.set_xlabel(x, color=theme.text, fontsize=11)
    axes.set_ylabel(y, color=theme.text, fontsize=11)


def add_legend(figure: Figure, axes: Axes, theme: Theme, columns: int = 4) -> None:
    """One legend below all panels, of what one of them shows."""
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        made = figure.legend(handles, labels, loc="outside lower center", frameon=False,
                             ncols=min(columns, len(labels)), fontsize=10.5)
        for text in made.get_texts():
            text.set_color(theme.text)


def set_heading(figure: Figure, theme: Theme, heading: str) -> None:
    """A line above all panels."""
    figure.suptitle(heading, color=theme.text, fontsize=12, x=0.01, ha="left")


def save(figure: Figure, file: Path) -> None:
    """Write a figure in the format that the suffix names; nothing is left half written."""
    part = file.with_name(f".part-{file.name}")
    options: dict[str, Any] = {"dpi": 160} if file.suffix.lower() == ".png" else {}
    figure.savefig(part, facecolor=figure.get_facecolor(), **options)
    part.replace(file)


def short_name(name: str) -> str:
    """A method's name for a label: of a folder or file only the last part."""
    parts = [part.rstrip("/").rsplit("/", 1)[-1] if "/" in part else part
             for part in name.split("+")]
    joined = "+".join(parts)
    return joined if len(joined) <= 26 else joined[:24] + "…"
