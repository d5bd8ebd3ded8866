"""What a case comes to: refused before the start, or equal to one process; everything else is a failure."""

from __future__ import annotations

import atexit
import functools
import os
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch

from megapar.arguments import Config, parse
from megapar.errors import ConfigError
from megapar.training.building.ampipe_degree import make_slicing
from megapar.training.building.partition import make_layout
from megapar.training.loop.callbacks import TrainerCallback
from megapar.training.loop.outline import outline
from tests.equivalence.compare import UNITS, bits, differences, growth_between, overflows, rounding_differences
from tests.equivalence.run import Routing, Trace, trace
from tests.fuzz.case import GLOO, STEPS, Case
from tests.fuzz.option import Option
from tests.fuzz.oracle import Parts, trace_by_parts
from tests.fuzz.table import OPTIONS
from tests.fuzz.texts import prepare
from tests.support.buckets import asked_at, environ_of, moto, new_bucket
from tests.support.forced import forced_parts
from tests.support.ranks import RanksFailed, run_ranks, side_by_side

REFUSED, EQUAL, FAILED = "refused", "equal", "failed"
NOISE = 1e-15  # of a gradient, per unit of the norm; a step of AdamW makes it lr / adam_eps times as large
TIMEOUT_SECONDS = 120.0  # of a hang; nothing here computes for long, but a compiler
COMPILE_SECONDS = 400.0


@dataclass(frozen=True)
class Outcome:
    """How a case ended. rules: the rows that refused it. text: what is wrong with it, or what they say."""

    kind: str
    rules: tuple[str, ...] = ()
    text: str = ""


def check(case: Case, rows: Sequence[Option] = OPTIONS) -> Outcome:
    """Parse, run on the layout and on one process, compare."""
    prepare()
    config = _parsed(case)
    if isinstance(config, Outcome):
        return config
    flags = case.reference_flags(config.training.global_batch_size, rows)
    try:
        parse(case.kind, flags, {})
    except ConfigError as error:
        return Outcome(FAILED, text=f"the layout is accepted, but one process is refused:\n{error}")
    try:
        found = _compared(case, config, tuple(flags), rows)
    except RanksFailed as error:
        # The first one tells; the others mostly lose their connection to it.
        rank, first = next(iter(error.failures.items()))
        return Outcome(FAILED, text=f"{str(error).splitlines()[0]}\n----- rank {rank} -----\n{first.rstrip()}")
    return Outcome(FAILED, text="\n".join(found)) if found else Outcome(EQUAL)


def _compared(case: Case, config: Config, flags: tuple[str, ...], rows: Sequence[Option]) -> list[str]:
    """What differs from one process; in other precisions than fp64, by more than two roundings do."""
    steps, parts = case.steps, _parts(config)
    if case.by_bits:
        want = _run(case.uninterrupted(), config, GLOO, until=steps)[GLOO]
        return [f"{name}: {text}" for name, got in _runs(case, config).items() for text in bits(got, want)]
    if case.exact:
        runs, want = side_by_side(
            case.world_size, lambda: _runs(case, config), lambda: reference(case.kind, flags, parts, steps)
        )
        per_gradient = config.optimizer.adam_eps if config.optimizer.optimizer != "sgd" else 1.0
        noise = NOISE * max(1.0, *want.norms) * steps / STEPS * config.optimizer.lr / per_gradient
        if not any(differences(got, want, noise) for got in runs.values()):
            return []
        # A high learning rate may multiply rounding by ten in every step: compare with how far one process gets from
        # itself when its first weights are a rounding away.
        growth = growth_between(reference(case.kind, flags, parts, steps, nudged=True), want)
        return [f"{backend}: {text}" for backend, got in runs.items() for text in differences(got, want, noise, growth)]
    wide = tuple(case.reference_flags(config.training.global_batch_size, rows, "fp64"))
    exact = reference(case.kind, wide, parts, steps)
    runs, alone = side_by_side(
        case.world_size,
        lambda: _runs(case, config, exact.routing),
        lambda: reference(case.kind, flags, parts, steps, wide),
    )
    if config.training.dtype == "fp16" and config.value("initial_loss_scale") > 1.0 and overflows(alone):
        found = [
            f"{backend}: steps {overflows(got)} overflow, of one process {overflows(alone)}"
            for backend, got in runs.items()
            if overflows(got) != overflows(alone)
        ]
        small = check(case.scaled_by(1.0), rows)
        return found if small.kind == EQUAL else [*found, f"{small.kind} with a loss scale of 1:", small.text]
    unit = max(UNITS[dtype] for dtype in (config.training.dtype, config.sharding.grad_reduce_dtype))
    return [
        f"{backend}: {text}" for backend, got in runs.items() for text in rounding_differences(got, alone, exact, unit)
    ]


def _runs(case: Case, config: Config, replay: Routing | None = None) -> dict[str, Trace]:
    """What the case computes on each of its backends, and where it is continued, there."""
    return {name: got for one in case.backends for name, got in _run(case, config, one, replay).items()}


def _run(
    case: Case, config: Config, backend: str, replay: Routing | None = None, until: int | None = None
) -> dict[str, Trace]:
    """The run, and its beginning with the end of the one that loads a checkpoint of it."""
    compiled = config.training.compile == "on" or "compiled" in dict(case.forced)
    timeout = COMPILE_SECONDS if compiled else TIMEOUT_SECONDS

    def ranks(part: Case, folder: str, *more: str) -> Trace:
        parts = forced_parts(**dict(part.forced))
        asked = (stored, environ, part.kind, [*part.flags(folder), *more], until or case.steps, replay, backend, parts)
        result = run_ranks(part.world_size, *asked, group=False, timeout=timeout)[0]
        assert isinstance(result, Trace)
        return result

    with _store(case) as (folder, environ):
        found = {backend: ranks(case, folder)}
        if case.continued:
            rest = ranks(case.continued, folder, "--load", folder, "--ckpt-step", str(case.resumed_at))
            found[f"{backend}, continued after step {case.resumed_at}"] = found[backend].continued_by(rest)
    return found


def stored(rank: int, world_size: int, rendezvous: str, environ: Mapping[str, str], *asked: Any) -> Trace | None:
    """Trace a run whose object store these variables name."""
    with patch.dict(os.environ, environ):
        return trace(rank, world_size, rendezvous, *asked)


@contextmanager
def _store(case: Case) -> Iterator[tuple[str, Mapping[str, str]]]:
    """Yield where the case saves checkpoints, and the variables by which its ranks find it."""
    if not case.bucket:
        with TemporaryDirectory() as folder:
            yield folder, {}
        return
    endpoint = _served()
    with asked_at(endpoint):
        place = new_bucket()
        yield str(place), environ_of(endpoint)
        place.remove()


@functools.cache
def _served() -> str:
    """Return the endpoint of a real server of S3, which is there until this process ends."""
    stack = ExitStack()
    atexit.register(stack.close)
    return stack.enter_context(moto())


def _parsed(case: Case) -> Config | Outcome:
    try:
        config = parse(case.kind, case.flags(), {"WORLD_SIZE": str(case.world_size)})
        outline(config)  # scripts ask it before they start: it refuses what does not fit the model
        return config
    except ConfigError as error:
        rules = tuple(complaint.rule for complaint in error.complaints)
        if not case.wild:
            return Outcome(FAILED, rules, f"legal by the fuzzer's table, but refused:\n{error}")
        return Outcome(REFUSED, rules, str(error))
    except Exception:
        return Outcome(FAILED, text=f"the parser failed:\n{traceback.format_exc()}")


@functools.lru_cache(maxsize=64)
def reference(
    kind: str,
    flags: tuple[str, ...],
    parts: Parts = (),
    steps: int = STEPS,
    routed_as: tuple[str, ...] = (),
    *,
    nudged: bool = False,
) -> Trace:
    """One process. parts: positions that each have a capacity of their own; none: all together.

    routed_as: flags of the run whose choices of experts are repeated. nudged: its first weights are a rounding away.
    """
    replay = reference(kind, routed_as, parts, steps).routing if routed_as else None
    callback = Nudge() if nudged else None
    if parts:
        asked: tuple[Any, ...] = (trace_by_parts, kind, flags, steps, parts, replay, callback)
    else:
        asked = (trace, kind, flags, steps, replay, "gloo", None, callback)
    result = run_ranks(1, *asked, group=False, timeout=TIMEOUT_SECONDS)[0]
    assert isinstance(result, Trace)
    return result


class Nudge(TrainerCallback):
    """Changes all weights by a rounding before the first step."""

    def begin(self, trainer: Any) -> None:
        """Change them."""
        with torch.no_grad():
            for shard in trainer.job.sharding.master_shards:
                shard.master.mul_(1 + 2.0**-50)


def _parts(config: Config) -> Parts:
    """Positions that count capacity apart from others: those of a rank, of a slice, or of a rank's part of a slice."""
    by_rank, slicing = config.value("moe_capacity_scope") == "rank", make_slicing(config)
    if config.value("moe_model_type") != "deepspeed_moe" or not (by_rank or slicing.capacity == "slice"):
        return ()
    layout, parallel = make_layout(config), config.parallel
    cuts = parallel.mp_degree if parallel.sequence_parallel else 1
    held: dict[tuple[int, ...], list[int]] = {}
    for cp_rank in range(layout.size):
        positions = layout.positions(config.model.seq_length, cp_rank)
        own, share = slicing.order(len(positions), cuts), len(positions) // cuts
        for mp_rank in range(cuts):
            mine = own[mp_rank * share : (mp_rank + 1) * share]
            for number, part in enumerate(slicing.cut(len(positions), cuts)):
                who = (cp_rank, mp_rank) if by_rank else ()
                key = (*who, number) if slicing.capacity == "slice" else who
                here = mine[part.start // cuts : part.stop // cuts]
                held.setdefault(key, []).extend(positions[at] for at in here)
    parts = tuple(tuple(sorted(positions)) for positions in held.values())
    return parts if len(parts) > 1 else ()
