"""Sizes of a self-attention layer, from which it is built, planned and listed in the parameter table.

Standard library only.

Tested in ``tests/model/layers/test_self_attention.py``.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class AttentionSizes:
    """Sizes and options that every kind of self-attention has, for the whole model.

    A kind with more of them extends this class.

    Attributes:
        kind: Name of its ``AttentionKind`` in ``model.attention``.
        hidden_size: Features of the input and the output.
        num_groups: Key-value heads.
        queries_per_group: Query heads that share a key-value head.
        key_dim: Features of a query or key head.
        value_dim: Features of a value head and of an output head.
        causal: A position attends to itself and earlier positions; False: all positions attend to each other.
        qkv_bias: The projections of queries, keys and values have biases.
        output_bias: The output projection has a bias.
        qk_norm: Queries and keys are normalized per head.
        epsilon: Added to the variance in the norms of queries and keys.
        dropout: Dropout probability of the attention weights.
        flash: Use the device's fused kernels if it has them; False: plain products.
    """

    kind: str
    hidden_size: int
    num_groups: int
    queries_per_group: int
    key_dim: int
    value_dim: int
    causal: bool
    qkv_bias: bool
    output_bias: bool
    qk_norm: bool
    epsilon: float
    dropout: float
    flash: bool

    @property
    def num_heads(self) -> int:
        """Query heads; also the number of output heads."""
        return self.num_groups * self.queries_per_group

    @property
    def rotary_dim(self) -> int:
        """Features of a query or key head that rotary position embedding rotates."""
        return self.key_dim
