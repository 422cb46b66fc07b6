"""mypy checks a user's program: the package has its types with it, and they find mistakes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import draftproof

PROGRAM = '''
import draftproof as dp

engine = dp.load("demo", assistant_model="demo-draft")
done = engine.generate("Once", max_new_tokens=5, sampling=dp.Sampling(temperature=0.5))[0]
reveal_type(done.text)
reveal_type(done.stats.tokens_per_round)
for chunk in engine.stream("Lily"):
    reveal_type(chunk.tokens)
dp.load("demo", assistent_model="demo-draft")
engine.generate("Once", max_tokens=5)
dp.Sampling(temprature=0.5)
'''
CONFIG = """
[mypy]
strict = true
follow_imports = silent
[mypy-torch.*,transformers.*,numpy.*,tokenizers.*,rich.*,huggingface_hub.*,safetensors.*]
follow_imports = skip
"""


def test_a_users_program_is_checked_with_our_types(tmp_path: Path) -> None:
    """With the package in site-packages, where mypy asks for py.typed."""
    package = Path(draftproof.__file__).parent
    assert (package / "py.typed").is_file()
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "mypy.ini").write_text(CONFIG)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "--cache-dir", "cache",
         "program.py"], capture_output=True, text=True, check=False, cwd=tmp_path)
    lines = [line for line in done.stdout.splitlines() if line.startswith("program.py")]
    revealed = [line.split("type is ")[1].replace("builtins.", "")
                for line in lines if "Revealed type" in line]
    assert revealed == ['"str"', '"float"', '"list[int]"'], done.stdout
    errors = [line for line in lines if ": error: " in line]
    assert len(errors) == 3, done.stdout
    for line, word in zip(errors, ("assistent_model", "max_tokens", "temprature"), strict=True):
        assert word in line
