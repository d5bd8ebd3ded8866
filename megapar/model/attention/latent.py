"""Description of multi-latent attention (MLA); ``model.layers`` has its class.

One latent of a position makes the keys and values of all heads, and one rotated key is shared by them. Source:
DeepSeek-V2 (arXiv 2405.04434, section 2.1).

Shape letters: H hidden, N heads, Rq rank of the queries' latent (0: queries straight from the hidden states), R rank of
the latent of keys and values, Dn plain features of a query or key head, Dr rotated features, which follow the plain
ones, V features of a value head.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megapar.model.attention.costs import AttentionShape
from megapar.model.attention.grouped_query import output_rows
from megapar.model.attention.kind import AttentionKind, HfNames
from megapar.model.attention.latent_costs import LatentCosts
from megapar.model.attention_sizes import AttentionSizes
from megapar.model.cost.model_cost import OpCost
from megapar.model.cost.operators import Operators
from megapar.model.parameter import HfPiece, ParameterSpec, fused_row, scale_row


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
    sizes = shape.sizes
    assert isinstance(sizes, LatentAttentionSizes)
    return LatentCosts(operators, sizes, sizes.query_rank, sizes.latent_rank).all


LATENT = AttentionKind(
    name="latent",
    rows=rows,
    widths=widths,
    costs=costs,
    parts="megapar.model.layers.latent_attention:LatentAttention",
)
