"""Plans of segments: every parameter once, in order; cut where the strategy says."""

import pytest

from megapar.core.sharding.bucket_plan import PlanError, by_anchors, by_bytes, by_unit
from megapar.model.decoder.sizes import DecoderSizes
from megapar.model.decoder.table import decoder_table
from megapar.model.parameter import ParameterSpec

ROWS = decoder_table(
    DecoderSizes(
        num_layers=3,
        hidden_size=32,
        num_attention_heads=4,
        num_query_groups=4,
        head_dim=8,
        ffn_hidden_size=48,
        vocab_size=100,
        seq_length=16,
        max_position_embeddings=16,
    )
)


def cost(row: ParameterSpec) -> int:
    return 2 * row.numel


@pytest.mark.parametrize("limit", [1, 5000, 20000, 10**9])
def test_by_bytes_keeps_order_and_fills_every_segment_but_the_last(limit: int) -> None:
    plan = by_bytes(ROWS, cost, limit)
    assert [name for segment in plan for name in segment.names] == [row.name for row in ROWS]
    assert all(segment.bytes >= limit for segment in plan[:-1])
    assert sum(segment.bytes for segment in plan) == sum(cost(row) for row in ROWS)
    assert (len(plan) == 1) == (limit == 10**9)


def test_by_unit_is_one_per_layer() -> None:
    plan = by_unit(ROWS, cost)
    assert [segment.span.split(".")[0] for segment in plan] == ["embedding", "layers", "layers", "layers", "final_norm"]


def test_anchors_start_segments_and_may_be_patterns() -> None:
    plan = by_anchors(ROWS, cost, ["layers.1", "layers.*.mlp"])
    assert [segment.names[0] for segment in plan] == [
        "embedding.word.weight",
        "layers.0.mlp.gate_up.weight",
        "layers.1.attention_norm.weight",
        "layers.1.mlp.gate_up.weight",
        "layers.2.mlp.gate_up.weight",
    ]


@pytest.mark.parametrize(
    ("anchors", "message"),
    [
        (["layer.1"], r"layer.1 names no module of this model. Near: layers.1"),
        (["layers.2", "layers.?"], r"layers.\? and layers.2 both name layers.2"),
        (["layers.0", "layers.0"], r"both name layers.0"),
    ],
)
def test_anchors_that_do_not_fit_are_refused(anchors: list[str], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        by_anchors(ROWS, cost, anchors)


def test_an_attention_is_never_cut() -> None:
    for segment in by_bytes(ROWS, cost, 1):
        if ".attention." in segment.names[0]:
            assert [name.rpartition(".")[0].rpartition(".")[2] for name in segment.names] == ["qkv", "proj"]
    with pytest.raises(PlanError, match=r"names no module of this model"):
        by_anchors(ROWS, cost, ["layers.1.attention.proj"])


@pytest.mark.parametrize("limit", [1, 5000, 20000])
def test_layers_may_be_kept_whole(limit: int) -> None:
    for plan in (by_bytes(ROWS, cost, limit, whole=True), by_anchors(ROWS, cost, ["layers.*.mlp"], whole=True)):
        held = [{row.unit for row in ROWS if row.name in segment.names} for segment in plan]
        assert sum(map(len, held)) == len({row.unit for row in ROWS}) == 5
    assert [segment.names[0] for segment in plan[1:]] == [f"layers.{n}.attention_norm.weight" for n in range(3)]
