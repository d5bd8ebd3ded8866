"""Operators of Ascend NPUs that torch_npu (2.11 and later) registers. Importing this module does not need torch_npu.

Arguments are [B, N, S, D] as in all other forms. They are views of [B, S, N, D], the layout that the kernels receive.

The attention kernel accepts values of a smaller head size than keys (documentation of npu_fusion_attention: Dq = Dk and
Dk >= Dv). If the head size of values is larger, queries and keys are padded with zeros.

Shape letters: B batch, S positions of q, L of k and v, N query heads, G key-value heads, D head size of q and k, V of v
and the output, T = B S, R rows, I and O features in and out, E experts, k choices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megapar.core.device.attention.blocks import AttentionBlock, BlockGradients
from megapar.core.device.attention.mask import DeviceMask, DocumentSlice
from megapar.core.device.attention.row_statistic import Rows
from megapar.core.device.attention.table import CAUSAL, MASKED
from megapar.core.device.attention.whole import cut_features, keys_of_heads, pad_features
from megapar.core.device.expert_rows import permute_reference, rows_of_pairs

# Mask modes of npu_fusion_attention. LOWER_RIGHT and BAND, which also hides keys far before a position, require the
# compressed causal mask.
WHOLE_MASK, LOWER_RIGHT, BAND = 0, 3, 4
COMPRESSED = 2048
LANES = 8  # The kernel stores each of the two statistics of a row eight times.


@lru_cache(maxsize=8)
def causal_mask(device: torch.device) -> Tensor:
    """Return the mask [2048, 2048] that represents a causal mask of any size. True is masked."""
    return torch.ones(COMPRESSED, COMPRESSED, dtype=torch.bool, device=device).triu(1)


def attention_npu(
    q: Tensor, k: Tensor, v: Tensor, *, form: str, valid: Tensor | None = None, dropout: float = 0.0, rows: Rows = None
) -> Tensor:
    """Compute ``attention_reference`` by npu_fusion_attention."""
    if form != MASKED:
        return _attend(q, k, v, form == CAUSAL, dropout).seen_by(rows)
    masked = (~keys_of_heads(valid)).expand(-1, 1, q.shape[2], -1)
    return _attend(q, k, v, False, dropout, atten_mask=masked.contiguous(), sparse_mode=WHOLE_MASK).seen_by(rows)


def attention_slice_npu(q: Tensor, k: Tensor, v: Tensor, *, dropout: float = 0.0, rows: Rows = None) -> Tensor:
    """Compute ``attention_slice_reference`` by npu_fusion_attention, which supports lower-right alignment."""
    return _attend(q, k, v, True, dropout).seen_by(rows)


def packed_attention_npu(
    q: Tensor, k: Tensor, v: Tensor, *, mask: DeviceMask, dropout: float = 0.0, rows: Rows = None
) -> Tensor:
    """Compute ``packed_attention_reference`` in one call for all documents."""
    q_TND, k_TGD, v_TGD = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    host, ends = mask.host, mask.host.flat_ends
    y = _attend_unequal(q_TND, k_TGD, v_TGD, ends, ends, dropout, causal=host.causal, window=host.window, rows=rows)
    return y.view(q.shape[0], q.shape[2], *y.shape[1:]).transpose(1, 2)


def packed_attention_slice_npu(
    q: Tensor, k: Tensor, v: Tensor, *, documents: DocumentSlice, dropout: float = 0.0, rows: Rows = None
) -> Tensor:
    """Compute ``packed_attention_slice_reference`` in one call, each query with the keys of its document."""
    before, keys, ends_q, ends_k = k.shape[2] - q.shape[2], [], [0], [0]
    for sample, queries, first in documents.pieces:
        keys.append((sample, slice(first, before + queries.stop)))
        ends_q.append(ends_q[-1] + queries.stop - queries.start)
        ends_k.append(ends_k[-1] + before + queries.stop - first)
    k_RGD, v_RGD = (torch.cat([x[sample, :, place].transpose(0, 1) for sample, place in keys]) for x in (k, v))
    q_TND, window = q.transpose(1, 2).flatten(0, 1), documents.window
    y = _attend_unequal(q_TND, k_RGD, v_RGD, ends_q[1:], ends_k[1:], dropout, window=window, rows=rows)
    return y.view(q.shape[0], q.shape[2], *y.shape[1:]).transpose(1, 2)


def block_npu(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, dropout: float = 0.0) -> AttentionBlock:
    """Compute ``block_reference``; ``drawn`` is the kernel's random state, three numbers."""
    attended = _attend(q, k, v, causal, dropout)
    return AttentionBlock(attended.out, attended.lse, attended.drawn)


def block_backward_npu(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, block: AttentionBlock, *, causal: bool, dropout: float = 0.0
) -> BlockGradients:
    """Compute ``block_backward_reference``, with a row's log-sum-exp passed as its largest score and a sum of one."""
    peak = block.lse.unsqueeze(-1).expand(*block.lse.shape, LANES).contiguous()
    seed, offset, numels = block.drawn
    dq, dk, dv, *_ = torch.ops.npu.npu_fusion_attention_grad(
        *(x.transpose(1, 2) for x in (*_at_least(v, q, k), v, grad)),
        q.shape[1],
        "BSND",
        softmax_max=peak,
        softmax_sum=torch.ones_like(peak),
        attention_in=block.out.transpose(1, 2),
        scale_value=q.shape[-1] ** -0.5,
        keep_prob=1.0 - dropout,
        seed=seed,
        offset=offset,
        numels=numels,
        **(_causal(q) if causal else {}),
    )
    dq, dk = (cut_features(x, q.shape[-1]) for x in (dq, dk))
    return BlockGradients(*(x.transpose(1, 2) for x in (dq, dk, dv)))


def rms_norm_npu(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Compute ``rms_norm_reference`` by npu_rms_norm, which rounds once, after the weight."""
    return torch.ops.npu.npu_rms_norm(x, weight, epsilon)[0]


def swiglu_npu(gate_up: Tensor, weights: Tensor | None = None) -> Tensor:
    """Compute ``swiglu_reference`` by npu_swiglu, which takes gate followed by up, and a product with the weights."""
    y: Tensor = torch.ops.npu.npu_swiglu(gate_up.flatten(-2), -1)
    return y if weights is None else y * weights.to(y.dtype)


def rotary_npu(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Compute ``rotary_reference`` by npu_rotary_mul, which takes angles of one sample: samples are concatenated."""
    angles = (a.repeat_interleave(2, dim=-1).flatten(0, 1)[None, :, None] for a in (cos, sin))
    flat = x.to(cos.dtype).flatten(0, 1)[None]
    y: Tensor = torch.ops.npu.npu_rotary_mul(flat, *angles, "interleave")
    return y.view_as(x).to(x.dtype)


def grouped_linear_npu(
    rows_RI: Tensor, weight_EOI: Tensor, counts_E: Tensor, ends: Callable[[], Tensor] | None = None
) -> Tensor:
    """Compute ``grouped_linear_reference`` by npu_grouped_matmul, for which the host does not wait for the counts."""
    return _GroupedLinear.apply(rows_RI, weight_EOI, counts_E)


def grouped_input_gradient_npu(dy_RO: Tensor, weight_EOI: Tensor, counts_E: Tensor) -> Tensor:
    """Compute ``grouped_input_gradient_reference`` by npu_grouped_matmul."""
    return _grouped(dy_RO, weight_EOI, counts_E, along=0)


def grouped_weight_gradient_npu(dy_RO: Tensor, rows_RI: Tensor, counts_E: Tensor) -> Tensor:
    """Compute ``grouped_weight_gradient_reference`` by npu_grouped_matmul, grouped along the summed dim."""
    return _grouped(dy_RO.t(), rows_RI, counts_E, along=2)


def unpermute_npu(rows_RH: Tensor, row_Tk: Tensor, kept_Tk: Tensor | None) -> Tensor:
    """Compute ``unpermute_reference`` by npu_moe_token_unpermute, which requires a weight for every pair."""
    if row_Tk.shape[1] == 1:
        return rows_of_pairs(rows_RH, row_Tk, kept_Tk)
    weights = row_Tk.new_ones(row_Tk.shape, dtype=rows_RH.dtype) if kept_Tk is None else kept_Tk.to(rows_RH.dtype)
    return torch.ops.npu.npu_moe_token_unpermute(rows_RH, row_Tk.flatten().to(torch.int32), weights)


def permute_npu(
    x_TH: Tensor, pair_R: Tensor, row_Tk: Tensor, kept_Tk: Tensor | None, row_kept_R: Tensor | None = None
) -> Tensor:
    """Compute ``permute_reference`` by npu_moe_token_permute, with rows as sort keys, if every pair has a row."""
    if kept_Tk is not None or row_kept_R is not None or row_Tk.numel() != pair_R.numel():
        return permute_reference(x_TH, pair_R, row_Tk, kept_Tk, row_kept_R)
    return torch.ops.npu.npu_moe_token_permute(x_TH, row_Tk, pair_R.numel())[0]


def _causal(q: Tensor, window: int | None = None) -> dict[str, Any]:
    mask = causal_mask(q.device)
    if window is None:
        return {"atten_mask": mask, "sparse_mode": LOWER_RIGHT}
    return {"atten_mask": mask, "sparse_mode": BAND, "pre_tockens": window - 1, "next_tockens": 0}


def _at_least(v: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Pad queries or keys [.., D] with zeros to the head size of v if that is larger."""
    return tuple(pad_features(x, max(x.shape[-1], v.shape[-1])) for x in tensors)


class _Attended(NamedTuple):
    """Outputs of one call of the kernel."""

    out: Tensor  # [B, N, S, V]
    peak: Tensor  # largest score of each row, [B, N, S, 8]
    total: Tensor  # sum of the exponentials of the scores minus ``peak``, [B, N, S, 8]
    drawn: tuple[int, ...]  # random state

    @property
    def lse(self) -> Tensor:
        """The log-sum-exp of each row, [B, N, S]."""
        return self.peak[..., 0] + self.total[..., 0].log()

    def seen_by(self, rows: Rows) -> Tensor:
        """Return the output with the end of its rows."""
        return self.out if rows is None else rows.end(self.out, self.lse)


def _attend(q: Tensor, k: Tensor, v: Tensor, causal: bool, dropout: float, **mask: Any) -> _Attended:
    """Call the kernel once."""
    out, peak, total, _, *drawn = torch.ops.npu.npu_fusion_attention(
        *(x.transpose(1, 2) for x in (*_at_least(v, q, k), v)),
        q.shape[1],
        "BSND",
        scale=q.shape[-1] ** -0.5,
        keep_prob=1.0 - dropout,
        **(_causal(q) if causal else mask),
    )
    return _Attended(out.transpose(1, 2), peak, total, tuple(drawn))


def _attend_unequal(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ends_q: Sequence[int],
    ends_k: Sequence[int],
    dropout: float,
    *,
    causal: bool = True,
    window: int | None,
    rows: Rows,
) -> Tensor:
    """Compute attention of concatenated sequences: q [T, N, D], k [R, G, D], v [R, G, V] to [T, N, V].

    The kernel stores the statistics of each sequence as [N, positions, 8], although their shape is [T, N, 8] (MindSpeed
    reorders them so for ring attention).
    """
    y, peak, total, *_ = torch.ops.npu.npu_fusion_attention(
        *(x.contiguous() for x in (*_at_least(v, q, k), v)),
        q.shape[1],
        "TND",
        scale=q.shape[-1] ** -0.5,
        keep_prob=1.0 - dropout,
        actual_seq_qlen=list(ends_q),
        actual_seq_kvlen=list(ends_k),
        **(_causal(q, window) if causal else {}),
    )
    if rows is not None:
        lse, heads = (peak[..., 0] + total[..., 0].log()).flatten(), q.shape[1]
        lengths = [end - start for start, end in zip((0, *ends_q), ends_q, strict=False)]
        by_sequence = [one.view(heads, -1) for one in lse.split([heads * length for length in lengths])]
        end = rows.run(0, 1, q.shape[0])
        y = end.end(y.transpose(0, 1)[None], torch.cat(by_sequence, dim=1)[None])[0].transpose(0, 1)
    return y


class _GroupedLinear(torch.autograd.Function):
    # The kernel has no backward.
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weight, counts)
        return _grouped(rows, weight.transpose(1, 2), counts, along=0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (rows, weight, counts), dy = ctx.saved_tensors, grads[0].contiguous()
        dx = _grouped(dy, weight, counts, along=0) if ctx.needs_input_grad[0] else None
        dw = grouped_weight_gradient_npu(dy, rows, counts) if ctx.needs_input_grad[1] else None
        return dx, dw, None


def _grouped(x: Tensor, weight: Tensor, counts: Tensor, *, along: int) -> Tensor:
    """Call the kernel for one output. ``along`` is 0 if the rows of x are grouped, 2 if the summed dim is."""
    (y,) = torch.ops.npu.npu_grouped_matmul(
        [x], [weight], group_list=counts, split_item=3, group_type=along, group_list_type=1
    )
    return y
