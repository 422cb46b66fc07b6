"""Planted bugs: bugs that real engines shipped, each planted alone; an examination must see it.

Numbers are those of the catalogue of known bugs that the examinations were written against. Bugs
inside the acceptance rules themselves are in `mistakes`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager as Context
from dataclasses import replace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from helpers import planting as plant

from draftproof.core.acceptance import KeyedChance
from draftproof.core.noise import Role
from draftproof.core.params import Sampling
from draftproof.core.sampling import Sampler


class Mutant(NamedTuple):
    """A bug, where it was seen, how it is planted, and the examination that must see it."""

    name: str
    seen_in: str
    plant: Callable[[], Context[Any]]
    watch: str
    options: tuple[Any, ...] = ()


SLOW = "15: vLLM #6038, #13196"
REPEATED = {"position": lambda place, origin: place - origin, "origin": None}

MUTANTS: tuple[Mutant, ...] = (
    # The draft's distribution
    Mutant("draft drawn from one law, weighed by another", "1: transformers #47932, DeepSpec #31",
           plant.drafts(plant.softer), "law", ("draft",)),
    Mutant("the likeliest draft token said to be drawn", "2: transformers 5.23 (Gemma-4 assistant)",
           plant.drafts(plant.likeliest), "count", ("rejection",)),
    Mutant("unlikely draft tokens dropped after they were drawn", "30: transformers threshold",
           plant.drafts(plant.likely_only), "law", ("draft",)),
    Mutant("token ids beyond the target's vocabulary drafted", "32: padded vocabulary",
           plant.around("drafters.draft_model:over_vocabulary", lambda own, logits, *rest: logits),
           "law", ("larger draft",)),
    # Noise
    Mutant("replacement drawn with the draft's noise", "4: vLLM #47386, #54282",
           plant.streams(Role.RECOVER, role=Role.DRAFT), "streams"),
    Mutant("coins tossed with the draft's noise", "4: vLLM #47386",
           plant.streams(Role.ACCEPT, role=Role.DRAFT), "streams"),
    Mutant("the same coins in every round", "4: fork #205", plant.streams(Role.ACCEPT, origin=None),
           "streams"),
    Mutant("one coin for all drafted tokens", "4: shared uniform",
           plant.streams(Role.ACCEPT, position=lambda place, origin: torch.ones_like(place)),
           "streams"),
    Mutant("the draft's noise repeats every round", "4: stale buffer",
           plant.streams(Role.DRAFT, **REPEATED), "noise"),
    Mutant("the target's noise repeats", "4: stale buffer",
           plant.streams(Role.TARGET, position=lambda place, origin: place % 4), "noise"),
    Mutant("the kernel's noise repeats", "4: stale buffer",
           plant.around("native.cpu_ops:DraftFunctions.stream", plant.only_first), "noise"),
    Mutant("replacement drawn by the smallest noise", "6: exponential race upside down",
           lambda: patch.object(KeyedChance, "draw", plant.smallest), "draws"),
    Mutant("a coin that cannot fall falls at zero", "6: transformers r_i <= probability_ratio",
           plant.around("core.acceptance:KeyedChance.flip", plant.falls_at_zero), "draws"),
    Mutant("the request's seed ignored", SLOW, plant.keys(lambda seed: 0), "noise"),
    Mutant("the high word of the seed dropped", SLOW, plant.keys(lambda seed: seed & 0xFFFFFFFF),
           "noise"),
    Mutant("samples of a prompt share their noise", SLOW,
           plant.keys(lambda seed: seed, lambda sample: 0), "noise"),
    Mutant("all rows draw with the first row's noise", "4: one generator per batch",
           plant.streams(None, keys=lambda keys: keys[:1].expand_as(keys)), "noise"),
    Mutant("noise by slot in the tree, not by position", "24: call-order randomness",
           plant.around(plant.SAMPLER + "sample", plant.by_slot), "bits"),
    Mutant("a greedy row in a mixed batch given noise", "16: batch leakage",
           lambda: patch.object(Sampler, "_some_greedy", False), "bits"),
    # Processors
    Mutant("penalties dropped on verified tokens", "12: vLLM #18902, TensorRT-LLM #17701",
           plant.filtered(plant.unpenalised), "law", ("options",)),
    Mutant("penalties see the committed text only", "13: history-dependent processors",
           plant.committed_only, "law", ("penalties in a tree",)),
    Mutant("penalties see siblings too", "13: flat draft list in a tree", plant.siblings_seen,
           "law", ("options",)),
    Mutant("presence penalty counts the prompt", "12: vLLM #42802",
           plant.rows(lambda row, first: replace(row, prompt_length=0)), "law", ("options",)),
    Mutant("minimum length held one token too long", "12: min_new_tokens",
           plant.rows(plant.longer_minimum), "law", ("ends",)),
    Mutant("temperature after the filters", "12: order of processors",
           plant.filtered(plant.heated_last), "law", ("options",)),
    Mutant("temperature of another row", "16: batch leakage",
           plant.rows(lambda row, first: plant.ask(row, temperature=first.sampling.temperature)),
           "law", ("mixed",)),
    Mutant("the row behind the draft escapes the grammar", "14: vLLM #44292, #36138",
           plant.filtered(plant.last_escapes), "law", ("grammar",)),
    Mutant("the grammar sees the same text at every node", "14: vLLM #44297, #53777",
           plant.committed_only, "law", ("grammar",)),
    # State
    Mutant("every row keeps as much as the luckiest", "16: ragged batches, arXiv 2510.22876",
           plant.around(plant.CACHE + "keep", plant.as_the_luckiest), "bits"),
    Mutant("accepted branch not moved to its place", "16: KV left in tree order",
           plant.around(plant.CACHE + "keep", lambda own, self, nodes, n: own(self, None, n)),
           "law", ("tree",)),
    Mutant("positions by slot, not by depth", "20: stale position_ids, transformers #46936",
           plant.around("core.tree:TokenTree.positions", plant.by_place), "law", ("tree",)),
    Mutant("mask forgets the last committed token", "16: mask off by one",
           plant.mask(plant.blind_to_last), "law", ("draft",)),
    Mutant("nodes see their siblings", "27: tree mask", plant.mask(plant.sees_siblings), "law",
           ("tree",)),
    Mutant("boolean mask added to the scores", "27: transformers eager attention",
           plant.mask(lambda own, *args: own(*args).clamp(min=-1.0)), "bits"),
    Mutant("cache rows not moved when a row retires", "16: KV of another row",
           plant.around(plant.CACHE + "select", plant.unmoved), "bits"),
    Mutant("cache rows rearranged wrongly when a row retires", "16: KV of another row",
           plant.around(plant.CACHE + "select", plant.reordered), "bits"),
    Mutant("text rows not moved when a row retires", "16: another row's history",
           plant.around("engine.batch:Batch.arrange", plant.text_left), "bits",
           (Sampling(repetition_penalty=1.5), Sampling(temperature=1.0, frequency_penalty=1.0))),
    Mutant("draft cache keeps rejected tokens", "17, 18: vLLM #39273, #14649",
           plant.around(plant.DRAFT + "observe", plant.everything), "accepted"),
    Mutant("last accepted draft token never read by the draft", "18: SGLang #28771",
           plant.around(plant.DRAFT + "_read_root", plant.all_but_last), "accepted"),
    Mutant("draft memory stale after a pause", "33: K to 0 to K",
           plant.around(plant.DRAFT + "observe", plant.forgetful), "accepted"),
    Mutant("draft cache rows not moved when a row retires", "16: drafter state",
           plant.around(plant.DRAFT + "select", plant.nothing), "accepted"),
    # Stopping and accounting
    Mutant("tokens behind an end token kept", "21: transformers #47912, SGLang #33758",
           plant.around(plant.ROW + "extend", plant.with_rest), "law", ("ends",)),
    Mutant("one token more than allowed", "21: SGLang #31599, openvino #1951",
           plant.around(plant.ROW + "extend", plant.one_more), "law", ("draft",)),
    Mutant("the stop string left in the text", "21: koboldcpp #1276",
           plant.around(plant.ROW + "_hold", plant.stop_kept), "law", ("ends",)),
    Mutant("stop strings searched in the last piece only", "21: SGLang #39826",
           plant.around(plant.ROW + "_hold", plant.last_piece), "law", ("ends",)),
    Mutant("tokens counted that were never emitted", "22: vLLM #56101",
           plant.around("engine.stats:RoundStats.record", plant.counted), "law", ("ends",)),
    Mutant("log-probabilities taken at the wrong node", "item of this project",
           plant.logprobs_elsewhere, "bits"),
)
