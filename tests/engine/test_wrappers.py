"""A wrapper of a drafter is that drafter in all it does not do itself."""

from __future__ import annotations

from drafting import Guess

from draftproof.drafters.base import Drafter
from draftproof.engine.wrappers import DrafterWrapper


class Marked(Guess):
    """Says something of its own under every public name that drafters have by default."""


def test_a_wrapper_forwards_every_attribute_that_drafters_have() -> None:
    """Those that are added later, too."""
    names = [name for name, value in vars(Drafter).items()
             if not name.startswith("_") and not callable(value)]  # fmt: skip
    inner = Marked()
    for name in (*names, "added_later"):
        setattr(inner, name, object())
    wrapper = DrafterWrapper(inner)
    assert len(names) > 6 and all(getattr(wrapper, name) is getattr(inner, name)
                                  for name in (*names, "added_later"))  # fmt: skip
    assert wrapper.unread.__self__ is inner
