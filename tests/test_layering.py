"""Structure: which folder may import which, how long a file may be, and links of the docs."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import draftproof

ROOT = Path(draftproof.__file__).parent
FLOORS = ("errors", "core", "native", "gguf", "weights", "tokenizer",
          "cache", "forward", "model", "requests", "drafters", "engine", "hf", "plots", "training",
          "verify", "bench", "plan", "server", "cli")
FILES = sorted(path for path in ROOT.rglob("*.py")
               if path.parent != ROOT or path.name == "errors.py")


EXAMINERS = {"weights", "tokenizer", "cache", "forward", "model", "hf", "verify", "bench", "cli"}
"""They run models through transformers, check it, or name its version (`cli`)."""


def imports(path: Path) -> Iterator[str]:
    """Every module a file names in an import, also inside functions and under TYPE_CHECKING."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: relative imports hide the floor they reach for"
            yield str(node.module)
            yield from (f"{node.module}.{name.name}" for name in node.names
                        if node.module in ("draftproof", None))


def floor(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_is_short_and_imports_only_the_folders_above_it(path: Path) -> None:
    """Decoding knows no transformers, and core needs torch and nothing else."""
    here, names = FLOORS.index(floor(path)), list(imports(path))
    for name in names:
        parts = name.split(".")
        if parts[0] == "draftproof" and len(parts) > 1 and parts[1] in FLOORS:
            assert FLOORS.index(parts[1]) <= here, f"{floor(path)} reaches down to {name}"
        elif parts[0] == "draftproof" and len(parts) == 1:
            assert here >= FLOORS.index("training"), f"{path.name} imports the whole package"
    roots = {name.split(".")[0] for name in names}
    if floor(path) == "gguf":                   # builds a tokenizer, and starts quickly
        assert not roots & {"transformers", "accelerate"}
    elif floor(path) not in EXAMINERS:
        assert not roots & {"transformers", "tokenizers", "accelerate"}
        heads = path.relative_to(ROOT) == Path("drafters", "weight_files.py")
        assert heads or "safetensors" not in roots      # heads lie in these files, as models do
    if floor(path) in ("errors", "native", "core"):
        assert roots <= {"torch", "draftproof", "__future__", *sys.stdlib_module_names}
    text = path.read_text()
    prose = 0
    for node in ast.walk(ast.parse(text)):
        lines = 0
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
            if ast.get_docstring(node) is not None:
                lines = (node.body[0].end_lineno or 0) - node.body[0].lineno + 1
            prose += lines
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert (node.end_lineno or 0) - node.lineno - lines < 60, node.name
    assert len(text.splitlines()) - prose <= 350


def test_drafters_never_import_each_other() -> None:
    """A method's files share their first word; `checkpoints` and `head_files` read all of them."""
    shared = {"base", "heads", "beams", "losses", "bigram", "weight_files", "features",
              "checkpoint"}
    readers = ("checkpoints", "head_files")
    for path in (ROOT / "drafters").glob("*.py"):
        for name in imports(path):
            if name.startswith("draftproof.drafters.") and path.stem not in readers:
                other = name.split(".")[2]
                ours = other.startswith(path.stem.partition("_")[0])
                ours |= (path.stem, other) == ("features", "draft_model")
                assert other in shared or ours, f"{path.name} imports {name}"


def imported_modules(path: Path) -> set[str]:
    """The modules of ours that a file needs, in functions too; not those of annotations alone."""
    names, waiting = set[str](), list[ast.AST]([ast.parse(path.read_text())])
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            waiting += node.orelse
            continue
        if isinstance(node, ast.Import):
            names |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {str(node.module), *(f"{node.module}.{name.name}" for name in node.names)}
        waiting += ast.iter_child_nodes(node)
    return names


CHOOSES = "draftproof.model.target"
"""`Target(model)` makes one of the classes derived from it, which it imports when it is called."""


def test_there_are_no_circular_imports() -> None:
    modules = {".".join(("draftproof", *path.relative_to(ROOT).with_suffix("").parts)): path
               for path in FILES if path.name != "__init__.py"}
    needs = {name: imported_modules(path) & (modules.keys() - {name})
             for name, path in modules.items()}
    needs[CHOOSES] = {name for name in needs[CHOOSES] if CHOOSES not in needs[name]}
    needs[CHOOSES].discard("draftproof.model.encoder_decoder")          # derived of a derived one
    while free := [name for name, others in needs.items() if not others & needs.keys()]:
        for name in free:
            del needs[name]
    assert not needs, "modules in a circle, or that import one"


MOST_ANY = 255
"""Lower it when there are fewer."""


def test_any_stays_rare() -> None:
    """mypy checks nothing of a value of type `Any`, so a new one takes the place of another."""
    lines = (line for path in ROOT.rglob("*.py") for line in path.read_text().splitlines())
    count = sum(len(re.findall(r"\bAny\b", line)) for line in lines
                if not line.lstrip().startswith(("from ", "import ")))
    assert count <= MOST_ANY


PAGES = [ROOT.parents[1] / "README.md", *sorted(ROOT.parents[1].glob("docs/**/*.md"))]


def test_documentation_links_resolve() -> None:
    def headings(page: Path) -> set[str]:
        return {re.sub(r"[^\w -]", "", line.lstrip("# ").lower()).replace(" ", "-")
                for line in page.read_text().splitlines() if line.startswith("#")}

    for page in PAGES:
        text = page.read_text()
        for link in re.findall(r"\]\((?!http)([^)\s]+)\)", text):
            name, _, heading = link.partition("#")
            to = (page.parent / name).resolve() if name else page
            assert to.exists(), f"{page.name}: {link}"
            assert not heading or heading in headings(to), f"{page.name}: {link}"


def test_files_that_contributors_are_sent_to_are_there() -> None:
    text = (ROOT.parents[1] / "CONTRIBUTING.md").read_text()
    files = re.findall(r"`(src/[\w/]+(?:\.py|/))`", text)
    assert len(files) > 8
    assert [file for file in files if not (ROOT.parents[1] / file).exists()] == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_tensor_is_made_in_the_default_dtype(path: Path) -> None:
    """A program may set it to anything; C trusts what Python makes."""
    makers = {"empty", "zeros", "ones", "full", "eye", "rand", "randn", "linspace", "logspace"}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            made = isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"
            if made and node.func.attr in makers:
                assert "dtype" in {keyword.arg for keyword in node.keywords}, f"line {node.lineno}"
