"""The description of latent attention: its rows, its names in folders, and the sizes that flags make."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megapar.arguments import parse
from megapar.model.attention.kinds import kind_of
from megapar.model.attention.latent import LatentAttentionSizes
from megapar.model.decoder.sizes import DecoderSizes
from megapar.model.spec import table_of
from tests.model import small

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
