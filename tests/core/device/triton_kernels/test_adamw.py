"""The kernel of an update with two-byte state has the reference's bits, run by Triton's interpreter."""

from __future__ import annotations

import itertools
import math
import re

import pytest
import torch

from megapar.core.device.adamw import AdamWStep, adamw_reference
from megapar.core.device.remainders import split_master
from megapar.core.device.tensor_piece import PROGRAM, ShardPieces, TensorPiece
from megapar.core.device.triton_operators import KERNELS
from tests.support.interpreted import run_interpreted

# Of one, two and four dims, below and above a program's elements, far in a large tensor, with gaps between them.
PIECES = ShardPieces(
    (
        TensorPiece(123456789, 3, (PROGRAM + 190,), (1,), 11, (1,)),
        TensorPiece((1 << 63) - 5, 710, (5, 33), (40, 1), (1 << 33) + 5, (70, 1)),
        TensorPiece(7, 910, (2, 3, 4, 5), (240, 70, 15, 2), 0, (9000, 300, 20, 3)),
        TensorPiece(8, 1350, (1,), (1,), 2, (1,)),
    )
)
NUMEL = 1360
SCALARS = ((None, None), (0.0, 3.0), (1.0, 3.0))  # found_inf, grad_scale
NAMES = ("master", "grad", "first", "second", "weights")
# What has two bytes: the gradient, the first and the second moment, and the master beside its weights.
HALVES = (
    *((False, *rounds, False) for rounds in itertools.product((True, False), repeat=2)),
    (True, False, False, False),
    (False, False, False, True),
    (True, True, True, True),
)


def shard(seed, halves):
    """Master, gradient, first and second moment, and weights."""
    random = torch.Generator().manual_seed(seed)
    master, grad, first, second = torch.randn(4, NUMEL, generator=random)
    master[:9] = torch.tensor([0.0, -0.0, 1e-40, -1e-40, 3.4e38, 1 + 2.0**-8, -1 - 2.0**-8, math.inf, math.nan])
    *narrow, splits = halves
    others = (grad, first * 0.1, second.square() * 0.01)
    weights, stored = split_master(master) if splits else (None, master)
    return stored, *(x.bfloat16() if half else x for x, half in zip(others, narrow, strict=True)), weights


def words(tensor):
    return tensor.view(torch.int16 if tensor.dtype.itemsize == 2 else torch.int32)


def check():
    for seed, (halves, (found_inf, grad_scale)) in enumerate(itertools.product(HALVES, SCALARS)):
        given = [None if value is None else torch.tensor(value) for value in (found_inf, grad_scale)]
        numbers = torch.tensor([1e-2, 0.2, 0.9, 0.1, 0.95, 0.05, 1e-8, 0.99])
        step = AdamWStep(torch.tensor(seed + 1), numbers, *given)
        here, there, before = (shard(seed, halves) for _ in range(3))
        adamw_reference(here, PIECES, step)
        integers = (x.view(torch.int16) if x is not None and x.dtype == torch.bfloat16 else x for x in there)
        KERNELS["update_adamw"](*integers, step.update, numbers, *given, *PIECES.table(torch.device("cpu")))
        for name, a, b, old in zip(NAMES, here, there, before, strict=True):
            if a is not None:
                assert torch.equal(words(a), words(b)), (name, halves, found_inf, grad_scale)
                assert torch.equal(words(b), words(old)) == (name == "grad" or found_inf == 1.0)


def test_a_shard_has_the_bits_of_the_reference():
    run_interpreted(__file__)


def test_a_hopper_gpu_rounds_each_operation_as_ieee_754_does():
    """So the bits are those of the reference there, too: no fused operation, no approximate root, no flushed number."""
    pytest.importorskip("triton")
    from tests.core.device.triton_kernels.kernels import KERNELS

    for kernel in KERNELS["adamw"].values():
        found = set(re.findall(r"\b[a-z]+\.[\w.]*f32\b", kernel.ptx(90))) - {"ld.param.f32", "mov.f32"}
        plain = {"add.f32", "sub.f32", "mul.f32", "add.rn.f32", "sub.rn.f32", "mul.rn.f32", "div.rn.f32", "sqrt.rn.f32"}
        assert {name for name in found if not name.startswith("setp.")} <= plain
        assert {"div.rn.f32", "sqrt.rn.f32"} <= found
