"""What a bench leaves behind says what was measured, and says "inflated" wherever it must."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest
from recorded import Scripted, Time, bench, three_ways

from draftproof.bench.figures import figures
from draftproof.bench.measure import Setting
from draftproof.bench.report import Report
from draftproof.engine.cost_curve import CostCurve

pytestmark = pytest.mark.usefixtures("memory_is_not_looked_at")

SETTINGS = [Setting(1, 0.0), Setting(4, 0.0), Setting(1, 0.7)]
ABOUT: dict[str, Any] = {"model": "small", "date": "2026-01-02", "workload": "4 prompts: some", "dtype": "bfloat16"}
MACHINE = {"device": "cpu", "device_name": "a processor", "cores": 2, "threads": 1}
CURVE = CostCurve((1, 2, 4), (0.01, 0.011, 0.02))


def report(about: dict[str, Any] | None = None, *, wrong: bool = False) -> Report:
    plain, drafter, stock = three_ways()
    stock.most = 1
    if wrong:
        drafter.text = [*range(6), 99, *range(7, 100)]
    run = bench(plain, drafter, stock, prompts=4, settings=SETTINGS, turns=2)
    run.run()
    categories = ["<code>", "prose", "<code>", "prose"]
    return Report({**ABOUT, **(about or {})}, MACHINE, run, figures(run, categories, 2.0), {1: CURVE, 4: CURVE})


def test_json_has_every_trial_and_can_be_read_back() -> None:
    made = report()
    found = json.loads(made.as_json())
    assert len(found["trials"]) == len(made.bench.trials) == made.bench.runs
    assert len(found["figures"]) == 8                                     # three ways, but one sits out with four rows
    first = found["trials"][0]
    assert {"way", "setting", "turn", "group", "prompts", "texts", "seconds", "parts", "reads", "joules"} <= first.keys()
    assert first["texts"][0]["tokens"] == list(range(9))
    drafter = next(one for one in found["figures"] if one["way"] == "drafter")
    assert drafter["speed_up"]["median"] == pytest.approx(8.5 / 3.5)
    assert drafter["setting"] == {"batch": 1, "temperature": 0.0}
    assert found["costs"]["1"] == {"widths": [1, 2, 4], "seconds": [0.01, 0.011, 0.02]}
    assert found["interrupted"] is False and found["machine"] == MACHINE


def test_tables_have_a_row_for_every_way() -> None:
    made = report()
    speed, use, parts, positions, categories = made.tables(SETTINGS[0])
    assert [row[0] for row in speed.rows] == [row[0] for row in use.rows] == ["plain", "drafter", "transformers"]
    assert [row[0] for row in parts.rows] == ["plain", "drafter"]         # transformers tells no parts
    assert positions.rows == [["drafter", "67 %", "100 %", "50 %"]]
    assert categories.columns == ["", "<code>", "prose"]
    for grid in (speed, use, parts, positions, categories):
        assert grid.title.startswith("small: greedy, batch 1") and all(len(row) == len(grid.columns) for row in grid.rows)
    drafter = dict(zip(speed.columns, speed.rows[1], strict=True))
    assert drafter["same\ntext"] == "yes" and drafter["speed-up"] == "2.43×" and drafter["95 %"] == "2.43–2.43"
    assert [row[0] for row in made.summary().rows] == ["drafter", "transformers"]
    several, one_group = "2.43× (2.43–2.43), same text", "2.43×, same text"
    assert made.summary().rows[0][1:] == [several, one_group, several]


def test_a_column_in_which_nothing_stands_is_left_out() -> None:
    (speed, use, *_) = report().tables(SETTINGS[0])
    assert "joules/\ntoken" not in use.columns and "cost/\nmillion" in use.columns
    assert "against\ngenerate" in speed.columns


def test_a_text_that_differs_is_not_hidden() -> None:
    made = report(wrong=True)
    speed = made.tables(SETTINGS[0])[0]
    assert speed.rows[1][1] == "0 of 8"
    note = next(note for note in made.notes() if note.startswith("drafter, greedy, batch 1"))
    assert "differs from plain at token 7 of prompt 1" in note and "near-tie" in note
    assert "near-tie" not in " ".join(report({"dtype": "float32"}, wrong=True).notes())
    assert "differs" not in " ".join(report().notes())


def test_what_was_left_out_is_said() -> None:
    made = report()
    assert "transformers cannot write 4 texts side by side and sat out." in made.notes()
    assert "Interrupted" in replace(made, interrupted=True).notes()[0]


def test_a_busy_machine_is_said_to_be_busy() -> None:
    busy = replace(report(), machine={**MACHINE, "load_average": 5.5})
    assert "The machine was busy when this began: a load of 5.5 on 2 cores." in busy.notes()
    assert "busy" not in " ".join(replace(busy, machine={**MACHINE, "load_average": 0.4}).notes())


def test_every_title_of_an_inflated_model_says_so() -> None:
    made = report({"inflated_to": "0.5B"})
    for setting in SETTINGS:
        assert all("inflated to 0.5B" in grid.title for grid in made.tables(setting))
    assert "inflated" in made.summary().title and "inflated" in json.loads(made.as_json())["name"]
    page = made.as_html({})
    assert all("inflated to 0.5B" in heading for heading in re.findall(r"<h[12]>(.*?)</h[12]>", page) if "small" in heading)
    assert "inflated" in re.findall(r"<title>(.*?)</title>", page)[0]
    assert "inflated" not in report().as_html({})


def test_the_page_needs_nothing_else_and_escapes_what_it_is_told() -> None:
    png = b"\x89PNG\r\n\x1a\n" + bytes(24)
    page = report().as_html({"speed-up": png})
    assert "src='data:image/png;base64," in page and "http" not in page and "<script" not in page
    assert "<code>" not in page and "&lt;code&gt;" in page


def test_pictures_are_drawn_in_every_case() -> None:
    pytest.importorskip("matplotlib")
    from draftproof.bench.plots import draw

    everything = {"speed-up", "costs", "parts", "acceptance", "tokens-per-round"}
    for made in (report(), report({"inflated_to": "1B"})):
        pictures = draw(made)
        assert pictures.keys() == everything
        assert all(png.startswith(b"\x89PNG") and len(png) > 5000 for png in pictures.values())
    alone = bench(Scripted("plain", Time(), [1] * 8), prompts=1)
    alone.run()
    assert draw(Report(ABOUT, MACHINE, alone, figures(alone, [""]), {})).keys() == {"parts"}
    assert draw(Report(ABOUT, MACHINE, bench(Scripted("plain", Time(), [1])), [], {})) == {}


def test_every_picture_names_the_model_and_that_it_is_inflated(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    from draftproof.bench.plots import draw

    said: list[str] = []
    write = Figure.text

    def noted(self: Any, x: float, y: float, text: str, **how: Any) -> Any:
        said.append(text)
        return write(self, x, y, text, **how)

    monkeypatch.setattr(Figure, "text", noted)
    pictures = draw(report({"inflated_to": "0.5B"}))
    assert len([text for text in said if "small, inflated to 0.5B" in text]) == len(pictures)
