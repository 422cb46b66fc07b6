"""What a drafter may not propose."""

from __future__ import annotations

import pytest
from tiny import CPU, target

from draftproof.core.messages import Frontier
from draftproof.core.ops import TORCH, Ops
from draftproof.core.tree import TokenTree, TreeShape
from draftproof.drafters.base import Drafter
from draftproof.engine.engine import Engine
from draftproof.errors import DrafterMismatch
from draftproof.native.cpu_ops import CpuOps


def _broken(frontier: Frontier, kind: str) -> TokenTree:
    """A tree with one thing wrong."""
    tokens = frontier.prefix.root[:, None].repeat(1, 4)
    tree = TokenTree.shaped(tokens, TreeShape.branching((1, 2)))
    parents = tree.parents.clone()
    if kind in ("parent behind", "parent beyond", "two roots"):
        parents[:, 2] = {"parent behind": 3, "parent beyond": 1 << 40, "two roots": -1}[kind]
    elif kind in ("unknown token", "negative token"):
        tokens[:, 3] = 1 << 40 if kind == "unknown token" else -5
    tokens = {"int32": tokens.int(), "more rows": tokens.repeat(2, 1)}.get(kind, tokens)
    return TokenTree(tokens, parents, 1 if kind == "deeper than said" else 2)


@pytest.mark.parametrize("ops", [CPU, TORCH], ids=["kernels", "operators"])
@pytest.mark.parametrize("kind", [
    "parent behind", "parent beyond", "two roots", "unknown token", "negative token", "int32",
    "more rows", "deeper than said"])  # fmt: skip
def test_what_is_no_tree_is_refused(kind: str, ops: Ops, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(Drafter):
        def propose(self, frontier: Frontier) -> TokenTree:
            return _broken(frontier, kind)

    monkeypatch.setattr(CpuOps, "run", ops.run)
    with pytest.raises(DrafterMismatch, match="proposed no tree"):
        Engine(target(), Broken(), budget=5).generate([[1, 2], [3]], max_new_tokens=4)
