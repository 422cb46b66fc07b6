"""The picture of a comparison: tokens per second of every engine, with intervals over prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from draftproof.bench.report import Interval
from draftproof.plots.style import dress, new_figure, save, set_heading, theme_of


def draw(rows: Sequence[Mapping[str, Any]], file: Path, heading: str) -> None:
    """Bars of the median speed over prompts, a panel per number of bits.

    Args:
        rows: Of the table; each with `engine`, `bits`, `mode` and `speeds`, one per prompt.
        file: Where the picture is written; its suffix names the format.
        heading: Models and conditions, in one line.
    """
    theme, bits = theme_of(file), list(dict.fromkeys(row["bits"] for row in rows))
    engines = list(dict.fromkeys(row["engine"] for row in rows))
    most = max(sum(row["bits"] == number for row in rows) for number in bits)
    figure = new_figure(theme, 9.0, 1.0 + len(bits) * (0.8 + 0.36 * most))
    panels = figure.subplots(len(bits), 1, squeeze=False, sharex=True)[:, 0]
    right = 0.0
    for number, axes in zip(bits, panels, strict=True):
        last = number == bits[-1]
        dress(axes, theme, title=f"{number} bits", grid="x",
              x="tokens per second, median over prompts (95 % interval)" if last else "")
        panel = [row for row in rows if row["bits"] == number]
        for place, row in enumerate(panel):
            speed = Interval.of(row["speeds"])
            low, high = speed.low or speed.median, speed.high or speed.median
            axes.barh(place, speed.median, height=0.66,
                      color=theme.color(1 + engines.index(row["engine"])),
                      alpha=1.0 if row["mode"] != "plain" else 0.55)
            axes.errorbar(speed.median, place, xerr=[[speed.median - low], [high - speed.median]],
                          color=theme.text, capsize=3, linewidth=1.2)
            axes.annotate(f"{speed.median:.1f}", (high, place), xytext=(6, 0), va="center",
                          textcoords="offset points", color=theme.text, fontsize=10)
            right = max(right, high)
        axes.set_yticks(range(len(panel)), [f"{row['engine']}, {row['mode']}" for row in panel])
        axes.invert_yaxis()
    panels[0].set_xlim(0, 1.12 * right)
    set_heading(figure, theme, heading)
    save(figure, file)
