"""Cost of multi-latent attention on one rank.

Shape letters: t positions that matrix products see, s positions outside them, H hidden, N heads of this rank, D
features of a query or key head (Dn plain ones, Dr rotated), V features of a value head, Rq and R ranks of the latents
of queries and of keys and values, W features of the down projection's output.

The latents, the rotary key and the queries are kept for the backward, and keys and values are not: attention's backward
makes them again. Under context parallelism ranks send latents or keys and values (``latent_exchange``); every rank
makes the keys and values of all latents that arrive. These up-projections are ``OpCost.extra``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from megapar.model.attention_sizes import AttentionSizes
from megapar.model.cost.model_cost import CommCost, OpCost, Product
from megapar.model.cost.operators import Operators, norm_kept
from megapar.model.cost.rank_view import RankView


@dataclass(frozen=True)
class LatentCosts:
    """Operators of one layer's attention.

    Attributes:
        operators: Costs of operators that all layers share.
        sizes: Sizes of the attention in the whole model.
        query_rank: Rq; 0 if queries come straight from the hidden states.
        latent_rank: R.
    """

    operators: Operators
    sizes: AttentionSizes
    query_rank: int
    latent_rank: int

    @property
    def all(self) -> list[OpCost]:
        """The operators in forward order, the norm before attention included."""
        view, x = self._view, self.operators.hidden_bytes
        e, t, H, out = view.item_bytes, view.tokens, self.operators.hidden_size, self._N * self.sizes.value_dim
        proj = OpCost(
            "proj",
            self.operators.dropped(),
            (Product(t, round(out), H),),
            moved=3 * x,
            sent=self.operators.communication.row_parallel(e * t * H),
            transient=e * t * out + 2 * x,
        )
        return [self.operators.norm(), self._latents(), self._queries(), self._keys_and_values(), self._core(), proj]

    @property
    def _view(self) -> RankView:
        return self.operators.view

    @property
    def _N(self) -> float:
        return self.sizes.num_heads / self._view.mp

    @cached_property
    def _widths(self) -> tuple[int, int]:
        """Features of query and value heads as kernels get them, with zeros after those of the shorter heads."""
        view, key, value = self._view, self.sizes.key_dim, self.sizes.value_dim
        if view.cp > 1 or not self.sizes.flash or view.item_bytes > 4:
            return key, value
        largest = max(key, value)
        return largest, value if view.kernels == "npu" else largest

    @cached_property
    def _columns(self) -> float:
        """Features of a position's keys and values, as ranks of cp send them."""
        if self._view.sends_latents:
            return self.latent_rank + self.sizes.rotary_dim
        return self._N * (self.sizes.key_dim + self.sizes.value_dim)

    def _latents(self) -> OpCost:
        """Return the cost of the down projection, both norms, and the gathering of latents over mp."""
        view, H, Dr = self._view, self.operators.hidden_size, self.sizes.rotary_dim
        Rq, R = self.query_rank, self.latent_rank
        e, s, t, W = view.item_bytes, view.local_tokens, view.tokens, Rq + R + Dr
        norms = norm_kept(view, s, R, "rmsnorm") + (norm_kept(view, s, Rq, "rmsnorm") if Rq else 0.0)
        # The rotary key is rotated in the product, whose other parts the norms keep, or in its copy of all positions.
        kept = norms + e * s * Dr + (view.wide_bytes * t * Dr if view.mp > 1 else 0.0)
        x = self.operators.hidden_bytes
        return OpCost(
            "latents",
            kept,
            (Product(s, H, W),),
            moved=x + e * (4 * s + t) * W,
            sent=self.operators.communication.shared_input(e * t * W, view.wide_bytes * t * W),
            transient=e * s * W + 2 * x + view.wide_bytes * t * W,
        )

    def _queries(self) -> OpCost:
        """Return the cost of the queries' up projection and rotation, in the product's memory.

        It keeps the inputs of the products too: making queries again makes the outputs of the norms again.
        """
        view, H = self._view, self.operators.hidden_size
        e, t, made = view.item_bytes, view.tokens, self._N * self._widths[0]
        straight = not self.query_rank
        sent = self.operators.communication.column_parallel(e * t * H) if straight else ()
        product = Product(t, self.query_rank or H, round(self._N * self.sizes.key_dim))
        inputs = view.stored_bytes(view.local_tokens * H) + e * t * (self.query_rank + self.latent_rank)
        kept, made = inputs + e * t * made, e * t * made
        return OpCost("qkv", kept, (product,), moved=3 * made, sent=sent, transient=2 * made)

    def _keys_and_values(self) -> OpCost:
        """Return the cost of making keys and values, in the forward and again in the backward."""
        view = self._view
        e, t = view.item_bytes, view.tokens
        made = self._N * (self.sizes.key_dim - self.sizes.rotary_dim + self.sizes.value_dim)

        def times(rows: float) -> Product:
            return Product(rows, self.latent_rank, round(made))

        extra: tuple[tuple[str, Product], ...] = (("backward", times(t)),)
        if view.sends_latents and view.attends_blockwise:
            # All ranks' columns in the forward, and in the backward again and for both gradients.
            others = t * (view.cp - 1)
            extra = (("forward", times(others)), ("backward", times(3 * others + t)))
        joined = self._N * (self.sizes.key_dim + self.sizes.value_dim)
        again = 0.0 if view.attends_blockwise else e * t * self._N * sum(self._widths)
        return OpCost(
            "kv",
            0.0,
            (times(t),),
            moved=2 * e * t * (made + joined),
            transient=e * t * made,
            kept_again=again,
            extra=extra,
        )

    def _core(self) -> OpCost:
        """Return the cost of softmax(q k^T) v, which causal attention's lower half is."""
        view, N, V = self._view, self._N, self.sizes.value_dim
        t, e, w = view.tokens, view.item_bytes, view.wide_bytes
        out, joined = N * V, N * (self.sizes.key_dim + V)
        # The kernel's output, of which features are copied.
        padded = N * self._widths[1] if self._widths[1] > V else 0.0
        whole = e * t * (out + padded) + 4 * t * N
        kept = e * t * out if view.selective_recompute and not view.attends_blockwise else whole
        # Keys and values made again, the product that they are made of, and their gradients and those of queries.
        transient = e * t * (2 * joined + N * self.sizes.key_dim + out) + (whole - kept)
        if view.attends_blockwise:
            # The output head by head, too; sums in fp32; columns and their gradients of two ranks (ring) or all ranks.
            kept += e * t * out
            transient += w * t * out + t * self._columns * (e + w) * (2 if view.ring else view.cp + 1)
            if view.sends_latents:  # a block's keys and values are made here, and their gradients summed in fp32
                transient += w * t * joined
            if view.ampipe_degree > 1:
                kept += e * view.cp * t * self._columns  # later slices need the columns of all ranks
        elif view.cp > 1:
            kept += e * t * out  # the core's output before and after the all-to-all
            if view.sends_latents:
                kept += e * (view.cp - 1) * t * self._columns  # of the other ranks
        scores = 2.0 * t * joined * view.seq_length * 0.5
        moved = whole + e * t * (N * self.sizes.key_dim + joined)
        return OpCost("core", kept, scores=scores, moved=moved, sent=self._sent(), transient=transient)

    def _sent(self) -> tuple[CommCost, ...]:
        """Return the communication over cp."""
        t, queries = self._view.tokens, self._N * (self.sizes.key_dim + self.sizes.value_dim)
        communication = self.operators.communication
        if self._view.ulysses and self._view.sends_latents:
            return communication.context_by_heads(t * queries, t * self._columns)
        return communication.context(t * queries, t * self._columns, self._N)
