"""The numbers of a self-attention layer. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class AttentionSizes:
    """The numbers that every kind of self-attention has; a kind with more of them extends this class.

    kind: a name in ``attention_kinds.ATTENTION_KINDS``.
    hidden_size: features that come in and go out.
    num_groups: key-value heads. queries_per_group: query heads that share one of them.
    key_dim: features of a query or key head. value_dim: features of a value head, and of a head of the output.
    causal: a position sees itself and what comes before it; else all positions see each other.
    bias: the projections have biases. qk_norm: queries and keys are normed per head, with ``epsilon``.
    dropout: probability, on the weights. flash: fused kernels where the device has them, else plain products.
    """

    kind: str
    hidden_size: int
    num_groups: int
    queries_per_group: int
    key_dim: int
    value_dim: int
    causal: bool
    bias: bool
    qk_norm: bool
    epsilon: float
    dropout: float
    flash: bool

    @property
    def num_heads(self) -> int:
        """Query heads, as many as heads of the output."""
        return self.num_groups * self.queries_per_group

    @property
    def rotary_dim(self) -> int:
        """Features of a query or key head that rotary position embedding turns."""
        return self.key_dim
