"""``draftproof run``: streams the completion of a prompt, or passes a file of prompts to `batch`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftproof.cli import options as opt
from draftproof.cli import show
from draftproof.cli.batch import Batch
from draftproof.cli.setup import (
    config_of,
    described,
    engine_of,
    lost,
    main_process_only,
    must_have_folders,
    start_pytorch,
)
from draftproof.engine.config import EngineConfig
from draftproof.errors import BadInput
from draftproof.requests.openai_format import prompt_of

if TYPE_CHECKING:
    from draftproof.core.params import Sampling
    from draftproof.engine.engine import Completion, Engine, Prompt

WARM_UP = 8
"""Tokens decoded before a comparison, so that neither side pays for the first calls."""


@opt.with_options(engine=None, sampling=None)
def run(
    model: opt.Model, text: opt.Text = None, prompt: opt.PromptText = None,
    prompt_file: opt.PromptFile = None, chat: opt.Chat = False, n: opt.Samples = 1,
    prompts: opt.Prompts = None, out: opt.Out = None, batch_size: opt.BatchSize = None,
    ray: opt.Ray = None, compare: opt.Compare = False, json_: opt.Json = False,
    trace: opt.Trace = None, bf16: opt.Bf16 = False, plan: opt.Plan = None, *,
    engine: dict[str, object], sampling: dict[str, object],
) -> None:  # fmt: skip
    """Complete a prompt, or a file of prompts."""
    if plan is not None:
        from draftproof.plan.report import read_start

        if engine.keys() & {"drafter", "assistant_model", "budget"}:
            raise BadInput("both a plan and a drafter or its tokens were given; the plan says both")
        engine |= read_start(plan)
    config = config_of(model, engine, bf16)
    if ray is not None and config.parallel is not None:
        raise BadInput("a Ray worker runs a whole model; leave one of --ray and --parallel out")
    sources = [source for source in (text, prompt, prompt_file) if source is not None]
    is_batch = any(option is not None for option in (prompts, out, batch_size, ray))
    if is_batch and (prompts is None or out is None or sources or compare or json_ or n != 1):
        raise BadInput(
            "a file of prompts needs both --prompts FILE.jsonl and --out FILE.jsonl, and completes "
            "each row once: leave out --compare, --json, --n and other prompts"
        )
    if not is_batch and len(sources) != 1:
        raise BadInput("give one prompt: --prompt TEXT, --prompt-file FILE, or - for stdin")
    if trace is not None and (is_batch or compare or json_ or n != 1):
        raise BadInput("--trace shows one text: leave out --prompts, --compare, --json and --n")
    must_have_folders(trace)
    if n < 1:
        raise BadInput(f"n was {n}; it must be at least 1")
    if sampling.get("logprobs") and not (json_ or is_batch):
        raise BadInput("--logprobs are shown with --json or --out; add one of them")
    source = sources[0] if sources else ""
    if source == "" and not is_batch:
        raise BadInput("the prompt is empty; give at least one character")
    prompt_text = _prompt(source, may_be_stdin=False)
    start_pytorch(config, sampling, loads=ray is None)
    with main_process_only(config) as group:
        if is_batch:
            assert prompts is not None and out is not None
            Batch(config, sampling, prompts, out, batch_size, chat, ray).run(group)
            return
        if text == "-":                                 # only rank 0 has stdin
            prompt_text = group.from_rank_0(lambda: _prompt("-", may_be_stdin=True))
        _run(config, sampling, prompt_of({"prompt": prompt_text}, chat), n, compare, json_,
             trace)


def _prompt(source: str | Path, may_be_stdin: bool) -> str:
    """The text of a prompt: from a file, from standard input if it is - and may be, or as given."""
    if isinstance(source, Path):
        return _decoded(partial(source.read_text, encoding="utf-8-sig"), str(source))
    if may_be_stdin and source == "-":
        return _decoded(sys.stdin.read, "standard input")
    return source


def _decoded(read: Callable[[], str], name: str) -> str:
    """The result of `read` without its last line break."""
    try:
        return read().removesuffix("\n")
    except UnicodeDecodeError as error:
        where = f"{error.reason} at byte {error.start}"
        raise BadInput(f"{name} is not UTF-8 text ({where})") from error


def _run(
    config: EngineConfig,
    options: dict[str, Any],
    prompt: Prompt,
    n: int,
    compare: bool,
    json_: bool,
    trace: Path | None = None,
) -> None:
    """Complete one prompt, on the terminal or as JSON."""
    engine = engine_of(config)
    wanted = replace(engine.sampling, **options)
    idle = [opt.flag(name) for name in ("top_k", "top_p", "min_p", "seed") if name in options]
    if wanted.temperature == 0 and idle:
        show.note(f"note: without effect at temperature 0: {', '.join(idle)}; add --temperature")
    plain = _plainly(engine, prompt, wanted, n) if compare else []
    if json_:
        ours = engine.generate([prompt], sampling=wanted, n=n)
        result: dict[str, Any] = {"samples": [show.completion(completion) for completion in ours]}
        result = result["samples"][0] if n == 1 else result
        result |= {"compare": _compared(ours, plain)} if compare else {}
        result["settings"] = described(config, engine, wanted)
        show.print_json(result)
    elif trace is not None:
        ours = _traced(engine, prompt, wanted, show.StreamWriter(sys.stdout), trace)
    else:
        ours = _written(engine, prompt, wanted, n, show.StreamWriter(sys.stdout))
    for completion in ours:
        completion.checked()                            # the text before the error was shown
    if json_:
        return
    show.note(show.summary(ours))
    show.lossy_distance(show.sum_stats(ours))
    for line in lost(engine):
        show.note(line)
    if compare:
        show.note("plain: " + show.summary(plain))
        show.note(_verdict(engine, wanted, _compared(ours, plain)), style="bold")


def _written(
    engine: Engine, prompt: Prompt, wanted: Sampling, n: int, writer: show.StreamWriter
) -> list[Completion]:
    """The completions, shown as they are written."""
    if n != 1:
        done = engine.generate([prompt], sampling=wanted, n=n)
        for index, completion in enumerate(done, 1):
            writer.write([(f"[{index}/{n}] {completion.text}\n", "")])
        return done
    done = []
    try:
        for chunk in engine.stream(prompt, sampling=wanted):
            writer.write(chunk.pieces)
            done += [chunk.completion] if chunk.completion is not None else []
    finally:
        writer.end()
    return done


def _traced(
    engine: Engine, prompt: Prompt, wanted: Sampling, writer: show.StreamWriter, file: Path
) -> list[Completion]:
    """The completion, shown as it is written, and the page of its rounds."""
    from draftproof.plots.trace import write_trace

    title = f"{Path(engine.target.name).name}, {engine.drafter.name}"
    try:
        done = write_trace(engine, prompt, file, title, lambda update: writer.write(update.pieces),
                           sampling=wanted)
    finally:
        writer.end()
    return [done]


def _plainly(engine: Engine, prompt: Prompt, wanted: Sampling, n: int) -> list[Completion]:
    """The texts of plain decoding, after warm-up so that neither side pays for first calls."""
    from draftproof.engine.engine import Engine

    plain = Engine(engine.target, codec=engine.codec, stop_tokens=engine.stop_tokens)
    with show.status("decoding plainly first ..."):
        for warm in (engine, plain):
            warm.generate([prompt], sampling=wanted, max_new_tokens=WARM_UP)
        return plain.generate([prompt], sampling=wanted, n=n)


def _compared(ours: Sequence[Completion], plain: Sequence[Completion]) -> dict[str, object]:
    """The speed-up, and the position of the first difference from plain decoding, if any."""
    from draftproof.requests.completion import first_difference

    pairs = zip(ours, plain, strict=True)
    differs = [first_difference(mine.tokens, theirs.tokens) for mine, theirs in pairs]
    place = next((place for place in differs if place is not None), None)
    return {"speed_up": show.per_token(plain) / show.per_token(ours),
            "plain_seconds_per_token": show.per_token(plain),
            "identical": place is None, "differs_at": place}


def _verdict(engine: Engine, wanted: Sampling, compared: dict[str, object]) -> str:
    """The speed-up, and whether the tokens are the same, in one line."""
    place = compared["differs_at"]
    same = "the text is identical" if place is None else f"the text differs at token {place}"
    if engine.lossy is not None and wanted.temperature > 0:
        same += " (typical acceptance is lossy: neither the target's text nor its distribution)"
    elif engine.acceptance != "match" and wanted.temperature > 0:
        same += f" ({engine.acceptance}: texts may differ, their distribution is the same)"
    return f"{compared['speed_up']:.2f}× as fast as plain decoding; {same}"
