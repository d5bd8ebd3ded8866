"""Who holds which positions."""

from __future__ import annotations

import pytest
import torch

from megapar.core.comm.axis import Axis
from megapar.core.context_parallel.positions import GATHERED, RING, ULYSSES, HeldRun, SequenceLayout, choose_layout
from megapar.core.context_parallel.share import Share


def drawing(layout, length):
    """Which rank holds each position, as in the layout's docstring."""
    holder = {at: rank for rank in range(layout.size) for at in layout.positions(length, rank)}
    return "".join(str(holder[at]) for at in range(length))


def test_the_drawings():
    assert drawing(SequenceLayout(4), 8) == "00112233"
    assert drawing(SequenceLayout(4, zigzag=True), 8) == "01233210"
    assert drawing(SequenceLayout(2, zigzag=True), 8) == "00111100"
    assert drawing(SequenceLayout(3), 9) == "000111222"
    assert drawing(SequenceLayout(), 5) == "00000"
    assert drawing(SequenceLayout(2, zigzag=True, slices=2), 8) == drawing(SequenceLayout(2, zigzag=True), 8)
    assert drawing(SequenceLayout(2, zigzag=True, slices=3), 12) == "001111000011"
    assert drawing(SequenceLayout(2, slices=2), 8) == "00110011"
    assert drawing(SequenceLayout(2, zigzag=True, slices=2, balanced=True, parts=2), 16) == "0000001111111100"


def test_zigzag_evens_out_causal_work():
    length = 48
    for size in (2, 3, 4):
        work = [sum(at + 1 for at in SequenceLayout(size, zigzag=True).positions(length, rank)) for rank in range(size)]
        assert len(set(work)) == 1
        uneven = [sum(at + 1 for at in SequenceLayout(size).positions(length, rank)) for rank in range(size)]
        assert max(uneven) > 1.4 * min(uneven)


def test_what_cannot_be_shared_is_refused():
    with pytest.raises(ValueError, match="6 positions cannot be shared by 2 ranks in 4 equal pieces"):
        SequenceLayout(2, zigzag=True).runs(6, 0)
    assert SequenceLayout(2).positions(6, 1) == [3, 4, 5]


@pytest.mark.parametrize(
    ("algorithm", "causal", "length", "zigzag"),
    [
        (RING, True, 8, True),
        (RING, False, 8, False),
        (ULYSSES, True, 8, False),
        (GATHERED, True, 8, True),
        (GATHERED, True, 6, False),
        (GATHERED, False, 8, False),
    ],
)
def test_zigzag_is_for_causal_masks(algorithm, causal, length, zigzag):
    assert choose_layout(algorithm, 2, causal=causal, length=length) == SequenceLayout(2, zigzag=zigzag)


def test_places_of_a_cut_that_sequence_parallelism_cuts_further():
    """cp 2 in zig-zag: 12 positions per rank in two runs of 6. mp cuts them in 3; the middle part has 2 of each run."""
    places = SequenceLayout(2, zigzag=True).places(24, parts=3)
    first, middle, last = 0, 1, 2
    assert places[:3] == (HeldRun(first, 0, 4), HeldRun(middle, 0, 2), HeldRun(3 + first, 0, 4))
    assert places[-2:] == (HeldRun(middle, 2, 4), HeldRun(last, 0, 4))
    assert SequenceLayout().places(6, parts=2) == (HeldRun(0, 0, 3), HeldRun(1, 0, 3))


@pytest.mark.parametrize("parts", [1, 2, 3])
@pytest.mark.parametrize("zigzag", [False, True])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_rows_by_rank_to_order_of_position_and_back(size, zigzag, parts):
    layout, length = SequenceLayout(size, zigzag=zigzag and size > 1), 24 * size
    held = [at for rank in range(size) for at in layout.positions(length, rank)]
    own = 24 // parts
    axes = [
        (Axis("cp", size, cp, None, tuple(range(size))), Axis("mp", parts, mp, None, tuple(range(parts))))
        for cp in range(size)
        for mp in range(parts)
    ]
    for number, (cp, mp) in enumerate(axes):
        share = Share(cp, mp, layout)
        assert (share.size, share.rank) == (size * parts, number)
        by_rank = torch.tensor(held).repeat_interleave(2)
        ordered = share.in_order(by_rank, own)
        assert ordered.tolist() == sorted(held * 2)
        assert share.own(ordered, own).tolist() == by_rank[number * own * 2 : (number + 1) * own * 2].tolist()


def test_a_slice_is_put_in_order_though_it_could_not_be_cut_again():
    """Slices with one position per rank, every second one mirrored."""
    layout = SequenceLayout(2, zigzag=True, slices=4)
    shares = [Share(cp=Axis("cp", 2, rank, None, (0, 1)), layout=layout) for rank in range(2)]
    rows = torch.arange(4).view(4, 1)  # two rows of the position of rank 0, then of rank 1's
    assert shares[0].in_order(rows, 1, number=0).flatten().tolist() == [0, 1, 2, 3]
    assert shares[0].in_order(rows, 1, number=1).flatten().tolist() == [2, 3, 0, 1]
    for number in range(4):
        whole = shares[0].in_order(rows, 1, number)
        assert [share.own(whole, 1, number).flatten().tolist() for share in shares] == [[0, 1], [2, 3]]
