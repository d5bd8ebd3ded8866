"""Roundings are to a neighbour, right in the mean, independent of one another, and a function of what names them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from megapar.core.device.stochastic_rounding import GAMMA, _mixed, random_bits, rounded
from megapar.core.optimizer.tensor_pieces import tensor_key

NUMEL = 1 << 18
FIELDS = 3
KEY = tensor_key(7, "model.layers.0.mlp.up_proj.weight")


def bits(numel: int = NUMEL, key: int = KEY, update: int = 5, begin: int = 0) -> Tensor:
    return random_bits(key, torch.tensor(update), torch.arange(begin, begin + numel))


def ups(random: Tensor, state: int = 0, value: float = 1.0 + 2.0**-9) -> Tensor:
    """Return 1 for each element that was rounded up, of a value that lies a quarter of the way between neighbours."""
    result = rounded(torch.full(random.shape, value), random, state)
    assert set(result.unique().tolist()) <= {1.0, 1.0 + 2.0**-7}
    return (result > 1).double()


def test_the_generator_is_splitmix64() -> None:
    """The outputs of a published program from the start 1234567 (Vigna, splitmix64.c)."""
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    outputs = _mixed(torch.arange(1, 5) * GAMMA + 1234567)
    assert [value % (1 << 64) for value in outputs.tolist()] == expected


@pytest.mark.parametrize("state", range(FIELDS))
@pytest.mark.parametrize("share", [1 / 4, 1 / 2, 15 / 16])
def test_the_share_rounded_up_is_the_distance_from_below(state: int, share: float) -> None:
    mean = ups(bits(), state, 1.0 + share * 2.0**-7).mean().item()
    assert abs(mean - share) < 4 * math.sqrt(share * (1 - share) / NUMEL)


@pytest.mark.parametrize("distance", [1, 2, 3, 8, 64, 4096, 1 << 15])
@pytest.mark.parametrize("state", range(FIELDS))
def test_roundings_of_neighbours_are_uncorrelated(state: int, distance: int) -> None:
    x = ups(bits(), state) - 0.25
    assert abs((x[:-distance] * x[distance:]).mean().item()) / 0.1875 < 4.5 / math.sqrt(NUMEL)


def test_roundings_of_states_updates_and_tensors_are_uncorrelated() -> None:
    random = bits()
    columns = [ups(random, state) for state in range(FIELDS)]
    columns += [ups(bits(update=update)) for update in (4, 6, 7, 1 << 20)]
    columns += [ups(bits(key=tensor_key(seed, name))) for seed, name in ((8, "a"), (7, "a"), (7, "b"))]
    columns += [ups(bits(begin=begin)) for begin in (NUMEL, 1 << 32, 3 << 40)]
    correlation = torch.corrcoef(torch.stack(columns)) - torch.eye(len(columns))
    assert correlation.abs().max().item() < 4.5 / math.sqrt(NUMEL)


def test_what_bf16_has_stays_and_the_rest_goes_to_a_neighbour() -> None:
    generator = torch.Generator().manual_seed(1)
    words = torch.randint(-(1 << 31), 1 << 31, (NUMEL,), generator=generator, dtype=torch.int64).to(torch.int32)
    x = words.view(torch.float32)
    x = x[x.isfinite() & (x.abs() < 3e38)]  # with subnormals
    below = (x.view(torch.int32) & -65536).view(torch.float32)
    above = ((x.view(torch.int32) & -65536) + 65536).view(torch.float32)  # away from zero
    result = rounded(x, bits(x.numel()), 1).float()
    assert ((result == below) | (result == above)).all()
    exact = torch.tensor([0.0, -0.0, 1.0, -2.5, 2.0**-133, math.inf, -math.inf, 3.3895313892515355e38])
    kept = rounded(exact, torch.full((8,), -1), 0).float()
    assert torch.equal(kept.view(torch.int32), exact.view(torch.int32))
    nan = torch.tensor([0x7FFFFFFF, -1], dtype=torch.int32).view(torch.float32)
    assert rounded(nan, torch.full((2,), -1), 0).isnan().all()


def test_fp64_is_rounded_as_its_nearest_fp32() -> None:
    x = torch.randn(NUMEL, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    assert torch.equal(rounded(x, bits(), 0), rounded(x.float(), bits(), 0))
