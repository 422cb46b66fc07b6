"""The same weights through draftproof, llama.cpp, ik_llama.cpp, OpenVINO GenAI and transformers.

    python recipes/compare/compare.py --model FOLDER --gguf FILE [--draft FOLDER --draft-gguf FILE]
        --prompts FILE [--bits 16 8 4] [--engines ours llama.cpp openvino transformers]

Each engine runs in a process of its own (workers.py), with the number of threads it is quickest
with. For each number of bits every prompt is completed by every engine, plain and speculating,
before the next; the order rotates. Token ids go in and come out. Speculating, an engine drafts with
the draft model, in the same bits; without one, by its default (ours) or prompt lookup (the others).
Speculated texts are compared with the engine's own plain ones: engines round differently, so texts
of different engines part at near-ties. With --texts, the distance of the weights from the folder's
is measured, too: our forward reads what ours and llama.cpp were given, as quantized_kl.py does.
Prints a table; Markdown and JSON go to --out.
README.md says which packages the others need.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch
from picture import draw
from rich.box import MARKDOWN, SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from workers import ENGINES, Missing

from draftproof.model.gguf_source import native_gguf
from draftproof.plots.style import check_plot_file

HERE = Path(__file__).parent
sys.path.append(str(HERE.with_name("figures")))
import quantized_kl  # noqa: E402

GGUF_TYPES = {16: "BF16", 8: "Q8_0", 4: "Q4_K_M"}
OPENVINO_FORMATS = {16: "fp16", 8: "int8", 4: "int4"}
EDITS = (
    "Rename the variables so that they say what they hold.", "Add type hints to every variable.",
    "Let it raise ValueError if an argument is None.", "Add a comment above each step.",
)
"""What --edits asks for of HumanEval's functions, in turn."""
PROBE = 24
"""New tokens of the runs that choose the number of threads."""
NAMES = {False: "plain", True: "speculating"}


@dataclass
class Contestant:
    """An engine at some bits: its process, and what it wrote, by speculating or not."""

    engine: str
    bits: int
    threads: int
    process: subprocess.Popen[str]
    model: Path
    runs: dict[bool, list[dict[str, Any]]] = field(default_factory=lambda: {False: [], True: []})

    def write(self, prompt: list[int], new_tokens: int, speculate: bool) -> dict[str, Any]:
        assert self.process.stdin is not None
        body = {"prompt": prompt, "new_tokens": new_tokens, "speculate": speculate}
        self.process.stdin.write(json.dumps(body) + "\n")
        self.process.stdin.flush()
        return self.read()

    def read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise Missing(f"{self.engine} ended early, with code {self.process.wait()}")
        told: dict[str, Any] = json.loads(line)
        return told

    def close(self) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(30)
        if self.process.poll() is None:
            self.process.kill()


class Files:
    """The models in each engine's format and bits; converted once, and kept in a folder."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given, self.folder = given, given.folder
        self.folder.mkdir(parents=True, exist_ok=True)

    def of(self, engine: str, bits: int, model: Path, gguf: Path | None) -> Path:
        """A folder, or the GGUF file itself where an engine reads it and it has these bits.

        Raises:
            Missing: The format cannot be made.
        """
        if engine.endswith("llama.cpp"):
            if gguf is None:
                raise Missing(f"{engine} reads GGUF files: give --gguf, with --draft --draft-gguf")
            return self._gguf(gguf, bits, model)
        if engine == "ours" and gguf is not None and self._bits(gguf, model) == bits:
            return gguf
        return self._openvino(model, bits) if engine == "openvino" else model

    def _bits(self, file: Path, model: Path) -> int:
        """Which of 16, 8 and 4 bits a weight of a GGUF file has, about."""
        weights = sum(part.stat().st_size for part in model.glob("*.safetensors")) / 2
        stored = 8 * file.stat().st_size / weights if weights else 0.0
        return 4 if stored < 6.5 else 8 if stored < 10 else 16

    def _gguf(self, file: Path, bits: int, model: Path) -> Path:
        """`file` itself if it has about so many bits per weight, else what llama-quantize makes."""
        if bits == self._bits(file, model):
            return file
        made = self.folder / f"{file.stem}-{GGUF_TYPES[bits]}.gguf"
        server = self.given.llama_server
        tool = server.with_name("llama-quantize") if server else shutil.which("llama-quantize")
        if not made.exists() and not (tool and Path(tool).exists()):
            raise Missing(f"llama-quantize, which makes {made.name}, is not beside llama-server")
        return self._made(made, [tool, "--allow-requantize", file, "{}", GGUF_TYPES[bits]])

    def _openvino(self, model: Path, bits: int) -> Path:
        made = self.folder / f"{model.name}-openvino-{OPENVINO_FORMATS[bits]}"
        tool = Path(self.given.openvino_python or sys.executable).with_name("optimum-cli")
        if not made.exists() and not tool.exists():
            raise Missing("optimum-cli, which makes OpenVINO's format, is not there: "
                          "pip install optimum-intel")
        return self._made(made, [tool, "export", "openvino", "--model", model, "--task",
                                 "text-generation-with-past", "--weight-format",
                                 OPENVINO_FORMATS[bits], "{}"])

    def _made(self, place: Path, command: Sequence[Any]) -> Path:
        """`place`, made by a command if it is not there; what fails leaves nothing of that name."""
        if not place.exists():
            part = place.with_name(f".part-{place.name}")
            words = [str(word).replace("{}", str(part)) for word in command]
            there = os.environ | {"PYTHONPATH": ""}     # it may be of another environment
            done = subprocess.run(words, capture_output=True, text=True, check=False, env=there)
            if done.returncode != 0 or not part.exists():
                said = (done.stderr + done.stdout).strip().splitlines() or ["it said nothing"]
                raise Missing(f"{Path(words[0]).name} could not make {place.name}: {said[-1]}")
            part.rename(place)
        return place


def start(
    given: argparse.Namespace, files: Files, engine: str, bits: int, threads: int
) -> Contestant:
    """A worker with its models loaded; raises Missing where it cannot be had."""
    draft = files.of(engine, bits, given.draft, given.draft_gguf) if given.draft else None
    model = files.of(engine, bits, given.model, given.gguf)
    spec = {"model": str(model), "draft": draft and str(draft), "bits": bits, "threads": threads,
            "draft_tokens": given.draft_tokens,
            "temperature": given.temperature, "speculate": given.speculate}
    python = (given.openvino_python if engine == "openvino" else None) or sys.executable
    servers = {"LLAMA_SERVER": given.llama_server, "IK_LLAMA_SERVER": given.ik_llama_server}
    extra = {name: str(server) for name, server in servers.items() if server}
    process = subprocess.Popen(
        [python, HERE / "workers.py", engine, json.dumps(spec)], text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=None if given.verbose else subprocess.DEVNULL,
        env=os.environ | extra | {"OMP_NUM_THREADS": str(threads)})
    contestant = Contestant(engine, bits, threads, process, model)
    said = contestant.read()
    if "missing" in said:
        contestant.close()
        raise Missing(said["missing"])
    return contestant


def quickest(
    given: argparse.Namespace, files: Files, engine: str, bits: int, prompt: list[int]
) -> Contestant:
    """The worker with the number of threads that writes a short text soonest; warmed up."""
    best: tuple[float, Contestant] | None = None
    for threads in given.threads:
        one = start(given, files, engine, bits, threads)
        seconds = min(one.write(prompt, PROBE, False)["seconds"] for _ in range(2))
        if given.speculate:
            one.write(prompt, PROBE, True)
        if best is None or seconds < best[0]:
            if best is not None:
                best[1].close()
            best = seconds, one
        else:
            one.close()
    assert best is not None
    return best[1]


def measure(
    given: argparse.Namespace, prompts: list[list[int]], say: Callable[[str], None]
) -> Iterator[Contestant | str]:
    """Every contestant with its runs, bits after bits; a sentence for what cannot be had."""
    files, modes = Files(given), (False, True) if given.speculate else (False,)
    for bits in given.bits:
        there: list[Contestant] = []
        try:
            for engine in given.engines:
                say(f"{engine}, {bits} bits: converting and loading")
                try:
                    there.append(quickest(given, files, engine, bits, prompts[0]))
                except Missing as error:
                    yield f"{engine}, {bits} bits: {error}"
            tasks = [(one, how) for one in there for how in modes]
            for place, prompt in enumerate(prompts):
                shift = place % max(1, len(tasks))
                for one, how in tasks[shift:] + tasks[:shift]:
                    say(f"{bits} bits, prompt {place + 1}: {one.engine}, {NAMES[how]}")
                    one.runs[how].append(one.write(prompt, given.new_tokens, how))
            yield from there
        finally:
            for one in there:
                one.close()


def distances(
    given: argparse.Namespace, contestants: Sequence[Contestant], say: Callable[[str], None]
) -> dict[tuple[Path, int], float]:
    """By model and bits, the mean KL divergence of the weights from the folder's, in nats; only of
    formats that our forward reads."""
    tokenizer = quantized_kl.Tokenizer.from_file(str(given.model / "tokenizer.json"))
    windows = torch.cat([quantized_kl.windows(tokenizer, text, given.windows)
                         for _, text in quantized_kl.texts(given.texts)])
    truth, result = [], dict[tuple[Path, int], float]()
    for contestant in contestants:
        key, is_file = (contestant.model, contestant.bits), contestant.model.is_file()
        if contestant.engine == "openvino" or key in result:
            continue
        if contestant.bits == 16 and not is_file:
            result[key] = 0.0                           # they are the folder's
            continue
        say(f"distance of {contestant.engine}'s weights, {contestant.bits} bits")
        if not truth:
            original = quantized_kl.folder_model(given.model, None)
            truth = [quantized_kl.log_probs(original, window) for window in windows]
            del original
        model = (native_gguf(contestant.model, torch.bfloat16) if is_file
                 else quantized_kl.folder_model(given.model, f"int{contestant.bits}"))
        if model is not None:
            read = [quantized_kl.log_probs(model, window) for window in windows]
            result[key] = quantized_kl.distance(truth, read).kl
    return result


def rows_of(
    contestants: Sequence[Contestant], kl: dict[tuple[Path, int], float]
) -> list[dict[str, Any]]:
    """A row per engine, bits and mode. tokens/s: prompts included; decode: without the first."""
    rows = []
    for one in contestants:
        for how, runs in one.runs.items():
            if not runs:
                continue
            counts = [len(run["tokens"]) for run in runs]
            after = sum(run["seconds"] - run["first"] for run in runs)
            rounds = [run["tokens_per_round"] for run in runs if run["tokens_per_round"]]
            pairs = zip(runs, one.runs[False], strict=False)
            same = sum(ours["tokens"] == plain["tokens"] for ours, plain in pairs)
            rows.append({
                "engine": one.engine, "bits": one.bits, "mode": NAMES[how], "threads": one.threads,
                "tokens/s": sum(counts) / sum(run["seconds"] for run in runs),
                "decode": (sum(counts) - len(runs)) / max(1e-9, after),
                "first": median(run["first"] for run in runs),
                "tokens/round": sum(rounds) / len(rounds) if rounds and how else None,
                "same": f"{same}/{len(runs)}" if how else "",
                "model": str(one.model), "kl": kl.get((one.model, one.bits)),
                "speeds": [len(run["tokens"]) / run["seconds"] for run in runs],
                "texts": [run["tokens"] for run in runs]})
    return rows


def table(rows: Sequence[dict[str, Any]], **style: Any) -> Table:
    """The quickest of each number of bits in bold."""
    shown = Table(title_justify="left", pad_edge=False, **style)
    names = ("engine", "bits", "mode", "thre-|ads", "tokens|/s", "decode,|tokens|/s",
             "first|token,|s", "tokens/|round", "same|text", "KL,|nats")
    for place, name in enumerate(names):
        broken = name.replace("|", "\n")
        if style.get("box") is MARKDOWN:
            broken = name.replace("-|", "").replace("|/", "/").replace("/|", "/")
            broken = broken.replace("|", " ")
        shown.add_column(broken, justify="left" if place in (0, 2) else "right", no_wrap=True)
    best = {row["bits"]: max(one["tokens/s"] for one in rows if one["bits"] == row["bits"])
            for row in rows}
    for row in rows:
        rounds = f"{row['tokens/round']:.2f}" if row["tokens/round"] else ""
        kl = "" if row["kl"] is None else f"{row['kl']:.4f}"
        bold = row["tokens/s"] == best[row["bits"]]
        mark = "**" if bold and style.get("box") is MARKDOWN else ""
        shown.add_row(row["engine"], str(row["bits"]), row["mode"], str(row["threads"]),
                      f"{mark}{row['tokens/s']:.1f}{mark}", f"{row['decode']:.1f}",
                      f"{row['first']:.2f}", rounds, row["same"], kl,
                      style="bold" if bold else "")
    return shown


def read_prompts(given: argparse.Namespace) -> list[list[int]]:
    """Token ids of prompts from all over a JSONL file, gzipped or not, in a chat if asked for."""
    from transformers import AutoTokenizer

    tokenizer, file = AutoTokenizer.from_pretrained(given.model), given.prompts
    opened = gzip.open if file.suffix == ".gz" else open
    with opened(file, "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines if line.strip()]
    rows = rows[:: max(1, len(rows) // given.limit)][: given.limit]
    texts = [row.get("prompt") or row.get("text") or (row["messages"][0]["content"]
             if "messages" in row else row["turns"][0]) for row in rows]
    if given.edits:
        solved = [text + row["canonical_solution"] for text, row in zip(texts, rows, strict=True)]
        texts = [f"```python\n{code}```\n{change} Give the whole function again."
                 for code, change in zip(solved, cycle(EDITS), strict=False)]
    if given.chat:
        chats = [[{"role": "user", "content": text}] for text in texts]
        texts = [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
                 for chat in chats]
    return [list(tokenizer(text, add_special_tokens=not given.chat).input_ids) for text in texts]


def options(cores: int) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", type=Path, required=True, help="Hugging Face folder of the target")
    add("--gguf", type=Path, help="the same weights as GGUF, for llama.cpp and ours")
    add("--draft", type=Path, help="Hugging Face folder of the draft model")
    add("--draft-gguf", type=Path)
    add("--prompts", type=Path, required=True, help="JSONL (or .gz): prompt, text or turns")
    add("--limit", type=int, default=8, help="prompts")
    add("--chat", action="store_true", help="in the model's chat template")
    add("--edits", action="store_true", help="of HumanEval: functions to change, in a chat")
    add("--bits", type=int, nargs="+", choices=(16, 8, 4), default=[16, 8, 4])
    add("--new-tokens", type=int, default=128)
    add("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    add("--temperature", type=float, default=0.0)
    add("--draft-tokens", type=int, default=4, help="per round, of the others; ours finds its own")
    add("--threads", type=int, nargs="+", default=sorted({max(1, cores // 2), cores}),
        help="numbers to choose from")
    add("--no-speculation", dest="speculate", action="store_false")
    add("--folder", type=Path, default=Path("compare-models"), help="for converted models")
    add("--out", type=Path, default=Path("compare"), help="for table and JSON")
    add("--openvino-python", type=Path, help="one that has openvino-genai and optimum-intel")
    add("--llama-server", type=Path, help="llama.cpp's server; llama-quantize lies beside it")
    add("--ik-llama-server", type=Path, help="the server of ik_llama.cpp, a fork of llama.cpp")
    add("--plot", type=Path, help="bars with intervals: .png, .svg or .pdf")
    add("--texts", type=Path, help="texts for the KL divergence of the weights: gutenberg/*.txt, "
        "humaneval/HumanEval.jsonl.gz, mt_bench/question.jsonl")
    add("--windows", type=int, default=2, help="of 512 tokens, of each kind of text")
    add("--verbose", action="store_true", help="show what the engines print")
    return parser.parse_args()


def main() -> None:
    """Measure, print, write."""
    cores = psutil.cpu_count(logical=False) or 1
    given = options(cores)
    given.chat = given.chat or given.edits
    check_plot_file(given.plot)
    prompts, load = read_prompts(given), psutil.getloadavg()[0]
    found: list[Contestant] = []
    missing: list[str] = []
    console, status = Console(highlight=False), Console(stderr=True).status("")
    with status, contextlib.suppress(KeyboardInterrupt):
        for one in measure(given, prompts, status.update):
            missing.append(one) if isinstance(one, str) else found.append(one)
    kl = dict[tuple[Path, int], float]()
    with status, contextlib.suppress(KeyboardInterrupt):
        kl = distances(given, found, status.update) if given.texts and found else kl
    rows, draft = rows_of(found, kl), f", draft {given.draft.name}" if given.draft else ""
    title = f"{given.model.name}{draft}, {len(prompts)} prompts, {given.new_tokens} new tokens"
    machine = f"{processor()}, {cores} cores; load average {load:.1f} before"
    notes = [*missing, machine]
    if rows:
        console.print(table(rows, title=title, box=SIMPLE_HEAD, padding=0))
    console.print("\n".join(notes), style="dim", markup=False)
    if not rows:
        raise SystemExit("nothing was measured")
    given.out.mkdir(parents=True, exist_ok=True)
    with (given.out / "compare.md").open("w", encoding="utf-8") as file:
        Console(file=file, width=200).print(table(rows, box=MARKDOWN))
        file.write("\n" + "\n".join(f"- {note}" for note in [title, *notes]) + "\n")
    body = {"title": title, "rows": rows, "notes": notes, "arguments": vars(given)}
    text = json.dumps(body, indent=1, default=str) + "\n"
    (given.out / "compare.json").write_text(text, encoding="utf-8")
    if given.plot:
        draw(rows, given.plot, title)
    console.print(f"compare.md and compare.json are in {given.out}", style="dim")


def processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    named = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.machine())


if __name__ == "__main__":
    main()
