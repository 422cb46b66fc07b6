"""A page that shows every round of a text: its draft tree, who drafted what, where time went."""

from __future__ import annotations

import codecs
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from draftproof.engine.engine import Completion, Engine, Prompt
from draftproof.requests.request import DraftTree, Update
from draftproof.requests.stats import PARTS

TEMPLATE = Path(__file__).with_name("trace.html")
PART_NAMES = dict(zip(PARTS, ("read the prompt", "draft", "verify", "decide"), strict=True))


@dataclass
class Round:
    """What one step brought.

    Attributes:
        tokens: Text and drafter of each new token; the drafter is "" for the target's own.
        tree: Text, parent, whether accepted, and drafter of each node; node 0 is the root.
        seconds: By part of a round, as in `PARTS`; "other" is what no part counts.
    """

    tokens: list[tuple[str, str]]
    tree: list[tuple[str, int, bool, str]]
    seconds: dict[str, float]


@dataclass
class Trace:
    """The rounds of one text, as they come.

    Args:
        engine: What writes it.
        prompt: What it is written after.

    Attributes:
        rounds: One per step that wrote something.
        completion: The whole text, once it has ended.
    """

    engine: Engine
    prompt: Prompt
    rounds: list[Round] = field(default_factory=list)
    completion: Completion | None = None
    _decoder: codecs.IncrementalDecoder = field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace"))

    def run(self, **options: Any) -> Iterator[Update]:
        """Write the text, an update per round.

        Args:
            **options: `sampling` and `max_new_tokens`, as for `Engine.stream`.
        """
        [request] = self.engine.read([self.prompt], **options)
        request.draft_trees = True
        with self.engine.scheduled([request], 1) as scheduler:
            before = dict.fromkeys(PARTS, 0.0)
            while scheduler.has_unfinished_requests():
                start = time.perf_counter()
                updates = scheduler.step()
                whole, now = time.perf_counter() - start, dict(scheduler.clock.seconds)
                spent = {part: now[part] - before[part] for part in PARTS}
                before = now
                for update in updates:
                    self._add(update, spent | {"other": max(0.0, whole - sum(spent.values()))})
                    yield update

    def _add(self, update: Update, seconds: dict[str, float]) -> None:
        """Keep a round; its last token is the target's own, those before it were drafted."""
        accepted = [who for _, _, kept, who in (update.tree or [])[1:] if kept]
        drafters = [*accepted, *[""] * len(update.tokens)]
        tokens = [(self._next_piece(token), who)
                  for token, who in zip(update.tokens, drafters, strict=False)]
        self.rounds.append(Round(tokens, self._readable(update.tree or []), seconds))
        self.completion = update.completion or self.completion

    def _next_piece(self, token: int) -> str:
        """Text of the next token; a character of several tokens comes with the last of them."""
        return self._decoder.decode(self._bytes(token))

    def _bytes(self, token: int) -> bytes:
        codec = self.engine.codec
        return codec.token_bytes[token] if codec is not None else f"[{token}]".encode()

    def _readable(self, tree: DraftTree) -> list[tuple[str, int, bool, str]]:
        """Nodes with their text; absent ones are left out."""
        present = [place for place, (token, *_) in enumerate(tree) if token >= 0]
        numbers = {place: number for number, place in enumerate(present)}
        return [(self._text(tree[place][0]), numbers.get(tree[place][1], -1), *tree[place][2:])
                for place in present]

    def _text(self, token: int) -> str:
        return self._bytes(token).decode("utf-8", "replace")

    def as_html(self, title: str) -> str:
        """The page: one file without links, which any browser opens, in light and dark.

        Args:
            title: Model and drafter, in one line.
        """
        done = self.completion
        data = {
            "prompt": self.prompt if isinstance(self.prompt, str) else "",
            "parts": {**PART_NAMES, "other": "other"},
            "rounds": [vars(each) for each in self.rounds],
            "stats": None if done is None else {
                "tokens": len(done.tokens), "rounds": done.stats.rounds,
                "tokens_per_round": done.stats.tokens_per_round,
                "drafted": done.stats.drafted, "accepted": done.stats.accepted,
                "seconds": sum(sum(each.seconds.values()) for each in self.rounds)},
        }  # fmt: skip
        body = json.dumps(data, ensure_ascii=False).replace("<", "\\u003c")
        page = TEMPLATE.read_text(encoding="utf-8")
        return page.replace("__TITLE__", escape(title)).replace('"__DATA__"', body)


def write_trace(
    engine: Engine, prompt: Prompt, file: Path, title: str, show: Callable[[Update], None],
    **options: object,
) -> Completion:  # fmt: skip
    """Write a text, and the page of its rounds; what was written before an error is on the page.

    Args:
        engine: What writes it.
        prompt: What it is written after.
        file: Where the page is written.
        title: The heading of the page.
        show: Gets each update as it comes.
        **options: As for `Engine.stream`.

    Returns:
        The completion.
    """
    trace = Trace(engine, prompt)
    try:
        for update in trace.run(**options):
            show(update)
    finally:
        file.write_text(trace.as_html(title), encoding="utf-8")
    assert trace.completion is not None
    return trace.completion
