"""The kernel of an update with moments in bf16 has the reference's bits, run by Triton's interpreter."""

from __future__ import annotations

import itertools

import torch

from megapar.core.device.adamw import AdamWStep, adamw_reference
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
ROUNDS = ((True, True), (True, False), (False, True), (False, False))


def shard(seed, rounds):
    """Master, gradient, first and second moment."""
    random = torch.Generator().manual_seed(seed)
    master, grad, first, second = torch.randn(4, NUMEL, generator=random)
    moments = (first * 0.1, second.square() * 0.01)
    return master, grad, *(x.bfloat16() if half else x for x, half in zip(moments, rounds, strict=True))


def words(tensor):
    return tensor.view(torch.int16 if tensor.dtype == torch.bfloat16 else torch.int32)


def check():
    scalars = itertools.product((None, 0.0, 1.0), (None, 3.0))
    for seed, (rounds, (found_inf, grad_scale)) in enumerate(itertools.product(ROUNDS, scalars)):
        given = [None if value is None else torch.tensor(value) for value in (found_inf, grad_scale)]
        numbers = torch.tensor([1e-2, 0.2, 0.9, 0.1, 0.95, 0.05, 1e-8, 0.99])
        step = AdamWStep(torch.tensor(seed + 1), numbers, *given)
        here, there, before = (shard(seed, rounds) for _ in range(3))
        adamw_reference(here, PIECES, step)
        integers = (x.view(torch.int16) if x.dtype == torch.bfloat16 else x for x in there)
        KERNELS["update_adamw"](*integers, step.update, numbers, *given, *PIECES.table(torch.device("cpu")))
        for name, a, b, old in zip(("master", "grad", "first", "second"), here, there, before, strict=True):
            assert torch.equal(words(a), words(b)), (name, rounds, found_inf, grad_scale)
            assert torch.equal(words(b), words(old)) == (name == "grad" or found_inf == 1.0)


def test_a_shard_has_the_bits_of_the_reference():
    run_interpreted(__file__)
