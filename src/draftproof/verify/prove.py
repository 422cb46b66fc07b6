"""The whole proof: its sections, one after the other."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from draftproof.engine.engine import Engine
from draftproof.errors import BadInput, DraftproofError
from draftproof.verify.architectures import prove_architectures
from draftproof.verify.bits import prove_bits
from draftproof.verify.configurations import prove_configurations
from draftproof.verify.exact import prove_distribution
from draftproof.verify.mutants import prove_mutants
from draftproof.verify.report import BROKE, Section, Tick, failed
from draftproof.verify.sampling import prove_sampling

USER_MODEL = ("bits", "fuzz")
"""The sections that run the user's model; the others run small models of their own."""


def prove(
    engine: Callable[[], Engine], sections: Sequence[str], *, quick: bool = False, seed: int = 0,
    progress: Callable[[str], Tick], mutants: Sequence[str] = (),
    fuzz: Callable[[Tick], Section] | None = None,
) -> Iterator[Section]:  # fmt: skip
    """Run `sections` in turn and yield each when it is done; one that raises an error has failed.

    engine: loads the user's model; called only if a section needs it. progress: the `Tick` of each
    section by name. mutants: words in the names of those to run; none for all.
    fuzz: runs the section of this name.
    Raises BadInput for an engine that is lossy.
    """
    runs: dict[str, Callable[[Tick], Section]] = {
        "distribution": lambda tick: prove_distribution(quick, tick),
        "sampling": lambda tick: prove_sampling(quick, tick, seed=seed),
        "bits": lambda tick: prove_bits(_exact(engine()), quick, tick, seed=seed),
        "configurations": lambda tick: prove_configurations(quick, tick, seed=seed),
        "architectures": lambda tick: prove_architectures(quick, tick),
        "mutants": lambda tick: prove_mutants(tick, words=mutants),
        **({"fuzz": fuzz} if fuzz is not None else {}),
    }
    for name in dict.fromkeys(sections):
        start, tick = time.perf_counter(), progress(name)
        try:
            done = runs[name](tick)
        except Exception as error:                      # a broken algorithm may break anywhere
            if name in USER_MODEL and isinstance(error, DraftproofError):
                raise                                   # the model or an option was refused
            done = Section(name, BROKE, failures=[failed(error)])
        yield replace(done, failures=done.failures[:20], seconds=time.perf_counter() - start)


def _exact(engine: Engine) -> Engine:
    if engine.lossy is not None:
        raise BadInput("the engine is lossy: its text is not the target's; leave lossy out")
    return engine
