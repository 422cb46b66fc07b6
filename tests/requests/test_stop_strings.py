"""Stop strings: the same answers as looking for each of them in turn, however many there are."""

from __future__ import annotations

from random import Random

import pytest

from draftproof.core.params import Sampling, SamplingParams
from draftproof.requests.sequence import SequenceState
from draftproof.requests.stop_strings import StopStrings


@pytest.mark.parametrize("seed", range(40))
def test_results_match_a_plain_search(seed: int) -> None:
    random = Random(seed)

    def word(longest: int) -> str:
        return "".join(random.choice("ab\n") for _ in range(random.randrange(1, longest)))

    strings = [word(6) for _ in range(random.randrange(1, 8))]
    stops = StopStrings(strings)
    for _ in range(100):
        text = word(12)
        places = [text.find(string) for string in strings if string in text]
        assert stops.find(text) == (min(places) if places else None)
        if not places:
            sizes = [size for size in range(1, len(text) + 1) for string in strings
                     if string.startswith(text[-size:])]
            assert stops.overlap(text) == max(sizes, default=0)


def test_a_thousand_long_stop_strings_cut_the_text_where_the_first_one_begins() -> None:
    stops = [f"{'x' * 900}{number}" for number in range(999)] + ["end"]

    class CharTokenizer:
        def push(self, token: int) -> str:
            return chr(token)

        def special(self, token: int) -> str:
            return ""

        def finish(self) -> str:
            return ""

    params = SamplingParams(Sampling(stop=stops), 0)
    row = SequenceState([], params, 5000, CharTokenizer())  # type: ignore[arg-type]
    text = "x" * 899 + "y the end"
    assert row.extend([ord(letter) for letter in text + "!"], None, ()) == len(text)
    assert (row.text, row.finish_reason) == ("x" * 899 + "y the ", "stop")
