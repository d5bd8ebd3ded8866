"""The description of latent attention: its rows, what it keeps, multiplies again and sends, and what ranks send."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megapar.arguments import parse
from megapar.core.attention_mask import AttentionMask
from megapar.model.attention.kinds import kind_of
from megapar.model.attention.latent import KEYS_AND_VALUES, LATENT, LatentAttentionSizes, LatentCosts, cheaper_exchange
from megapar.model.cost.model_cost import OpCost
from megapar.model.cost.operators import Operators
from megapar.model.cost.rank_view import RankView
from megapar.model.decoder.sizes import DecoderSizes
from megapar.model.spec import table_of
from tests.model import small
from tests.model.attention.test_latent_layer import BATCH, LENGTH, bytes_of_a_position, latent_sizes

RANKS = {"q_lora_rank": 10, "kv_lora_rank": 14, "qk_head_dim": 6, "qk_pos_emb_head_dim": 4, "v_head_dim": 5}


def decoder(**more: Any) -> DecoderSizes:
    """A small decoder with latent attention."""
    return replace(small.LATENT, **{**RANKS, **more})


def test_one_product_makes_latents_and_the_rotary_key() -> None:
    sizes = decoder()
    H, N = sizes.hidden_size, sizes.num_attention_heads
    rows = {row.name: row for row in table_of(sizes) if row.name.startswith("layers.0.attention.")}
    shapes = {name.removeprefix("layers.0.attention."): row.shape for name, row in rows.items()}
    assert shapes == {
        "down.weight": (10 + 14 + 4, H),
        "q_norm.weight": (10,),
        "kv_norm.weight": (14,),
        "q_up.weight": (N, 6 + 4, 10),
        "kv_up.weight": (N, 6 + 5, 14),
        "proj.weight": (H, N * 5),
    }
    down = rows["layers.0.attention.down.weight"]
    assert [(piece.hf_name.rsplit(".", 2)[1], piece.hf_shape) for piece in down.pieces] == [
        ("q_a_proj", (10, H)),
        ("kv_a_proj_with_mqa", (14 + 4, H)),
    ]
    assert (down.axes, down.mp_partial) == ((), "sp")
    assert [name for name, row in rows.items() if row.axes == (("mp", 0),)] == [
        "layers.0.attention.q_up.weight",
        "layers.0.attention.kv_up.weight",
    ]


def test_without_a_query_rank_queries_come_from_the_hidden_states() -> None:
    sizes = decoder(q_lora_rank=0)
    rows = {row.name: row for row in table_of(sizes) if row.name.startswith("layers.0.attention.")}
    assert "layers.0.attention.q_norm.weight" not in rows
    assert rows["layers.0.attention.down.weight"].shape == (14 + 4, sizes.hidden_size)
    up = rows["layers.0.attention.q_up.weight"]
    assert up.shape == (sizes.num_attention_heads, 10, sizes.hidden_size)
    assert up.pieces[0].hf_name == "model.layers.0.self_attn.q_proj.weight"


def test_widths_are_those_of_all_heads() -> None:
    sizes = decoder()
    N = sizes.num_attention_heads
    assert kind_of(sizes.attention).widths(sizes.attention) == (N * (10 + 6 + 5), N * 5)


def test_flags_make_the_sizes() -> None:
    line = "--multi-latent-attention --q-lora-rank none --qk-head-dim 24 --layernorm-epsilon 1e-6"
    line += " --rope-scaling-type yarn --mscale-all-dim 1 --rope-scaling-factor 40"
    config = parse("moe", line.split(), {})
    found = config.model.attention
    assert isinstance(found, LatentAttentionSizes)
    assert (found.query_rank, found.latent_rank, found.plain_dim, found.rotary_dim) == (0, 512, 24, 64)
    assert config.model.head_dim == found.key_dim == 24 + 64
    assert found.epsilon == 1e-6
    # As published: (0.1 ln 40 + 1)^2 on the scores, besides the square root of a head's size.
    assert found.softmax_scale == pytest.approx(88**-0.5 * 1.3688879454113936**2)


@pytest.mark.parametrize(
    "wrong",
    [{"position_embedding_type": "learned"}, {"qk_pos_emb_head_dim": 5}, {"num_query_groups": 2}, {"qk_norm": True}],
)
def test_what_it_cannot_be_together_with_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="latent_attention"):
        decoder(**wrong)


@pytest.mark.parametrize(
    ("latent", "heads", "cp", "by_heads", "exchange"),
    [
        (576, 128 * 320, 8, False, LATENT),  # DeepSeek-V3
        (576, 128 * 320, 8, True, LATENT),
        (576, 16 * 320, 8, True, KEYS_AND_VALUES),  # mp 8: two of its heads for each rank of cp
        (576, 16 * 320, 8, False, LATENT),
        (576, 320, 2, False, KEYS_AND_VALUES),
        (320, 320, 2, False, LATENT),
        (10, 30, 2, True, LATENT),  # 2 x (16 + 32 bits) of 10 against 2 x 16 of 30
        (10, 29, 2, True, KEYS_AND_VALUES),
    ],
)
def test_fewer_bytes(latent, heads, cp, by_heads, exchange):
    assert cheaper_exchange(latent, heads, cp, by_heads=by_heads) == exchange


VIEW = replace(RankView.alone(LENGTH), samples=BATCH)
SIZES = latent_sizes()
MASK = AttentionMask(1, LENGTH, causal=True)
H, N = SIZES.hidden_size, SIZES.num_heads
W = SIZES.query_rank + SIZES.latent_rank + SIZES.rotary_dim


def operators(sizes: Any = SIZES, **view: Any) -> dict[str, OpCost]:
    """The operators of attention by their names, on a rank with this view."""
    shared = Operators(replace(VIEW, **view), H, normalization="rmsnorm", dropout=False)
    found = LatentCosts(shared, sizes, MASK).all
    return {operator.name: operator for operator in found}


def test_what_is_kept_is_what_the_layer_keeps() -> None:
    """``test_latent_layer`` reads the same bytes from saved tensors; there the input is known, and has no norm."""
    found = operators()
    inputs = 4 * BATCH * LENGTH * H
    kept = sum(operator.kept for name, operator in found.items() if name != "norm")
    assert kept - inputs == BATCH * LENGTH * bytes_of_a_position(SIZES)
    assert found["kv"].kept == 0


def test_products_are_those_of_the_weights() -> None:
    weights = [(W, H), (N * SIZES.key_dim, SIZES.query_rank), (H, N * SIZES.value_dim)]
    weights.append((N * (SIZES.plain_dim + SIZES.value_dim), SIZES.latent_rank))
    flops = sum(2 * BATCH * LENGTH * out * inner for out, inner in weights)
    assert sum(product.flops for one in operators().values() for product in one.products) == flops


def test_keys_and_values_are_made_again_once() -> None:
    kv = operators()["kv"]
    assert kv.extra == (("backward", kv.products[0]),)
    assert kv.extra_flops == kv.flops


def test_every_rank_of_cp_makes_the_columns_of_all() -> None:
    kv = operators(cp=4, ring=True, sends_latents=True)["kv"]
    assert kv.extra_flops == kv.flops * (3 + 3 * 3 + 1)
    assert operators(cp=4, ring=True)["kv"].extra_flops == kv.flops
    assert operators(cp=4, ulysses=True, sends_latents=True)["kv"].extra_flops == kv.flops


def sent(axis: str, **view: Any) -> float:
    return sum(one.bytes for operator in operators(**view).values() for one in operator.sent if one.axis == axis)


@pytest.mark.parametrize("algorithm", [{"ring": True}, {}])
def test_latents_or_keys_and_values_travel_between_positions(algorithm: dict[str, bool]) -> None:
    latents, heads = (sent("cp", cp=2, sends_latents=chosen, **algorithm) for chosen in (True, False))
    columns = SIZES.latent_rank + SIZES.rotary_dim, N * (SIZES.key_dim + SIZES.value_dim)
    assert latents / heads == columns[0] / columns[1]
    assert heads == 3 * 4 * BATCH * LENGTH // 2 * columns[1]


def test_by_heads_latents_go_to_all_ranks() -> None:
    messages = operators(cp=2, ulysses=True, sends_latents=True)["core"].sent
    assert [message.kind for message in messages] == ["all_to_all", "all_to_all", "all_gather", "reduce_scatter"]


def test_by_heads_the_latents_of_other_ranks_are_kept() -> None:
    latents, heads = (operators(cp=4, ulysses=True, sends_latents=chosen)["core"].kept for chosen in (True, False))
    assert latents - heads == 4 * 3 * (BATCH * LENGTH // 4) * (SIZES.latent_rank + SIZES.rotary_dim)


def test_ranks_of_mp_send_latents_alone() -> None:
    found = operators(mp=2, sequence_parallel=True)
    assert [message.kind for message in found["latents"].sent] == ["all_gather", "reduce_scatter"]
    assert found["latents"].sent[0].bytes == 4 * BATCH * LENGTH * W / 2
    assert found["qkv"].sent == ()
    straight = operators(replace(SIZES, query_rank=0), mp=2, sequence_parallel=True)
    assert straight["qkv"].sent != ()
