"""FLOPs against published and hand-counted figures."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megapar.model.decoder.sizes import DecoderSizes
from megapar.model.flops import flops_per_token, step_flops
from tests.model.small import ERNIE_300B, ERNIE_BASE


def test_ernie_300b_at_4096():
    assert flops_per_token(ERNIE_300B, 4096) == pytest.approx(0.293e12, rel=0.002)


def test_gpt3_175b_is_the_published_formula():
    """72 s l h^2 (1 + s / 6h + V / 12lh) per sequence, with the scores halved for causal attention."""
    L, h, s, V = 96, 12288, 2048, 51200
    gpt3 = DecoderSizes(
        num_layers=L,
        hidden_size=h,
        num_attention_heads=96,
        num_query_groups=96,
        head_dim=128,
        ffn_hidden_size=4 * h,
        vocab_size=V,
        seq_length=s,
        max_position_embeddings=s,
        activation="gelu",
        add_bias_linear=True,
    )
    published = 72 * s * L * h**2 * (1 + s / (2 * 6 * h) + V / (12 * L * h))
    assert step_flops(gpt3, 1, s) == pytest.approx(published, rel=1e-9)


def test_a_dense_model_is_six_per_weight_and_the_scores():
    dense = replace(ERNIE_300B, moe=None, num_layers=1, num_query_groups=64)
    weights = 4 * 8192 * 8192 + 3 * 8192 * 28672 + 8192 * 103424
    assert step_flops(dense, 2, 1024) == 2 * 1024 * (6 * weights + 6 * 64 * 128 * 1024)


def test_a_window_counts_the_keys_that_it_leaves():
    """Of 4 layers 3 have it; the keys of a position are those of a trapezoid, w - w^2 / 2 s, in place of s / 2."""
    dense = replace(ERNIE_300B, moe=None, num_layers=4)
    windowed = replace(dense, window_size=128, window_attn_skip_freq="4")
    saved = 3 * 3 * 4 * 4096 * 64 * 128 * (4096 / 2 - 128 * (1 - 128 / 8192))
    assert step_flops(dense, 1, 4096) - step_flops(windowed, 1, 4096) == pytest.approx(saved, rel=1e-12)
    assert step_flops(windowed, 1, 128) == step_flops(dense, 1, 128)


def test_router_and_shared_experts_are_counted():
    sizes = replace(ERNIE_300B, num_layers=4)
    assert sizes.moe is not None
    shared = replace(sizes, moe=replace(sizes.moe, shared_experts=2))
    assert flops_per_token(shared, 8) - flops_per_token(sizes, 8) == 6 * 2 * 3 * 8192 * 3584
    more = replace(sizes, moe=replace(sizes.moe, num_experts=65))
    assert flops_per_token(more, 8) - flops_per_token(sizes, 8) == 6 * 8192


def test_ernie_base():
    per_layer = 6 * (4 * 768 * 768 + 2 * 768 * 3072) + 12 * 768 * 512
    heads = 6 * 768 * (768 + 2)
    words = 6 * 768 * (768 + 40000)
    assert step_flops(ERNIE_BASE, 4, 512, predicted=300) == 4 * (512 * 12 * per_layer + heads) + 300 * words
    assert step_flops(ERNIE_BASE, 100, 512) == step_flops(ERNIE_BASE, 100, 512, predicted=7680)
