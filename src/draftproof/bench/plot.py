"""The picture of a measurement: speed-ups with intervals, in a panel per setting."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from draftproof.bench.report import Figures
from draftproof.plots.style import (
    Theme,
    dress,
    new_figure,
    save,
    set_heading,
    short_name,
    theme_of,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

AXIS = "speed-up over plain decoding (95 % interval)"
COLUMNS = 2
"""Panels side by side."""


def plot(figures: Sequence[Figures], file: Path, heading: str) -> None:
    """Draw speed-ups over plain decoding as bars with 95 % intervals.

    Args:
        figures: The measured figures, in the order of the table.
        file: The file of the picture, whose suffix determines the format.
        heading: Model and conditions, in one line.
    """
    theme = theme_of(file)
    panels = [list(group) for _, group in groupby(figures, key=lambda figure: figure.setting)]
    columns = min(COLUMNS, len(panels))
    rows = -(-len(panels) // columns)
    bars = max(map(len, panels))
    made = new_figure(theme, 8.0 if columns == 1 else 13.0, 1.1 + rows * (0.9 + 0.42 * bars))
    grid = made.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    for place, (panel, axes) in enumerate(zip(panels, grid.flat, strict=False)):
        last = place + columns >= len(panels)
        dress(axes, theme, title=str(panel[0].setting), x=AXIS if last else "", grid="x")
        _draw_setting(axes, theme, panel)
    grid[0][0].invert_yaxis()
    for axes in list(grid.flat)[len(panels):]:
        axes.set_visible(False)
    set_heading(made, theme, heading)
    save(made, file)


def _draw_setting(axes: Axes, theme: Theme, panel: Sequence[Figures]) -> None:
    """Draw one bar per method, with the first on top, followed by its figures."""
    ends = [figure.speed_up.high or figure.speed_up.median
            for figure in panel if figure.speed_up is not None]
    right = max([1.0, *ends])
    room = 2.1 if any(figure.same < figure.texts for figure in panel) else 1.6
    for place, figure in enumerate(panel):
        ratio = figure.speed_up
        if ratio is None:
            continue
        axes.barh(place, ratio.median, height=0.66, color=theme.color(place))
        end = ratio.median
        if ratio.low is not None and ratio.high is not None:
            sides = [[ratio.median - ratio.low], [ratio.high - ratio.median]]
            axes.errorbar(ratio.median, place, xerr=sides, color=theme.text, capsize=3,
                          linewidth=1.2)
            end = max(end, ratio.high)
        differs = "" if figure.same == figure.texts else f", {figure.same}/{figure.texts} same text"
        label = f"{ratio.median:.2f}×, {figure.tokens_per_second:.0f} tokens/s{differs}"
        axes.text(end + 0.02 * right, place, label, va="center", color=theme.text, fontsize=10)
    axes.axvline(1.0, color=theme.faint, linewidth=1.0, linestyle=(0, (4, 3)))
    axes.set_yticks(range(len(panel)), [short_name(figure.method) for figure in panel])
    axes.set_xlim(0, max(axes.get_xlim()[1], right * room))
