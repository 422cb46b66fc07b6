"""The picture of a calibration: what a round costs, what it brings, and which choices of the heads are right.

Knows figures and matplotlib, which comes with the extra ``train``.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftproof.errors import BadInput

if TYPE_CHECKING:
    from draftproof.training.calibrate import Calibration

COLUMNS = 10
"""Ranks that are shown."""
BLUE, ORANGE, GREY, GREEN = "#2b6cb0", "#c05621", "#718096", "#2f855a"


def check() -> None:
    """Refuse at once if nothing can be drawn."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise BadInput("the picture needs matplotlib; install draftproof[train]") from None


def draw(found: Calibration, title: str, file: Path) -> None:
    """Left: seconds of a round and the expected speed-up by the size of the tree. Right: acceptance by depth and rank."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12.5, 5.2), layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold")
    parts: Any = figure.subfigures(1, 2, width_ratios=(1.12, 1))
    left, right = parts
    cost, gain = left.subplots(2, 1, sharex=True)
    _costs(cost, found)
    _gains(gain, found)
    for axes in (cost, gain):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#e2e8f0", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.axvline(found.nodes, color=GREEN, linewidth=1, linestyle=(0, (4, 3)))
    _ranks(right, found)
    figure.savefig(file, dpi=150)


def _costs(axes: Any, found: Calibration) -> None:
    sizes = range(len(found.tokens))
    verify = [1000 * found.verify.at(nodes + 1) for nodes in sizes]
    whole = [1000 * found.seconds(nodes) for nodes in sizes]
    axes.plot(sizes, verify, color=BLUE, linewidth=1.8, label="the target reads")
    axes.plot([width - 1 for width in found.verify.widths], [1000 * s for s in found.verify.seconds], "o", color=BLUE, ms=3.5)
    axes.fill_between(sizes, verify, whole, color=ORANGE, alpha=0.35, linewidth=0, label="drafting and deciding")
    axes.set_ylim(0, 1.12 * max(whole))
    axes.set_ylabel("ms per round")
    axes.set_title("A round costs", loc="left", fontsize=10)
    axes.legend(frameon=False, fontsize=8.5, loc="lower right")


def _gains(axes: Any, found: Calibration) -> None:
    sizes = range(1, len(found.tokens))
    axes.plot(sizes, found.speed_up[1:], color=BLUE, linewidth=1.8, label="expected")
    axes.axhline(1, color=GREY, linewidth=1)
    axes.annotate("plain decoding", (len(found.tokens) - 1, 1), (0, 3), textcoords="offset points", ha="right", fontsize=8.5,
                  color=GREY)  # fmt: skip
    plain, *rivals = found.lanes
    for lane, marker, color in zip(rivals, "Ds", (GREEN, ORANGE), strict=False):
        axes.plot(found.nodes, lane.speed_up(plain), marker, color=color, ms=6, markeredgecolor="white",
                  label=f"measured, {lane.name}", zorder=4 if marker == "D" else 3)  # fmt: skip
    best = found.speed_up[found.nodes]
    axes.annotate(f"{found.nodes}: {best:.2f}×", (found.nodes, 0), (5, 6), xycoords=("data", "axes fraction"),
                  textcoords="offset points", color=GREEN, fontsize=9)  # fmt: skip
    axes.set_ylim(0, 1.15 * max(1.0, *found.speed_up, *(lane.speed_up(plain) for lane in rivals)))
    axes.set_xlim(0, len(found.tokens) - 1)
    axes.set_xlabel("draft tokens per round")
    axes.set_ylabel("times as fast")
    axes.set_title("and brings", loc="left", fontsize=10)
    axes.legend(frameon=False, fontsize=8.5, loc="lower right")


def _ranks(figure: Any, found: Calibration) -> None:
    """A cell per depth and rank; those that the chosen tree uses somewhere are framed."""
    from matplotlib.patches import Rectangle

    axes = figure.subplots()
    columns = min(COLUMNS, len(found.acceptance[0]))
    shares = [row[:columns] for row in found.acceptance]
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=max(0.01, *(max(row) for row in shares)), aspect="auto")
    used = {(len(path) - 1, path[-1]) for path in found.chosen}
    for depth, row in enumerate(shares):
        for rank, share in enumerate(row):
            dark = share > 0.6 * max(max(row) for row in shares)
            axes.text(rank, depth, f"{100 * share:.0f}" if share >= 0.095 else f"{100 * share:.1f}", ha="center", va="center",
                      fontsize=8.5, color="white" if dark else "#1a202c")  # fmt: skip
            if (depth, rank) in used:
                axes.add_patch(Rectangle((rank - 0.47, depth - 0.47), 0.94, 0.94, fill=False, edgecolor=GREEN, linewidth=1.6))
    axes.set_xticks(range(columns), [str(rank + 1) for rank in range(columns)])
    axes.set_yticks(range(len(shares)), [f"{depth + 1}" for depth in range(len(shares))])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_xlabel("choice of the head, best first")
    axes.set_ylabel("token of the draft")
    title = f"Acceptance in %, where all before it stands in the tree of {len(found.tree)}\n(framed: in the calibrated tree)"
    axes.set_title(title, loc="left", fontsize=10)
