"""Sizes of a self-attention layer, from which it is built, planned and listed in the parameter table."""

from __future__ import annotations

from dataclasses import dataclass, field

from megapar.model.rope import Rope

QK_NORM_SCOPES = ("head", "width")


@dataclass(frozen=True)
class AttentionSizes:
    """Sizes and options that every kind of self-attention has, for the whole model. Kinds with more extend it.

    Attributes:
        kind: Name of its ``AttentionKind`` in ``model.attention``.
        num_groups: Key-value heads.
        queries_per_group: Query heads that share a key-value head.
        key_dim: Features of a query or key head.
        value_dim: Features of a value head and of an output head.
        rotary_dim: Leading features of a query or key head that rotary position embedding rotates.
        softmax_scale: Factor on the scores before the softmax, usually key_dim^-0.5.
        causal: A position attends to itself and earlier positions; False: all positions attend to each other.
        qk_norm: Queries and keys are normalized.
        qk_norm_scope: Features that their norms see: those of one ``head``, or of all heads, the whole ``width``.
        epsilon: Added to the variance in the norms of queries and keys.
        dropout: Dropout probability of the attention weights.
        flash: Use the device's fused kernels if it has them; False: plain products.
        window: The most keys that a position attends to, itself included; 0 for any number.
        sinks: Each query head has a trained score that joins the softmax of its rows, and has no value.
        one_plus: The norms of queries and keys multiply by 1 + weight.
        rope: Rotary positions of queries and keys, whose angles the context has; None without.
    """

    kind: str
    hidden_size: int
    num_groups: int
    queries_per_group: int
    key_dim: int
    value_dim: int
    rotary_dim: int
    softmax_scale: float
    causal: bool
    qkv_bias: bool
    output_bias: bool
    qk_norm: bool
    qk_norm_scope: str
    epsilon: float
    dropout: float
    flash: bool
    window: int = field(default=0, kw_only=True)
    sinks: bool = field(default=False, kw_only=True)
    one_plus: bool = field(default=False, kw_only=True)
    rope: Rope | None = field(default=None, kw_only=True)

    @property
    def num_heads(self) -> int:
        """Query heads; also the number of output heads."""
        return self.num_groups * self.queries_per_group

    @property
    def angles_dim(self) -> int:
        """Features that the angles of rope cover: a whole head, of which those after ``rotary_dim`` have angle 0."""
        return self.key_dim

    @property
    def norms_width(self) -> bool:
        """The norms of queries and keys see all heads."""
        return self.qk_norm and self.qk_norm_scope == "width"

    @property
    def query_factor(self) -> float:
        """Factor on the queries of a kind whose scores the kernels scale by key_dim^-0.5."""
        return 1.0 if self.softmax_scale == self.key_dim**-0.5 else self.softmax_scale * self.key_dim**0.5
