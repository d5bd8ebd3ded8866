"""Attention of ERNIE 3.0's two branches: bidirectional over the sample, or causal over segments with a memory.

Segment n attends to itself, causally, and to the last M positions of *the same layer's* output for segment n - 1,
detached:

    layer l      y0 = f(x0)    y1 = f(x1 | memory y0[-M:])    y2 = f(x2 | memory y1[-M:])  ..

Source: the enhanced recurrence of ERNIE-Doc (arXiv 2012.15688, section 3.3), as ERNIE 3.0's generation uses it.

Shape letters: B rows, S positions, s of a segment, M of the memory, H hidden, N heads, D head size; /mp marks dims that
are split over the tensor parallel axis (positions only under sequence parallelism).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megapar.core.comm.autograd import gather
from megapar.core.device.attention.table import MASKED
from megapar.core.device.attention.whole import attention_reference, torch_attention
from megapar.core.device.ops import op
from megapar.core.recompute.selective import recompute_in_backward
from megapar.core.tensor_parallel.collective_product import SEQUENCE_DIM
from megapar.model.ernie.block import ErnieBlock
from megapar.model.layers.context import Context


@dataclass(frozen=True)
class BranchContext(Context):
    """Context of a micro-batch whose samples run through two branches.

    The slices are the segments. Positions are ordered so that each mp rank holds its part of every segment.

    Attributes:
        understanding: Samples of the understanding branch, [rows] int64.
        generation: Samples of the generation branch, [rows] int64.
        back: Place of each sample in the concatenation of the two, [B] int64.
        text: ``valid`` in the order of the positions.
        memory: Positions M of the memory.
    """

    understanding: Tensor | None = None
    generation: Tensor | None = None
    back: Tensor | None = None
    text: Tensor | None = None
    memory: int = 0


def understand(block: ErnieBlock, x: Tensor, rows: Tensor, context: BranchContext) -> Tensor:
    """Run the block with bidirectional attention on x [B, S(/mp), H], the samples ``rows``."""
    valid = _of(context.valid, rows)
    return _run(block, x, context, "understanding", lambda q, k, v, p: _plain(block, q, k, v, p, valid))


def generate(block: ErnieBlock, x: Tensor, rows: Tensor, context: BranchContext) -> Tensor:
    """Run the block on x [B, S(/mp), H], the samples ``rows``, segment by segment with a memory."""
    valid, memory = _of(context.text, rows), None
    outputs: list[Tensor] = []
    for number, (local_slice, place) in enumerate(zip(context.own_slices, context.slices, strict=True)):
        mask = None
        if memory is not None:
            mask = _mask(memory.shape[1], place, valid, x.device)
        outputs.append(_segment(block, x[:, local_slice], memory, mask, context, number))
        if number + 1 < len(context.slices):
            detached = outputs[-1].detach()
            whole = gather(detached, block.attention.mp, SEQUENCE_DIM) if block.cut else detached
            memory = whole[:, -context.memory :]
    return torch.cat(outputs, dim=1)


def _segment(
    block: ErnieBlock, x: Tensor, memory: Tensor | None, mask: Tensor | None, context: BranchContext, number: int
) -> Tensor:
    """Run the block on segment ``number``, x [B, s(/mp), H].

    Args:
        x: The segment.
        memory: Output for the previous segment, [B, M, H]; None for the first segment.
        mask: Keys that each position attends to, [B or 1, 1, s, M + s] bool; None for the first segment.
        number: Number of the segment.
    """
    attention = block.attention

    def core(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
        if memory is None:
            return _plain(block, q, k, v, dropout, None, causal=True)
        k_memory, v_memory = (t.transpose(1, 2) for t in attention.project_memory(memory))
        k, v = torch.cat((k_memory, k), dim=2), torch.cat((v_memory, v), dim=2)
        return torch_attention(MASKED, q, k, v, mask=mask, dropout=dropout)

    return _run(block, x, context, f"generation.{number}", core)


def _run(
    block: ErnieBlock,
    x: Tensor,
    context: BranchContext,
    place: str,
    core: Callable[[Tensor, Tensor, Tensor, float], Tensor],
) -> Tensor:
    """Run the block with ``core`` as the core of its attention. place: Suffix of the dropouts' random streams."""
    attention = block.attention

    def attend(*heads: Tensor) -> Tensor:
        with attention.drawing(context, f"{attention.place}.{place}", x.device) as dropout:
            q, k, v = (t.transpose(1, 2) for t in heads)
            return core(q, k, v, dropout).transpose(1, 2)

    q, k, v, *more = attention.project(x, None)
    attended = recompute_in_backward(attend, q, k, v) if attention.selective else attend(q, k, v)
    y = attention.output(attended, *more)
    x = block.attention_norm(x + block.drop(y, context, f"attention.{place}"))
    out: Tensor = block.mlp_norm(x + block.drop(block.mlp(x), context, f"mlp.{place}"))
    return out


def _of(valid: Tensor | None, rows: Tensor) -> Tensor | None:
    """Return ``valid`` of the samples ``rows``."""
    return None if valid is None else valid.index_select(0, rows)


def _plain(
    block: ErnieBlock, q: Tensor, k: Tensor, v: Tensor, dropout: float, valid: Tensor | None, causal: bool = False
) -> Tensor:
    form = op(block.attention.operator, q) if block.attention.sizes.flash else attention_reference
    return form(q, k, v, causal=causal, valid=valid, dropout=dropout)


def _mask(memory: int, place: slice, valid: Tensor | None, device: torch.device) -> Tensor:
    """Return the mask of the keys that each position of a segment attends to, [B or 1, 1, s, M + s] bool.

    A position always attends to itself.
    """
    length = place.stop - place.start
    causal = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    mask = torch.cat((causal.new_ones(length, memory), causal), dim=1)[None, None]
    if valid is None:
        return mask
    # Padding comes after the text, so under the causal mask text attends only to text within its segment.
    before = valid[:, place.start - memory : place.start]
    return mask & torch.cat((before, before.new_ones(len(before), length)), dim=1)[:, None, None, :]
