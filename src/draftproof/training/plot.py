"""The curves of a training run: loss and tokens per round by step, as a picture and as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from draftproof.plots.style import can_plot, dress, new_figure, save, theme_of

CURVES = "curves.png"
"""The picture in the folder of a run, which is drawn again after each evaluation."""
SMOOTH = 20
"""Parts of a run over each of which the training loss is averaged for the picture."""
BLOCKS = " ▁▂▃▄▅▆▇█"
SHOWN = 14
"""The most evaluations that the terminal shows."""
Row = Mapping[str, Any]
"""A line of log.jsonl."""
Points = list[tuple[float, float]]


def held_out(log: Sequence[Row], name: str) -> Points:
    """A figure from every evaluation, by step."""
    return [(row["step"], row["held_out"][name]) for row in log if "held_out" in row]


def smoothed(log: Sequence[Row]) -> Points:
    """The training loss by step, averaged over parts of the run."""
    size = max(1, len(log) // SMOOTH)
    parts = [log[start : start + size] for start in range(0, len(log), size)]
    return [(part[-1]["step"], sum(row["loss"] for row in part) / len(part)) for part in parts]


def plot(log: Sequence[Row], file: Path) -> None:
    """Draw the curves of a run, if matplotlib is installed.

    Args:
        log: Lines of log.jsonl.
        file: The file of the picture, whose suffix determines the format.
    """
    if not can_plot() or not any("held_out" in row for row in log):
        return
    theme = theme_of(file)
    figure = new_figure(theme, 9.6, 3.9)
    losses, rates = figure.subplots(1, 2)
    losses.plot(*zip(*smoothed(log), strict=True), color=theme.color(1), linewidth=2,
                label="training (average)")
    losses.plot(*zip(*held_out(log, "loss"), strict=True), color=theme.color(2), linewidth=2,
                marker="o", markersize=5, label="held-out text")
    dress(losses, theme, title="loss, summed over heads", x="step", y="loss")
    losses.legend(frameon=False, labelcolor=theme.text, fontsize=10.5)
    points = held_out(log, "tokens_per_round")
    rates.plot(*zip(*points, strict=True), color=theme.color(3), linewidth=2, marker="o",
               markersize=5)
    step, rate = points[-1]
    rates.annotate(f"{rate:.2f}", (step, rate), xytext=(0, 8), textcoords="offset points",
                   ha="right", color=theme.text, fontsize=11)
    dress(rates, theme, title="tokens per round on held-out text", x="step",
          y="tokens per round (1 is plain)")
    rates.set_ylim(bottom=min(1.0, min(rate for _, rate in points)))
    rates.margins(y=0.15)
    save(figure, file)


def as_text(log: Sequence[Row], height: int = 6) -> str:
    """Held-out loss and tokens per round side by side, a column of blocks per evaluation.

    Returns:
        Lines of at most 80 columns; "" before the second evaluation.
    """
    charts = [columns_of("held-out loss", held_out(log, "loss"), height),
              columns_of("tokens per round", held_out(log, "tokens_per_round"), height)]
    if len(charts[0]) < 2:
        return ""
    return "\n".join(f"{left:40}{right}".rstrip() for left, right in zip(*charts, strict=True))


def columns_of(title: str, points: Points, height: int) -> list[str]:
    """A chart of columns, with the highest and lowest value on the left and the steps below.

    Returns:
        A line for the title, `height` lines, and one for the steps; empty for fewer than two
        points.
    """
    points = points[-SHOWN:]
    if len(points) < 2:
        return []
    values = [value for _, value in points]
    low, high = min(values), max(values)
    scale = (8 * height - 1) / (high - low) if high > low else 0.0
    eighths = [1 + round((value - low) * scale) for value in values]
    lines = [title]
    for row in reversed(range(height)):
        mark = f"{high:.2f}" if row == height - 1 else f"{low:.2f}" if row == 0 else ""
        blocks = (BLOCKS[min(8, max(0, count - 8 * row))] * 2 for count in eighths)
        lines.append(f"{mark:>7} {''.join(blocks)}")
    first, last = f"{points[0][0]:g}", f"{points[-1][0]:g}"
    room = 2 * len(points) - len(first) - len(last)
    return [*lines, f"{'step':>7} {first}{' ' * max(1, room)}{last}"]
