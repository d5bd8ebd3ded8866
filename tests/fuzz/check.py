"""What a case comes to: refused before the start, or equal to one process; everything else is a failure."""

from __future__ import annotations

import functools
import traceback
from collections.abc import Sequence
from dataclasses import dataclass

from megapar.arguments import Config, parse
from megapar.errors import ConfigError
from megapar.training.build import make_layout
from megapar.training.sizes import outline
from tests.equivalence.compare import differences
from tests.equivalence.run import Trace, trace
from tests.fuzz.case import Case
from tests.fuzz.option import Option
from tests.fuzz.oracle import Parts, trace_by_rank
from tests.fuzz.table import OPTIONS
from tests.support.ranks import RanksFailed, run_ranks

REFUSED, EQUAL, FAILED = "refused", "equal", "failed"
STEPS = 2
NOISE = 1e-12  # per unit of the gradient norm: 1e-15 of a gradient, times lr / adam_eps of the table
TIMEOUT_SECONDS = 120.0  # of a hang; nothing here computes for long


@dataclass(frozen=True)
class Outcome:
    """How a case ended. rules: the rows that refused it. text: what is wrong with it."""

    kind: str
    rules: tuple[str, ...] = ()
    text: str = ""


def check(case: Case, rows: Sequence[Option] = OPTIONS) -> Outcome:
    """Parse, run on the layout and on one process, compare."""
    config = _parsed(case)
    if isinstance(config, Outcome):
        return config
    flags = case.reference_flags(config.training.global_batch_size, rows)
    try:
        parse(case.kind, flags, {})
    except ConfigError as error:
        return Outcome(FAILED, text=f"the layout is accepted, but one process is refused:\n{error}")
    try:
        want = reference(case.kind, tuple(flags), _parts(config))
        got = run_ranks(
            *(case.world_size, trace, case.kind, case.flags(), STEPS, None, case.backend),
            group=False,
            timeout=TIMEOUT_SECONDS,
        )[0]
    except RanksFailed as error:
        # The first one tells; the others mostly lose their connection to it.
        rank, first = next(iter(error.failures.items()))
        return Outcome(FAILED, text=f"{str(error).splitlines()[0]}\n----- rank {rank} -----\n{first.rstrip()}")
    found = differences(got, want, NOISE * max(1.0, *want.norms))
    return Outcome(FAILED, text="\n".join(found)) if found else Outcome(EQUAL)


def _parsed(case: Case) -> Config | Outcome:
    try:
        config = parse(case.kind, case.flags(), {"WORLD_SIZE": str(case.world_size)})
        outline(config)  # scripts ask it before they start: it refuses what does not fit the model
        return config
    except ConfigError as error:
        rules = tuple(complaint.rule for complaint in error.complaints)
        if not case.wild:
            return Outcome(FAILED, rules, f"legal by the fuzzer's table, but refused:\n{error}")
        return Outcome(REFUSED, rules)
    except Exception:
        return Outcome(FAILED, text=f"the parser failed:\n{traceback.format_exc()}")


@functools.lru_cache(maxsize=64)
def reference(kind: str, flags: tuple[str, ...], parts: Parts = ()) -> Trace:
    """One process. parts: the positions of ranks that each count the capacity of their own; none: all together."""
    if parts:
        result = run_ranks(1, trace_by_rank, kind, flags, STEPS, parts, group=False, timeout=TIMEOUT_SECONDS)[0]
    else:
        result = run_ranks(1, trace, kind, flags, STEPS, group=False, timeout=TIMEOUT_SECONDS)[0]
    assert isinstance(result, Trace)
    return result


def _parts(config: Config) -> Parts:
    """The positions of ranks that count capacity apart."""
    if config.moe.moe_capacity_scope != "rank":
        return ()
    layout, parallel = make_layout(config), config.parallel
    ranks = [layout.positions(config.model.seq_length, rank) for rank in range(layout.size)]
    cuts = parallel.mp_degree if parallel.sequence_parallel else 1
    share = len(ranks[0]) // cuts
    parts = tuple(tuple(held[cut * share : (cut + 1) * share]) for held in ranks for cut in range(cuts))
    return parts if len(parts) > 1 else ()
