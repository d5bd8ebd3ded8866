"""Grouped-query attention on a fused query-key-value weight that has a separate dim for groups.

Shape letters: B batch, S sequence (under context parallelism, this rank's part of it), H hidden, G groups (key-value
heads), Q query heads per group, N query heads, D head size; /mp marks dims that are split over the tensor parallel
axis.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megapar.core.context_parallel.method import ContextParallel
from megapar.core.device.compiled import counted, plain
from megapar.core.device.ops import op
from megapar.core.device.rotary import rotary_heads_in_one_kernel, split_heads
from megapar.core.tensor_parallel.layers import ColumnLinear, LayerOptions, RowLinear, Started, local
from megapar.core.tensor_parallel.split_norm import SplitNorm
from megapar.core.tensor_parallel.weight_gradients import linear
from megapar.model.attention.self_attention import Angles, SelfAttention
from megapar.model.attention_sizes import AttentionSizes
from megapar.model.layers.norm import RmsNorm, rms_norm
from megapar.model.layers.rotary import rotate

if TYPE_CHECKING:
    from typing_extensions import Unpack


class GroupedQueryAttention(SelfAttention):
    """Multi-head (Q = 1), grouped-query or multi-query (G = 1) attention; groups are split over mp.

    x [B, S(/mp), H] -> qkv: column linear -> [B, S, G/mp, Q + 2, D] -> (norm, rope) -> softmax(q k^T) v
      -> [B, S, G Q D/mp] -> proj: row linear -> y [B, S(/mp), H]
    The backward mirrors this. q_norm and k_norm [D] see only this rank's heads, so their gradients are partial sums
    over mp. Norms over all heads have weights [N/mp, D] and [G/mp, D], and sum their squares over mp.
    """

    def __init__(
        self, sizes: AttentionSizes, layer: int, *, cp: ContextParallel | None = None, **options: Unpack[LayerOptions]
    ) -> None:
        super().__init__(sizes, layer, cp=cp, **options)
        if sizes.key_dim != sizes.value_dim:
            raise ValueError(
                f"heads of the fused weight have one size, but keys have {sizes.key_dim} features and values "
                f"{sizes.value_dim}; make them equal, or choose another kind than {sizes.kind}"
            )
        dtype, device = options["dtype"], options["device"]
        H, G, Q, D = sizes.hidden_size, sizes.num_groups, sizes.queries_per_group, sizes.key_dim
        self.qkv = ColumnLinear(H, (G, Q + 2, D), split=0, bias=sizes.qkv_bias, **options)
        self.proj = RowLinear(G * Q * D, H, bias=sizes.output_bias, **options)
        self.q_norm = self.k_norm = None
        if sizes.qk_norm:
            heads = self.qkv.out_dims[0]
            q_size, k_size = ((heads * Q, D), (heads, D)) if sizes.norms_width else (D, D)
            norm = partial(RmsNorm, dtype=dtype, device=device, run=self.run, one_plus=sizes.one_plus)
            self.q_norm = norm(q_size, sizes.epsilon)
            self.k_norm = norm(k_size, sizes.epsilon)

    def project(self, x: Tensor, angles: Angles | None) -> tuple[Tensor, ...]:
        """See ``SelfAttention.project``. Without norms and rope, k and v are views of the product."""
        return self._finished_heads(self.qkv(x), angles)

    def output(self, y: Tensor, *more: Tensor) -> Tensor:
        """See ``SelfAttention.output``."""
        return self.proj(y.flatten(2))

    def start_project(self, x: Tensor) -> Started:
        """Launch the all-gather of x over mp."""
        return self.qkv.start(x)

    def finish_project(self, started: Started, angles: Angles | None) -> tuple[Tensor, ...]:
        """See ``SelfAttention.finish_project``."""
        return self._finished_heads(self.qkv.finish(started), angles)

    def start_output(self, y: Tensor, *more: Tensor) -> Started:
        """Launch the sum of the products over mp."""
        return self.proj.start(y.flatten(2))

    def finish_output(self, started: Started) -> Tensor:
        """See ``SelfAttention.finish_output``."""
        return self.proj.finish(started)

    def project_memory(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        """See ``SelfAttention.project_memory``. Supports neither rope nor several query heads per group."""
        qkv = self.qkv
        # A deferred weight gradient (zero bubble) covers the whole weight, so include the queries' part.
        later = None if qkv.weight_gradients is None else qkv.weight_gradients.of(qkv.weight)
        first = 1 if later is None else 0
        weight = local(qkv.weight)[:, first:]
        bias = None if qkv.bias is None else local(qkv.bias)[:, first:].flatten()
        both = linear(memory, weight.flatten(0, -2), bias, later).unflatten(-1, weight.shape[:-1])
        return both[..., -2, :], both[..., -1, :]

    def clip_factors(self, factors: Tensor) -> dict[str, Tensor]:
        """See ``SelfAttention.clip_factors``: queries take the factor, since heads of a group share their keys."""
        queries = factors.view(-1, self.sizes.queries_per_group)
        fused = torch.cat((queries, queries.new_ones(len(queries), 2)), dim=1)
        return {"qkv.weight": fused, "qkv.bias": fused}

    def _finished_heads(self, qkv: Tensor, angles: Angles | None) -> tuple[Tensor, ...]:
        """Split [B, S, G, Q + 2, D] into q [B, S, N, D], k and v [B, S, G, D]; normalize and rotate q and k."""
        sizes, factor = self.sizes, self.sizes.query_factor
        if self.q_norm is None and angles is None:
            q, k, v = split_heads(qkv)  # views
            return q if factor == 1.0 else q * factor, k, v
        if sizes.norms_width and self.mp.size > 1:
            q, k, v = split_heads(qkv)
            q, k = self._norm_over_ranks(q, k)
            return (*self.run(rotated, q, k, *(angles or (None, None)), factor), v)
        weights = [None if norm is None else norm.scale() for norm in (self.q_norm, self.k_norm)]
        own_kernel = self.run is not plain and self.q_norm is None and rotary_heads_in_one_kernel(qkv)
        run = plain if own_kernel else self.run
        return run(rotated_heads, qkv, *weights, sizes.epsilon, *(angles or (None, None)), factor)

    def _norm_over_ranks(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Normalize this rank's heads, [B, S, N, D] and [B, S, G, D], by the means over the heads of all mp ranks."""
        assert self.q_norm is not None
        assert self.k_norm is not None
        norm = SplitNorm(self.sizes.epsilon, self.mp, self.run)
        return norm(q, k, self.q_norm.scale(), self.k_norm.scale())


@counted(2, 0, 0, 0, 2, 2)
def rotated_heads(
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    epsilon: float,
    cos: Tensor | None,
    sin: Tensor | None,
    factor: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Split heads as ``split_heads`` does. Normalize q and k if weights are given, rotate them if angles are given.

    Weights [D] are of norms of each head; [N, D] and [G, D] are of norms of all heads together.
    """
    if q_weight is None and cos is not None:
        split_and_rotate: Callable[..., Any] = op("rotary_heads", qkv)
        q, k, v = split_and_rotate(qkv, cos, sin)
        return q if factor == 1.0 else q * factor, k, v
    q, k, v = split_heads(qkv)
    if q_weight is not None and k_weight is not None:
        q, k = _normed(q, q_weight, epsilon), _normed(k, k_weight, epsilon)
    return *rotated(q, k, cos, sin, factor), v


@counted(2, 2, 2, 2)
def rotated(q: Tensor, k: Tensor, cos: Tensor | None, sin: Tensor | None, factor: float) -> tuple[Tensor, Tensor]:
    """Rotate q [B, S, N, D] and k [B, S, G, D] if angles are given, and multiply q by ``factor``."""
    if cos is not None and sin is not None:
        q, k = rotate(q, (cos, sin)), rotate(k, (cos, sin))
    return q if factor == 1.0 else q * factor, k


def _normed(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Normalize each head of x [B, S, N, D] by weight [D], or all of them together by weight [N, D]."""
    if weight.dim() == 1:
        return rms_norm(x, weight, epsilon)
    return rms_norm(x.flatten(2), weight.flatten(), epsilon).view(x.shape)
