"""Rows of a micro-batch through one block: whole and bidirectional, or segment by segment with a memory, left to right.

Segment n sees itself, causally, and the last M positions of what *the same layer* made of segment n - 1, detached:

    layer l      y0 = f(x0)    y1 = f(x1 | memory y0[-M:])    y2 = f(x2 | memory y1[-M:])  ..

Source: the enhanced recurrence of ERNIE-Doc (arXiv 2012.15688, section 3.3), as ERNIE 3.0's generation uses it.

Shape letters: B rows, S positions, s of a segment, M of the memory, H hidden, N heads, D head size; /mp marks what
is cut over the tensor parallel axis (positions only under sequence parallelism).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megapar.core.comm.autograd import gather
from megapar.core.device.ops import attention_reference, op
from megapar.core.recompute.selective import again
from megapar.core.tensor_parallel.layers import SEQUENCE_DIM
from megapar.model.layers.block import ErnieBlock
from megapar.model.layers.context import Context


@dataclass(frozen=True)
class BranchContext(Context):
    """The context of a micro-batch whose samples run through two branches.

    understanding, generation: [rows] int64 which samples; back: [B] places in the two put together.
    text: ``valid`` in the order of the positions. memory: M.
    The slices are the segments; positions are ordered so that each rank of mp has its part of every one.
    """

    understanding: Tensor | None = None
    generation: Tensor | None = None
    back: Tensor | None = None
    text: Tensor | None = None
    memory: int = 0


def understand(block: ErnieBlock, x: Tensor, rows: Tensor, context: BranchContext) -> Tensor:
    """[B, S(/mp), H] of the rows, every position seeing all that is not padding."""
    valid = _of(context.valid, rows)
    return _run(block, x, context, "understanding", lambda q, k, v, p: _plain(block, q, k, v, p, valid))


def generate(block: ErnieBlock, x: Tensor, rows: Tensor, context: BranchContext) -> Tensor:
    """[B, S(/mp), H] of the rows, segment after segment."""
    valid, before = _of(context.text, rows), None
    done: list[Tensor] = []
    for number, (own, place) in enumerate(zip(context.own_slices, context.slices, strict=True)):
        seen = None
        if before is not None:
            seen = _mask(before.shape[1], place, valid, x.device)
        done.append(_segment(block, x[:, own], before, seen, context, number))
        if number + 1 < len(context.slices):
            whole = gather(done[-1].detach(), block.attention.mp, SEQUENCE_DIM) if block.cut else done[-1].detach()
            before = whole[:, -context.memory :]
    return torch.cat(done, dim=1)


def _segment(
    block: ErnieBlock, x: Tensor, memory: Tensor | None, seen: Tensor | None, context: BranchContext, number: int
) -> Tensor:
    """[B, s(/mp), H]; memory: [B, M, H], seen: [B or 1, 1, s, M + s] bool, both of segments after the first."""
    attention = block.attention

    def core(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
        if memory is None:
            return _plain(block, q, k, v, dropout, None, causal=True)
        k_memory, v_memory = (t.transpose(1, 2) for t in attention.project_memory(memory))
        k, v = torch.cat((k_memory, k), dim=2), torch.cat((v_memory, v), dim=2)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, dropout_p=dropout)

    return _run(block, x, context, f"generation.{number}", core)


def _run(
    block: ErnieBlock,
    x: Tensor,
    context: BranchContext,
    place: str,
    core: Callable[[Tensor, Tensor, Tensor, float], Tensor],
) -> Tensor:
    """Run the block with another core in its attention. place: names the random numbers of its dropouts."""
    attention = block.attention

    def attend(*heads: Tensor) -> Tensor:
        with attention.drawing(context, f"{attention.place}.{place}", x.device) as dropout:
            q, k, v = (t.transpose(1, 2) for t in heads)
            return core(q, k, v, dropout).transpose(1, 2)

    heads = attention.project(x, None)
    y = attention.output(again(attend, *heads) if attention.selective else attend(*heads))
    x = block.attention_norm(x + block.drop(y, context, f"attention.{place}"))
    out: Tensor = block.mlp_norm(x + block.drop(block.mlp(x), context, f"mlp.{place}"))
    return out


def _of(valid: Tensor | None, rows: Tensor) -> Tensor | None:
    """``valid`` of some samples."""
    return None if valid is None else valid.index_select(0, rows)


def _plain(
    block: ErnieBlock, q: Tensor, k: Tensor, v: Tensor, dropout: float, valid: Tensor | None, causal: bool = False
) -> Tensor:
    form = op("attention", q) if block.attention.sizes.flash else attention_reference
    return form(q, k, v, causal=causal, valid=valid, dropout=dropout)


def _mask(memory: int, place: slice, valid: Tensor | None, device: torch.device) -> Tensor:
    """[B or 1, 1, s, M + s] bool: which keys a position of a segment sees; itself always."""
    length = place.stop - place.start
    own = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    seen = torch.cat((own.new_ones(length, memory), own), dim=1)[None, None]
    if valid is None:
        return seen
    # Padding comes after the text, so in its segment a position of the text sees text only.
    before = valid[:, place.start - memory : place.start]
    return seen & torch.cat((before, before.new_ones(len(before), length)), dim=1)[:, None, None, :]
