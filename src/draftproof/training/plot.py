"""Pictures of training and of calibration. Needs matplotlib, which comes with the extra ``train``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from draftproof.errors import BadInput
from draftproof.training.files import whole

if TYPE_CHECKING:
    from draftproof.training.calibrate import Calibration


def need_matplotlib() -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise BadInput("the picture needs matplotlib; install draftproof[train]") from None


def plot_training(log: Path, folder: Path, title: str) -> None:
    """loss.png and accuracy.png from a run's log, over the tokens read."""
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    evaluated = [row for row in rows if "held_out" in row]
    read, results = [row["tokens"] / 1e6 for row in evaluated], [row["held_out"] for row in evaluated]
    losses, window = np.array([row["loss"] for row in rows]), np.ones(max(1, len(rows) // 30))
    smooth = np.convolve(losses, window)[: len(rows)] / np.convolve(np.ones(len(rows)), window)[: len(rows)]
    figure, (axes,) = _figure(1, "million tokens read", title)
    axes.plot([row["tokens"] / 1e6 for row in rows], smooth, label="training")
    axes.plot(read, [result["loss"] for result in results], "o-", label="held out")
    axes.set_ylabel("loss, all steps together")
    _save(figure, axes, folder / "loss.png")
    figure, (top1, top5, chain) = _figure(3, "million tokens read", title)
    for axes, key in ((top1, "top1"), (top5, "top5")):
        for step in range(len(results[0][key])):
            axes.plot(read, [100 * result[key][step] for result in results], "o-", label=f"token {step + 2}")
        axes.set(ylim=(0, 100), title=f"% right, {'first choice' if key == 'top1' else 'one of five choices'}")
    chain.plot(read, [result["tokens_per_round"] for result in results], "o-")
    chain.set_title("tokens per round, chain of first choices")
    _save(figure, top1, folder / "accuracy.png")


def plot_calibration(found: Calibration, title: str, file: Path) -> None:
    """What a round of each size costs, what it brings, and which choices of the heads are right."""
    figure, (cost, gain, ranks) = _figure(3, "draft tokens per round", title)
    sizes = range(len(found.tokens))
    cost.plot(sizes, [1000 * found.verify.at(nodes + 1) for nodes in sizes], label="the target reads")
    cost.plot(sizes, [1000 * found.seconds(nodes) for nodes in sizes], label="with drafting and deciding")
    cost.set(ylim=(0, None), title="ms per round")
    gain.plot(sizes, found.speed_up, label="expected")
    plain, *others = found.compared
    for other in others:
        gain.plot(found.nodes, other.speed_up(plain), "D", label=f"measured, {other.name}")
    gain.axvline(found.nodes, linestyle="--", color="grey")
    gain.set(ylim=(0, None), title="times as fast as plain decoding")
    gain.legend(frameon=False)
    shares = [row[:10] for row in found.acceptance]
    ranks.imshow(shares, cmap="Blues", vmin=0, aspect="auto", extent=(0.5, len(shares[0]) + 0.5, len(shares) + 0.5, 0.5))
    for depth, row in enumerate(shares, 1):
        for rank, share in enumerate(row, 1):
            ranks.text(rank, depth, f"{100 * share:.0f}", ha="center", va="center")
    ranks.grid(False)
    ranks.set(xlabel="choice of the head, best first", ylabel="token of the draft", title="acceptance in %")
    _save(figure, cost, file)


def _figure(columns: int, xlabel: str, title: str) -> tuple[Any, Sequence[Any]]:
    """A figure that needs no display."""
    from matplotlib.figure import Figure

    figure = Figure((4.2 * columns + 2, 4), layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", fontweight="bold")
    axes = list(figure.subplots(1, columns, squeeze=False)[0])
    for one in axes:
        one.set_xlabel(xlabel)
        one.grid(alpha=0.4)
        one.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _save(figure: Any, legend: Any, file: Path) -> None:
    legend.legend(frameon=False)
    with whole(file) as part:
        figure.savefig(part, format="png", dpi=160)
