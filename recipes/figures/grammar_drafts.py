"""Drafts from the grammar: tokens per round and per second on 24 schema-bound prompts, with what
the schema forces drafted and without, the default drafter in both.

    python recipes/figures/grammar_drafts.py qwen2.5-coder-1.5b-instruct-q8_0.gguf

Each prompt runs both ways, one after the other, and the other way round the next time. Texts must
be equal.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import draftproof as dp
from draftproof.core.params import LogitsRule
from draftproof.server.grammar import Grammars
from draftproof.server.json_schema import json_rule

TEXT = {"type": "string", "maxLength": 24}
NUMBER = {"type": "integer", "minimum": 0, "maximum": 9999}


def record(**fields: Any) -> dict[str, Any]:
    return {"type": "object", "properties": fields, "required": [*fields],
            "additionalProperties": False}


def several(fields: dict[str, Any], count: int = 3) -> dict[str, Any]:
    return {"type": "array", "items": fields, "minItems": count, "maxItems": count}


SCHEMAS = {
    "a person with name, age, city and occupation": record(
        full_name=TEXT, age_in_years=NUMBER, city_of_residence=TEXT, occupation=TEXT),
    "a product of an online shop": record(
        product_name=TEXT, price_in_cents=NUMBER, is_available={"type": "boolean"},
        category={"enum": ["electronics", "clothing", "groceries"]}),
    "a call of a weather service": record(
        function={"const": "get_current_weather"}, arguments=record(
            location=TEXT, temperature_unit={"enum": ["celsius", "fahrenheit"]})),
    "three books with title, author and year": record(
        books=several(record(title=TEXT, author=TEXT, publication_year=NUMBER))),
    "a git commit": record(
        commit_hash={"type": "string", "pattern": "^[0-9a-f]{8}$"}, author_name=TEXT,
        files_changed=NUMBER, lines_added=NUMBER, lines_deleted=NUMBER),
    "two points of a map with their coordinates": record(
        points=several(record(label=TEXT, latitude=NUMBER, longitude=NUMBER), 2)),
    "a bug report": record(
        issue_title=TEXT, severity={"enum": ["low", "medium", "high", "critical"]},
        reproducible={"type": "boolean"}, affected_component=TEXT),
    "a calendar entry": record(
        event_name=TEXT, start_hour=NUMBER, duration_in_minutes=NUMBER,
        attendees=several(TEXT, 2)),
}
ASK = ("Write {} as JSON.", "Invent {} and answer in JSON only.", "JSON for {}, please:")


def without(rule: LogitsRule) -> LogitsRule:
    """The same masks, without saying what is forced."""
    return LogitsRule(rule.name, lambda request: rule.make(request).__call__)


def main(model: str, tokens: int = 64) -> None:
    engine = dp.load(model)
    target: Any = engine.target
    grammars = Grammars(engine.codec, target.vocab_size, tuple(engine.stop_tokens))
    totals = {way: [0, 0, 0.0] for way in ("without", "with")}
    equal, number = 0, 0
    for ask in ASK:
        for what, schema in SCHEMAS.items():
            rule = grammars.lark(f"start: {json_rule(schema)}")
            rules, texts = {"without": without(rule), "with": rule}, {}
            for way in [*totals][:: 1 - 2 * (number % 2)]:
                begin = time.perf_counter()
                sampling = dp.Sampling(logits_rules=[rules[way]])
                done = engine.generate(ask.format(what), sampling=sampling,
                                       max_new_tokens=tokens)[0]
                seconds = done.stats.seconds
                totals[way][0] += done.stats.emitted
                totals[way][1] += done.stats.rounds
                totals[way][2] += time.perf_counter() - begin - seconds.get("prefill", 0.0)
                texts[way] = done.tokens
            equal += texts["with"] == texts["without"]
            number += 1
    for way, (emitted, rounds, seconds) in totals.items():
        each, rate = emitted / rounds, emitted / seconds
        print(f"{way:8} {each:5.2f} tokens per round, {rate:6.2f} tokens/s")
    rates = [emitted / seconds for emitted, _, seconds in totals.values()]
    print(f"{rates[1] / rates[0]:.2f} x; {equal} of {number} texts equal")


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
