"""Planted bugs: bugs that real engines shipped, each planted alone; a check must see it.

Numbers are those of the catalogue of known bugs that the checks were written against.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager as Context
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import cache, wraps
from types import ModuleType
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

import draftproof
from draftproof.core import noise
from draftproof.core.params import Sampling
from draftproof.core.prefix import Paths
from draftproof.core.tree import ABSENT, TokenTree
from draftproof.native import cpu_ops

Plant = Callable[[], Context[Any]]
NOISE, CHANCE = "core.noise:", "core.sampling:KeyedChance."
SAMPLER, FILTERS = "core.sampling:Sampler.", "core.processors:LogitsProcessors."
CACHE, ROW = "cache.kv_cache:KVCache.", "requests.sequence:SequenceState."
DRAFT = "drafters.draft_model:DraftModel."


def located(where: str) -> tuple[Any, Any, str, Any]:
    """Module, owner, name and present value of "module:name" or "module:Class.name"."""
    module, _, path = where.partition(":")
    home = owner = importlib.import_module(f"draftproof.{module}")
    *outer, name = path.split(".")
    for item in outer:
        owner = getattr(owner, item)
    return home, owner, name, inspect.getattr_static(owner, name)


def counted(function: Callable[..., Any], calls: list[str]) -> Callable[..., Any]:
    """The function, noting each of its calls."""
    @wraps(function)
    def called(*args: Any, **options: Any) -> Any:
        calls.append(function.__name__)
        return function(*args, **options)

    return called


def written(where: str, *changes: tuple[str, str], calls: list[str] | None = None) -> Any:
    """The function at "module:name" with parts of its source written otherwise; calls: of it."""
    home, owner, name, ours = located(where)
    source = textwrap.dedent(inspect.getsource(getattr(ours, "func", getattr(ours, "fget", ours))))
    for old, new in changes:
        assert old in source, f"{where} has no {old!r}"
        source = source.replace(old, new)
    noted = [] if calls is None else calls
    space: dict[str, Any] = {"_counted": lambda function: counted(function, noted)}
    tree = ast.parse(source)
    assert isinstance(tree.body[0], ast.FunctionDef)
    tree.body[0].decorator_list.append(ast.Name("_counted", ast.Load()))       # the innermost
    exec(compile(ast.fix_missing_locations(tree), where, "exec"), vars(home), space)
    if hasattr(space[name], "__set_name__"):
        space[name].__set_name__(owner, name)
    else:
        space[name].__name__ = f"planted_{name}"                # no kernel stands for it
    return space[name]


@cache
def import_everything() -> None:
    """Import all of draftproof that can be imported here.

    A module first imported while a bug is planted would keep the bug for the tests that follow.
    """
    for module in pkgutil.walk_packages(draftproof.__path__, "draftproof."):
        if not module.name.endswith("__main__"):
            with suppress(ImportError):                     # of extras that are not installed
                importlib.import_module(module.name)


@contextmanager
def planted(where: str, new: Any, calls: list[str]) -> Iterator[None]:
    """`new` in the place of what is at "module:name", in every module that imported it.

    It fails if nothing called it: such a bug was never planted.
    """
    import_everything()
    _, owner, name, ours = located(where)
    owners = [owner]
    if isinstance(owner, ModuleType):
        owners += [module for key, module in list(sys.modules.items()) if module is not owner
                   and key.startswith("draftproof.") and vars(module).get(name) is ours]
    with ExitStack() as stack:
        for each in owners:
            stack.enter_context(patch.object(each, name, new))
        yield
    assert calls, f"{where} was never called, so nothing was planted"


def text(where: str, *changes: tuple[str, str]) -> Plant:
    """Plants what `written` gives."""
    def plant() -> Context[Any]:
        calls: list[str] = []
        return planted(where, written(where, *changes, calls=calls), calls)

    return plant


def around(where: str, change: Callable[..., Any]) -> Plant:
    """Plants ``change(own, *args)`` in the place of the function or method at "module:name"."""
    def plant() -> Context[Any]:
        ours, calls = located(where)[3], list[str]()
        return planted(
            where, counted(lambda *args, **how: change(ours, *args, **how), calls), calls
        )

    return plant


def kernel(function: Callable[..., Any], change: Callable[..., Any]) -> Plant:
    """Plants ``change(kernel, library, *args)`` in the place of the kernel of a function."""
    @contextmanager
    def plant() -> Iterator[None]:
        original, calls = cpu_ops._KERNELS[function], list[str]()
        new = counted(lambda *args: change(original, *args), calls)
        with patch.dict(cpu_ops._KERNELS, {function: new}):
            yield
        assert calls, f"the kernel of {function.__name__} was never called"

    return plant


def drafts(change: Callable[[TokenTree], Tensor]) -> Plant:
    """A draft model whose drawn tokens [B, N - 1] are changed afterwards."""
    def proposed(original: Any, self: Any, frontier: Any) -> TokenTree:
        tree = original(self, frontier)
        if tree.draft_probs is None:
            return tree
        return replace(tree, tokens=torch.cat([tree.tokens[:, :1], change(tree)], 1))

    return around(DRAFT + "propose", proposed)


def likely_only(tree: TokenTree) -> Tensor:
    chance = tree.draft_probs.gather(-1, tree.tokens.clamp(min=0)[..., None])[..., 0]
    return torch.where((chance > 0.3)[:, 1:].cummin(1).values, tree.tokens[:, 1:], ABSENT)


def reordered(ours: Any, self: Any, order: Sequence[int], *rest: Any) -> Any:
    order = list(order)
    return ours(self, order[::-1] if len(order) > 1 and order != sorted(order) else order, *rest)


def text_left(original: Any, self: Any, order: Sequence[int], *rest: Any) -> Any:
    before = self.text.clone()
    done = original(self, order, *rest)
    self.text.copy_(before)
    return done


def forgetful(original: Any, self: Any, commit: Any) -> None:
    if commit.tokens.shape[1] > 1 or self.scratch is not None:      # plain rounds are ignored
        original(self, commit)


def all_but_last(original: Any, self: Any, prefix: Any, *rest: Any) -> Any:
    lengths = self._cache(len(prefix.position)).lengths.clone()
    return original(self, replace(prefix, position=lengths), *rest)


def blind_to_last(original: Any, tree: Any, lengths: Tensor, span: int, *rest: Any) -> Tensor:
    made = original(tree, lengths, span, *rest)
    last = torch.arange(span) == lengths[:, None, None, None] - 1
    return made.masked_fill(last & (lengths[:, None, None, None] > 1), torch.finfo(made.dtype).min)


def with_rest(original: Any, self: Any, tokens: Sequence[int], *rest: Any, **how: Any) -> int:
    taken = original(self, tokens, *rest, **how)
    if self.finish_reason is not None:
        self.tokens += list(tokens[taken:])
    return int(taken)


def one_more(original: Any, self: Any, *args: Any, **how: Any) -> int:
    self.limit += 1
    try:
        return int(original(self, *args, **how))
    finally:
        self.limit -= 1


def stop_kept(original: Any, self: Any, piece: str, *rest: Any, **how: Any) -> None:
    before = self.text + "".join(text for text, *_ in self._held)
    original(self, piece, *rest, **how)
    if self.finish_reason == "stop" and self.params.sampling.stop:
        self.text = before + piece


def last_piece(original: Any, self: Any, *rest: Any, **how: Any) -> None:
    original(self, *rest, **how)
    if self.finish_reason is None:
        self._release(sum(len(text) for text, *_ in self._held))


class Mutant(NamedTuple):
    """A bug, where it was seen, how it is planted, and the check that must see it."""

    name: str
    seen_in: str
    plant: Plant
    watch: str
    options: tuple[Any, ...] = ()


SLOW = "15: vLLM #6038, #13196"
TREE_MASK, KEYED = "cache.kv_cache:tree_mask", "role, positions, origin"
TEMPERATURE = '(self._any("temperature"), kind._apply_temperature),'
DEPTHS = "self.tree.depths[:, self.first :]"
COMMITTED_ONLY = text("core.prefix:Paths.lengths", (DEPTHS, f"0 * {DEPTHS}"))
PENALISED = Sampling(repetition_penalty=1.5), Sampling(temperature=1.0, frequency_penalty=1.0)

MUTANTS: tuple[Mutant, ...] = (
    # The draft's distribution
    Mutant("the likeliest draft token said to be drawn", "2: transformers 5.23 (Gemma-4 assistant)",
           drafts(lambda tree: tree.draft_probs[:, 1:].argmax(-1)), "count", ("rejection",)),
    Mutant("unlikely draft tokens dropped after they were drawn", "30: transformers threshold",
           drafts(likely_only), "distribution", ("draft",)),
    Mutant("token ids beyond the target's vocabulary drafted", "32: padded vocabulary",
           around("drafters.draft_model:over_vocabulary", lambda original, logits, *rest: logits),
           "distribution", ("larger draft",)),
    # Noise
    Mutant("replacement drawn with the draft's noise", "4: vLLM #47386, #54282",
           text(CHANCE + "draw", ("RECOVER", "DRAFT")), "streams"),
    Mutant("coins tossed with the draft's noise", "4: vLLM #47386",
           text(CHANCE + "flip", ("ACCEPT", "DRAFT")), "streams"),
    Mutant("the same coins in every round", "4: fork #205",
           text(CHANCE + "flip", ("where, self.position", "where")), "streams"),
    Mutant("one coin for all drafted tokens", "4: shared uniform",
           text(CHANCE + "flip", ("self.position, node", "self.position, 1")), "streams"),
    Mutant("the draft's noise repeats every round", "4: stale buffer",
           text(SAMPLER + "_made",
                (KEYED, "role, positions - (0 if origin is None else origin), None")), "noise"),
    Mutant("the target's noise repeats", "4: stale buffer",
           text(SAMPLER + "_made", (KEYED, "role, positions % 4, origin")), "noise"),
    Mutant("the kernel's noise repeats", "4: stale buffer",
           kernel(noise.stream, lambda original, library, keys, role, place, *on:
                  original(library, keys, role, place[:, :1].expand_as(place), *on)), "noise"),
    Mutant("replacement drawn by the smallest noise", "6: exponential race upside down",
           text(CHANCE + "draw", ("+ gumbel", "- gumbel")), "draws"),
    Mutant("a coin that cannot fall falls at zero", "6: transformers r_i <= probability_ratio",
           text(CHANCE + "flip", ("< probability", "<= probability")), "draws"),
    Mutant("the request's seed ignored", SLOW, text(NOISE + "row_keys", ("seed &", "0 &")),
           "noise"),
    Mutant("the high word of the seed dropped", SLOW, text(NOISE + "row_keys", ("seed >>", "0 >>")),
           "noise"),
    Mutant("samples of a prompt share their noise", SLOW,
           text(NOISE + "row_keys", ("sample *", "0 *")), "noise"),
    Mutant("all rows draw with the first row's noise", "4: one generator per batch",
           text(SAMPLER + "streams", ("self.keys", "self.keys[:1].expand_as(self.keys)")), "noise"),
    Mutant("noise by slot in the tree, not by position", "24: call-order randomness",
           around(SAMPLER + "sample", lambda original, self, logits, paths: original(
               self, logits, Paths(paths.prefix, TokenTree.chain(paths.tree.tokens), paths.first)
           )), "bits"),
    Mutant("a greedy row in a mixed batch given noise", "16: batch leakage",
           text(SAMPLER + "_made", ("not self.some_greedy", "True")), "bits"),
    # Processors
    Mutant("penalties dropped on verified tokens", "12: vLLM #18902, TensorRT-LLM #17701",
           text(FILTERS + "_counts", ("counted.float()", "counted.float() * (len(counts[0]) < 2)")),
           "distribution", ("options",)),
    Mutant("penalties see the committed text only", "13: history-dependent processors",
           COMMITTED_ONLY, "distribution", ("penalties in a tree",)),
    Mutant("penalties see siblings too", "13: flat draft list in a tree",
           text("core.prefix:Paths.sequences",
                ("self.tree.ancestors", "torch.ones_like(self.tree.ancestors).tril()")),
           "distribution", ("options",)),
    Mutant("presence penalty counts the prompt", "12: vLLM #42802",
           text(FILTERS + "_counts", ("not prompt", "False")), "distribution", ("options",)),
    Mutant("minimum length held one token too long", "12: min_new_tokens",
           text(FILTERS + "_known", ("min_new_tokens for", "min_new_tokens + 1 for")),
           "distribution", ("ends",)),
    Mutant("temperature after the filters", "12: order of processors",
           text(FILTERS + "_known", (TEMPERATURE, ""),
                ("\n    ]", f"\n        {TEMPERATURE}\n    ]")),
           "distribution", ("options",)),
    Mutant("temperature of another row", "16: batch leakage",
           text(FILTERS + "__init__", ("getattr(row.", "getattr(rows[0].")),
           "distribution", ("mixed",)),
    Mutant("the row after the draft escapes the grammar", "14: vLLM #44292, #36138",
           text(FILTERS + "_ask", ("enumerate(lengths[row])", "enumerate(lengths[row][:-1])")),
           "distribution", ("grammar",)),
    Mutant("the grammar sees the same text at every node", "14: vLLM #44297, #53777",
           COMMITTED_ONLY, "distribution", ("grammar",)),
    # State
    Mutant("every row keeps as much as the luckiest", "16: ragged batches, arXiv 2510.22876",
           around(CACHE + "keep", lambda original, self, nodes, count: original(
               self, nodes, count.amax().expand_as(count).contiguous()
           )), "bits"),
    Mutant("accepted branch not moved to its place", "16: KV left in tree order",
           around(CACHE + "keep", lambda original, self, nodes, n: original(self, None, n)),
           "distribution", ("tree",)),
    Mutant("positions by slot, not by depth", "20: stale position_ids, transformers #46936",
           text("core.tree:TokenTree.positions",
                ("self.depths", "torch.arange(self.tokens.shape[1])")), "distribution", ("tree",)),
    Mutant("mask forgets the last committed token", "16: mask off by one",
           around(TREE_MASK, blind_to_last), "distribution", ("draft",)),
    Mutant("nodes see their siblings", "27: tree mask",
           around(TREE_MASK, lambda original, tree, *rest:
                  original(TokenTree.chain(tree.tokens), *rest)), "distribution", ("tree",)),
    Mutant("boolean mask added to the scores", "27: transformers eager attention",
           around(TREE_MASK, lambda original, *args: original(*args).clamp(min=-1.0)), "bits"),
    Mutant("cache rows not moved when a row retires", "16: KV of another row",
           around(CACHE + "select", lambda mine, self, order:
                  mine(self, range(len(order)))), "bits"),
    Mutant("cache rows rearranged wrongly when a row retires", "16: KV of another row",
           around(CACHE + "select", reordered), "bits"),
    Mutant("text rows not moved when a row retires", "16: another row's history",
           around("engine.batch:Batch.reorder", text_left), "bits", PENALISED),
    Mutant("draft cache keeps rejected tokens", "17, 18: vLLM #39273, #14649",
           around(DRAFT + "observe", lambda original, self, commit: original(
               self, replace(commit, count=torch.full_like(commit.count, commit.tokens.shape[1]))
           )), "accepted"),
    Mutant("last accepted draft token never read by the draft", "18: SGLang #28771",
           around(DRAFT + "_read_root", all_but_last), "accepted"),
    Mutant("draft memory stale after a pause", "33: K to 0 to K",
           around(DRAFT + "observe", forgetful), "accepted"),
    Mutant("draft cache rows not moved when a row retires", "16: drafter state",
           around(DRAFT + "select", lambda *args: None), "accepted"),
    # Stopping and accounting
    Mutant("tokens after an end token kept", "21: transformers #47912, SGLang #33758",
           around(ROW + "extend", with_rest), "distribution", ("ends",)),
    Mutant("one token more than allowed", "21: SGLang #31599, openvino #1951",
           around(ROW + "extend", one_more), "distribution", ("draft",)),
    Mutant("the stop string left in the text", "21: koboldcpp #1276",
           around(ROW + "_hold", stop_kept), "distribution", ("ends",)),
    Mutant("stop strings searched in the last piece only", "21: SGLang #39826",
           around(ROW + "_hold", last_piece), "distribution", ("ends",)),
    Mutant("tokens counted that were never emitted", "22: vLLM #56101",
           around("requests.stats:RoundStats.record", lambda original, self, width, drafted, reach,
                  accepted, emitted, *rest: original(self, width, drafted, reach, accepted,
                                                accepted + 1, *rest)), "distribution", ("ends",)),
    Mutant("log-probabilities taken at the wrong node", "item of this project",
           around("engine.row_output:logprobs", lambda original, logits, nodes, *rest:
                  original(logits, torch.zeros_like(nodes), *rest)), "bits"),
)  # fmt: skip

TOKEN, BLOCK = "core.acceptance:accept_by_rejection", "core.acceptance:accept_by_block"
RATIO = "target[rows, token] / draft[rows, token].clamp(min=_TINY)"
RULES: dict[str, Callable[[], Any]] = {
    name: lambda where=where, changes=changes: written(where, *changes)
    for where, name, *changes in (
        (TOKEN, "target instead of residual", ("fails, left, target", "fails, target, target")),
        (TOKEN, "residual softmaxed",
         ("_normalised((target - draft).clamp(min=0), target)", "(target - draft).softmax(-1)")),
        (TOKEN, "residual of the wrong node", ("(target - draft).c", "(probs[:, node] - draft).c")),
        (TOKEN, "draft probabilities raw",
         ("_draft_probs(tree)", "_normalised(tree.draft_probs.sqrt(), 0.0)")),
        (TOKEN, "draft distribution not renormalised",
         ("_normalised(draft.scatter(1, token[:, None], 0.0), draft)",
          "draft.scatter(1, token[:, None], 0.0)")),
        (TOKEN, "residual restricted to the draft's support",
         ("(target - draft).clamp(min=0)", "(target - draft).clamp(min=0) * (draft > 0)")),
        (TOKEN, "ratio upside down",
         (RATIO, "draft[rows, token] / target[rows, token].clamp(min=_TINY)")),
        (TOKEN, "one child stands for all",
         ("fails, left, target", "fails & untried[:, None], left, target")),
        (TOKEN, "accepted without a coin", (RATIO, f"({RATIO}).clamp(min=float(node == 1))")),
        (TOKEN, "absent nodes accepted",
         ("    return", "    here = torch.where(tree.present[:, -1], here, node)\n    return")),
        (BLOCK, "stop at the first failed coin",
         ("here = torch.where(accepted", "accepted &= here == node - 1\n        "
                                         "here = torch.where(accepted")),
        (BLOCK, "token rule's residual",
         ("rest = _residual(weight, ", "rest = _residual(torch.ones_like(weight), ")),
        (BLOCK, "no minimum", ("(weight * ratio).clamp(max=1)", "weight * ratio")),
        (BLOCK, "bonus from a residual",
         ("mass = rest", "if node + 1 == nodes:\n            "
                         "rest = (rest - drafts[:, node]).clamp(min=0)\n        "
                         "mass = rest")),
        (BLOCK, "p_i in Z_i", ("mass = rest.sum(-1)", "mass = _residual(weight, "
                               "probs[:, node - 1], drafts, node).sum(-1)")),
    )
}  # fmt: skip
"""The drawn rules with the mistakes that real projects made."""
