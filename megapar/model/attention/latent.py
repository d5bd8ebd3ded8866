"""Multi-latent attention (MLA) as rows of the parameter table, as costs on a rank, and as messages between ranks of cp.

One latent of a position makes the keys and values of all heads, and one rotated key is shared by them. The latents, the
rotary key and the queries are kept for the backward, and keys and values are not: attention's backward makes them
again. Under context parallelism ranks send latents or keys and values; every rank makes the keys and values of all
latents that arrive. These up-projections are ``OpCost.extra``.

Shape letters: t positions that matrix products see, s positions outside them, H hidden, N heads (of this rank in
costs), Rq rank of the queries' latent (0: queries straight from the hidden states), R rank of the latent of keys and
values, Dn plain features of a query or key head, Dr rotated features, which follow the plain ones (D in all), V
features of a value head, W features of the down projection's output.

Source: DeepSeek-V2 (arXiv 2405.04434, section 2.1).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from megapar.core.attention_mask import AttentionMask
from megapar.model.attention.grouped_query import output_rows
from megapar.model.attention.kind import AttentionKind, AttentionShape, HfNames
from megapar.model.attention_sizes import AttentionSizes
from megapar.model.cost.model_cost import CommCost, OpCost, Product
from megapar.model.cost.operators import Operators, norm_kept
from megapar.model.cost.rank_view import RankView
from megapar.model.parameter import HfPiece, ParameterSpec, fused_row, scale_row

LATENT, KEYS_AND_VALUES, AUTO = "latent", "kv", "auto"
EXCHANGES = (LATENT, KEYS_AND_VALUES, AUTO)  # what ranks of cp send: latents, keys and values, or what is less


@dataclass(frozen=True)
class LatentAttentionSizes(AttentionSizes):
    """Sizes of multi-latent attention. Every head has its own keys: ``queries_per_group`` is 1.

    Attributes:
        query_rank: Features of the queries' latent (Rq); 0 if queries come straight from the hidden states.
        latent_rank: Features of the latent of keys and values (R).
    """

    query_rank: int
    latent_rank: int

    @property
    def plain_dim(self) -> int:
        """Features of a query or key head that are not rotated (Dn). They come first."""
        return self.key_dim - self.rotary_dim

    @property
    def angles_dim(self) -> int:
        """See ``AttentionSizes``. Rotated features are apart from the others, so that only they have angles."""
        return self.rotary_dim


def rows(sizes: AttentionSizes, name: str, hf: HfNames, unit: str) -> list[ParameterSpec]:
    """Return the rows of the down projection, the latents' norms, both up projections and the output projection.

    One product makes the latents and the shared rotary key, whose weight is whole on every tensor parallel rank.
    """
    assert isinstance(sizes, LatentAttentionSizes)
    H, N, Rq, R = sizes.hidden_size, sizes.num_groups, sizes.query_rank, sizes.latent_rank
    D, shared = sizes.key_dim, R + sizes.rotary_dim
    pieces = [HfPiece(f"{hf('q_a')}.weight", (Rq, H), (slice(0, Rq),))] if Rq else []
    pieces.append(HfPiece(f"{hf('kv_a')}.weight", (shared, H), (slice(Rq, Rq + shared),)))
    down = fused_row(f"{name}.down.weight", (Rq + shared, H), pieces, unit, ())
    found = [replace(down, mp_partial="sp")]
    if Rq:
        found.append(scale_row(f"{name}.q_norm.weight", Rq, f"{hf('q_a_norm')}.weight", unit))
    found.append(scale_row(f"{name}.kv_norm.weight", R, f"{hf('kv_a_norm')}.weight", unit))
    found.append(_up(f"{name}.q_up.weight", (N, D, Rq or H), hf("q_b" if Rq else "q"), unit))
    found.append(_up(f"{name}.kv_up.weight", (N, sizes.plain_dim + sizes.value_dim, R), hf("kv_b"), unit))
    return found + output_rows(sizes, name, hf, unit)


def _up(name: str, shape: tuple[int, int, int], hf: str, unit: str) -> ParameterSpec:
    """Return the row of an up projection, whose heads are split over mp. shape: (N, features of a head, rank)."""
    heads, features, rank = shape
    piece = HfPiece(f"{hf}.weight", (heads * features, rank), ())
    return fused_row(name, shape, (piece,), unit, (("mp", 0),))


def widths(sizes: AttentionSizes) -> tuple[int, int]:
    """Return the features of all query heads, keys and values made by the up projections, and of all output heads."""
    assert isinstance(sizes, LatentAttentionSizes)
    made = sizes.key_dim + sizes.plain_dim + sizes.value_dim
    return sizes.num_heads * made, sizes.num_heads * sizes.value_dim


def costs(operators: Operators, shape: AttentionShape) -> list[OpCost]:
    """Return the operators on a rank."""
    assert isinstance(shape.sizes, LatentAttentionSizes)
    return LatentCosts(operators, shape.sizes, shape.masks[0]).all


@dataclass(frozen=True)
class LatentCosts:
    """Operators of one layer's attention."""

    operators: Operators
    sizes: LatentAttentionSizes
    mask: AttentionMask

    @property
    def all(self) -> list[OpCost]:
        """The operators in forward order, the norm before attention included."""
        view, x = self._view, self.operators.hidden_bytes
        e, t, H, out = view.item_bytes, view.tokens, self.operators.hidden_size, self._N * self.sizes.value_dim
        proj = OpCost(
            "proj",
            self.operators.dropped(),
            (Product(t, round(out), H, fp8="fp8"),),
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
            return self.sizes.latent_rank + self.sizes.rotary_dim
        return self._N * (self.sizes.key_dim + self.sizes.value_dim)

    def _latents(self) -> OpCost:
        """Return the cost of the down projection, both norms, and the gathering of latents over mp."""
        view, H, Dr = self._view, self.operators.hidden_size, self.sizes.rotary_dim
        Rq, R = self.sizes.query_rank, self.sizes.latent_rank
        e, s, t, W = view.item_bytes, view.local_tokens, view.tokens, Rq + R + Dr
        norms = sum(norm_kept(view, s, rank, "rmsnorm", wide=self.sizes.one_plus) for rank in (R, Rq) if rank)
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
        straight = not self.sizes.query_rank
        sent = self.operators.communication.column_parallel(e * t * H) if straight else ()
        product = Product(t, self.sizes.query_rank or H, round(self._N * self.sizes.key_dim))
        inputs = view.stored_bytes(view.local_tokens * H) + e * t * (self.sizes.query_rank + self.sizes.latent_rank)
        kept, made = inputs + e * t * made, e * t * made
        return OpCost("qkv", kept, (product,), moved=3 * made, sent=sent, transient=2 * made)

    def _keys_and_values(self) -> OpCost:
        """Return the cost of making keys and values, in the forward and again in the backward."""
        view = self._view
        e, t = view.item_bytes, view.tokens
        made = self._N * (self.sizes.plain_dim + self.sizes.value_dim)

        def times(rows: float) -> Product:
            return Product(rows, self.sizes.latent_rank, round(made))

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
        """Return the cost of softmax(q k^T) v, of whose scores causal attention computes half."""
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
        scores = 2.0 * t * joined * self.mask.mean_keys
        moved = whole + e * t * (N * self.sizes.key_dim + joined)
        if self.sizes.sinks:  # weigh the output, which is read and written
            moved += 2 * e * t * N * self.sizes.value_dim
            transient += 2 * view.wide_bytes * t * N * self.sizes.value_dim
        return OpCost("core", kept, scores=scores, moved=moved, sent=self._sent(), transient=transient)

    def _sent(self) -> tuple[CommCost, ...]:
        """Return the communication over cp."""
        t, queries = self._view.tokens, self._N * (self.sizes.key_dim + self.sizes.value_dim)
        communication = self.operators.communication
        if self._view.ulysses and self._view.sends_latents:
            return communication.context_by_heads(t * queries, t * self._columns)
        return communication.context(t * queries, t * self._columns, self._N)


def cheaper_exchange(latent: int, heads: int, cp: int, *, by_heads: bool) -> str:
    """Return the exchange that sends fewer bytes, forward and backward; latents if they are equal.

    Blocks are sent in the dtype of the run, and their gradients in fp32, either way. By heads (Ulysses), latents go to
    all ranks and their gradients return in fp32, which counts as two numbers of a 16-bit run, while keys and values of
    a head go to one rank.

    Args:
        latent: Features of a latent and its rotary key.
        heads: Features of the keys and values of a position on this rank of mp.
    """
    if by_heads:
        return LATENT if (1 + 2) * latent * cp <= 2 * heads else KEYS_AND_VALUES
    return LATENT if latent <= heads else KEYS_AND_VALUES


MULTI_LATENT = AttentionKind(
    name="latent", rows=rows, widths=widths, costs=costs, parts="megapar.model.attention.latent_layer:LatentAttention"
)
