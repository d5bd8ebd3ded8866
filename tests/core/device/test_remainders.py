"""A master and its weight with a remainder are the same 32 bits."""

from __future__ import annotations

import math

import torch

from megapar.core.device.remainders import join_master, split_master


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int32)


def of_bits(*words: int) -> torch.Tensor:
    return torch.tensor([word - (1 << 32) * (word >> 31) for word in words], dtype=torch.int32).view(torch.float32)


def test_every_upper_half_comes_back_with_lower_halves_around_the_tie() -> None:
    """All signs and exponents: zeros, subnormals, infinities."""
    upper = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32) << 16
    for lower in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        master = (upper | lower).view(torch.float32)
        weights, remainders = split_master(master)
        assert (weights.dtype, remainders.dtype) == (torch.bfloat16, torch.int16)
        joined, number = join_master(weights, remainders), ~master.isnan()
        assert torch.equal(bits(joined)[number], bits(master)[number])
        assert joined[~number].isnan().all()
        assert weights[~number].isnan().all()


def test_random_masters_come_back_and_weights_are_the_nearest() -> None:
    words = torch.randint(-(1 << 31), 1 << 31, (1 << 20,), generator=torch.Generator().manual_seed(1))
    master = words.to(torch.int32).view(torch.float32)
    master = master[~master.isnan()]
    weights, remainders = split_master(master)
    assert torch.equal(bits(join_master(weights, remainders)), bits(master))
    tie = bits(master) & 0xFFFF == 0x8000
    assert torch.equal(weights[~tie], master[~tie].to(torch.bfloat16))


def test_ties_are_rounded_up_in_magnitude_where_a_cast_takes_the_even_one() -> None:
    master = of_bits(0x3F808000, 0xBF808000, 0x3F818000, 0x00008000, 0x80008000, 0x7F7F8000, 0x80000000)
    weights, remainders = split_master(master)
    expected = of_bits(0x3F810000, 0xBF810000, 0x3F820000, 0x00010000, 0x80010000, 0x7F800000, 0x80000000)
    assert torch.equal(bits(weights.float()), bits(expected))
    assert master[0].to(torch.bfloat16).item() == 1.0 != weights[0].item()
    assert math.isinf(weights[5].item())
    assert torch.equal(bits(join_master(weights, remainders)), bits(master))


def test_no_nan_becomes_a_number() -> None:
    """Not that of an NVIDIA GPU either, whose bits are all ones but the sign."""
    master = of_bits(0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0xFF808000, 0x7FC00000)
    weights, remainders = split_master(master)
    assert weights.isnan().all()
    assert join_master(weights, remainders).isnan().all()
