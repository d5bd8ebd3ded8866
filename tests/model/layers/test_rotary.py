"""Rotary embedding: frequencies and factors are those of transformers to the last bit, in every type of scaling."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.deepseek_v3.modeling_deepseek_v3 import yarn_apply_mscale

from megapar.arguments import parse
from megapar.core.device.ops import OPS
from megapar.model.layers.rotary import RotaryEmbedding, rotate
from megapar.model.rope_scaling import RopeScaling
from tests.model.conformance.exact import Widened
from tests.support.ascend import stand_in

stand_in()
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


def test_a_scaling_has_the_defaults_of_its_flags() -> None:
    config = parse("moe", ["--rope-scaling-type", "yarn"], {})
    assert config.model.rope_scaling == RopeScaling(rope_type="yarn")


def test_angles_of_far_positions_are_not_rounded_to_the_compute_dtype() -> None:
    positions = torch.arange(100_000, 100_064)[None]
    exact, half = (RotaryEmbedding(16, 1e4, dtype).angles(positions) for dtype in (torch.float32, torch.bfloat16))
    assert [x.dtype for x in half] == [torch.float32] * 2
    assert all(map(torch.equal, exact, half))


FACTOR, LENGTH, PAIRS = 32.0, 4096, 32


def of_papers(kind: str, theta: float, pair: int) -> float:
    """Radians per position of a pair of features, each paper's formula: RopeScaling has the sources."""
    plain = theta ** (-pair / PAIRS)
    turns = LENGTH * plain / (2 * math.pi)
    if kind == "linear":
        return plain / FACTOR
    if kind == "llama3":
        kept = min(1.0, max(0.0, (turns - 1) / (4 - 1)))
        return kept * plain + (1 - kept) * plain / FACTOR
    if kind == "yarn":
        first, last = (PAIRS * math.log(LENGTH / (beta * 2 * math.pi)) / math.log(theta) for beta in (32, 1))
        first, last = max(math.floor(first), 0), min(math.ceil(last), 2 * PAIRS - 1)
        divided = min(1.0, max(0.0, (pair - first) / (last - first)))
        return (1 - divided) * plain + divided * plain / FACTOR
    return plain


def rotated_by_every_form(x: Tensor, angles: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    """x [B, S, N, D] as queries, as queries and keys of a fused product, and as the last features of latent heads."""
    found = {f"rotary, {device}": form(x, *angles) for device, form in OPS["rotary"].items() if device != "cuda"}
    for device, form in OPS["rotary_heads"].items():
        q, k, _ = form(torch.stack((x, x, x), 3), *angles)
        found |= {f"queries, {device}": q, f"keys, {device}": k}
    for device, form in OPS["rotate_last"].items():
        wide = torch.cat((torch.ones_like(x[..., :4]), x), -1)
        found[f"last, {device}"] = form(wide, *angles, 1.0, wide.shape[-1])[..., 4:]
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["none", "linear", "llama3", "yarn"])
@pytest.mark.parametrize(("theta", "last"), [(1e4, 100_000), (1e6, 1_000_000)])
def test_far_positions_are_rotated_as_in_the_papers(theta: float, last: int, kind: str, dtype: torch.dtype) -> None:
    """In fp32, as published classes, frequencies have up to 16 roundings: 0.1 radians at position 100,000."""
    positions = torch.tensor([[0, 1, 4097, last // 3, last - 1]])
    numbers = {} if kind == "linear" else {"original_max_position_embeddings": LENGTH}
    scaling = None if kind == "none" else RopeScaling(rope_type=kind, factor=FACTOR, **numbers)
    x = torch.randn(1, 5, 2, 2 * PAIRS, generator=torch.Generator().manual_seed(0)).to(dtype)
    frequencies = torch.tensor([of_papers(kind, theta, pair) for pair in range(PAIRS)], dtype=torch.float64)
    radians = positions.double().unsqueeze(-1) * frequencies
    size = 0.1 * math.log(FACTOR) + 1 if kind == "yarn" else 1.0
    pairs = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)))
    want = torch.view_as_real(pairs * torch.polar(torch.full_like(radians, size), radians).unsqueeze(2)).flatten(-2)
    rounding = 2**-22 if dtype == torch.float32 else 2**-8
    bound = size * pairs.abs() * (16 * 2**-24 * radians.unsqueeze(2) + rounding)
    angles = RotaryEmbedding(2 * PAIRS, theta, dtype, scaling).angles(positions)
    for name, y in rotated_by_every_form(x, angles).items():
        assert y.dtype == dtype
        assert ((y.double() - want).abs() <= bound.repeat_interleave(2, -1)).all(), name
