"""Section "mutants": bugs that real engines shipped, planted one at a time in the installed code; each must be caught.

A mutant is one snippet of one function, replaced in memory while the sections run small. The numbers are those of the
list of known bugs in docs/lossless.md; the references are to the projects that had them.
"""

from __future__ import annotations

import importlib
import inspect
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from types import FunctionType
from typing import Any, NamedTuple

from draftproof.core.params import Sampling
from draftproof.core.tree import TreeShape
from draftproof.drafters.draft_model import DraftModel
from draftproof.engine.engine import Engine
from draftproof.verify.bits import prove_bits
from draftproof.verify.exact import prove_law
from draftproof.verify.report import Section, Tick, silent
from draftproof.verify.sampling import Trial, prove_sampling, toy


class Mutant(NamedTuple):
    """A bug: what it is, where it was seen, and the one snippet of `where` ("module:function") that brings it back."""

    name: str
    seen_in: str
    where: str
    old: str
    new: str


@contextmanager
def planted(mutant: Mutant) -> Iterator[None]:
    """While this lasts, the installed function has the bug; every reference to it, wherever it was imported, has it.

    Raises ValueError if the snippet does not occur exactly once: the code has moved on and the mutant must follow.
    """
    function = _function(mutant.where)
    source = textwrap.dedent(inspect.getsource(function))
    if source.count(mutant.old) != 1:
        count = source.count(mutant.old)
        raise ValueError(f"{mutant.where} holds {mutant.old!r} {count} times, wanted once; update the mutant")
    space: dict[str, Any] = {}
    body = "from __future__ import annotations\n" + _without_decorators(source.replace(mutant.old, mutant.new))
    exec(compile(body, f"<{mutant.name}>", "exec"), dict(function.__globals__), space)
    sound, function.__code__ = function.__code__, space[function.__name__].__code__
    try:
        yield
    finally:
        function.__code__ = sound


def _function(where: str) -> FunctionType:
    module, _, path = where.partition(":")
    found: Any = importlib.import_module(f"draftproof.{module}")
    for name in path.split("."):
        found = inspect.getattr_static(found, name) if inspect.isclass(found) else getattr(found, name)
    found = found.func if isinstance(found, cached_property) else getattr(found, "__func__", found)
    found = inspect.unwrap(found)
    assert isinstance(found, FunctionType)
    return found


def _without_decorators(source: str) -> str:
    return source[source.index("def ") :]


# The sections, small --------------------------------------------------------------------------------------------------


def _bits() -> Section:
    wants = {
        "greedy": Sampling(repetition_penalty=1.2, min_new_tokens=3, stop_tokens=(1, 5)),
        "sampled": Sampling(temperature=1.0, seed=3, stop_tokens=(2,)),
    }
    engine = Engine(toy(11, 6, 2), DraftModel(toy(12, 6), 6, TreeShape.branching((3, 2))))
    return prove_bits(engine, wants=wants, new_tokens=8, exact_nodes=0)


def _sampling() -> Section:
    trials = (Trial("match", "chain", 2), Trial("rejection", "chain", 2))
    return prove_sampling(True, sequences=4096, trials=trials, controls=False)


WATCHES: dict[str, Callable[[], Section]] = {
    "law": lambda: prove_law(glance=True), "bits": _bits, "sampling": _sampling,
}
"""Each small section, the quickest first."""


def prove_mutants(quick: bool = False, tick: Tick = silent, *, mutants: Sequence[Mutant] | None = None) -> Section:
    """Plant every mutant and see which section catches it first; passes if all are caught and the sound code is not.

    quick: every fifth. The watches first run on the sound code and must pass: they are no use if they
    accuse everything.
    """
    start = time.perf_counter()
    chosen = list(mutants or (MUTANTS[::5] if quick else MUTANTS))
    tick(0.0, "the sound code")
    sound = {name: watch() for name, watch in WATCHES.items()}
    failures = [f"the sound code fails {name}: {'; '.join(one.failures)}" for name, one in sound.items() if not one.passed]
    caught: dict[str, str] = {}
    for done, mutant in enumerate(chosen if not failures else ()):
        tick((done + 1) / (len(chosen) + 1), mutant.name)
        try:
            with planted(mutant):
                caught[mutant.name] = _catcher()
        except ValueError as gone:
            failures.append(f"{mutant.name} could not be planted: {gone}")
    survivors = [mutant for mutant in chosen if caught.get(mutant.name) == ""]
    failures += [f"{mutant.name} ({mutant.seen_in}): nobody saw it" for mutant in survivors]
    by = {name: sum(catcher == name for catcher in caught.values()) for name in WATCHES}
    catchers = ", ".join(f"{count} by {name}" for name, count in by.items())
    verdict = (
        f"{len(caught) - len(survivors)} of {len(chosen)} planted bugs caught ({catchers}); "
        + ("the sound code is not accused" if caught else "the sound code is accused")
    )
    figures = {
        "planted": len(chosen), "caught": len(caught) - len(survivors), "caught_by": by, "first_to_catch": caught,
        "seen_in": {mutant.name: mutant.seen_in for mutant in chosen},
    }
    return Section("mutants", not failures, verdict, figures, failures[:20], time.perf_counter() - start)


def _catcher() -> str:
    """The first section that fails; "" if none does."""
    for name, watch in WATCHES.items():
        try:
            if not watch().passed:
                return name
        except Exception:                                     # a bug may break the run itself: that is being caught
            return name
    return ""


ACCEPT, DECODER = "core.acceptance:", "engine.decoder:Decoder."
SAMPLER, PROCESSING = "core.sampling:Sampler.", "core.processors:LogitsProcessors."
DRAFT, RUNNING = "drafters.draft_model:DraftModel.", "engine.sequence:SequenceState."

MUTANTS = (
    # The law of acceptance
    Mutant("draft drawn from the filtered law, weighed by the raw one", "1: transformers #47932, DeepSpec #31",
           DRAFT + "propose",
           "frontier.sampler.probs(logits, paths)[:, parents]", "logits.softmax(-1)[:, parents]"),
    Mutant("the likeliest draft token said to be drawn", "2: transformers 5.23 (Gemma-4 assistant), apple #6, jaymody #3",
           DRAFT + "_children", "frontier.sampler.gumbel_logits(logits, paths, Role.DRAFT)",
           "frontier.sampler.filtered(logits, paths)"),
    Mutant("siblings tried by independent coins", "3: Apple ReDrafter _choose_from_candidates", ACCEPT + "accept_by_rejection",
           "torch.where(fails, left, target))", "target)"),
    Mutant("replacement drawn with the draft's noise", "4: vLLM #47386, #54282", ACCEPT + "KeyedChance.draw",
           "Role.RECOVER", "Role.DRAFT"),
    Mutant("coins tossed with the draft's noise", "4: vLLM #47386", ACCEPT + "KeyedChance.flip", "Role.ACCEPT", "Role.DRAFT"),
    Mutant("the same coins in every round", "4: fork #205", ACCEPT + "KeyedChance.flip", "where, self.position)",
           "where, None)"),
    Mutant("one coin for all drafted tokens", "4: shared uniform", ACCEPT + "KeyedChance.flip",
           "torch.full_like(self.position, node)", "torch.ones_like(self.position)"),
    Mutant("a coin that cannot fall falls at zero", "6: transformers utils.py r_i <= probability_ratio",
           ACCEPT + "KeyedChance.flip", "[:, 0] < probability", "[:, 0] <= probability"),
    Mutant("replacement drawn by the smallest noise", "6: exponential race upside down", ACCEPT + "KeyedChance.draw",
           "weights.log() + self", "weights.log() - self"),
    Mutant("residual softmaxed", "5: transformers #28508", ACCEPT + "accept_by_rejection",
           "_normalised((target - draft).clamp(min=0), target)", "(target - draft).clamp(min=0).softmax(-1)"),
    Mutant("residual of the wrong position", "5: transformers #28166", ACCEPT + "accept_by_rejection",
           "(target - draft).clamp(min=0)", "(probs[:, node] - draft).clamp(min=0)"),
    Mutant("the target in place of the residual", "5: OpenVINO GenAI", ACCEPT + "accept_by_rejection",
           "_normalised((target - draft).clamp(min=0), target)", "target"),
    Mutant("ratio upside down", "5: OpenVINO GenAI", ACCEPT + "accept_by_rejection",
           "target[rows, token] / draft[rows, token].clamp(min=_TINY)",
           "draft[rows, token] / target[rows, token].clamp(min=_TINY)"),
    Mutant("block verification stops at the first failed coin", "7: vllm-ascend #7807", ACCEPT + "accept_by_block",
           "stands = there & chance", "stands = there & (here == node - 1) & chance"),
    Mutant("block verification with the token rule's residual", "7: vllm-ascend #7603", ACCEPT + "accept_by_block",
           "_residual(weight, probs[:, node], drafts, node)",
           "_residual(torch.ones_like(weight), probs[:, node], drafts, node)"),
    Mutant("block weights without their minimum", "7: vllm-ascend #7839", ACCEPT + "accept_by_block",
           "(weight * ratio).clamp(max=1)", "weight * ratio"),
    Mutant("block bonus drawn from a residual", "7: vllm-ascend #7839", ACCEPT + "_residual",
           "return target", "return (target - drafts[:, node]).clamp(min=0)"),
    Mutant("siblings drawn without replacement, weighed as if with", "8: EAGLE PR #47, #74, #171",
           ACCEPT + "accept_by_rejection",
           "_normalised(draft.scatter(1, token[:, None], 0.0), draft)", "draft"),
    Mutant("sibling law not renormalised", "8: EAGLE #183, #283", ACCEPT + "accept_by_rejection",
           "_normalised(draft.scatter(1, token[:, None], 0.0), draft)", "draft.scatter(1, token[:, None], 0.0)"),
    Mutant("residual only where the draft has tokens", "9: reduced draft vocabulary", ACCEPT + "accept_by_rejection",
           "(target - draft).clamp(min=0)", "((target - draft).clamp(min=0) * (draft > 0))"),
    Mutant("first drafted token accepted unseen", "10: lattice #243", ACCEPT + "accept_by_matching",
           "tree.parents < 0", "tree.parents < 1"),
    Mutant("a hit stands without its ancestors", "10: sample-and-match", ACCEPT + "accept_by_matching",
           "(hit[:, None] | ~tree.ancestors).all(-1)", "hit"),
    Mutant("the bonus token picked at the root", "10: sample-and-match", ACCEPT + "accept_by_matching",
           "_accepted(tree, last, target_tokens.gather(1, last[:, None])[:, 0])", "_accepted(tree, last, target_tokens[:, 0])"),
    Mutant("relaxed acceptance without saying so", "11: SGLang thresholds, vLLM FLy, TensorRT-LLM",
           ACCEPT + "accept_by_rejection",
           "ratio.clamp(max=1)", "(ratio * 1.25).clamp(max=1)"),
    Mutant("unlikely draft tokens thrown away after they were drawn", "30: transformers confidence threshold",
           DRAFT + "propose",
           "(scores > -torch.inf) &",
           "(scores > -torch.inf) & (frontier.sampler.probs(logits, paths)[:, parents]"
           ".gather(2, children[..., None])[..., 0] > 0.3) &"),
    # What the sampler is asked
    Mutant("penalties dropped on verified tokens", "12: vLLM #18902, #42744, TensorRT-LLM #17701", PROCESSING + "filtered",
           "in self._processes:", "in self._processes[0 if scores.shape[1] == 1 else -1 :]:"),
    Mutant("penalties see the committed text only", "13: history-dependent processors", "core.prefix:Paths.lengths",
           " + self.tree.depths[:, self.first :]", ""),
    Mutant("penalties see siblings too", "13: flat draft list in a tree", "core.prefix:Paths.sequences",
           "sees = self.tree.ancestors[:, self.first :]",
           "sees = torch.ones_like(self.tree.ancestors).tril()[:, self.first :]"),
    Mutant("presence penalty counts the prompt", "12: vLLM #42802", PROCESSING + "_penalise_presence", "prompt=False",
           "prompt=True"),
    Mutant("minimum length held one token too long", "12: min_new_tokens", PROCESSING + "_hold_stop_tokens", "] < first",
           "] <= first"),
    Mutant("temperature after the filters", "12: order of processors", PROCESSING + "_processes",
           '(self._any("temperature"), self._heat),\n        '
           '(self._any("top_k"), self._keep_top_k),\n        (self._any("top_p"), '
           "self._keep_top_p),",
           '(self._any("top_k"), self._keep_top_k),\n        '
           '(self._any("top_p"), self._keep_top_p),\n        (self._any("temperature"), '
           "self._heat),"),
    Mutant("temperature of another row", "16: batch leakage", PROCESSING + "_heat",
           'self._column("temperature", scores.dtype)', 'self._column("temperature", scores.dtype)[:1]'),
    Mutant("the row behind the draft escapes the grammar", "14: vLLM #44292, #36138", PROCESSING + "_ask_user",
           "for node in range(scores.shape[1])", "for node in range(scores.shape[1] - 1 or 1)"),
    Mutant("the grammar sees the same text at every node", "14: vLLM #44297, #53777", PROCESSING + "_ask_user",
           "paths.sequences[row, node, : lengths[row][node]]", "paths.sequences[row, 0, : lengths[row][0]]"),
    # Randomness
    Mutant("the request's seed ignored", "15: vLLM #6038, #13196", SAMPLER + "__init__",
           "[want.seed for want in wants]", "[0 for want in wants]"),
    Mutant("samples of a prompt share their noise", "15: vLLM #6038", SAMPLER + "__init__",
           "[row.sample for row in rows]", "[0 for row in rows]"),
    Mutant("all rows draw with the first row's noise", "4: one generator per batch", SAMPLER + "_made",
           "noise.stream, self.keys,", "noise.stream, self.keys[:1].expand_as(self.keys),"),
    Mutant("noise by slot in the tree, not by position", "24: call-order randomness", SAMPLER + "gumbel_logits",
           "depths = paths.tree.depths[:, paths.first :, None]",
           "depths = torch.arange(scores.shape[1]).clamp(max=noises.shape[1] - 1)[None, :, None].expand(len(scores), -1, -1)"),
    Mutant("the noise of the last round used again", "4: stale buffer", SAMPLER + "_noise", "made_for is not position",
           "made_for is None"),
    # State
    Mutant("every row keeps as much as the luckiest", "16: ragged batches, arXiv 2510.22876", "model.kv_cache:KVCache.keep",
           "self.lengths.add_(count)", "self.lengths.add_(count.amax())"),
    Mutant("accepted branch not moved to its place", "16: KV left in tree order", "model.kv_cache:KVCache.keep",
           "if nodes is not None:", "if False:"),
    Mutant("positions by slot, not by depth", "20: stale position_ids, transformers #46936", "core.tree:TokenTree.positions",
           "(lengths[:, None] + self.depths)", "(lengths[:, None] + torch.arange(self.depths.shape[1]))"),
    Mutant("mask forgets the last committed token", "16: mask off by one", "model.masks:tree_mask", "(node < 0)[:, None]",
           "(node < -1)[:, None]"),
    Mutant("nodes see their siblings", "27: tree mask", "model.masks:tree_mask",
           "tree.ancestors[:, first:].gather(2, index) & inside[:, None]", "inside[:, None].expand_as(index)"),
    Mutant("boolean mask added to the scores", "27: transformers eager attention", "model.masks:tree_mask",
           "torch.finfo(dtype).min", "1.0"),
    Mutant("cache rows not moved when a row retires", "16: KV of another row", DECODER + "_arrange",
           "self.cache.select(order)", "pass"),
    Mutant("text rows not moved when a row retires", "16: another row's history", DECODER + "_arrange",
           "self.text[: len(order)] = self.text[list(order)]", "pass"),
    Mutant("the chosen root written at the wrong place", "16: off by one behind a rejection", "core.messages:append_tokens",
           "accepted.count[:, None] - 1, accepted.root",
           "(accepted.count[:, None]).clamp(max=new.shape[1] - 1), accepted.root"),
    Mutant("draft cache keeps rejected tokens", "17, 18: vLLM #39273, #14649", DRAFT + "observe",
           "(commit.nodes < self.scratch) & stands", "(commit.nodes < self.scratch)"),
    Mutant("last accepted draft token never read by the draft", "18: SGLang #28771", DRAFT + "_read_root",
           "gap = prefix.position - cache.lengths", "gap = torch.zeros_like(cache.lengths)"),
    Mutant("draft memory stale after a pause", "33: K to 0 to K", DRAFT + "observe", "self.behind[row] += width",
           "self.behind[row] += 0"),
    Mutant("draft cache rows not moved when a row retires", "16: drafter state", DRAFT + "select", "self.cache.select(rows)",
           "pass"),
    Mutant("token ids beyond the target's vocabulary drafted", "32: padded vocabulary", "drafters.base:over_vocabulary",
           "logits[..., :vocab_size]", "logits"),
    # Stopping and accounting
    Mutant("tokens behind an end token kept", "21: transformers #47912, SGLang #33758", RUNNING + "extend",
           "self.finish_reason is not None:\n            return index + 1", "False:\n            return index + 1"),
    Mutant("one token more than allowed", "21: SGLang #31599, openvino #1951", RUNNING + "extend",
           "len(self.tokens) >= self.limit", "len(self.tokens) > self.limit"),
    Mutant("the stop string left in the text", "21: koboldcpp #1276", RUNNING + "_hold", "self._release(min(found))",
           "self._release(len(held))"),
    Mutant("stop strings searched in the last piece only", "21: SGLang #39826", RUNNING + "_hold", "held.find(stop)",
           "piece.find(stop)"),
    Mutant("tokens counted that were never emitted", "22: vLLM #56101", DECODER + "_deliver", "emitted=emitted",
           "emitted=count"),
    Mutant("an end token that was only drafted ends the request", "23: vLLM #41493", DECODER + "_deliver",
           "drafted=count - 1)\n",
           "drafted=count - 1)\n        "
           "if set(tree.tokens[self.running.index(row), 1:].tolist()) & set(row.params.stop_tokens): "
           "row._end('stop')\n"),
)
