"""Multi-head, grouped-query and multi-query attention as rows of the parameter table and as costs on a rank.

Shape letters as in ``model.parameter``; t positions that matrix products see, H hidden, N query heads, G key-value
heads, Q query heads of a group, D head size. N and G are those of the rank in costs.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import NamedTuple

from megapar.model.attention.kind import AttentionKind, AttentionShape, HfNames
from megapar.model.attention_sizes import AttentionSizes
from megapar.model.cost.model_cost import CommCost, OpCost, Product
from megapar.model.cost.operators import Operators, norm_kept
from megapar.model.cost.rank_view import RankView
from megapar.model.parameter import HfPiece, ParameterSpec, attention_rows, row_parallel_rows, scale_row, weight_row


def rows(sizes: AttentionSizes, name: str, hf: HfNames, unit: str) -> list[ParameterSpec]:
    """Return the rows of the fused query-key-value projection, the output projection and the norms."""
    H, G, Q, D = sizes.hidden_size, sizes.num_groups, sizes.queries_per_group, sizes.key_dim
    parts: dict[str, int | slice] = {hf("q"): slice(0, Q), hf("k"): Q, hf("v"): Q + 1}
    fused = attention_rows(f"{name}.qkv", (G, Q + 2, D, H), parts, unit, sizes.qkv_bias)
    return [replace(row, rotated=sizes.rotary_dim) for row in fused] + output_rows(sizes, name, hf, unit)


def output_rows(sizes: AttentionSizes, name: str, hf: HfNames, unit: str) -> list[ParameterSpec]:
    """Return the rows of the output projection, of the sinks, and of the norms of queries and keys."""
    shape = (sizes.hidden_size, sizes.num_heads * sizes.value_dim)
    found = row_parallel_rows(f"{name}.proj", shape, hf("o"), unit, sizes.output_bias)
    if sizes.sinks:
        sinks = weight_row(f"{name}.sinks", (sizes.num_heads,), hf("sinks"), unit, axes=(("mp", 0),))
        found.append(replace(sinks, decay=False))
    if sizes.qk_norm:
        heads = {"q": sizes.num_heads, "k": sizes.num_groups}
        found += [_norm_row(sizes, f"{name}.{part}_norm.weight", heads[part], unit) for part in "qk"]
    return found


def _norm_row(sizes: AttentionSizes, name: str, heads: int, unit: str) -> ParameterSpec:
    """Return the row of a norm of queries or keys: of each head, or of all heads together."""
    row = replace(scale_row(name, sizes.key_dim, "", unit, mp_partial="always"), rotated=sizes.rotary_dim)
    if not sizes.norms_width:
        return row
    piece = HfPiece(name, (heads * sizes.key_dim,), ())
    return replace(row, mp_partial="never", shape=(heads, sizes.key_dim), axes=(("mp", 0),), pieces=(piece,))


def widths(sizes: AttentionSizes) -> tuple[int, int]:
    """Return the features of all query, key and value heads, and of all output heads."""
    queries = sizes.num_heads * sizes.key_dim
    return queries + 2 * sizes.num_groups * sizes.key_dim, queries


class _Heads(NamedTuple):
    """Heads of one rank.

    Attributes:
        qkv: Output features of the matrix products before the core.
        out: Input features of the output projection.
        kept: Bytes kept of queries, keys and values, including those kept to rotate and normalize them.
        moved: Bytes that kernels before the core read and write in the forward, half of those in the backward.
        read: Bytes besides the core's result that count as moved in the core.
    """

    N: float
    G: float
    D: int
    qkv: float
    out: float
    kept: float
    moved: float
    read: float


def costs(operators: Operators, shape: AttentionShape) -> list[OpCost]:
    """Return the operators of attention: norm, queries, keys and values, core, output projection."""
    view, H = operators.view, operators.hidden_size
    e, t, x = view.item_bytes, view.tokens, operators.hidden_bytes
    heads = _heads(view, shape)
    factor = 0.0 if shape.sizes.query_factor == 1.0 else 2 * e * t * heads.N * heads.D
    return [
        operators.norm(),
        OpCost(
            "qkv",
            view.stored_bytes(view.local_tokens * H) + heads.kept,
            (Product(t, H, round(heads.qkv), fp8="fp8"),),
            moved=x + heads.moved + factor,
            sent=(*operators.communication.column_parallel(e * t * H), *_norms_sent(operators, shape.sizes)),
            transient=e * t * heads.qkv + 2 * x + operators.column_gathers,
        ),
        _core(operators, shape, heads),
        OpCost(
            "proj",
            operators.dropped(),
            (Product(t, round(heads.out), H, fp8="fp8"),),
            moved=3 * x,
            sent=operators.communication.row_parallel(e * t * H),
            transient=e * t * heads.out + x + operators.row_gathers,
        ),
    ]


def _heads(view: RankView, shape: AttentionShape) -> _Heads:
    t, e = view.tokens, view.item_bytes
    N, G, D = shape.sizes.num_heads / view.mp, shape.sizes.num_groups / view.mp, shape.sizes.key_dim
    qkv, out = (width / view.mp for width in widths(shape.sizes))
    kept = e * t * qkv
    # Shared slices keep queries, and in the core the keys and values of all ranks. Ulysses keeps what it has received.
    shares = view.attends_blockwise and view.ampipe_degree > 1 and not shape.windowed
    if shares:
        kept = e * t * N * D
    if shape.rotary:
        # Rotated queries and keys; values are a view of the product's output.
        kept += 0.0 if shares or (view.cp > 1 and view.ulysses) else e * t * (N + G) * D
    elif shape.sizes.queries_per_group > 1 and not shares:
        kept += e * t * N * D
    if shape.sizes.qk_norm:
        kept += _norms_kept(view, shape.sizes, N, G)
    moved, read = kept * (3 if shape.rotary else 1), 0.0 if view.fuses else kept  # the core is bound by its products
    if shape.rotary and _rotated_by_kernel(view, shape, N, G):
        moved = e * t * qkv * 4 / 3  # read and written once in each direction
    if not (shares or (view.cp > 1 and view.ulysses)):
        kept -= _not_kept(view, shape, N, G)
    if view.repeats_heads and not shape.sizes.qk_norm:
        moved += 2 * e * t * (N - G) * D
        kept = 3 * e * t * N * D
    return _Heads(N, G, D, qkv, out, kept, moved, read)


def _not_kept(view: RankView, shape: AttentionShape, N: float, G: float) -> float:
    """Return the bytes of queries, keys and values that a GPU frees before the backward, of whole samples."""
    sizes, both = shape.sizes, view.item_bytes * view.tokens * (N + G) * shape.sizes.key_dim
    if view.kernels != "cuda" or not shape.rotary or sizes.norms_width:
        return 0.0
    if sizes.one_plus and view.item_bytes < view.wide_bytes:  # norms keep copies in fp32
        return both * N / (N + G)
    if sizes.qk_norm:  # their inputs are parts of the kept product, but queries of several heads of a group are a copy
        return both * (1.0 if sizes.queries_per_group > 1 else (2 * N + G) / (N + G))
    # The kernel that rotates them writes values, too, so that nothing keeps the product.
    return both if _rotated_by_kernel(view, shape, N, G) else 0.0


def _rotated_by_kernel(view: RankView, shape: AttentionShape, N: float, G: float) -> bool:
    """Return True if one kernel splits and rotates heads."""
    return not shape.sizes.qk_norm and (N / G + 2) * shape.sizes.key_dim <= view.fused_group


def _norms_kept(view: RankView, sizes: AttentionSizes, N: float, G: float) -> float:
    """Return the bytes that the norms of queries and keys keep."""
    t, e, D = view.tokens, view.item_bytes, sizes.key_dim
    kept = partial(norm_kept, view, normalization="rmsnorm", wide=sizes.one_plus)
    if not sizes.norms_width:
        return kept(rows=t * N, width=D) + kept(rows=t * G, width=D) + e * t * N * D
    if view.mp == 1:
        return kept(rows=t, width=round(N * D)) + kept(rows=t, width=round(G * D))
    # Queries of several heads of a group are a copy; keys and single queries are parts of the product's output.
    return (e * t * N * D if sizes.queries_per_group > 1 else 0.0) + 2 * view.wide_bytes * t


def _norms_sent(operators: Operators, sizes: AttentionSizes) -> list[CommCost]:
    """Return the sums over mp of norms over all heads: two numbers per position."""
    view = operators.view
    if view.mp == 1 or not sizes.norms_width:
        return []
    sums = 2 * view.wide_bytes * view.tokens
    return [operators.communication.over_mp("all_reduce", sums, phase) for phase in ("forward", "backward")]


def _core(operators: Operators, shape: AttentionShape, heads: _Heads) -> OpCost:
    """Return the cost of softmax(q k^T) v."""
    view = operators.view
    t, e, N, G, D = view.tokens, view.item_bytes, heads.N, heads.G, heads.D
    core = e * t * heads.out + 4 * t * N
    length, memory = shape.masks[-1].length, shape.masks[-1].memory
    if memory:  # later segments also attend to a memory, with a mask; their keys and values are concatenated
        later = len(shape.masks) - 1
        joined = t / len(shape.masks) * later * (1 + memory / length)
        core += 2 * e * joined * N * D + e * later * length * (length + memory)
    if (shape.sizes.dropout and view.kernels == "cpu") or not shape.sizes.flash:
        core += _scores_kept(view, shape, heads, length + memory)
    blockwise = view.attends_blockwise and not shape.windowed
    kept = e * t * heads.out if view.selective_recompute and not blockwise else core
    transient = e * t * (heads.qkv + heads.out) + max(0.0, core - kept) + operators.hidden_bytes
    exchanged = _exchanged(operators, heads, blockwise=blockwise)
    kept, transient = kept + exchanged[0], transient + exchanged[1]
    if shape.windowed and view.kernels == "cpu" and shape.sizes.flash:
        # Tiles: sums of gradients in fp32, and of a tile its reversed inputs, output and gradients.
        transient += t * D * (view.wide_bytes * (N + 2 * G) + e * (4 * N + 4 * G))
        if view.cp == 1:  # the output head by head, besides that of each position for the projection
            kept += e * t * heads.out
    sent = operators.communication.context(2 * t * N * D, 2 * t * G * D, G)
    if shape.windowed and view.attends_blockwise:
        sent = operators.communication.context_in_window(2 * G * D)
    keys, moved = shape.mean_keys * (view.window_keys if shape.windowed else 1.0), core + heads.read
    if shape.sizes.sinks:  # weigh the output, which is read and written
        moved, transient = moved + 2 * e * t * heads.out, transient + 2 * view.wide_bytes * t * heads.out
    return OpCost("core", kept, scores=2.0 * t * (2 * N * D) * keys, moved=moved, sent=sent, transient=transient)


def _exchanged(operators: Operators, heads: _Heads, *, blockwise: bool) -> tuple[float, float]:
    """Return what context parallelism adds to the core: bytes kept, bytes of temporary tensors."""
    view = operators.view
    t, e, w, columns = view.tokens, view.item_bytes, view.wide_bytes, 2 * view.tokens * heads.G * heads.D
    out = e * t * heads.out
    if blockwise:  # kept: the output head by head, besides that of each position for the projection
        kept = out
        if view.ring:  # sums in fp32; keys, values and their gradients of two ranks
            transient = w * t * heads.out + 2 * columns * (e + w)
        else:  # gathered, joined and its gradient; gradients of all ranks summed, stacked, and on a CPU received
            copies = 3 if view.kernels == "cpu" else 2
            inside = out + columns * (e * 3 * (view.cp + 1) + w * (copies * view.cp + 1))
            transient = w * t * heads.out + inside + operators.hidden_bytes
        if view.ampipe_degree > 1:
            kept += e * view.cp * columns  # later slices need the keys and values of all ranks
        return kept, transient
    if view.cp > 1 and view.ulysses:
        return out, 0.0  # the core's output before and after the all-to-all
    if view.cp > 1:  # in a window: the keys and values that this rank's rows see, joined, and their gradients
        seen = 2 * view.samples * view.window_seen * heads.G * heads.D
        return e * seen + (out if view.ampipe_degree <= 1 else 0.0), (e + w) * seen  # of several runs, joined
    return 0.0, 0.0


def _scores_kept(view: RankView, shape: AttentionShape, heads: _Heads, length: float) -> float:
    """Return the bytes kept without a fused kernel: softmax's output, and with dropout the weights and their mask.

    In place of its fused kernel torch computes on a CPU in fp32, with copies of queries, keys and values.
    """
    e, t, mask = view.item_bytes, view.tokens, view.dropout_item_bytes
    kept = 0.0
    if shape.sizes.flash and view.kernels == "cpu" and e < view.wide_bytes:
        e = mask = view.wide_bytes
        kept = e * t * (heads.N + 2 * heads.G) * heads.D
    scores = t * heads.N * length
    return kept + e * scores + ((e + mask) * scores if shape.sizes.dropout else 0.0)


GROUPED_QUERY = AttentionKind(
    name="grouped_query",
    rows=rows,
    widths=widths,
    costs=costs,
    parts="megapar.model.attention.grouped_query_layer:GroupedQueryAttention",
)
