"""Layers into chunks: every way to cut, what is refused, and where chunks live."""

from __future__ import annotations

from itertools import combinations

import pytest

from megapar.core.pipeline.stages import Chunk, CutError, PipelineLayers, Stages


def layers(costs: list[float], names: tuple[str, ...] = ()) -> PipelineLayers:
    """Costs of the embedding, every layer, and the head."""
    return PipelineLayers(("Embedding", *(names or ("Block",) * (len(costs) - 2)), "Head"), tuple(costs))


@pytest.mark.parametrize(
    ("count", "parts", "starts"),
    [(4, 2, (0, 2)), (7, 3, (0, 2, 4)), (8, 3, (0, 2, 5)), (5, 4, (0, 1, 2, 3)), (3, 3, (0, 1, 2)), (6, 1, (0,))],
)
def test_uniform_gives_what_is_left_over_to_the_last_chunks(count: int, parts: int, starts: tuple[int, ...]) -> None:
    assert layers([1.0] * (count + 2)).starts(parts) == starts


def dearest(model: PipelineLayers, starts: tuple[int, ...]) -> float:
    return max(model.cost(chunk) for chunk in Stages.of(starts, model.num_layers, len(starts)).chunks)


@pytest.mark.parametrize("costs", [[0, 1, 1, 1, 1, 1, 1, 4], [9, 1, 1, 1, 1, 1, 1, 0], [0, 5, 1, 1, 7, 1, 2, 2, 3, 1]])
@pytest.mark.parametrize("parts", [1, 2, 3, 4])
def test_no_cut_has_a_cheaper_dearest_chunk_than_balanced(costs: list[float], parts: int) -> None:
    model = layers(costs)
    every = [(0, *inner) for inner in combinations(range(1, model.num_layers), parts - 1)]
    assert dearest(model, model.starts(parts, "balanced")) == min(dearest(model, starts) for starts in every)


def test_balanced_spares_the_stage_with_the_head() -> None:
    assert layers([0, *[1.0] * 8, 3.0]).starts(2, "balanced") == (0, 6) != layers([0, *[1.0] * 8, 3.0]).starts(2)


def test_a_pattern_shares_its_matches_out_and_leaves_the_rest_where_it_stands() -> None:
    model = layers([1.0] * 8, ("Dense", "Dense", "Moe", "Moe", "Moe", "Moe"))
    assert model.starts(2, "layer:^moe$") == (0, 4)  # case does not matter; what comes first goes to the first chunk
    assert model.starts(4, "layer:Moe") == (0, 3, 4, 5)
    assert model.starts(2, "layer:Dense") == (0, 1)


@pytest.mark.parametrize(
    ("method", "parts", "words"),
    [
        ("uniform", 7, "6 layers cannot fill 7 chunks"),
        ("layer:Attention", 2, "matches none of the layers, whose kinds are Embedding, Dense, Moe, Head"),
        ("layer:Moe", 3, "matches 4 layers, which do not divide into 3 chunks"),
        ("layer:(", 2, "not a regular expression"),
        ("layer:Head|Embedding", 2, "every chunk holds at least one layer"),
        ("0,3,5", 2, "gives 3 starts for 2 chunks"),
        ("1,3", 2, "the first start is 0"),
        ("0,6", 2, "every chunk holds at least one layer"),
        ("0,0", 2, "every chunk holds at least one layer"),
        ("evenly", 2, "none of uniform, balanced, layer:REGEX and starts"),
    ],
)
def test_what_cannot_be_cut_is_refused_with_what_is_there(method: str, parts: int, words: str) -> None:
    model = layers([1.0] * 8, ("Dense", "Dense", "Moe", "Moe", "Moe", "Moe"))
    with pytest.raises(CutError, match=words.replace("(", r"\(")):
        model.starts(parts, method)


def test_chunks_go_round_or_down_and_up() -> None:
    loop, v = (Stages.of((0, 2, 3, 5), 8, 2, style) for style in ("loop", "v"))
    assert [chunk.rank for chunk in loop.chunks] == [0, 1, 0, 1]
    assert [chunk.rank for chunk in v.chunks] == [0, 1, 1, 0]
    assert loop.on(1) == (Chunk(1, 1, range(2, 3), False, False), Chunk(3, 1, range(5, 8), False, True))
    assert v.rank_layers(0).layers == (0, 1, 5, 6, 7)
    assert v.rank_layers(0).first
    assert v.rank_layers(0).last
    assert not loop.rank_layers(0).last


def test_every_unit_has_one_stage() -> None:
    stages = Stages.of((0, 2, 3, 5), 8, 2)
    units = ["embedding", *(f"layers.{layer}" for layer in range(8)), "head"]
    assert [stages.rank_of_unit(unit) for unit in units] == [0, 0, 0, 1, 0, 0, 1, 1, 1, 1]
