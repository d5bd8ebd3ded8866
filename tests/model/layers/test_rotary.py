"""Rotary embedding: frequencies and factors are those of transformers to the last bit, in every type of scaling."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.deepseek_v3.modeling_deepseek_v3 import yarn_apply_mscale

from megapar.model.layers.rotary import RotaryEmbedding, rotate
from megapar.model.rope_scaling import RopeScaling
from tests.model.conformance.exact import Widened

DRAWS = 60


def drawn(kind: str, random_: random.Random) -> dict[str, Any]:
    """Numbers of a scaling, none of them round, and now and then a key left out."""
    found: dict[str, Any] = {"factor": random_.uniform(0.9, 41)}
    if kind != "linear":
        found["original_max_position_embeddings"] = random_.choice((7, 33, 511, 4096, 8191))
    if kind == "llama3":
        found["low_freq_factor"] = random_.uniform(0.3, 2)
        found["high_freq_factor"] = found["low_freq_factor"] + random_.uniform(0.1, 7)
    if kind == "yarn":
        may = {
            "beta_fast": random_.uniform(8, 40),
            "beta_slow": random_.uniform(0.2, 3),
            "mscale": random_.uniform(0.1, 2),
            "mscale_all_dim": random_.uniform(0.1, 2),
            "attention_factor": random_.uniform(0.5, 2),
            "truncate": False,
        }
        found |= {key: value for key, value in may.items() if random_.random() < 0.5}
    return found


def cases(kind: str) -> list[tuple[dict[str, Any], int, float, int]]:
    random_ = random.Random(kind)
    return [
        (drawn(kind, random_), 2 * random_.randint(1, 70), random_.uniform(1.5, 6e5), random_.choice((1, 2)))
        for _ in range(DRAWS)
    ]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("kind", ["linear", "llama3", "yarn"])
def test_frequencies_are_those_of_transformers(kind: str, dtype: torch.dtype) -> None:
    for numbers, rotated, theta, share in cases(kind):
        parameters = {"rope_type": kind, "rope_theta": theta, "partial_rotary_factor": 1 / share, **numbers}
        config = LlamaConfig(
            hidden_size=4 * rotated * share, num_attention_heads=4, rope_parameters=parameters, head_dim=rotated * share
        )
        formula: Callable[..., tuple[Tensor, float]] = ROPE_INIT_FUNCTIONS[kind]
        if dtype == torch.float64:
            with Widened():
                theirs, factor = formula(config)
        else:
            theirs, factor = formula(config)
        scaling = RopeScaling(rope_type=kind, **numbers)
        rope = RotaryEmbedding(rotated, theta, dtype, scaling, rotated * share)
        ours = rope._make_frequencies(torch.device("cpu"))
        still = torch.zeros((share - 1) * rotated // 2, dtype=dtype)
        assert theirs.dtype == dtype
        assert torch.equal(ours, torch.cat((theirs, still))), (numbers, rotated, theta)
        assert scaling.rotated_factor == factor
        assert scaling.scores_factor == pytest.approx(yarn_apply_mscale(parameters, 1.0), rel=1e-15)


def test_without_scaling_nothing_changes() -> None:
    positions = torch.arange(13).expand(2, 13)
    angles = positions.unsqueeze(-1) / 7.0 ** (torch.arange(0, 10, 2).double() / 10)
    cos, sin = RotaryEmbedding(10, 7.0, torch.float64).angles(positions)
    assert torch.allclose(cos, angles.cos(), rtol=0, atol=1e-14)
    assert torch.allclose(sin, angles.sin(), rtol=0, atol=1e-14)


@pytest.mark.parametrize("scaling", [None, RopeScaling(rope_type="yarn", factor=3.7)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_features_after_the_rotated_ones_pass(dtype: torch.dtype, scaling: RopeScaling | None) -> None:
    positions = torch.arange(5).expand(2, 5)
    x = torch.randn(2, 5, 3, 10, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)
    x.requires_grad_()
    y = rotate(x, RotaryEmbedding(4, 100.0, dtype, scaling, 10).angles(positions))
    alone = rotate(x[..., :4], RotaryEmbedding(4, 100.0, dtype, scaling).angles(positions))
    assert torch.equal(y, torch.cat((alone, x[..., 4:]), -1))
    up = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    whole, parts = torch.autograd.grad(y, x, up)[0], torch.autograd.grad(alone, x, up[..., :4])[0]
    assert torch.equal(whole, torch.cat((parts[..., :4], up[..., 4:]), -1))


def test_scalings_that_are_none() -> None:
    with pytest.raises(ValueError, match="rope_type is 'dynamic'"):
        RopeScaling(rope_type="dynamic")
    with pytest.raises(ValueError, match="low_freq_factor"):
        RopeScaling(rope_type="llama3", low_freq_factor=4.0)


def test_angles_of_far_positions_are_not_rounded_to_the_compute_dtype() -> None:
    positions = torch.arange(100_000, 100_064)[None]
    exact, half = (RotaryEmbedding(16, 1e4, dtype).angles(positions) for dtype in (torch.float32, torch.bfloat16))
    assert [x.dtype for x in half] == [torch.float32] * 2
    assert all(map(torch.equal, exact, half))
