"""All ranks' tiles together are the mask, each pair once; drawn as in the module's docstring."""

from __future__ import annotations

import itertools

import pytest

from megapar.core.attention_mask import AttentionMask
from megapar.core.context_parallel.positions import SequenceLayout
from megapar.core.context_parallel.tiles import (
    Tile,
    cut_columns,
    gathered_tiles,
    halves,
    local_tiles,
    spans,
    tiles_between,
)

LENGTH = 16
MASKS = {
    "causal": AttentionMask.of(2, LENGTH, causal=True),
    "documents": AttentionMask.of(2, LENGTH, causal=True, ends=[3, 9, 16, 16 + 7, 16 + 8, 32]),
    "documents alike": AttentionMask.of(2, LENGTH, causal=True, ends=[5, 16, 21, 32]),
    "a document per position": AttentionMask.of(1, LENGTH, causal=True, ends=list(range(1, LENGTH + 1))),
    "both ways": AttentionMask.of(2, LENGTH, causal=False),
    "padding": AttentionMask.of(3, LENGTH, causal=False, lengths=[16, 9, 1]),
}
LAYOUTS = [SequenceLayout(size, zigzag=zigzag) for size in (2, 4) for zigzag in (False, True)]


def visible(mask):
    """Pairs (sample, query, key) that the mask connects, by its definition."""
    found = set()
    for sample in range(mask.samples):
        ends = (mask.ends or ((mask.length,),) * mask.samples)[sample]
        seen = (mask.lengths or (mask.length,) * mask.samples)[sample]
        for i, j in itertools.product(range(mask.length), repeat=2):
            together = next(e for e in ends if i < e) == next(e for e in ends if j < e)
            if (j <= i and together) if mask.causal else j < seen:
                found.add((sample, i, j))
    return found


def pairs(tiles, rows, columns, mask):
    """Pairs of positions that tiles cover. rows, columns: the position in each place."""
    found = []
    for tile in tiles:
        for sample in range(mask.samples) if tile.sample is None else [tile.sample]:
            for (a, i), (b, j) in itertools.product(enumerate(tile.queries), enumerate(tile.keys)):
                if not tile.causal or b <= a:
                    found.append((sample, rows[i], columns[j]))
    return found


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_a_ring_covers_the_mask_once(name, layout):
    mask, found = MASKS[name], []
    for rank in range(layout.size):
        rows = layout.positions(LENGTH, rank)
        own = local_tiles(layout, rank, mask)
        found += pairs(own, rows, rows, mask)
        early, late = halves(own, LENGTH // layout.size // 2)
        assert sorted(pairs([*early, *late], rows, rows, mask)) == sorted(pairs(own, rows, rows, mask))
        for source in set(range(layout.size)) - {rank}:
            tiles = tiles_between(layout, rank, source, mask)
            found += pairs(tiles, rows, layout.positions(LENGTH, source), mask)
    assert len(found) == len(set(found))
    assert set(found) == visible(mask)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_gathered_keys_cover_the_mask_once(name, layout):
    mask, found = MASKS[name], []
    for rank in range(layout.size):
        rows = layout.positions(LENGTH, rank)
        found += pairs(local_tiles(layout, rank, mask), rows, rows, mask)
        found += pairs(gathered_tiles(layout, rank, mask), rows, range(LENGTH), mask)
    assert len(found) == len(set(found))
    assert set(found) == visible(mask)


def test_causal_tiles_are_as_drawn():
    layout, mask = SequenceLayout(2, zigzag=True), MASKS["causal"]
    own = local_tiles(layout, 0, mask)
    assert own == [Tile(None, range(8), range(8), causal=True)]
    early, late = halves(own, 4)
    assert early == [Tile(None, range(4, 8), range(4))]
    assert late == [Tile(None, range(4), range(4), causal=True), Tile(None, range(4, 8), range(4, 8), causal=True)]
    assert tiles_between(layout, 0, 1, mask) == [Tile(None, range(4, 8), range(8))]
    assert tiles_between(layout, 1, 0, mask) == [Tile(None, range(8), range(4))]


@pytest.mark.parametrize("size", [2, 4, 8])
def test_every_step_of_a_causal_ring_is_equal_work(size):
    layout, mask = SequenceLayout(size, zigzag=True), AttentionMask.of(1, 4 * size, causal=True)
    ranks = itertools.permutations(range(size), 2)
    areas = {sum(tile.area for tile in tiles_between(layout, rank, source, mask)) for rank, source in ranks}
    assert areas == {8.0}  # half of 4 x 4
    assert all(len(tiles_between(layout, *pair, mask)) == 1 for pair in itertools.permutations(range(size), 2))


def test_what_covers_arrival_and_way_home_is_even():
    for name in ("causal", "both ways", "documents"):
        early, late = halves(local_tiles(SequenceLayout(2, zigzag=name != "both ways"), 0, MASKS[name]), 4)
        areas = [sum(tile.area for tile in part) for part in (early, late)]
        assert min(areas) > 0
        assert max(areas) <= 2.5 * min(areas), name


def test_rows_meet_gathered_columns_in_few_calls():
    """Both runs see what lies before the first; the second also what lies between them."""
    tiles = gathered_tiles(SequenceLayout(4, zigzag=True), 1, AttentionMask.of(1, 64, causal=True))
    assert tiles == [Tile(None, range(16), range(8)), Tile(None, range(8, 16), range(16, 48))]
    both_ways = gathered_tiles(SequenceLayout(4), 1, AttentionMask.of(1, 64, causal=False))
    assert both_ways == [Tile(None, range(16), range(16)), Tile(None, range(16), range(32, 64))]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_tiles_cut_by_columns_cover_the_same_pairs_in_few_spans(name, layout):
    mask, held = MASKS[name], LENGTH // layout.size
    for rank in range(layout.size):
        rows, places = layout.positions(LENGTH, rank), range(LENGTH)
        tiles = gathered_tiles(layout, rank, mask)
        cut = cut_columns(tiles, held)
        assert sorted(pairs(cut, rows, places, mask)) == sorted(pairs(tiles, rows, places, mask))
        groups = spans(cut, held)
        assert len(groups) <= layout.size
        assert all(len(span) <= held for span, _ in groups)
        back = [
            tile._replace(keys=range(tile.keys.start + span.start, tile.keys.stop + span.start))
            for span, group in groups
            for tile in group
        ]
        assert back == cut


def test_a_causal_tile_is_a_span_of_its_own_where_it_is_too_long():
    tiles = [Tile(None, range(2), range(0, 2)), Tile(None, range(6), range(2, 8), causal=True)]
    assert cut_columns(tiles, 4) == tiles
    assert spans(tiles, 4) == [(range(0, 2), [tiles[0]]), (range(2, 8), [Tile(None, range(6), range(6), causal=True)])]
    assert spans([], 4) == []
