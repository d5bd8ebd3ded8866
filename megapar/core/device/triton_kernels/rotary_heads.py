"""Rotary position embedding of queries and keys while the fused heads are split, one pass per direction.

Shape letters: T tokens, G key-value heads, Q query heads of a group, D head size.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

ELEMENTS_OF_A_WARP = 512  # 16 of a thread


@triton.jit
def _heads(  # type: ignore[no-untyped-def]
    fused,
    q,
    k,
    v,
    cos,
    sin,
    S,
    stride,
    G: tl.constexpr,
    Q: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    SPLIT: tl.constexpr,
):
    token, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, WIDTH)[None, :]
    inside = column < D
    is_q, is_k, is_v = (row < Q) & inside, (row == Q) & inside, (row == Q + 1) & inside
    place = fused + ((token * G + group) * (Q + 2) + row) * D + column
    place_q = q + ((token * G + group) * Q + row) * D + column
    place_k = k + (token * G + group) * D + column + 0 * row
    place_v = v + (token * G + group) * D + column + 0 * row
    if SPLIT:
        x = tl.load(place, mask=(row < Q + 2) & inside, other=0.0)
    else:
        x = tl.load(place_q, mask=is_q, other=0.0)
        x += tl.load(place_k, mask=is_k, other=0.0)
        x += tl.load(place_v, mask=is_v, other=0.0)
    half = tl.arange(0, WIDTH // 2)[None, :]
    angle = token // S * stride + token % S * (D // 2) + half
    turned = (tl.arange(0, ROWS)[:, None] <= Q) & (half < D // 2)
    c = tl.where(turned, tl.load(cos + angle, mask=half < D // 2, other=1.0), 1.0)
    s = tl.where(turned, tl.load(sin + angle, mask=half < D // 2, other=0.0), 0.0)
    if not SPLIT:
        s = -s
    even, odd = tl.split(tl.reshape(x.to(tl.float32), (ROWS, WIDTH // 2, 2)))
    y = tl.reshape(tl.join(even * c - odd * s, odd * c + even * s), (ROWS, WIDTH)).to(fused.dtype.element_ty)
    if SPLIT:
        tl.store(place_q, y, mask=is_q)
        tl.store(place_k, y, mask=is_k)
        tl.store(place_v, y, mask=is_v)
    else:
        tl.store(place, y, mask=(row < Q + 2) & inside)


def rotary_heads(qkv: Tensor, cos: Tensor, sin: Tensor, heads: tuple[Tensor, Tensor, Tensor]) -> None:
    """Split qkv [B, S, G, Q + 2, D] into q [B, S, G Q, D], k and v [B, S, G, D], and rotate q and k.

    All are contiguous, but for cos and sin, [B, S, D / 2] fp32: all samples may be one in memory.
    """
    _launch(qkv, heads, cos, sin, split=True)


def rotary_heads_backward(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor, dqkv: Tensor) -> None:
    """Compute the gradient of qkv for the gradients of ``rotary_heads``."""
    _launch(dqkv, (dq, dk, dv), cos, sin, split=False)


def _launch(qkv: Tensor, heads: tuple[Tensor, Tensor, Tensor], cos: Tensor, sin: Tensor, *, split: bool) -> None:
    B, S, G, together, D = qkv.shape
    if B * S == 0:
        return
    sizes = {"G": G, "Q": together - 2, "D": D}
    blocks = {"ROWS": triton.next_power_of_2(together), "WIDTH": triton.next_power_of_2(D)}
    warps = max(1, min(16, blocks["ROWS"] * blocks["WIDTH"] // ELEMENTS_OF_A_WARP))
    _heads[(B * S, G)](qkv, *heads, cos, sin, S, cos.stride(0), **sizes, **blocks, SPLIT=split, num_warps=warps)
