"""AdamW with two-byte state: one pass over a shard, by programs of a piece (``PieceTable``).

Each operation rounds once, as those of ``core.device.adamw.adamw_reference`` do, whose bits these are: products and
sums are not fused. Tensors in bf16 are read and written as 16-bit integers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megapar.core.device.remainders import HALF, NAN
from megapar.core.device.stochastic_rounding import FACTORS, GAMMA
from megapar.core.device.tensor_piece import COLUMNS, DIMS, PROGRAM

WARPS = 4

_GAMMA, _FACTOR_0, _FACTOR_1 = (tl.constexpr(number % (1 << 64)) for number in (GAMMA, *FACTORS))
_HALF, _NAN = tl.constexpr(HALF), tl.constexpr(NAN)
_DIMS, _COLUMNS = tl.constexpr(DIMS), tl.constexpr(COLUMNS)


@triton.jit
def _mixed(x):  # type: ignore[no-untyped-def]
    x = (x ^ (x >> 30)) * _FACTOR_0
    x = (x ^ (x >> 27)) * _FACTOR_1
    return x ^ (x >> 31)


@triton.jit
def _loaded(tensor, place, inside, NARROW: tl.constexpr):  # type: ignore[no-untyped-def]
    x = tl.load(tensor + place, mask=inside, other=0)
    if NARROW:
        x = (x.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return x


@triton.jit
def _store(moment, place, inside, x, random, ROUNDED: tl.constexpr):  # type: ignore[no-untyped-def]
    if ROUNDED:
        words = x.to(tl.int32, bitcast=True) + (random & 0xFFFF).to(tl.int32)
        words = tl.where(x == x, words, _NAN)
        tl.store(moment + place, (words >> 16).to(tl.int16), mask=inside)
    else:
        tl.store(moment + place, x, mask=inside)


@triton.jit
def _update(  # type: ignore[no-untyped-def]  # noqa: PLR0913, PLR0915
    master, grad, exp_avg, exp_avg_sq, weights, update, numbers, found_inf, grad_scale, pieces, owners,
    GRADIENT: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    program = tl.program_id(0)
    row = pieces + tl.load(owners + program).to(tl.int64) * _COLUMNS
    start, first_index, numel = tl.load(row + 1), tl.load(row + 2), tl.load(row + 4)
    element = (program - tl.load(row + 3).to(tl.int32)) * BLOCK + tl.arange(0, BLOCK)
    end = numel.to(tl.int32)
    if found_inf is not None:
        end = tl.where(tl.load(found_inf) > 0, 0, end)
    inside = element < end
    # Where the elements are in memory, and which of the tensor they are.
    place = start + element.to(tl.int64) * tl.load(row + (4 + 2 * _DIMS))
    index = first_index + element.to(tl.int64) * tl.load(row + (4 + 3 * _DIMS))
    if tl.load(row + (4 + _DIMS)) != numel:
        place = start + 0 * place
        index = first_index + 0 * index
        rest = element
        for dim in tl.static_range(_DIMS):
            size = tl.load(row + (4 + _DIMS - dim)).to(tl.int32)
            outer = rest // size
            along = (rest - outer * size).to(tl.int64)
            place += along * tl.load(row + (4 + 2 * _DIMS - dim))
            index += along * tl.load(row + (4 + 3 * _DIMS - dim))
            rest = outer
    g = _loaded(grad, place, inside, GRADIENT)
    if grad_scale is not None:
        g = tl.div_rn(g, tl.load(grad_scale))
    rate, root, eps, decay = tl.load(numbers), tl.load(numbers + 1), tl.load(numbers + 6), tl.load(numbers + 7)
    m = _loaded(exp_avg, place, inside, FIRST) * tl.load(numbers + 2) + g * tl.load(numbers + 3)
    v = _loaded(exp_avg_sq, place, inside, SECOND) * tl.load(numbers + 4) + g * g * tl.load(numbers + 5)
    change = tl.div_rn(m, tl.div_rn(tl.sqrt_rn(v), root) + eps) * rate
    old = tl.load(master + place, mask=inside, other=0)
    if weights is not None:
        upper = tl.load(weights + place, mask=inside, other=0).to(tl.int32)
        old = ((upper << 16) + old.to(tl.int32)).to(tl.float32, bitcast=True)
    new = old * decay - change
    if weights is not None:
        words = tl.where(new == new, new.to(tl.int32, bitcast=True), _NAN) + _HALF
        tl.store(weights + place, (words >> 16).to(tl.int16), mask=inside)
        tl.store(master + place, ((words & 0xFFFF) - _HALF).to(tl.int16), mask=inside)
    else:
        tl.store(master + place, new, mask=inside)
    begin = _mixed(tl.load(update).to(tl.uint64) * _GAMMA + tl.load(row).to(tl.uint64))
    random = _mixed(index.to(tl.uint64) * _GAMMA + begin)
    _store(exp_avg, place, inside, m, random, FIRST)
    _store(exp_avg_sq, place, inside, v, random >> 16, SECOND)


def update_adamw(
    master: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    weights: Tensor | None,
    update: Tensor,
    numbers: Tensor,
    found_inf: Tensor | None,
    grad_scale: Tensor | None,
    pieces: Tensor,
    owners: Tensor,
) -> None:
    """Change master, moments and weights of a shard in place, as ``adamw_reference``.

    Args:
        master: In fp32, or remainders in int16.
        grad: In fp32, or bf16 as int16; the moments likewise.
        weights: In bf16, as int16.
        numbers: ``AdamWStep.numbers``.
        pieces: Numbers of a ``PieceTable``, whose ``owners`` are the programs.
    """
    if owners.numel():
        tensors = master, grad, exp_avg, exp_avg_sq, weights, update, numbers, found_inf, grad_scale, pieces, owners
        narrow = {"GRADIENT": grad, "FIRST": exp_avg, "SECOND": exp_avg_sq}
        forms = {name: tensor.dtype == torch.int16 for name, tensor in narrow.items()}
        _update[(owners.numel(),)](*tensors, **forms, BLOCK=PROGRAM, num_warps=WARPS, enable_fp_fusion=False)
