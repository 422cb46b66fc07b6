"""Run the same weights in draftproof, llama.cpp, ik_llama.cpp, OpenVINO GenAI and transformers.

    python recipes/compare/compare.py --model FOLDER --gguf FILE [--draft FOLDER --draft-gguf FILE]
        --prompts FILE [--bits 16 8 4] [--engines ours llama.cpp openvino transformers]

Each engine runs in its own process (workers.py), with the number of threads that makes it fastest.
For each number of bits, all engines complete a prompt, with and without speculation, before the
next prompt; their order rotates. The engines receive and return token ids. To speculate, an engine
drafts with the draft model, in the same number of bits; without a draft model, draftproof (`ours`)
uses its default drafter, and the others use prompt lookup. Speculated texts are compared with the
plain texts of the same engine: engines round differently, so texts of different engines diverge at
near-ties. --texts also measures the KL divergence of the weights from the folder's: our own forward
pass reads the files that draftproof and llama.cpp ran, as in quantized_kl.py.
Prints a table; --out names the folder for the results as Markdown and JSON.
README.md lists the packages that the other engines need.
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
"""The changes to HumanEval's functions that --edits asks for, in turn."""
PROBE = 24
"""New tokens in the runs that choose the number of threads."""
NAMES = {False: "plain", True: "speculating"}


@dataclass
class Contestant:
    """An engine with weights of `bits` bits, its process, and its runs by `speculate`."""

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
            raise Missing(f"{self.engine} exited early, with code {self.process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(30)
        if self.process.poll() is None:
            self.process.kill()


class Files:
    """The models in each engine's format and number of bits, converted once, kept in a folder."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.folder = options, options.folder
        self.folder.mkdir(parents=True, exist_ok=True)

    def of(self, engine: str, bits: int, model: Path, gguf: Path | None) -> Path:
        """The folder or file that an engine loads; the GGUF file itself if its bits are right.

        Raises:
            Missing: The model cannot be converted.
        """
        if engine.endswith("llama.cpp"):
            if gguf is None:
                raise Missing(f"{engine} reads GGUF files: give --gguf, with --draft --draft-gguf")
            return self._gguf(gguf, bits, model)
        if engine == "ours" and gguf is not None and self._bits(gguf, model) == bits:
            return gguf
        return self._openvino(model, bits) if engine == "openvino" else model

    def _bits(self, file: Path, model: Path) -> int:
        """The bits per weight of a GGUF file, rounded to 16, 8 or 4."""
        weights = sum(part.stat().st_size for part in model.glob("*.safetensors")) / 2
        stored = 8 * file.stat().st_size / weights if weights else 0.0
        return 4 if stored < 6.5 else 8 if stored < 10 else 16

    def _gguf(self, file: Path, bits: int, model: Path) -> Path:
        """`file` itself if it has about `bits` bits per weight, else what llama-quantize makes."""
        if bits == self._bits(file, model):
            return file
        made = self.folder / f"{file.stem}-{GGUF_TYPES[bits]}.gguf"
        server = self.options.llama_server
        tool = server.with_name("llama-quantize") if server else shutil.which("llama-quantize")
        if not made.exists() and not (tool and Path(tool).exists()):
            raise Missing(f"llama-quantize, which makes {made.name}, is not next to llama-server")
        return self._made(made, [tool, "--allow-requantize", file, "{}", GGUF_TYPES[bits]])

    def _openvino(self, model: Path, bits: int) -> Path:
        made = self.folder / f"{model.name}-openvino-{OPENVINO_FORMATS[bits]}"
        tool = Path(self.options.openvino_python or sys.executable).with_name("optimum-cli")
        if not made.exists() and not tool.exists():
            raise Missing("optimum-cli, which makes OpenVINO's format, is not installed: "
                          "pip install optimum-intel")
        return self._made(made, [tool, "export", "openvino", "--model", model, "--task",
                                 "text-generation-with-past", "--weight-format",
                                 OPENVINO_FORMATS[bits], "{}"])

    def _made(self, path: Path, command: Sequence[Any]) -> Path:
        """`path`, made by a command if it does not exist; a failed command leaves nothing there."""
        if not path.exists():
            part = path.with_name(f".part-{path.name}")
            words = [str(word).replace("{}", str(part)) for word in command]
            environment = os.environ | {"PYTHONPATH": ""}       # the tool may have another Python
            done = subprocess.run(words, capture_output=True, text=True, check=False,
                                  env=environment)
            if done.returncode != 0 or not part.exists():
                output = (done.stderr + done.stdout).strip().splitlines() or ["it printed nothing"]
                raise Missing(f"{Path(words[0]).name} could not make {path.name}: {output[-1]}")
            part.rename(path)
        return path


def start(
    options: argparse.Namespace, files: Files, engine: str, bits: int, threads: int
) -> Contestant:
    """A worker whose models are loaded; raises Missing if it cannot be started."""
    draft = files.of(engine, bits, options.draft, options.draft_gguf) if options.draft else None
    model = files.of(engine, bits, options.model, options.gguf)
    spec = {"model": str(model), "draft": draft and str(draft), "bits": bits, "threads": threads,
            "draft_tokens": options.draft_tokens,
            "temperature": options.temperature, "speculate": options.speculate}
    python = (options.openvino_python if engine == "openvino" else None) or sys.executable
    servers = {"LLAMA_SERVER": options.llama_server, "IK_LLAMA_SERVER": options.ik_llama_server}
    extra = {name: str(server) for name, server in servers.items() if server}
    process = subprocess.Popen(
        [python, HERE / "workers.py", engine, json.dumps(spec)], text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=None if options.verbose else subprocess.DEVNULL,
        env=os.environ | extra | {"OMP_NUM_THREADS": str(threads)})
    contestant = Contestant(engine, bits, threads, process, model)
    answer = contestant.read()
    if "missing" in answer:
        contestant.close()
        raise Missing(answer["missing"])
    return contestant


def quickest(
    options: argparse.Namespace, files: Files, engine: str, bits: int, prompt: list[int]
) -> Contestant:
    """A warm worker with the number of threads that writes a short text fastest."""
    best: tuple[float, Contestant] | None = None
    for threads in options.threads:
        contestant = start(options, files, engine, bits, threads)
        seconds = min(contestant.write(prompt, PROBE, False)["seconds"] for _ in range(2))
        if options.speculate:
            contestant.write(prompt, PROBE, True)
        if best is None or seconds < best[0]:
            if best is not None:
                best[1].close()
            best = seconds, contestant
        else:
            contestant.close()
    assert best is not None
    return best[1]


def measure(
    options: argparse.Namespace, prompts: list[list[int]], say: Callable[[str], None]
) -> Iterator[Contestant | str]:
    """The contestants with their runs, by number of bits; a sentence for each missing engine."""
    files, modes = Files(options), (False, True) if options.speculate else (False,)
    for bits in options.bits:
        contestants: list[Contestant] = []
        try:
            for engine in options.engines:
                say(f"{engine}, {bits} bits: converting and loading")
                try:
                    contestants.append(quickest(options, files, engine, bits, prompts[0]))
                except Missing as error:
                    yield f"{engine}, {bits} bits: {error}"
            tasks = [(contestant, speculate) for contestant in contestants for speculate in modes]
            for place, prompt in enumerate(prompts):
                shift = place % max(1, len(tasks))
                for contestant, speculate in tasks[shift:] + tasks[:shift]:
                    say(f"{bits} bits, prompt {place + 1}: {contestant.engine}, {NAMES[speculate]}")
                    run = contestant.write(prompt, options.new_tokens, speculate)
                    contestant.runs[speculate].append(run)
            yield from contestants
        finally:
            for contestant in contestants:
                contestant.close()


def distances(
    options: argparse.Namespace, contestants: Sequence[Contestant], say: Callable[[str], None]
) -> dict[tuple[Path, int], float]:
    """The mean KL divergence of the weights from the folder's, in nats, by model and number of
    bits; only for formats that our own forward pass reads."""
    tokenizer = quantized_kl.Tokenizer.from_file(str(options.model / "tokenizer.json"))
    windows = torch.cat([quantized_kl.windows(tokenizer, text, options.windows)
                         for _, text in quantized_kl.texts(options.texts)])
    truth, result = [], dict[tuple[Path, int], float]()
    for contestant in contestants:
        key, is_file = (contestant.model, contestant.bits), contestant.model.is_file()
        if contestant.engine == "openvino" or key in result:
            continue
        if contestant.bits == 16 and not is_file:
            result[key] = 0.0                           # these are the folder's weights
            continue
        say(f"KL divergence of {contestant.engine}'s weights, {contestant.bits} bits")
        if not truth:
            original = quantized_kl.folder_model(options.model, None)
            truth = [quantized_kl.log_probs(original, window) for window in windows]
            del original
        model = (native_gguf(contestant.model, torch.bfloat16) if is_file
                 else quantized_kl.folder_model(options.model, f"int{contestant.bits}"))
        if model is not None:
            log_probs = [quantized_kl.log_probs(model, window) for window in windows]
            result[key] = quantized_kl.distance(truth, log_probs).kl
    return result


def rows_of(
    contestants: Sequence[Contestant], kl: dict[tuple[Path, int], float]
) -> list[dict[str, Any]]:
    """A row per engine, number of bits and mode.

    tokens/s includes the time to read the prompt; decode counts from the first token on.
    """
    rows = []
    for contestant in contestants:
        for speculate, runs in contestant.runs.items():
            if not runs:
                continue
            counts = [len(run["tokens"]) for run in runs]
            after = sum(run["seconds"] - run["first"] for run in runs)
            rounds = [run["tokens_per_round"] for run in runs if run["tokens_per_round"]]
            pairs = zip(runs, contestant.runs[False], strict=False)
            same = sum(run["tokens"] == plain["tokens"] for run, plain in pairs)
            rows.append({
                "engine": contestant.engine, "bits": contestant.bits, "mode": NAMES[speculate],
                "threads": contestant.threads,
                "tokens/s": sum(counts) / sum(run["seconds"] for run in runs),
                "decode": (sum(counts) - len(runs)) / max(1e-9, after),
                "first": median(run["first"] for run in runs),
                "tokens/round": sum(rounds) / len(rounds) if rounds and speculate else None,
                "same": f"{same}/{len(runs)}" if speculate else "",
                "model": str(contestant.model), "kl": kl.get((contestant.model, contestant.bits)),
                "speeds": [len(run["tokens"]) / run["seconds"] for run in runs],
                "texts": [run["tokens"] for run in runs]})
    return rows


def table(rows: Sequence[dict[str, Any]], **style: Any) -> Table:
    """A table with the fastest row of each number of bits in bold."""
    shown = Table(title_justify="left", pad_edge=False, **style)
    names = ("engine", "bits", "mode", "thre-|ads", "tokens|/s", "decode,|tokens|/s",
             "first|token,|s", "tokens/|round", "same|text", "KL,|nats")
    for place, name in enumerate(names):
        broken = name.replace("|", "\n")
        if style.get("box") is MARKDOWN:
            broken = name.replace("-|", "").replace("|/", "/").replace("/|", "/")
            broken = broken.replace("|", " ")
        shown.add_column(broken, justify="left" if place in (0, 2) else "right", no_wrap=True)
    best = {row["bits"]: max(other["tokens/s"] for other in rows if other["bits"] == row["bits"])
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


def read_prompts(options: argparse.Namespace) -> list[list[int]]:
    """Token ids of prompts spread over a JSONL file, gzipped or not; in a chat with --chat."""
    from transformers import AutoTokenizer

    tokenizer, file = AutoTokenizer.from_pretrained(options.model), options.prompts
    opened = gzip.open if file.suffix == ".gz" else open
    with opened(file, "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines if line.strip()]
    rows = rows[:: max(1, len(rows) // options.limit)][: options.limit]
    texts = [row.get("prompt") or row.get("text") or (row["messages"][0]["content"]
             if "messages" in row else row["turns"][0]) for row in rows]
    if options.edits:
        solved = [text + row["canonical_solution"] for text, row in zip(texts, rows, strict=True)]
        texts = [f"```python\n{code}```\n{change} Give the whole function again."
                 for code, change in zip(solved, cycle(EDITS), strict=False)]
    if options.chat:
        chats = [[{"role": "user", "content": text}] for text in texts]
        texts = [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
                 for chat in chats]
    return [list(tokenizer(text, add_special_tokens=not options.chat).input_ids) for text in texts]


def parse_options(cores: int) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", type=Path, required=True, help="Hugging Face folder of the target")
    add("--gguf", type=Path, help="the same weights as a GGUF file, for llama.cpp and draftproof")
    add("--draft", type=Path, help="Hugging Face folder of the draft model")
    add("--draft-gguf", type=Path)
    add("--prompts", type=Path, required=True, help="JSONL (or .gz) with prompt, text or turns")
    add("--limit", type=int, default=8, help="number of prompts")
    add("--chat", action="store_true", help="apply the model's chat template")
    add("--edits", action="store_true", help="ask for changes to HumanEval's functions, in a chat")
    add("--bits", type=int, nargs="+", choices=(16, 8, 4), default=[16, 8, 4])
    add("--new-tokens", type=int, default=128)
    add("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    add("--temperature", type=float, default=0.0)
    add("--draft-tokens", type=int, default=4,
        help="per round, for the other engines; draftproof chooses its own number")
    add("--threads", type=int, nargs="+", default=sorted({max(1, cores // 2), cores}),
        help="numbers of threads to try")
    add("--no-speculation", dest="speculate", action="store_false")
    add("--folder", type=Path, default=Path("compare-models"), help="folder for converted models")
    add("--out", type=Path, default=Path("compare"), help="folder for the table and the JSON file")
    add("--openvino-python", type=Path, help="a Python that has openvino-genai and optimum-intel")
    add("--llama-server", type=Path, help="llama.cpp's server, with llama-quantize next to it")
    add("--ik-llama-server", type=Path, help="the server of ik_llama.cpp, a fork of llama.cpp")
    add("--plot", type=Path, help="bars with intervals: .png, .svg or .pdf")
    add("--texts", type=Path, help="texts for the KL divergence of the weights: gutenberg/*.txt, "
        "humaneval/HumanEval.jsonl.gz, mt_bench/question.jsonl")
    add("--windows", type=int, default=2, help="windows of 512 tokens of each kind of text")
    add("--verbose", action="store_true", help="show what the engines print")
    return parser.parse_args()


def main() -> None:
    """Measure, print, write."""
    cores = psutil.cpu_count(logical=False) or 1
    options = parse_options(cores)
    options.chat = options.chat or options.edits
    check_plot_file(options.plot)
    prompts, load = read_prompts(options), psutil.getloadavg()[0]
    contestants: list[Contestant] = []
    missing: list[str] = []
    console, status = Console(highlight=False), Console(stderr=True).status("")
    with status, contextlib.suppress(KeyboardInterrupt):
        for result in measure(options, prompts, status.update):
            missing.append(result) if isinstance(result, str) else contestants.append(result)
    kl = dict[tuple[Path, int], float]()
    with status, contextlib.suppress(KeyboardInterrupt):
        if options.texts and contestants:
            kl = distances(options, contestants, status.update)
    rows = rows_of(contestants, kl)
    draft = f", draft {options.draft.name}" if options.draft else ""
    title = f"{options.model.name}{draft}, {len(prompts)} prompts, {options.new_tokens} new tokens"
    machine = f"{processor()}, {cores} cores; load average {load:.1f} before"
    notes = [*missing, machine]
    if rows:
        console.print(table(rows, title=title, box=SIMPLE_HEAD, padding=0))
    console.print("\n".join(notes), style="dim", markup=False)
    if not rows:
        raise SystemExit("nothing was measured")
    options.out.mkdir(parents=True, exist_ok=True)
    with (options.out / "compare.md").open("w", encoding="utf-8") as file:
        Console(file=file, width=200).print(table(rows, box=MARKDOWN))
        file.write("\n" + "\n".join(f"- {note}" for note in [title, *notes]) + "\n")
    body = {"title": title, "rows": rows, "notes": notes, "arguments": vars(options)}
    text = json.dumps(body, indent=1, default=str) + "\n"
    (options.out / "compare.json").write_text(text, encoding="utf-8")
    if options.plot:
        draw(rows, options.plot, title)
    console.print(f"compare.md and compare.json are in {options.out}", style="dim")


def processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


if __name__ == "__main__":
    main()
