"""``draftproof calibrate``: the draft tree that pays most on the user's prompts and machine."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console

from draftproof.cli import options as opt
from draftproof.cli import show
from draftproof.cli.setup import must_decode_alone
from draftproof.cli.train import Screen, Strict
from draftproof.errors import BadInput

if TYPE_CHECKING:
    from draftproof.training.calibrate import Calibration

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""Rows of the table."""
_option = partial(opt.option, None)
Heads = Annotated[str, _option("DIR", "The draft heads.", "--drafter")]
Files = Annotated[list[Path], _option("FILE", ".jsonl or .txt; repeatable.", "--prompts")]
Tokens = Annotated[int, _option("N", "New tokens per prompt.", "--tokens")]
Temp = Annotated[float, _option("T", "What the target writes with; 0 is greedy.", "--temperature")]
MaxNodes = Annotated[int, _option("N", "The largest tree that is looked at.", "--max-nodes")]
Most = Annotated[int, _option("N", "Of the files, at most so many prompts.", "--max-prompts")]
Out = Annotated[Path | None, _option("DIR", "For the heads and their tree; or in place.", "--out")]


@opt.with_options(engine=("dtype", "device"))
def calibrate(
    model: opt.Model, drafter: Heads, prompts: Files, tokens: Tokens = 128, temperature: Temp = 0.0,
    max_nodes: MaxNodes = 64, max_prompts: Most = 64, out: Out = None, chat: opt.Chat = False,
    strict: Strict = False, *, engine: dict[str, Any],
) -> None:  # fmt: skip
    """Find the draft tree that is fastest for these heads, on your prompts, on this machine."""
    from draftproof.drafters.checkpoints import is_head, read_head, write_head
    from draftproof.drafters.medusa import MedusaHead
    from draftproof.engine.engine import Engine
    from draftproof.engine.load import load
    from draftproof.engine.named_drafters import HEADS
    from draftproof.model import loading
    from draftproof.training import calibrate as calibration
    from draftproof.training.rows import prompt_of
    from draftproof.training.texts import read

    config = calibration.CalibrateConfig(tokens, temperature, max_nodes)
    folder = Path(loading.resolve(HEADS.get(drafter, drafter)))
    if not is_head(folder):
        raise BadInput(f"{drafter} holds no draft heads; give a folder that draftproof train made")
    if out is None and not Path(drafter).is_dir():
        raise BadInput("heads that come with the package are left as they are; give --out DIR")
    out = out or folder
    _must_be_ours(out)
    with show.status("loading ..."):
        plain = must_decode_alone(load(model, drafter="none", **engine), "calibrate")
        target, codec = plain.target, plain.codec
        head = read_head(folder, target).to(target.device)
        drafting = Engine(target, head.drafter(target), codec=codec, sampling=plain.sampling,
                          stop_tokens=plain.stop_tokens)  # fmt: skip
    if codec is None:
        raise BadInput(f"{target.name} has no tokenizer; it is needed to read the prompts")
    documents = read(prompts, chat, strict=strict, note=show.note)[: 4 * max_prompts]
    asked = [prompt_of(document, codec) for document in documents]
    fitting = [one for one in asked if 0 < len(one) <= target.context - tokens][:max_prompts]
    if not fitting:
        wanted = f"{tokens} new tokens in {target.context}"
        raise BadInput(f"no prompt leaves room for {wanted}; give shorter ones")
    with Screen() as screen:
        found = calibration.calibrate(drafting, head, fitting, config, screen.show_bar)
    _show(show.page(), found)
    if isinstance(head, MedusaHead):
        head.config = replace(head.config, tree=found.chosen)
        write_head(head, out)
        use = f"draftproof run MODEL --drafter {out}"
        show.note(f"the tree ({_tokens(found)}) is in {out}: {use}", style="bold")
    else:
        out.mkdir(parents=True, exist_ok=True)
        show.note(f"{head.kind} heads shape a tree of their own in every round: none was stored")
    (out / "calibration.json").write_text(json.dumps(found.as_json(), indent=1) + "\n")
    show.note(f"figures: {out / 'calibration.json'}")


def _must_be_ours(folder: Path) -> None:
    """Refuse before the work to write over heads of another layout, or anything else."""
    if folder.exists() and not folder.is_dir():
        raise BadInput(f"{folder} is a file; give --out a folder")
    config = folder / "config.json"
    ours = config.is_file() and "speculator_type" in config.read_text(encoding="utf-8")
    if folder.is_dir() and any(folder.iterdir()) and not ours:
        raise BadInput(f"{folder} holds something else than draftproof's own heads; give --out DIR")


def _show(out: Console, found: Calibration) -> None:
    out.print(f"{found.written:,} tokens written by the target")
    sizes = sorted({0, found.nodes, len(found.tree), *(n for n in SIZES if n < len(found.tree))})
    columns = "draft tokens", "tokens/round", "ms/round", "expected speed-up"
    table = show.table("by size of the tree", *columns)
    for size in sizes:
        figures = found.tokens[size], 1000 * found.seconds[size], found.speed_up[size]
        table.add_row(f"{'*' * (size == found.nodes)}{size}", *(f"{one:.2f}" for one in figures))
    out.print(table)
    best = found.speed_up[found.nodes]
    if best < 1:
        verdict = f"drafting does not pay here: {best:.2f}× at best; use --drafter none"
    else:
        verdict = f"{found.tokens[found.nodes]:.2f} tokens per round, {best:.2f}× expected"
    out.print(f"{_tokens(found)} per round: {verdict}", style="bold", markup=False)


def _tokens(found: Calibration) -> str:
    return f"{found.nodes} draft token{'s' * (found.nodes != 1)}"
