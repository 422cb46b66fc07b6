"""``draftproof run``: one prompt, streamed; or a file of prompts, handed to `batch`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftproof.cli import options as opt
from draftproof.cli import show
from draftproof.cli.batch import Batch
from draftproof.cli.setup import (
    described,
    engine_of,
    gaudi_words,
    lost,
    main_process_only,
    plain_engine,
    planned,
)  # fmt: skip
from draftproof.engine.config import EngineConfig
from draftproof.engine.rows import prompt_of
from draftproof.errors import BadInput

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
    color: opt.When = opt.Color.auto, bf16: opt.Bf16 = False, plan: opt.Plan = None,
    *, engine: dict[str, Any], sampling: dict[str, Any],
) -> None:  # fmt: skip
    """Complete a prompt, or a file of prompts."""
    engine = {**engine, **planned(plan, engine)} if plan is not None else engine
    config = EngineConfig(model, **gaudi_words(engine, bf16))
    many = any(option is not None for option in (prompts, out, batch_size, ray))
    with main_process_only(config) as group:
        if many:
            if prompts is None or out is None:
                raise BadInput(
                    "a file of prompts needs both --prompts FILE.jsonl and --out FILE.jsonl"
                )
            if compare or n != 1 or any(one is not None for one in (text, prompt, prompt_file)):
                raise BadInput(
                    "--prompts completes each row once; leave out --compare, --n and other prompts"
                )
            Batch(config, sampling, prompts, out, batch_size, chat, ray).run()
            return
        what = group.from_rank_0(lambda: _prompt(text, prompt, prompt_file))   # stdin is rank 0's
        writer = None if json_ else show.StreamWriter(sys.stdout, color)
        _run(config, sampling, prompt_of({"prompt": what}, chat), n, compare, writer)


def _run(
    config: EngineConfig, given: dict[str, Any], prompt: Prompt, n: int, compare: bool,
    writer: show.StreamWriter | None,
) -> None:  # fmt: skip
    """Complete one prompt, on `writer` or as JSON."""
    engine = engine_of(config)
    wanted = replace(engine.sampling, **given)
    _check_effect(wanted, given)
    plain = _plainly(engine, prompt, wanted, n) if compare else None
    ours = _written(engine, prompt, wanted, n, writer)
    if writer is None:
        print(show.as_json(_as_json(ours, plain, described(config, engine, wanted))))
    for completion in ours:
        completion.checked()                            # it was shown as far as it goes
    if writer is None:
        return
    show.note(show.summary(ours))
    show.lossy_distance(show.added(ours))
    for line in lost(engine):
        show.note(line)
    if plain is not None:
        show.note("plain: " + show.summary(plain))
        show.note(_verdict(engine, wanted, ours, plain), style="bold")


def _prompt(text: str | None, prompt: str | None, file: Path | None) -> str:
    """The one prompt that was given."""
    if sum(source is not None for source in (text, prompt, file)) != 1:
        raise BadInput("give one prompt: --prompt TEXT, --prompt-file FILE, or - for stdin")
    try:
        if file is not None:
            text = file.read_text(encoding="utf-8").removesuffix("\n")
        elif text == "-" and sys.stdin is None:
            raise BadInput("the prompt was to come from stdin, which is closed; use --prompt TEXT")
        elif text == "-":
            text = sys.stdin.read().removesuffix("\n")
    except UnicodeDecodeError as error:
        where = f"{error.reason} at byte {error.start}"
        raise BadInput(f"{file or 'stdin'} is not UTF-8 text ({where})") from error
    return text if text is not None else prompt or ""


def _check_effect(wanted: Sampling, given: dict[str, Any]) -> None:
    """Say so when an option changes nothing."""
    idle = [opt.flag(name) for name in ("top_k", "top_p", "min_p", "seed") if name in given]
    if wanted.temperature == 0 and idle:
        show.note(f"note: without effect at temperature 0: {', '.join(idle)}; add --temperature")


def _written(
    engine: Engine, prompt: Prompt, wanted: Sampling, n: int, writer: show.StreamWriter | None
) -> list[Completion]:
    """The completions; shown on `writer` as they come."""
    if n != 1 or writer is None:
        done = engine.generate([prompt], sampling=wanted, n=n)
        for index, completion in enumerate(done if writer else [], 1):
            text = show.harmless(completion.text) if writer and writer.terminal else completion.text
            print(f"[{index}/{n}] {text}", flush=True)
        return done
    try:
        for chunk in engine.stream(prompt, sampling=wanted):
            writer.write(chunk)
            if chunk.completion is not None:
                return [chunk.completion]
    finally:
        writer.end()
    raise AssertionError("a stream ends with its completion")


def _plainly(engine: Engine, prompt: Prompt, wanted: Sampling, n: int) -> list[Completion]:
    """What plain decoding writes, with neither side paying for the first calls."""
    plain = plain_engine(engine)
    with show.status("decoding plainly first ..."):
        for warm in (engine, plain):
            warm.generate([prompt], sampling=wanted, max_new_tokens=WARM_UP)
        return plain.generate([prompt], sampling=wanted, n=n)


def _differences(ours: Sequence[Completion], plain: Sequence[Completion]) -> list[int | None]:
    """Where each text parts from the plain one."""
    from draftproof.engine.completion import first_difference

    pairs = zip(ours, plain, strict=True)
    return [first_difference(mine.tokens, theirs.tokens) for mine, theirs in pairs]


def _verdict(
    engine: Engine, wanted: Sampling, ours: Sequence[Completion], plain: Sequence[Completion]
) -> str:
    """Speed-up and whether the tokens are the same, in one line."""
    place = next((place for place in _differences(ours, plain) if place is not None), None)
    same = "the text is identical" if place is None else f"the text differs at token {place}"
    if engine.lossy is not None and wanted.temperature > 0:
        same += " (typical acceptance is lossy: neither the target's text nor its law)"
    elif engine.acceptance != "match" and wanted.temperature > 0:
        same += f" ({engine.acceptance}: texts may differ, the law is the same)"
    speed_up = show.per_token(plain) / show.per_token(ours)
    return f"{speed_up:.2f}× as fast as plain decoding; {same}"


def _as_json(
    ours: list[Completion], plain: list[Completion] | None, settings: dict[str, Any]
) -> dict[str, Any]:
    samples = [show.completion(completion) for completion in ours]
    found: dict[str, Any] = samples[0] if len(samples) == 1 else {"samples": samples}
    if plain is not None:
        differs = _differences(ours, plain)
        found["compare"] = {
            "speed_up": show.per_token(plain) / show.per_token(ours),
            "plain_seconds_per_token": show.per_token(plain),
            "identical": all(place is None for place in differs),
            "differs_at": differs[0] if len(differs) == 1 else differs,
        }
    return {**found, "settings": settings}
