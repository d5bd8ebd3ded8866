"""Description of multi-head, grouped-query and multi-query attention; ``model.layers`` has its class.

Shape letters as in ``model.parameter``; Q query heads of a group.
"""

from __future__ import annotations

from dataclasses import replace

from megapar.model.attention.costs import AttentionShape, attention_cost
from megapar.model.attention.kind import AttentionKind, HfNames
from megapar.model.attention_sizes import AttentionSizes
from megapar.model.cost.model_cost import OpCost
from megapar.model.cost.operators import Operators
from megapar.model.parameter import HfPiece, ParameterSpec, attention_rows, row_parallel_rows, scale_row


def rows(sizes: AttentionSizes, name: str, hf: HfNames, unit: str) -> list[ParameterSpec]:
    """Return the rows of the fused query-key-value projection, the output projection and the norms."""
    H, G, Q, D = sizes.hidden_size, sizes.num_groups, sizes.queries_per_group, sizes.key_dim
    parts: dict[str, int | slice] = {hf("q"): slice(0, Q), hf("k"): Q, hf("v"): Q + 1}
    fused = attention_rows(f"{name}.qkv", (G, Q + 2, D, H), parts, unit, sizes.qkv_bias)
    return [replace(row, rotated=sizes.rotary_dim) for row in fused] + output_rows(sizes, name, hf, unit)


def output_rows(sizes: AttentionSizes, name: str, hf: HfNames, unit: str) -> list[ParameterSpec]:
    """Return the rows of the output projection and of the norms of queries and keys."""
    shape = (sizes.hidden_size, sizes.num_heads * sizes.value_dim)
    found = row_parallel_rows(f"{name}.proj", shape, hf("o"), unit, sizes.output_bias)
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


def costs(operators: Operators, shape: AttentionShape) -> list[OpCost]:
    """Return the operators on a rank."""
    return attention_cost(operators, shape, widths(shape.sizes))


GROUPED_QUERY = AttentionKind(
    name="grouped_query",
    rows=rows,
    widths=widths,
    costs=costs,
    parts="megapar.model.layers.grouped_query_attention:GroupedQueryAttention",
)
