"""Every row of the table gives the numbers of one process, in fp64 exactly and in bf16 as well as bf16 can."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from _pytest.mark import ParameterSet

from megapar.arguments import parse
from megapar.data.own_data import OwnData
from megapar.training.building.parts import Parts
from tests.equivalence.compare import differences, excess, still
from tests.equivalence.run import Routing, Trace, trace
from tests.equivalence.table import (
    FORCED_ROWS,
    FORCED_SUITE,
    FP8_ROWS,
    FP8_SUITE,
    KIND_ROWS,
    KIND_SUITE,
    LATENT_CONTEXT_ROWS,
    LATENT_ROWS,
    LATENT_SUITE,
    MOVED_ROWS,
    MOVED_SUITE,
    MOVES,
    MUON_ROWS,
    MUON_SUITE,
    NODE_ROWS,
    NODE_SUITE,
    QK_CLIP_ROWS,
    QK_CLIP_SUITE,
    ROWS,
    SHARED_WINDOW_ROWS,
    SHARED_WINDOW_SUITE,
    SINK_ROWS,
    SINK_SUITE,
    SPELLED_ROWS,
    SPELLED_SUITE,
    WEIGHTED_ROWS,
    WEIGHTED_SUITE,
    WINDOW_ROWS,
    WINDOW_SUITE,
    Row,
)
from tests.support.forced import forced_parts, outcomes
from tests.support.pairwise import covering
from tests.support.ranks import run_ranks, side_by_side
from tests.support.weighted import WeightedSequences

# The second step starts from parameters that the first one changed; what it does to moments is in those it leaves.
STEPS, MORE_STEPS = 2, 3
ADAPTIVE_STEPS = 3  # two are measured
SCHEDULED_STEPS = 5  # to the end of a learning rate's decay, and beyond a batch that grows
# bf16 is compared over steps that change nothing, so that all of them measure the rounding of one model.
STILL_STEPS = 8


@functools.cache
def reference(kind: str, flags: tuple[str, ...], dtype: str, steps: int) -> Trace:
    """One process; in bf16 it repeats the choices of the fp64 run, so that only rounding differs."""
    replay: Routing | None = None
    if dtype == "bf16":
        replay = reference(kind, flags, "fp64", steps).routing
    return _run(kind, 1, (*flags, "--dtype", dtype), steps, replay)


def _run(
    kind: str,
    world_size: int,
    flags: tuple[str, ...],
    steps: int,
    replay: Routing | None = None,
    backend: str = "gloo",
    parts: Parts | None = None,
    timeout: float = 60.0,
    data: OwnData | None = None,
) -> Trace:
    run = (trace, kind, flags, steps, replay, backend, parts, None, data)
    result = run_ranks(world_size, *run, group=False, timeout=timeout)[0]
    assert isinstance(result, Trace)
    return result


def _steps(row: Row) -> int:
    """A growing batch needs a third step, and experts that have moved, returned for a save, and move back."""
    if {"--lr-decay-style", "--rampup-batch-size"} & set(row.options):
        return SCHEDULED_STEPS
    return MORE_STEPS if "--progressive-iters" in row.options or set(MOVES) <= set(row.layout) else STEPS


def _cost(row: Row, steps: int = STEPS) -> float:
    """Estimate what a row costs: starting ranks, and what they compute, of which a slice is a call of its own.

    ERNIE 3.0 computes more, because it also writes.
    """
    ranks = row.world_size // row.layout_degree("--pp-degree")
    calls = ranks * row.accumulation * row.layout_degree("--ampipe-degree")
    return 2 + row.world_size + steps / STILL_STEPS * calls * (3 if row.model == "ernie3" else 1)


def _marked(rows: Sequence[Row], suite: Collection[Row]) -> list[ParameterSet]:
    """Rows, of which the suite runs some, and ``-m table`` the others, as .ci/run does too."""
    return [pytest.param(row, id=row.name, marks=[] if row in suite else [pytest.mark.table]) for row in rows]


def _covered_pairs(rows: Sequence[Row], streamed: Sequence[ParameterSet]) -> list[ParameterSet]:
    """Rows, of which the suite runs a covering set of pairs of traits, with what it runs on streams."""
    return _marked(rows, set(covering(rows, lambda row: row.traits, 2, _cost, _of_the_suite(streamed))))


def _of_the_suite(parameters: Sequence[ParameterSet]) -> list[Row]:
    return [one.values[0] for one in parameters if not one.marks]


def _covered_layouts(rows: Sequence[Row], steps: int = STEPS) -> list[ParameterSet]:
    """Rows, of which the suite runs a covering set of models and of what a layout consists of.

    What options of a model do to a layout is a matter of its mathematics, and in the rows of fp64.
    """
    return _marked(rows, set(covering(rows, lambda row: row.layout_traits, 1, partial(_cost, steps=steps))))


ALL_LATENT_ROWS = (*LATENT_ROWS, *LATENT_CONTEXT_ROWS)


STREAMED_ROWS = _covered_layouts([row for row in ROWS if row.on_streams])
FP64_ROWS = _covered_pairs(ROWS, STREAMED_ROWS)
# Of latent attention, fp8, the dispatch by node and experts that move the suite runs rows that are named for it.
NAMED_ROWS = [
    *_marked(ALL_LATENT_ROWS, LATENT_SUITE),
    *_marked(NODE_ROWS, NODE_SUITE),
    *_marked(MOVED_ROWS, MOVED_SUITE),
    *_marked(SPELLED_ROWS, SPELLED_SUITE),
    *_marked(MUON_ROWS, MUON_SUITE),
    *_marked(WINDOW_ROWS, WINDOW_SUITE),
    *_marked(SHARED_WINDOW_ROWS, SHARED_WINDOW_SUITE),
    *_marked(KIND_ROWS, KIND_SUITE),
    *_marked(FP8_ROWS, FP8_SUITE),
    *_marked(QK_CLIP_ROWS, QK_CLIP_SUITE),
    *_marked(SINK_ROWS, SINK_SUITE),
]
NAMED_STREAMED_ROWS = [
    *_marked([row for row in ALL_LATENT_ROWS if row.on_streams], LATENT_SUITE[3:4]),
    *_marked([row for row in FP8_ROWS if row.on_streams], FP8_SUITE[2:]),
    *_marked([row for row in SHARED_WINDOW_ROWS if row.on_streams], SHARED_WINDOW_SUITE[1:]),
    *_marked(NODE_ROWS, NODE_SUITE[:1]),
    *_marked(MOVED_ROWS, MOVED_SUITE),
    *_marked(MUON_ROWS, MUON_SUITE[:1]),
    *_marked([row for row in QK_CLIP_ROWS if row.on_streams], QK_CLIP_SUITE[:1]),
    *_marked([row for row in SINK_ROWS if row.on_streams], SINK_SUITE[2:]),
]


def test_the_suite_has_every_pair_of_the_table() -> None:
    """Of a model or flag with another one: what the suite leaves to ``-m table`` is how they stand three at a time.

    A row that runs on streams shows what it would show without them, and more.
    """
    suite, table = (
        {pair for row in rows for pair in itertools.combinations(row.traits, 2)}
        for rows in (_of_the_suite([*FP64_ROWS, *STREAMED_ROWS]), ROWS)
    )
    assert suite == table


@pytest.mark.parametrize("row", [*FP64_ROWS, *NAMED_ROWS])
def test_fp64(row: Row) -> None:
    """Loss, every gradient, the norm, the updated parameters, the auxiliary loss and the drops.

    Where our own code has communication in flight the ranks meet on the late backend: gloo, but whatever is read before
    its wait or reused in flight shows.
    """
    steps = _steps(row)
    backend, flags = "late" if row.overlaps else "gloo", (*row.flags(), "--dtype", "fp64")
    timeout = 400.0 if "--compile" in row.layout else 60.0
    got, want = side_by_side(
        row.world_size,
        lambda: _run(row.kind, row.world_size, flags, steps, backend=backend, timeout=timeout),
        lambda: reference(row.kind, row.reference_flags(), "fp64", steps),
    )
    assert differences(got, want) == []


# Relays run on the stream of ep at every layout, and experts move behind the optimizer.
@pytest.mark.parametrize("row", [*STREAMED_ROWS, *NAMED_STREAMED_ROWS])
def test_on_streams(row: Row) -> None:
    """The same in fp64 where the host runs ahead of a device with streams: what waits for too little shows.

    There messages are launched late, bad steps are judged late, and any number of gradients is in flight.
    """
    flags = (*row.flags(), "--dtype", "fp64")
    got, want = side_by_side(
        row.world_size,
        lambda: _run(row.kind, row.world_size, flags, _steps(row), backend="lazy"),
        lambda: reference(row.kind, row.reference_flags(), "fp64", _steps(row)),
    )
    assert got.decided_on_device == ("--progressive-iters" not in row.options)  # growing batches: by the host
    assert differences(got, want) == []


def _steady(row: Row) -> Row:
    """The row as bf16 can compare it: with drops by position where attention runs in blocks.

    Blocks round otherwise, and of two tokens with nearly the same probability the other one would be dropped.
    """
    in_blocks = "--cp-degree" in row.layout and "ulysses_cp_algo" not in row.layout
    if not in_blocks or "probs" not in row.options:
        return row
    at = row.options.index("probs")
    return replace(row, options=(*row.options[: at - 1], *row.options[at + 1 :]))


def _forced() -> Iterator[ParameterSet]:
    """Rows with outcomes of their choices, of which the suite runs those that are named for it."""
    for row, forced in FORCED_ROWS:
        marks = [] if (row, forced) in FORCED_SUITE else [pytest.mark.table]
        yield pytest.param(row, forced, id=f"{row.name} {forced}", marks=marks)


@pytest.mark.parametrize(("row", "forced"), _forced())
def test_forced(row: Row, forced: dict[str, Any]) -> None:
    """The same in fp64 with each outcome of a choice that a clock, memory or the device makes."""
    steps = ADAPTIVE_STEPS if "layers" in forced else STEPS
    flags = (*row.flags(), "--dtype", "fp64")
    timeout = 400.0 if "compiled" in forced else 60.0
    open_to = outcomes(parse(row.kind, [*flags], {"WORLD_SIZE": str(row.world_size)}))
    assert all(outcome in open_to[name] for name, outcome in forced.items())
    got, want = side_by_side(
        row.world_size,
        lambda: _run(
            row.kind, row.world_size, flags, steps, backend="late", parts=forced_parts(**forced), timeout=timeout
        ),
        lambda: reference(row.kind, row.reference_flags(), "fp64", steps),
    )
    assert differences(got, want) == []


WEIGHTED = OwnData("weighted", WeightedSequences(17, 101), WeightedSequences(17, 101, 1))


@pytest.mark.parametrize("row", _marked(WEIGHTED_ROWS, WEIGHTED_SUITE))
def test_weights(row: Row) -> None:
    """The same in fp64 where labels have weights: of a micro-batch, a sample, or a rank some, all or none."""
    got, want = side_by_side(
        row.world_size,
        lambda: _run(row.kind, row.world_size, (*row.flags(), "--dtype", "fp64"), STEPS, data=WEIGHTED),
        lambda: _run(row.kind, 1, (*row.reference_flags(), "--dtype", "fp64"), STEPS, data=WEIGHTED),
    )
    assert differences(got, want) == []


def _rounding(rows: Sequence[Row], suite: Sequence[Row] | None = None) -> list[ParameterSet]:
    """Rows that bf16 is compared in: every pair of traits, and with ``-m table`` as well.

    What three traits do together is mathematics, and in the rows of fp64. suite: by default a covering set of layouts.
    """
    steady = covering([_steady(row) for row in rows], lambda row: row.traits, 2, partial(_cost, steps=STILL_STEPS))
    return (
        _covered_layouts(steady, STILL_STEPS) if suite is None else _marked([*dict.fromkeys((*suite, *steady))], suite)
    )


BF16_ROWS = _rounding(ROWS)
OTHER_BF16_ROWS = [
    *(row for rows in (ALL_LATENT_ROWS, NODE_ROWS, MOVED_ROWS) for row in _rounding(rows, ())),
    *_rounding(WINDOW_ROWS, WINDOW_SUITE[:1]),
    *_rounding(SINK_ROWS, SINK_SUITE[:1]),
    *_rounding(KIND_ROWS, KIND_SUITE[:1]),
]


@pytest.mark.parametrize("row", [*BF16_ROWS, *OTHER_BF16_ROWS])
def test_bf16(row: Row) -> None:
    """Casts, fp32 reductions and sums over slices, which fp64 cannot see: in the suite every trait once."""
    flags = still(row.reference_flags())
    exact = reference(row.kind, flags, "fp64", STILL_STEPS)
    layout = (*still(row.flags()), "--dtype", "bf16")
    got, alone = side_by_side(
        row.world_size,
        lambda: _run(row.kind, row.world_size, layout, STILL_STEPS, exact.routing),
        lambda: reference(row.kind, flags, "bf16", STILL_STEPS),
    )
    assert excess(got, alone, exact) == []
