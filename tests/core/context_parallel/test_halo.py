"""What ranks exchange for a window, by arithmetic: every key that a row sees and its rank lacks, once."""

from __future__ import annotations

import pytest

from megapar.core.attention_mask import AttentionMask
from megapar.core.context_parallel.halo import Halo, halo_of, most_keys, rows_exchanged
from megapar.core.context_parallel.positions import SequenceLayout

LENGTH = 48
LAYOUTS = [
    *(SequenceLayout(size, zigzag=zigzag) for size in (2, 3, 4) for zigzag in (False, True)),
    *(SequenceLayout(2, zigzag=zigzag, slices=3, balanced=zigzag) for zigzag in (False, True)),
    SequenceLayout(4, zigzag=True, slices=2),
]
DOCUMENTS = ((9, 34, 48), (1, 27, 48))


def numbers_of(layout: SequenceLayout) -> list[int | None]:
    return [None] if layout.slices == 1 else list(range(layout.slices))


def keys_of(
    layout: SequenceLayout, rank: int, mask: AttentionMask, number: int | None, arrived: list[int]
) -> list[int]:
    """The positions of the keys in ``pieces``, from the rows that the other ranks send; adds them to ``arrived``."""

    def positions(other: int) -> list[int]:
        runs = layout.runs(LENGTH, other)[: None if number is None else number + 1]
        return [at for run in runs for at in run]

    halo = halo_of(layout, rank, mask, number)
    for other in range(layout.size):
        sent = halo_of(layout, other, mask, number).sent[rank]
        rows = [positions(other)[row] for run in sent for row in run]
        assert len(rows) == halo.received[other]
        arrived += rows
    assert not set(arrived) & set(positions(rank))
    assert len(set(arrived)) == len(arrived)  # never twice, however many slices see it
    assert arrived == [at for run in halo.arrived for at in run]
    sources = (positions(rank), arrived)
    return [sources[source][row] for source, run in halo.pieces for row in run]


@pytest.mark.parametrize("ends", [None, DOCUMENTS])
@pytest.mark.parametrize("window", [1, 2, 5, 13, 30, 47])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_each_run_gets_the_keys_that_its_rows_see(layout: SequenceLayout, window: int, ends) -> None:
    mask = AttentionMask(2, LENGTH, causal=True, ends=ends).within(window)
    for rank in range(layout.size):
        rows, arrived, kept = list[int](), list[int](), 0
        for number in numbers_of(layout):
            halo, keys = halo_of(layout, rank, mask, number), keys_of(layout, rank, mask, number, arrived)
            seen: set[int] = set()
            for run, own, part in zip(halo.runs, halo.queries, halo.rows, strict=True):
                assert own.stop - own.start == len(run)
                assert keys[part] == list(range(mask.first_key(run.start), run.stop))
                seen |= set(keys[part])
                rows += run
            assert sorted(seen) == keys  # each once, and nothing else
            kept += len(keys)
        assert rows == layout.positions(LENGTH, rank)
        assert ends or kept <= rows_exchanged(layout, window, LENGTH)[1]


def test_the_first_key_is_that_of_the_longest_document_at_a_position() -> None:
    mask = AttentionMask(2, LENGTH, causal=True, ends=DOCUMENTS)
    assert [mask.first_key(at) for at in (0, 8, 9, 26, 27, 40)] == [0, 0, 1, 1, 9, 27]
    assert [mask.within(4).first_key(at) for at in (0, 8, 9, 26, 27, 40)] == [0, 5, 6, 23, 24, 37]
    assert AttentionMask(1, LENGTH, causal=True).first_key(30) == 0


def test_a_rank_exchanges_at_most_a_window_before_each_run() -> None:
    """Twice in zig-zag, d times with d slices, and never more than all keys of the others."""
    for window in (2, 5):
        for layout, runs in zip(LAYOUTS, [1, 1, 1, 2, 1, 2, 3, 2, 2], strict=True):
            assert rows_exchanged(layout, window, LENGTH)[0] == runs * (window - 1)
    for layout in LAYOUTS:
        assert rows_exchanged(layout, LENGTH - 1, LENGTH)[0] == LENGTH - LENGTH // layout.size
    assert [rows_exchanged(LAYOUTS[0], window, LENGTH) for window in (0, 1, 5)] == [(0, 0), (0, 24), (4, 28)]


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout.size > 1])
def test_the_busiest_rank_is_the_one_whose_rows_see_most_keys(layout: SequenceLayout) -> None:
    """Half a key of each position is not counted, nor half a window at the start of the sequence (``mean_keys``)."""
    for window in (1, 4, 13, LENGTH - 1):
        seen = [
            sum(min(window, row + 1) - 0.5 * (window > row) for run in layout.runs(LENGTH, rank) for row in run)
            for rank in range(layout.size)
        ]
        assert most_keys(layout, window, LENGTH) == pytest.approx(max(seen) / sum(seen) * layout.size)


@pytest.mark.parametrize("size", [2, 3, 8, 64])
def test_ranks_in_zigzag_are_nearly_balanced_in_windows(size: int) -> None:
    layout, run = SequenceLayout(size, zigzag=True), 32
    length = 2 * size * run
    assert max(most_keys(layout, window, length) for window in range(1, run // 4 + 1)) <= 1.05
    assert 1.15 < max(most_keys(layout, window, length) for window in range(1, length)) <= 4 / 3
    assert most_keys(layout, length, length) == pytest.approx(1.0)


def test_nothing_crosses_the_start_of_a_document() -> None:
    layout = SequenceLayout(2)
    mask = AttentionMask(1, LENGTH, causal=True, ends=((24, 48),)).within(5)
    assert [halo_of(layout, rank, mask).received for rank in (0, 1)] == [(0, 0), (0, 0)]
    assert isinstance(halo_of(layout, 0, mask), Halo)
