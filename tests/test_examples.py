"""Every example runs, and what it claims is true."""

import runpy
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs_and_its_claims_hold(
    example: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runpy.run_path(str(example), run_name="__main__")
    printed = capsys.readouterr().out
    assert printed.strip()
    assert "DIFFERENT" not in printed
    assert "False" not in printed
