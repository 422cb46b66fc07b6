"""Pictures of a run: loss and accuracy over the tokens read. Knows the log; needs matplotlib, which is optional."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

INK, GRID, PAPER = "#1f2933", "#e4e7eb", "#ffffff"
SHADES = ("#0b4f6c", "#1b7f9e", "#3aa6b9", "#e0a03b", "#d1603d", "#9d3c72", "#5b4b8a", "#7b8794")
"""One colour per step of the head, from near to far."""


def write_plots(log: Path, folder: Path, title: str) -> bool:
    """Write loss.png and accuracy.png; False if matplotlib is missing, or nothing was logged."""
    try:
        import matplotlib
    except ImportError:
        return False
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    if not any("held_out" in row for row in rows):
        return False
    style: Any = {
        "font.size": 10, "axes.edgecolor": GRID, "axes.labelcolor": INK, "text.color": INK, "xtick.color": INK,
        "ytick.color": INK, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": GRID,
        "axes.axisbelow": True, "savefig.dpi": 160, "figure.facecolor": PAPER, "legend.frameon": False,
    }  # fmt: skip
    with matplotlib.rc_context(style):
        _save(_loss(rows, title), folder / "loss.png")
        _save(_accuracy([row for row in rows if "held_out" in row], title), folder / "accuracy.png")
    return True


def _loss(rows: Sequence[dict[str, Any]], title: str) -> Any:
    figure, axes = _figure(1, (7.2, 4.0))
    read = [row["tokens"] / 1e6 for row in rows]
    smooth = _smoothed([row["loss"] for row in rows])
    axes[0].plot(read, [row["loss"] for row in rows], color=SHADES[2], alpha=0.25, linewidth=0.8)
    axes[0].plot(read, smooth, color=SHADES[0], linewidth=1.8, label="training")
    exams = [row for row in rows if "held_out" in row]
    axes[0].plot(
        [row["tokens"] / 1e6 for row in exams], [row["held_out"]["loss"] for row in exams],
        color=SHADES[4], marker="o", markersize=4, linewidth=1.4, label="held out",
    )  # fmt: skip
    top = sorted(row["loss"] for row in rows)[max(0, int(0.98 * len(rows)) - 1)]        # the first steps would squeeze the rest
    axes[0].set_ylim(top=max(top, *(row["held_out"]["loss"] for row in exams)) * 1.02)
    axes[0].set(xlabel="million tokens read", ylabel="loss, all steps together")
    axes[0].legend()
    axes[0].set_title(title, loc="left", fontsize=11, fontweight="bold")
    return figure


def _accuracy(exams: Sequence[dict[str, Any]], title: str) -> Any:
    """Left and middle: how often the first choice, or one of five, is right; right: what that is worth."""
    figure, axes = _figure(3, (12.0, 4.0))
    read = [row["tokens"] / 1e6 for row in exams]
    for axis, key, what in ((axes[0], "top1", "first choice is right"), (axes[1], "top5", "one of five choices is right")):
        for step in range(len(exams[0]["held_out"][key])):
            hits = [100 * row["held_out"][key][step] for row in exams]
            colour = SHADES[step % len(SHADES)]
            axis.plot(read, hits, color=colour, linewidth=1.8, marker="o", markersize=3, label=f"token {step + 2}")
            _last_value(axis, read, hits, "{:.0f}", colour)
        axis.set_ylim(0, 100)
        axis.set(xlabel="million tokens read", ylabel="% of held-out places")
        axis.set_title(what, loc="left", fontsize=11)
    axes[0].legend(title="ahead of the text", fontsize=9, loc="upper left", ncols=2)
    worth = [row["held_out"]["tokens_per_round"] for row in exams]
    axes[2].plot(read, worth, color=SHADES[4], linewidth=2.2, marker="o", markersize=3)
    _last_value(axes[2], read, worth, "{:.2f}", SHADES[4])
    axes[2].set_ylim(bottom=1)
    axes[2].set(xlabel="million tokens read", ylabel="tokens")
    axes[2].set_title("expected per round, chain of first choices", loc="left", fontsize=11)
    figure.suptitle(title, x=0.012, ha="left", fontsize=12, fontweight="bold")
    return figure


def _last_value(axis: Any, read: Sequence[float], values: Sequence[float], form: str, colour: str) -> None:
    """The last value beside its place."""
    place = (read[-1], values[-1])
    axis.annotate(form.format(values[-1]), place, (6, 0), textcoords="offset points", va="center", color=colour, fontsize=9)


def _figure(columns: int, size: tuple[float, float]) -> tuple[Any, list[Any]]:
    """A figure that needs no display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, columns, squeeze=False)
    return figure, list(axes[0])


def _smoothed(values: Sequence[float]) -> list[float]:
    """Means over a thirtieth of the run around each place."""
    reach = max(1, len(values) // 60)
    sums = [0.0, *accumulate(values)]
    spans = [(max(0, place - reach), min(len(values), place + reach + 1)) for place in range(len(values))]
    return [(sums[end] - sums[start]) / (end - start) for start, end in spans]


def _save(figure: Any, file: Path) -> None:
    """The whole picture or none."""
    part = file.with_suffix(".part")
    figure.savefig(part, format="png")
    part.replace(file)
