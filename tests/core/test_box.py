"""Boxes: cutting covers the whole once, meeting is symmetric."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from megapar.core.box import Box

SHAPES = st.lists(st.integers(1, 7), min_size=1, max_size=3).map(tuple)


@given(SHAPES, st.data())
def test_pieces_of_a_cut_cover_the_whole_once(shape: tuple[int, ...], data: st.DataObject) -> None:
    dim = data.draw(st.integers(0, len(shape) - 1))
    parts = data.draw(st.integers(1, 9))
    counts = np.zeros(shape, dtype=int)
    for part in range(parts):
        counts[Box.whole(shape).cut(dim, parts, part).slices] += 1
    assert (counts == 1).all()


@given(SHAPES, st.data())
def test_meet_is_the_common_part(shape: tuple[int, ...], data: st.DataObject) -> None:
    def draw() -> Box:
        offsets = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
        return Box(offsets, tuple(data.draw(st.integers(1, n - o)) for n, o in zip(shape, offsets, strict=True)))

    a, b = draw(), draw()
    mask = np.zeros(shape, dtype=int)
    mask[a.slices] += 1
    mask[b.slices] += 1
    common = a.meet(b)
    assert common == b.meet(a)
    assert (common.numel if common else 0) == (mask == 2).sum()
    if common:
        values = np.arange(mask.size).reshape(shape)
        assert (values[a.slices][common.within(a)] == values[common.slices]).all()


@given(SHAPES, st.integers(1, 60), st.data())
def test_slabs_are_the_whole_in_order(shape: tuple[int, ...], numel: int, data: st.DataObject) -> None:
    whole = np.arange(int(np.prod(shape))).reshape(shape)
    kept = data.draw(st.one_of(st.none(), st.integers(0, len(shape))))
    slabs = list(Box.whole(shape).slabs(numel, kept))
    assert np.concatenate([whole[slab.slices].ravel() for slab in slabs]).tolist() == whole.ravel().tolist()
    least = 1 if kept is None else int(np.prod(shape[kept:]))
    assert all(slab.numel <= max(numel, least) for slab in slabs)


def test_an_index_is_a_box_with_all_dims() -> None:
    assert Box.at((4, 6, 8), (1, slice(2, 5))) == Box((1, 2, 0), (1, 3, 8))
    assert Box.at((4, 6), (slice(None),)) == Box.whole((4, 6))
