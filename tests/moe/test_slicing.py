"""Where the sequence is cut: lengths, areas, and the order of the data under sequence parallelism."""

from __future__ import annotations

import pytest

from megapar.moe.slicing import Slicing


def lengths(slicing, length, parts=1):
    slices = slicing.cut(length, parts)
    assert [s.start for s in slices] == [0, *(s.stop for s in slices[:-1])]
    assert slices[-1].stop == length
    return [s.stop - s.start for s in slices]


def test_equal_slices_differ_by_one_position_at_most():
    assert lengths(Slicing(4), 16) == [4, 4, 4, 4]
    assert sorted(lengths(Slicing(3), 16)) == [5, 5, 6]
    assert sorted(lengths(Slicing(3), 16, parts=2)) == [4, 6, 6]
    assert lengths(Slicing(8), 8) == [1] * 8


@pytest.mark.parametrize("degree", [2, 3, 4, 8])
def test_balanced_slices_have_equal_causal_work(degree):
    slices = Slicing(degree, balanced=True).cut(4096)
    work = [sum(range(s.start + 1, s.stop + 1)) for s in slices]
    assert max(work) < 1.01 * min(work)


def test_no_slice_is_empty():
    assert lengths(Slicing(4, balanced=True), 4) == [1, 1, 1, 1]
    with pytest.raises(ValueError, match="cannot be cut into 5 slices"):
        Slicing(5).cut(4)
    with pytest.raises(ValueError, match="on 2 ranks cannot be cut"):
        Slicing(2).cut(5, parts=2)
    with pytest.raises(ValueError, match="degree 0"):
        Slicing(0)


def test_a_ranks_chunk_holds_its_part_of_every_slice():
    order = Slicing(2).order(8, 2)
    assert order == [0, 1, 4, 5, 2, 3, 6, 7]
    for slicing, parts in ((Slicing(3), 2), (Slicing(4, balanced=True), 4), (Slicing(1), 2)):
        length = 24
        order = slicing.order(length, parts)
        assert sorted(order) == list(range(length))
        chunks = [order[rank * length // parts : (rank + 1) * length // parts] for rank in range(parts)]
        for s in slicing.cut(length, parts):
            own = slice(s.start // parts, s.stop // parts)
            assert [position for chunk in chunks for position in chunk[own]] == list(range(s.start, s.stop))
