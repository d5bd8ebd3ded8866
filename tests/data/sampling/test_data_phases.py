"""Data that changes on the way: exact ledgers of what every source gave, over phases, tasks and epochs."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megapar.data import build
from megapar.data.sampling.data_phases import Phase, PhasedPieces, PhasedSamples, first_lanes
from megapar.data.sampling.mixture import Blend
from megapar.data.sampling.samples import DecoderSamples, Windows
from megapar.data.tasks.build import TaskData
from megapar.data.tokens.store import TokenStore

A, B, C = 0, 1000, 2000  # a window's first token tells its source
SIZES = {A: 40, B: 30, C: 25}


def _windows(first: int) -> Windows:
    n = SIZES[first]
    return Windows(TokenStore(np.arange(first, first + n * 4 + 1, dtype=np.uint16), np.array([0, n * 4 + 1])), 4)


def _weights(*numbers: int) -> tuple[Fraction, ...]:
    return tuple(map(Fraction, numbers))


def _read(samples: Any, first: int, last: int) -> list[int]:
    return [int(samples[number]["tokens"][0]) for number in range(first, last)]


def _of(drawn: list[int], source: int) -> list[int]:
    return [one for one in drawn if source <= one < source + 1000]


def test_a_single_phase_is_the_order_of_before() -> None:
    blend = Blend([_windows(A), _windows(B)], _weights(1, 2))
    phase = Phase(0, _weights(1, 2), first_lanes(_weights(1, 2)))
    assert _read(DecoderSamples(PhasedPieces(blend, (phase,)), 4, 3), 0, 200) == _read(
        DecoderSamples(blend, 4, 3), 0, 200
    )
    single = PhasedPieces(_windows(A), (Phase(0, None, first_lanes(None)),))
    assert _read(DecoderSamples(single, 4, 3), 0, 99) == _read(DecoderSamples(_windows(A), 4, 3), 0, 99)
    assert _read(DecoderSamples(single, 4, None), 0, 9) == _read(DecoderSamples(_windows(A), 4, None), 0, 9)


def test_sources_that_stay_go_on_and_new_ones_begin_at_their_start() -> None:
    """A and B 1:1, then A and C 3:1, then A alone, then B and A again: no source repeats before its epoch ends."""
    alone = _read(DecoderSamples(_windows(C), 4, 9), 0, 5)
    phases = [
        (Phase(0, _weights(1, 1), ("mixture/0/", "mixture/1/")), (A, B)),
        (Phase(20, _weights(3, 1), ("mixture/0/", "phase/1/0/")), (A, C)),
        (Phase(52, None, ("mixture/0/",)), (A,)),
        (Phase(57, _weights(1, 1), ("mixture/1/", "mixture/0/")), (B, A)),
    ]
    drawn: list[int] = []
    for number, (phase, sources) in enumerate(phases):
        run = tuple(one for one, _ in phases[: number + 1])
        parts = [_windows(source) for source in sources]
        pieces = parts[0] if phase.weights is None else Blend(parts, phase.weights)
        samples = DecoderSamples(PhasedPieces(pieces, run), 4, seed=9)
        end = phases[number + 1][0].start if number + 1 < len(phases) else 137
        drawn += _read(samples, phase.start, end)
        with pytest.raises(IndexError):
            samples[phase.start - 1]
    counts = Counter(one // 1000 for one in drawn)
    assert counts == {0: 10 + 24 + 5 + 40, 1: 10 + 40, 2: 8}
    for source, size in SIZES.items():
        mine = _of(drawn, source)
        for epoch in range(0, len(mine), size):
            assert len(set(mine[epoch : epoch + size])) == len(mine[epoch : epoch + size])
    assert _of(drawn, C)[:5] != alone  # a lane of its own
    before = DecoderSamples(Blend([_windows(A), _windows(B)], _weights(1, 1)), 4, 9)
    assert _of(_read(before, 0, 200), A)[:79] == _of(drawn, A)[:79]
    assert _of(_read(before, 0, 200), B)[:50] == _of(drawn, B)


def test_as_many_lanes_as_sources() -> None:
    with pytest.raises(ValueError, match="2 sources on 1 lanes"):
        PhasedPieces(Blend([_windows(A), _windows(B)], _weights(1, 1)), (Phase(0, None, ("",)),))


@pytest.mark.parametrize("tasks", [None, TaskData("knowledge_mlm:1,document_lm:2")])
def test_every_kind_of_samples_goes_on(tasks: TaskData | None, small_jsonl: Path) -> None:
    """The same weights once more are no change: tasks count for themselves, and so does every source of theirs."""
    data: dict[str, Any] = {"vocab_size": 600, "seq_length": 32, "seed": 1, "tasks": tasks}
    corpus = build("ernie", data_path=[str(small_jsonl)], **data)
    run_phases = (Phase(0, None, ("",)), Phase(7, None, ("",)), Phase(30, None, ("",)))
    again = corpus.in_phases(run_phases)
    for number in range(30, 70):
        for name, array in corpus.train[number].items():
            assert np.array_equal(array, again.train[number][name])


def _phased(*rows: tuple[int, tuple[Fraction, ...] | None, tuple[int, ...]]) -> PhasedSamples:
    """Samples of phases, each (start, weights, sources), whose lanes are the sources."""
    phases = tuple(Phase(start, weights, tuple(map(str, sources))) for start, weights, sources in rows)
    read, sizes = [], {}
    for number, (_, weights, sources) in enumerate(rows):
        parts = [_windows(source) for source in sources]
        pieces = PhasedPieces(parts[0] if weights is None else Blend(parts, weights), phases[: number + 1])
        read.append(DecoderSamples(pieces, 4, seed=9))
        sizes.update(pieces.sizes)
    return PhasedSamples(phases, read, sizes)


def test_a_run_goes_through_its_phases_and_knows_its_first_repeated_sample() -> None:
    for rows in (
        ((0, _weights(1, 1), (A, B)), (20, _weights(3, 1), (A, C)), (52, None, (A,)), (57, _weights(1, 1), (B, A))),
        ((0, None, (A,)), (39, _weights(1, 2, 3), (A, B, C))),
        ((0, None, (C,)), (60, None, (A,))),
        ((0, _weights(5, 1), (A, C)), (44, None, (B,)), (50, _weights(1, 1), (A, B))),
    ):
        samples = _phased(*rows)
        drawn, seen, first = _read(samples, 0, 200), set[int](), None
        for number, one in enumerate(drawn):
            if one in seen and first is None:
                first = number
            seen.add(one)
        repeated = samples.first_repeated()
        assert repeated is not None
        assert repeated[0] == first
        assert int(repeated[1]) == drawn[repeated[0]] // 1000 * 1000
        for source, size in SIZES.items():  # once per epoch, over all phases
            mine = _of(drawn, source)
            for epoch in range(0, len(mine), size):
                assert len(set(mine[epoch : epoch + size])) == len(mine[epoch : epoch + size])
    late = _phased((0, None, (C,)), (60, None, (A,)))
    later = PhasedSamples(late.phases, late.samples[1:], late.sizes)
    assert _read(later, 60, 99) == _read(late, 60, 99)
    with pytest.raises(IndexError):
        later[59]
