"""The picture of a plan: predicted speed-ups by drafter and batch, and the cost of a round."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from draftproof.plan.planner import PLAIN, Plan, Prediction
from draftproof.plots.style import (
    Theme,
    add_legend,
    dress,
    new_figure,
    save,
    set_heading,
    short_name,
    theme_of,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_NODES = 16
"""Draft tokens up to which costs are drawn, if the plan tried no more."""


def plot(plan: Plan, file: Path) -> None:
    """Draw a plan: a panel of speed-ups per temperature, and one of the cost of a round.

    Args:
        plan: The plan.
        file: The file of the picture, whose suffix determines the format.
    """
    theme, temperatures = theme_of(file), plan.config.temperatures
    figure = new_figure(theme, 4.6 * (len(temperatures) + 1), 4.6)
    panels = list(figure.subplots(1, len(temperatures) + 1, squeeze=False)[0])
    for axes in panels[1:-1]:
        axes.sharey(panels[0])
    best = plan.rows()
    drafters = list(dict.fromkeys(row.drafter for row in best if row.drafter != PLAIN))
    for axes, temperature in zip(panels, temperatures, strict=False):
        rows = [row for row in best if row.temperature == temperature]
        _draw_speed_ups(axes, theme, rows, drafters, plan.config.batches)
        title = f"T = {temperature:g}" if temperature else "greedy"
        dress(axes, theme, title=title, x="batch size",
              y="predicted speed-up over plain decoding")
    _draw_costs(panels[-1], theme, plan)
    add_legend(figure, panels[0], theme)
    how = "timed here" if plan.machine.measured else "calculated, not measured"
    set_heading(figure, theme, f"{short_name(plan.model)} on {plan.machine.name} ({how})")
    save(figure, file)


def _draw_speed_ups(
    axes: Axes, theme: Theme, rows: Sequence[Prediction], drafters: Sequence[str],
    batches: Sequence[int],
) -> None:  # fmt: skip
    """Draw bars of all drafters side by side for every batch, with 95 % intervals."""
    width = 0.8 / max(1, len(drafters))
    for number, drafter in enumerate(drafters):
        for row in rows:
            if row.drafter != drafter:
                continue
            x = batches.index(row.batch) + (number - (len(drafters) - 1) / 2) * width
            label = short_name(drafter) if row.batch == batches[0] else None
            axes.bar(x, row.speed_up, width=0.88 * width, color=theme.color(number + 1),
                     label=label)
            sides = [[row.speed_up - row.low], [row.high - row.speed_up]]
            axes.errorbar(x, row.speed_up, yerr=sides, color=theme.text, capsize=3, linewidth=1.2)
            axes.annotate(f"{row.speed_up:.2f}", (x, row.high), xytext=(0, 4), ha="center",
                          textcoords="offset points", color=theme.text,
                          fontsize=10 if len(drafters) * len(batches) <= 8 else 7.5)
    axes.axhline(1.0, color=theme.faint, linewidth=1.0, linestyle=(0, (4, 3)))
    axes.set_xticks(range(len(batches)), [str(batch) for batch in batches])
    axes.margins(y=0.12)
    axes.set_xlim(-0.6, len(batches) - 0.4)


def _draw_costs(axes: Axes, theme: Theme, plan: Plan) -> None:
    """Draw the milliseconds of a round by draft tokens per row, with a line per batch."""
    tried = [row.budget for row in plan.predictions if isinstance(row.budget, int)]
    nodes = range(max([MOST_NODES, *tried]) + 1)
    sampled = plan.config.temperatures[0] > 0
    lines = list[tuple[float, str]]()
    for number, batch in enumerate(plan.config.batches, 1):
        costs = [1000 * plan.machine.round(sampled, batch, count, 0) for count in nodes]
        axes.plot(list(nodes), costs, color=theme.color(number), linewidth=2)
        lines.append((costs[-1], f"batch {batch}"))
    for place, (end, label) in zip(_apart(lines), lines, strict=True):
        axes.annotate(label, (nodes[-1], end), xytext=(nodes[-1] * 1.04, place),
                      va="center", color=theme.text, fontsize=10, annotation_clip=False)
    dress(axes, theme, title="cost of a round", x="draft tokens per row", y="milliseconds")
    axes.set_xlim(0, nodes[-1] * 1.3)
    axes.set_xticks(range(0, len(nodes), max(1, len(nodes) // 4)))
    axes.set_ylim(0)


def _apart(lines: Sequence[tuple[float, str]]) -> list[float]:
    """Heights of labels at the ends of lines, with enough distance to be legible."""
    gap, heights = 0.06 * max(end for end, _ in lines), dict[int, float]()
    below = float("-inf")
    for index in sorted(range(len(lines)), key=lambda index: lines[index][0]):
        heights[index] = below = max(lines[index][0], below + gap)
    return [heights[index] for index in range(len(lines))]
