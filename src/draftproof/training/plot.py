"""Pictures of training and of calibration, by matplotlib, which comes with the extra ``train``."""

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
    read = [row["tokens"] / 1e6 for row in evaluated]
    held_out = {key: np.array([row["held_out"][key] for row in evaluated])
                for key in ("loss", "top1", "top5", "tokens_per_round")}  # fmt: skip
    losses, window = np.array([row["loss"] for row in rows]), np.ones(max(1, len(rows) // 30))
    counts = np.convolve(np.ones(len(rows)), window)
    smooth = (np.convolve(losses, window) / counts)[: len(rows)]
    figure, (axes,) = _figure(title, "million tokens read", ["loss, all steps together"])
    axes.plot([row["tokens"] / 1e6 for row in rows], smooth, label="training")
    axes.plot(read, held_out["loss"], "o-", label="held out")
    _save(figure, axes, folder / "loss.png")
    titles = ["first choice right, %", "one of five right, %", "tokens per round"]
    figure, (top1, top5, chain) = _figure(title, "million tokens read", titles)
    for axes, key in ((top1, "top1"), (top5, "top5")):
        for step, hits in enumerate(held_out[key].T):
            axes.plot(read, 100 * hits, "o-", label=f"token {step + 2}")
        axes.set_ylim(0, 100)
    chain.plot(read, held_out["tokens_per_round"], "o-")
    _save(figure, top1, folder / "accuracy.png")


def plot_calibration(found: Calibration, title: str, file: Path) -> None:
    """What a round of each size costs and brings, and which choices of the heads are right."""
    titles = ["ms per round", "times as fast as plain", "acceptance in %, by depth and rank"]
    figure, (cost, gain, ranks) = _figure(title, "draft tokens per round", titles)
    sizes, (plain, *others) = range(len(found.tokens)), found.compared
    reads = [1000 * found.verify.at(nodes + 1) for nodes in sizes]
    cost.plot(sizes, reads, label="the target reads")
    cost.plot(sizes, [1000 * found.seconds(nodes) for nodes in sizes], label="drafting as well")
    gain.plot(sizes, found.speed_up, label="expected")
    for other in others:
        gain.plot(found.nodes, other.speed_up(plain), "D", label=f"measured, {other.name}")
    gain.legend(frameon=False)
    shares = [row[:10] for row in found.acceptance]
    ranks.imshow(shares, cmap="Blues", vmin=0, aspect="auto")
    for (depth, rank), share in np.ndenumerate(shares):
        ranks.text(rank, depth, f"{100 * share:.0f}", ha="center", va="center")
    ranks.set(xlabel="choice of the head, best first", ylabel="token of the draft")
    ranks.grid(False)
    _save(figure, cost, file)


def _figure(title: str, xlabel: str, titles: Sequence[str]) -> tuple[Any, Sequence[Any]]:
    """A figure that needs no display, with axes of these titles side by side."""
    from matplotlib.figure import Figure

    figure = Figure((4.2 * len(titles) + 2, 4), layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", fontweight="bold")
    axes = list(figure.subplots(1, len(titles), squeeze=False)[0])
    for one, name in zip(axes, titles, strict=True):
        one.set(xlabel=xlabel, title=name)
        one.grid(alpha=0.4)
    return figure, axes


def _save(figure: Any, legend: Any, file: Path) -> None:
    legend.legend(frameon=False)
    with whole(file) as part:
        figure.savefig(part, format="png", dpi=160)
