"""Products in fp8 at the shapes of the races' models, by each recipe of torch, and the casts that they need.

Recipes: a scale per tensor, per row, or per 128 features of a row and 128 x 128 block of a weight (the last one on
compute capability 9.0 only). Each result is compared with that of the bf16 numbers in fp64.

Shape letters: R rows, K contracted features, N features of the product, E experts.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megapar.core.device import fp8 as package
from megapar.core.device import triton_operators
from megapar.core.device.ops import op
from scripts.gpu_day.day import Answer, Day
from scripts.gpu_day.timed import NO_GPU, computed, median_seconds, moved, normal

E4M3, LARGEST, BLOCK = torch.float8_e4m3fn, 448.0, 128
SHAPES = {  # R, K, N
    "dense": (16384, 2048, 6144),
    "dense, down": (16384, 6144, 2048),
    "ernie": (16384, 2048, 8192),
    "h 4096": (16384, 4096, 14336),
}
GROUPED = (65536, 2048, 1536, 16)  # R, K, N, E of the MoE
SMALL, SMALL_GROUPED = (64, 256, 128), (64, 128, 48, 4)
CHECKED_ROWS = 128
# Three bits of mantissa: a number is off by 1/16 at most and by 0.026 in the mean square, a product of two by 0.037.
TOLERANCE = 0.06
COMPILE_SECONDS = 20.0


class Scaled(NamedTuple):
    """An operand: e4m3 numbers, and the scales that multiply them."""

    values: Tensor
    scale: Tensor


def run(day: Day) -> None:
    """Time products, casts, and last the compiled cast, as the compiler may take long."""
    torch.manual_seed(0)
    for name, shape in {"small": SMALL}.items() if day.small else SHAPES.items():
        day.attempt(f"products, {name}", partial(products, day, *shape), least=2.0)
    day.attempt("grouped products", partial(grouped, day, *(SMALL_GROUPED if day.small else GROUPED)), least=2.0)
    day.attempt("casts", partial(casts, day), least=2.0)
    day.attempt("compiled cast", partial(compiled, day), least=1.0 if day.small else COMPILE_SECONDS)


def per_tensor(x: Tensor) -> Scaled:
    """Scale by the largest number of the tensor."""
    return _divided(x, x.abs().amax().float() / LARGEST)


def per_row(x: Tensor) -> Scaled:
    """Scale each row by its largest number; scales have the dims of ``x``, the last of size 1."""
    return _divided(x, x.abs().amax(-1, keepdim=True).float() / LARGEST)


def per_block(x: Tensor, rows: int) -> Scaled:
    """Scale each block of ``rows`` x 128 numbers by its largest one; scales are [R / rows, K / 128]."""
    blocks = x.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, rows))
    values, scale = _divided(blocks, blocks.abs().amax((1, 3), keepdim=True).float() / LARGEST)
    return Scaled(values.flatten(2, 3).flatten(0, 1), scale[:, 0, :, 0])


def _divided(x: Tensor, scale: Tensor) -> Scaled:
    scale = scale.clamp(min=1e-12)
    return Scaled((x.float() / scale).clamp(-LARGEST, LARGEST).to(E4M3), scale)


def rows_together(scale: Tensor) -> Tensor:
    """Return scales [R, K / 128] with the rows together in memory."""
    return scale.t().contiguous().t()


def blocks_together(scale: Tensor) -> Tensor:
    """Return scales [N / 128, K / 128] as [K / 128, N / 128] with the former together, filled up to a multiple of 4."""
    return F.pad(scale, (0, -scale.shape[1] % 4)).t()


def products(day: Day, R: int, K: int, N: int) -> Answer:
    """Time x [R, K] times w [N, K]^T in bf16 and by each recipe; wrong if an error is larger than e4m3 explains."""
    x, w = normal(day, R, K), normal(day, N, K)
    exact = x[:CHECKED_ROWS].double() @ w.double().t()
    works = {"bf16": lambda: x @ w.t(), **_recipes(x, w)}
    found = {name: _measured(day, work, exact, 2.0 * R * K * N) for name, work in works.items()}
    return _judged(day, found)


def _recipes(x: Tensor, w: Tensor) -> dict[str, Callable[[], Tensor]]:
    """Return the products whose operands are cast already, as functions that may refuse this device."""
    xt, wt, xr, wr = per_tensor(x), per_tensor(w), per_row(x), per_row(w)
    xb, x_w, wb = per_block(x, 1), per_block(w, 1), per_block(w, BLOCK)
    return {
        "tensor": partial(_multiplied, xt, wt, False),
        "tensor, fast sums": partial(_multiplied, xt, wt, True),
        "row": partial(_multiplied, xr, wr, False),
        "row, fast sums": partial(_multiplied, xr, wr, True),
        "1x128, 128x128": _blockwise(xb, Scaled(wb.values, blocks_together(wb.scale)), 1, BLOCK),
        "of the package, with the cast of x": partial(op("fp8_product", x), x, op("fp8_weight", w)(w)[0]),
        "of the package, tensor, with the cast of x": partial(
            op("fp8_product", x), x, op("fp8_tensor_weight", w)(w)[0]
        ),
        "1x128, 1x128": _blockwise(xb, Scaled(x_w.values, rows_together(x_w.scale)), 1, 1),
    }


def _multiplied(x: Scaled, w: Scaled, fast: bool) -> Tensor:
    factors = x.values, w.values.t(), x.scale, w.scale.t()
    return torch._scaled_mm(*factors, out_dtype=torch.bfloat16, use_fast_accum=fast)


def _blockwise(x: Scaled, w: Scaled, x_rows: int, w_rows: int) -> Callable[[], Tensor]:
    kinds = {1: F.ScalingType.BlockWise1x128, BLOCK: F.ScalingType.BlockWise128x128}
    scale = rows_together(x.scale)
    return lambda: F.scaled_mm(x.values, w.values.t(), scale, kinds[x_rows], w.scale, kinds[w_rows])


def grouped(day: Day, R: int, K: int, N: int, E: int) -> Answer:
    """Time the products of the experts' rows, in bf16 and with a scale per row."""
    x, w = normal(day, R, K), normal(day, E, N, K)
    ends = torch.arange(R // E, R + 1, R // E, dtype=torch.int32, device=day.place)
    counts = torch.full((E,), R // E, device=day.place)
    exact = x[: min(CHECKED_ROWS, R // E)].double() @ w[0].double().t()
    xr, wr = per_row(x), per_row(w)
    scales = xr.scale.squeeze(-1).contiguous(), wr.scale.squeeze(-1).contiguous()

    def scaled(fast: bool) -> Tensor:
        return torch._scaled_grouped_mm(
            xr.values, wr.values.mT, *scales, offs=ends, out_dtype=torch.bfloat16, use_fast_accum=fast
        )

    works: dict[str, Callable[[], Tensor]] = {
        "bf16": lambda: F.grouped_mm(x, w.mT, offs=ends),
        "row": partial(scaled, False),
        "row, fast sums": partial(scaled, True),
        "of the package, with the cast of x": partial(
            op("fp8_grouped_product", x), x, op("fp8_experts", w)(w)[0], counts
        ),
    }
    found = {name: _measured(day, work, exact, 2.0 * R * K * N) for name, work in works.items()}
    return _judged(day, found)


def _measured(day: Day, work: Callable[[], Tensor], exact: Tensor, flops: float) -> dict[str, Any]:
    """Return time and error of the first rows, or why the product is not possible here."""
    try:
        y = work()
        found = computed(flops, median_seconds(day, work, 20))
    except (RuntimeError, ValueError, NotImplementedError) as error:
        return {"not_to_be_had": f"{type(error).__name__}: {str(error)[:200]}"}
    return {**found, "error": float((y[: exact.shape[0]].double() - exact).norm() / exact.norm())}


def _judged(day: Day, found: dict[str, dict[str, Any]]) -> Answer:
    errors = [figures["error"] for figures in found.values() if "error" in figures]
    wrong = any(not error <= TOLERANCE for error in errors)
    if not day.on_gpu:
        return Answer(False if wrong else None, {**found, "not_to_be_had": NO_GPU})
    return Answer(not wrong, found)


def casts(day: Day) -> Answer:
    """Time the casts of an operand by torch's operators and by one kernel; wrong if the kernel's numbers differ."""
    x = normal(day, *((64, 256) if day.small else (16384, 6144)))
    works: dict[str, Callable[[], object]] = {
        "read and write": lambda: x.to(E4M3),  # as fast as it can be
        "tensor": lambda: per_tensor(x),
        "row": lambda: per_row(x),
        "1x128": lambda: per_block(x, 1),
    }
    figures: dict[str, Any] = {name: _cast_speed(day, x, work) for name, work in works.items()}
    if not day.on_gpu:
        return Answer(None, {**figures, "not_to_be_had": "the kernel needs a GPU"})
    kernels, w = triton_operators.KERNELS, normal(day, 6144, 2048)
    rows, wanted = kernels["cast_rows"](x), package.cast_rows_reference(x)
    whole, turned = package.cast_weight_reference(w)
    pairs = zip((*rows, *kernels["cast_weight"](w)), (wanted.values, wanted.scale.t(), *whole, *turned), strict=True)
    different = sum(int((got.float() != right.float()).sum()) for got, right in pairs)
    figures["1x128, one kernel"] = _cast_speed(day, x, lambda: kernels["cast_rows"](x))
    figures["128x128 and transposed, one kernel"] = _cast_speed(day, w, lambda: kernels["cast_weight"](w))
    figures["tensor, two kernels"] = _cast_speed(day, x, lambda: kernels["cast_tensor"](x))
    dy, norm = normal(day, len(x), x.shape[1] // 2), normal(day, x.shape[1])
    outputs: dict[str, Callable[[], object]] = {  # the second of two, without the cast's kernel of the first
        "norm": lambda: F.rms_norm(x, norm.shape, norm, 1e-5),
        "norm and its cast": lambda: kernels["norm_cast"](x, norm, 1e-5),
        "swiglu": lambda: kernels["swiglu"](x, None, False),
        "swiglu and its cast": lambda: kernels["swiglu_cast"](x, False),
        "backward of swiglu": lambda: kernels["swiglu_backward"](dy, x, None, False),
        "backward of swiglu and its cast": lambda: kernels["swiglu_cast_backward"](dy, x, False),
    }
    figures |= {name: {"milliseconds": 1e3 * median_seconds(day, work)} for name, work in outputs.items()}
    return Answer(not different, {**figures, "different": different})


def compiled(day: Day) -> Answer:
    """Time the casts per row and per 1x128 as torch's compiler makes them."""
    if day.small:
        return Answer(None, {"not_to_be_had": "a compiler takes longer than a small day"})
    x, figures = normal(day, 16384, 6144), dict[str, Any]()
    for name, cast in (("row", per_row), ("1x128", partial(per_block, rows=1))):
        began = time.monotonic()
        made = torch.compile(cast)
        made(x)
        figures[name] = {"compile_seconds": time.monotonic() - began, **_cast_speed(day, x, lambda made=made: made(x))}  # type: ignore[misc]
        if day.seconds_left < COMPILE_SECONDS / 2:
            break
    return Answer(None, figures)


def _cast_speed(day: Day, x: Tensor, work: Callable[[], object]) -> dict[str, Any]:
    return moved(x.numel() * (x.element_size() + 1), median_seconds(day, work))
