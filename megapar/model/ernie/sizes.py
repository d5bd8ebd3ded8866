"""Sizes of an ERNIE encoder. Standard library only, no torch. All sizes are global."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from megapar.model.attention_sizes import AttentionSizes
from megapar.model.sizes import ModelSizes
from megapar.schema.flag import flag


@dataclass(frozen=True, kw_only=True)
class ErnieSizes(ModelSizes):
    """Sizes of an ERNIE encoder with a masked language model head and, with ``sop``, a sentence-order head."""

    type_vocab_size: int = flag(2, "rows of the token type embedding", low=1, value=4, other=4)
    task_type_vocab_size: int = flag(3, "rows of the task type embedding", low=1, other=4)
    sop: bool = True
    layernorm_epsilon: float = 1e-12

    stored_kind: ClassVar[str] = "ErnieSizes"

    def __post_init__(self) -> None:
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size ({self.hidden_size}) is not a multiple of "
                f"num_attention_heads ({self.num_attention_heads})"
            )

    @property
    def layer_names(self) -> tuple[str, ...]:
        """See ``ModelSizes``."""
        return ("ErnieEmbedding", *("ErnieBlock(Mlp)",) * self.num_layers, "ErnieHead")

    @property
    def head_dim(self) -> int:
        """Features of an attention head."""
        return self.hidden_size // self.num_attention_heads

    @property
    def attention(self) -> AttentionSizes:
        """See ``ModelSizes``. Attention is multi-head, so each query head has a key-value head."""
        return AttentionSizes(
            kind="grouped_query",
            hidden_size=self.hidden_size,
            num_groups=self.num_attention_heads,
            queries_per_group=1,
            key_dim=self.head_dim,
            value_dim=self.head_dim,
            rotary_dim=self.head_dim,
            softmax_scale=self.head_dim**-0.5,
            causal=False,
            qkv_bias=True,
            output_bias=True,
            qk_norm=False,
            qk_norm_scope="head",
            epsilon=self.layernorm_epsilon,
            dropout=self.attention_dropout,
            flash=self.use_flash_attn,
        )

    def loss_weights(self, values: Mapping[str, Any]) -> dict[str, float]:
        """See ``ModelSizes``."""
        return {"lm": 1.0, "sop": values["sop_loss_weight"]}
