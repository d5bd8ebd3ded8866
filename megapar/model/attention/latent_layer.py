"""Multi-latent attention: keys and values of all heads from one latent of a position, and one rotary key.

    x -> down -> | query latent -> norm -> q_up ------------------------> | plain | rotated |  q
                 | latent       -> norm -> kv_up -> | plain key | value |
                 | rotary key   -> rotated          | for all heads     | -> k, v

The core's backward makes keys and values again from the latent, by kv_up, so that the latent is kept in their place.

Shape letters: B batch, S sequence (under context parallelism, this rank's part of it), H hidden, N heads, D = Dn + Dr
features of a query or key head (Dn plain ones, Dr rotated ones after them), V features of a value head, Rq and R ranks
of the latents of queries and of keys and values; /mp marks dims that are split over the tensor parallel axis.

Source: DeepSeek-V2, arXiv 2405.04434, section 2.1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from megapar.core.comm.async_pairs import start
from megapar.core.comm.exchange import AllGather
from megapar.core.comm.in_flight import CommContext
from megapar.core.context_parallel.columns import Expansion
from megapar.core.context_parallel.heads import own_heads, queries_to_heads
from megapar.core.context_parallel.method import ContextParallel
from megapar.core.device.attention.whole import HeadWidths, cut_features, kernel_head_dims, pad_features
from megapar.core.device.compiled import counted
from megapar.core.device.ops import op
from megapar.core.tensor_parallel.execution import DEFAULT
from megapar.core.tensor_parallel.layers import ColumnLinear, LayerOptions, ReplicatedLinear, RowLinear, Started, local
from megapar.core.tensor_parallel.shared_input import SharedComm, shared_products
from megapar.core.tensor_parallel.weight_gradients import defer_wgrad_of, linear
from megapar.model.attention.latent import LatentAttentionSizes
from megapar.model.attention.self_attention import Angles, SelfAttention
from megapar.model.layers.norm import RmsNorm

if TYPE_CHECKING:
    from typing_extensions import Unpack


class LatentAttention(SelfAttention):
    """Multi-latent attention, whose heads are split over mp; latents and rotary key are whole on every rank.

    x [B, S(/mp), H] -> down [Rq + R + Dr, H] (whole weight) -> norms of both latents -> all-gather over mp (sequence
      parallel) -> q_up: [B, S, N/mp, D], kv_up: [B, S, N/mp, Dn + V] -> (rope) -> softmax(q k^T) v -> [B, S, N V/mp]
      -> proj: row linear -> y [B, S(/mp), H]
    The gradients of latents and rotary key are sums over heads: partial over mp, and summed once before the norms
    (``core.tensor_parallel.shared_input``). The gradients of down and the norms are then whole, and partial over mp
    under sequence parallelism only. Without a query rank, q_up is a column parallel layer on x.
    """

    def __init__(
        self,
        sizes: LatentAttentionSizes,
        layer: int,
        *,
        cp: ContextParallel | None = None,
        **options: Unpack[LayerOptions],
    ) -> None:
        super().__init__(sizes, layer, cp=cp, **options)
        execution, dtype, device = options.get("execution", DEFAULT), options["dtype"], options["device"]
        H, N, D, V = sizes.hidden_size, sizes.num_heads, sizes.key_dim, sizes.value_dim
        Rq, R, Dr = sizes.query_rank, sizes.latent_rank, sizes.rotary_dim
        self.parts, self.plain_dim, self.value_dim = (Rq, R, Dr), sizes.plain_dim, V
        self.sequence_parallel = options["sequence_parallel"]
        self.comm, self.weight_gradients = execution.comm or CommContext(), execution.weight_gradients
        self.down = ReplicatedLinear(H, Rq + R + Dr, dtype=dtype, device=device, execution=execution)
        norm = partial(RmsNorm, dtype=dtype, device=device, run=self.run, one_plus=sizes.one_plus)
        self.q_norm = norm(Rq, sizes.epsilon) if Rq else None
        self.kv_norm = norm(R, sizes.epsilon)
        # In the backward attention makes keys and values again, from products in the dtype.
        plain: LayerOptions = {**options, "execution": replace(execution, fp8=None)}
        self.q_up = ColumnLinear(Rq or H, (N, D), split=0, bias=False, **plain)
        self.kv_up = ColumnLinear(R, (N, self.plain_dim + V), split=0, bias=False, **plain)
        self.proj = RowLinear(N * V, H, bias=sizes.output_bias, **options)

    def project(self, x: Tensor, angles: Angles | None) -> tuple[Tensor, ...]:
        """See ``SelfAttention.project``. Heads have the sizes that the core's kernels want, with zeros at their ends.

        After v it returns what makes k and v again: the latent [B, S, R] and the rotated key [B, S, Dr].
        """
        latents = self._latents(x)
        if self.mp.size > 1:
            return self._shared_heads(x, Started(torch.cat(latents, dim=-1)), angles)
        *queries, latent, key = latents
        q = self.q_up(queries[0] if queries else x)
        if self._sends_latents:
            return self._finished_columns(q, latent, key, angles)
        return self._finished_heads(q, self.kv_up(latent), key, latent, angles)

    def output(self, y: Tensor, *more: Tensor) -> Tensor:
        """See ``SelfAttention.output``."""
        return self.proj(cut_features(y, self.value_dim).flatten(2))

    def start_project(self, x: Tensor) -> Started:
        """Launch the all-gather of latents and rotary key over mp."""
        if self.mp.size == 1 or not self.sequence_parallel:
            return Started(x)
        return Started(x, *start(AllGather(self.mp), torch.cat(self._latents(x), dim=-1), self.comm))

    def finish_project(self, started: Started, angles: Angles | None) -> tuple[Tensor, ...]:
        """See ``SelfAttention.finish_project``."""
        if started.handle is None or started.ticket is None:
            return self.project(started.x, angles)
        return self._shared_heads(started.x, started._replace(x=started.handle), angles)

    def expansion(self) -> Expansion | None:
        """See ``SelfAttention.expansion``."""
        if not self._sends_latents:
            return None
        weight = self.kv_up.weight
        return Expansion(local(weight), defer_wgrad_of(weight, self.weight_gradients))

    def to_heads(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """See ``SelfAttention.to_heads``. Latents are gathered, and make keys and values of this cp rank's heads."""
        expansion = self.expansion()
        if expansion is None:
            return super().to_heads(q, k, v)
        message = torch.cat((k, v), dim=-1).squeeze(2)
        q, whole = queries_to_heads(q, message, self.cp.axis, self.cp.comm)
        latent, key = whole.split(self.parts[1:], dim=-1)
        own = own_heads(expansion, self.cp.axis)
        product = linear(latent, own.weight.flatten(0, 1), None, own.defer_wgrad)
        k, v = self._joined(product.unflatten(-1, own.weight.shape[:2]), key)
        return pad_features(q, k.shape[-1]), k, v, latent.detach(), key.detach()

    def to_positions(self, y: Tensor) -> Tensor:
        """See ``SelfAttention.to_positions``. Zeros after the features of a head are not sent."""
        return super().to_positions(cut_features(y, self.value_dim))

    def start_output(self, y: Tensor, *more: Tensor) -> Started:
        """Launch the sum of the products over mp."""
        return self.proj.start(cut_features(y, self.value_dim).flatten(2))

    def finish_output(self, started: Started) -> Tensor:
        """See ``SelfAttention.finish_output``."""
        return self.proj.finish(started)

    def remaker(self) -> Callable[..., tuple[Tensor, Tensor]]:
        """See ``SelfAttention.remaker``."""
        weight = self.kv_up.weight
        # Autograd keeps the same memory for its products: under FSDP it is gathered again before the unit's backward.
        whole = (weight.to_local() if isinstance(weight, DTensor) else weight).detach()
        now = own_heads(Expansion(whole), self.cp.axis).weight if self.cp.deals_heads else whole

        def make(latent: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
            product = F.linear(latent, now.flatten(0, 1))
            return self._joined(product.unflatten(-1, now.shape[:2]), key)

        return make

    def clip_factors(self, factors: Tensor) -> dict[str, Tensor]:
        """See ``SelfAttention.clip_factors``: plain queries and keys take its root each.

        Rotary queries take it whole, since all heads share the rotary key (Kimi K2, arXiv 2507.20534, algorithm 1).
        """
        roots = factors.sqrt()[:, None].expand(-1, self.plain_dim)
        rotary, values = (factors[:, None].expand(-1, size) for size in (self.parts[2], self.value_dim))
        q, kv = torch.cat((roots, rotary), dim=1), torch.cat((roots, torch.ones_like(values)), dim=1)
        return {"q_up.weight": q, "kv_up.weight": kv}

    def _latents(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the query latent [B, S(/mp), Rq] if any, the latent [.., R] and the rotary key [.., Dr] of x."""
        queries, latent, key = self.down(x).split(self.parts, dim=-1)
        latent = self.kv_norm(latent)
        return (latent, key) if self.q_norm is None else (self.q_norm(queries), latent, key)

    def _shared_heads(self, x: Tensor, message: Started, angles: Angles | None) -> tuple[Tensor, ...]:
        """Return ``project``'s tensors for x and its latents and rotary key, or their all-gather in flight."""
        layers = [] if self.q_norm is None else [self.q_up]
        layers += [] if self._sends_latents else [self.kv_up]
        weights = [local(layer.weight).flatten(0, -2) for layer in layers]
        defer = tuple(defer_wgrad_of(layer.weight, self.weight_gradients) for layer in layers)
        comm = SharedComm(self.mp, self.sequence_parallel, self.comm, defer, message.ticket)
        shared = shared_products(message.x, weights, comm)
        products = [y.unflatten(-1, layer.out_dims) for y, layer in zip(shared.products, layers, strict=True)]
        q = self.q_up(x) if self.q_norm is None else products[0]
        if self._sends_latents:
            latent, key = shared.rest.split(self.parts[1:], dim=-1)
            return self._finished_columns(q, latent, key, angles)
        product, latent = products[-1], shared.whole.split(self.parts, dim=-1)[1]
        return self._finished_heads(q, product, shared.rest, latent, angles)

    @property
    def _sends_latents(self) -> bool:
        """Between ranks of cp, latents travel in place of keys and values."""
        return self.cp.active and self.cp.latents

    def _finished_columns(
        self, q: Tensor, latent: Tensor, key: Tensor, angles: Angles | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rotate q [B, S, N, D] and the rotary key [B, S, Dr]; return q, latents [B, S, 1, R], keys [B, S, 1, Dr]."""
        factor = self._score_factor(self._widths(q).key) if self.cp.deals_heads else self.sizes.query_factor
        q, key = self._rotated(q, key, angles, factor, self.sizes.key_dim)
        return q, latent.unsqueeze(2), key.unsqueeze(2)

    def _score_factor(self, width: int) -> float:
        """Return the factor on queries whose heads have ``width`` features: kernels scale by the size that they see."""
        return self.sizes.query_factor * math.sqrt(width / self.sizes.key_dim)

    def _rotated(
        self, q: Tensor, key: Tensor, angles: Angles | None, factor: float, width: int
    ) -> tuple[Tensor, Tensor]:
        if angles is None:
            raise ValueError("latent attention has a rotary key: it needs rotary position embedding")
        return self.run(rotated, q, key, *angles, factor, width)

    def _finished_heads(
        self, q: Tensor, product: Tensor, key: Tensor, latent: Tensor, angles: Angles | None
    ) -> tuple[Tensor, ...]:
        """Rotate q [B, S, N, D] and the rotary key [B, S, Dr], and join k and v from the product [B, S, N, Dn + V]."""
        width = self._widths(q).key
        q, key = self._rotated(q, key, angles, self._score_factor(width), width)
        return q, *self._joined(product, key), latent.detach(), key.detach()

    def _joined(self, product: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        return self.run(joined, product, key, self.plain_dim, self._widths(product))

    def _widths(self, like: Tensor) -> HeadWidths:
        """Return the sizes of heads for the core. Between ranks, and in plain products, they travel without zeros."""
        between_ranks = self.cp.active and not (self.cp.deals_heads and self.cp.latents)
        if between_ranks or not self.sizes.flash:
            return HeadWidths(self.sizes.key_dim, self.value_dim)
        return kernel_head_dims(self.operator, like, self.sizes.key_dim, self.value_dim)


@counted(2, 2, 2, 2)
def rotated(q: Tensor, key: Tensor, cos: Tensor, sin: Tensor, factor: float, width: int) -> tuple[Tensor, Tensor]:
    """Rotate the last features of q [B, S, N, D] and the rotary key [B, S, Dr], both in their memory if uncompiled."""
    turn: Callable[..., Tensor] = op("rotate_last", q)
    return turn(q, cos, sin, factor, width), turn(key.unsqueeze(2), cos, sin, 1.0, key.shape[-1]).squeeze(2)


@counted(2, 2)
def joined(product: Tensor, key: Tensor, plain_dim: int, widths: HeadWidths) -> tuple[Tensor, Tensor]:
    """Join k [B, S, N, D] and v [B, S, N, V] from the product [B, S, N, Dn + V] and the rotated key [B, S, Dr]."""
    join: Callable[..., Any] = op("join_heads", product)
    return join(product, key, plain_dim, widths)
