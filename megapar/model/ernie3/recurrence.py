"""Attention of ERNIE 3.0's two branches: bidirectional over the sample, or causal over segments with a memory.

Segment n attends to itself, causally, and to the last M positions of *the same layer's* output for segment n - 1,
detached:

    layer l      y0 = f(x0)    y1 = f(x1 | memory y0[-M:])    y2 = f(x2 | memory y1[-M:])  ..

Source: the enhanced recurrence of ERNIE-Doc (arXiv 2012.15688, section 3.3), as ERNIE 3.0's generation uses it.

Shape letters: B rows, S positions, s of a segment, M of the memory, H hidden, N heads, D head size; /mp marks dims that
are split over the tensor parallel axis (positions only under sequence parallelism).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megapar.core.attention_mask import AttentionMask
from megapar.core.comm.autograd import all_gather_replicated
from megapar.core.device.attention.mask import DeviceMask
from megapar.core.recompute.selective import recompute_in_backward
from megapar.core.tensor_parallel.collective_product import SEQUENCE_DIM
from megapar.model.ernie.block import ErnieBlock
from megapar.model.layers.context import Context


class Branch(NamedTuple):
    """The samples of a micro-batch that run one branch.

    Attributes:
        rows: Their numbers, [rows] int64.
        samples: ``rows``; sample 0 if there are none. A branch without samples runs sample 0 and multiplies the result
            by 0, because sharding requires that all ranks gather and reduce all parameters.
        masks: The mask of ``samples`` in each segment; a single one without segments.
    """

    rows: Tensor
    samples: Tensor
    masks: tuple[DeviceMask, ...]

    @classmethod
    def understanding(cls, rows: Tensor, valid: Tensor | None, length: int) -> Branch:
        """Make the branch whose positions attend to all of their sample. valid: [B, S] bool, False at padding."""
        samples = _or_first(rows)
        mask = AttentionMask(len(samples), length, causal=False, padded=valid is not None)
        return cls(rows, samples, (DeviceMask(mask, _of(valid, samples)),))

    @classmethod
    def generation(cls, rows: Tensor, valid: Tensor | None, segments: Sequence[slice], memory: int) -> Branch:
        """Make the branch whose positions attend to earlier ones of their segment, and to a memory before it.

        Args:
            rows: Numbers of the samples.
            valid: [B, S] bool, False at padding, in the order of the sequence.
            memory: Positions of the memory, the last ones of the segment before.
        """
        samples = _or_first(rows)
        valid = _of(valid, samples)
        masks = []
        for place in segments:
            mask = AttentionMask(len(samples), place.stop - place.start, causal=True, memory=memory * (place.start > 0))
            before = None if valid is None else valid[:, place.start - memory : place.start]
            masks.append(DeviceMask.of_memory(mask, before, rows.device) if mask.memory else DeviceMask(mask))
        return cls(rows, samples, tuple(masks))


@dataclass(frozen=True)
class BranchContext(Context):
    """Context of a micro-batch whose samples run through two branches.

    The slices are the segments. Positions are ordered so that each mp rank holds its part of every segment. ``back`` is
    the place of each sample in the concatenation of the branches, [B] int64.
    """

    understanding: Branch | None = None
    generation: Branch | None = None
    back: Tensor | None = None


def understand(block: ErnieBlock, x: Tensor, branch: Branch, context: BranchContext) -> Tensor:
    """Run the block with bidirectional attention on x [B, S(/mp), H], the samples of the branch."""
    return _run(block, x, branch.masks[0], context, "understanding")


def generate(block: ErnieBlock, x: Tensor, branch: Branch, context: BranchContext) -> Tensor:
    """Run the block on x [B, S(/mp), H], the samples of the branch, segment by segment with a memory."""
    memory = None
    outputs: list[Tensor] = []
    for number, (local_slice, mask) in enumerate(zip(context.own_slices, branch.masks, strict=True)):
        outputs.append(_run(block, x[:, local_slice], mask, context, f"generation.{number}", memory))
        if number + 1 < len(branch.masks):
            detached = outputs[-1].detach()
            whole = all_gather_replicated(detached, block.attention.mp, SEQUENCE_DIM) if block.cut else detached
            memory = whole[:, -branch.masks[number + 1].host.memory :]
    return torch.cat(outputs, dim=1)


def _run(
    block: ErnieBlock, x: Tensor, mask: DeviceMask, context: BranchContext, place: str, memory: Tensor | None = None
) -> Tensor:
    """Run the block on a segment, x [B, s(/mp), H].

    Args:
        place: Suffix of the dropouts' random streams.
        memory: Output for the previous segment, [B, M, H]; None for the first one.
    """
    attention = block.attention

    def attend(*heads: Tensor) -> Tensor:
        with attention.drawing(context, f"{attention.place}.{place}", x.device) as dropout:
            q, k, v = (t.transpose(1, 2) for t in heads)
            if memory is not None:
                before = (t.transpose(1, 2) for t in attention.project_memory(memory))
                k, v = (torch.cat(both, dim=2) for both in zip(before, (k, v), strict=True))
            return attention.attend(q, k, v, mask, dropout).transpose(1, 2)

    q, k, v, *more = attention.project(x, None)
    attended = recompute_in_backward(attend, q, k, v) if attention.selective else attend(q, k, v)
    y = attention.output(attended, *more)
    x = block.add(x, y, context, place=f".{place}")
    return block.add(x, block.mlp(x), context, "mlp", f".{place}")


def _of(valid: Tensor | None, samples: Tensor) -> Tensor | None:
    return None if valid is None else valid.index_select(0, samples)


def _or_first(rows: Tensor) -> Tensor:
    return rows if len(rows) else rows.new_zeros(1)
