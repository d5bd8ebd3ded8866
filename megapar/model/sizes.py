"""Sizes and options that all models share. Standard library only, no torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar

from megapar.model.attention_sizes import AttentionSizes
from megapar.schema import role as roles
from megapar.schema.flag import flag
from megapar.schema.legal_values import MAX_LAYERS, require_choice

GEGLU = "geglu"
GATED = ("swiglu", "clamped_swiglu", GEGLU)
ACTIVATIONS = ("swiglu", "gelu", "clamped_swiglu", GEGLU)
NO_LOSS = -100  # the label of a position that does not contribute to any loss

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True, kw_only=True)
class ModelSizes(ABC):
    """Sizes and options that all models have, which their flags explain. All sizes are global.

    Attributes:
        max_position_embeddings: Rows of learned positions; exported models state it. Rope itself has no limit.
        stored_kind: Name of the model in ``layout.json``, part of the checkpoint format.
    """

    role: ClassVar[roles.Role] = roles.MODEL
    num_layers: int = flag(4, "transformer layers", unit="layers", low=1, high=MAX_LAYERS, other=3, value=MISSING)
    hidden_size: int = flag(256, "features of a token", unit="features", low=1, other=32, value=MISSING)
    num_attention_heads: int = flag(4, "query heads", unit="heads", low=1, other=2, value=MISSING)
    ffn_hidden_size: int = flag(
        None,
        "intermediate features of the dense MLP",
        unit="features",
        low=1,
        derived="4 x hidden-size; with a gate 2/3 of it, rounded down to a multiple of 64",
        other=24,
    )
    seq_length: int = flag(256, "tokens of a sample", unit="tokens", low=1, ernie=128, other=8, value=MISSING)
    max_position_embeddings: int = flag(
        None, "positions that the model supports", unit="tokens", low=1, derived="seq-length", other=20
    )
    vocab_size: int = flag(
        None,
        "rows of the embedding; a trained tokenizer gets as many ids",
        unit="tokens",
        low=8,
        derived="the tokenizer's size, or the checkpoint's rows; 4096 for a tokenizer that is trained",
        other=103,
    )
    layernorm_epsilon: float = flag(
        1e-5, "added to the variance in norms", ernie=1e-12, above=0, aliases=("norm-epsilon",), other=0.01
    )
    attention_dropout: float = flag(0.0, "dropout on attention weights", ernie=0.1, low=0, high=0.99, role=roles.LOSS)
    hidden_dropout: float = flag(
        0.0, "dropout on the outputs of attention and MLP", ernie=0.1, low=0, high=0.99, role=roles.LOSS
    )
    init_std: float = flag(
        0.02, "standard deviation of initial weights", above=0, aliases=("init-method-std",), other=0.2
    )
    depth_scaled_init: bool = flag(
        False,
        "weights whose products are added to the residual stream start at init-std / sqrt(2 x layers) (Megatron-LM)",
    )
    use_flash_attn: bool = flag(
        True,
        "attention by the device's fused kernel; off: the plain reference",
        aliases=("use-fused-attn",),
        role=roles.by_hand("switches to the reference that tests compare with, which no run needs"),
    )

    stored_kind: ClassVar[str]

    @property
    def num_blocks(self) -> int:
        """Number of consecutive layers."""
        return self.num_layers

    @property
    @abstractmethod
    def layer_names(self) -> tuple[str, ...]:
        """Class names of the embedding, of each layer including its inner layer, and of the head."""

    @property
    @abstractmethod
    def attention(self) -> AttentionSizes:
        """Sizes of the self-attention of a layer."""

    @property
    def mlp_widths(self) -> tuple[int, ...]:
        """Distinct widths of the MLPs that all tokens pass; 0 for a layer without one."""
        return (self.ffn_hidden_size,)

    @property
    def gated(self) -> bool:
        """The MLP has a gate in addition to the up projection."""
        return False

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Global numbers of the mixture-of-experts layers."""
        return ()

    @property
    def routed_layers(self) -> tuple[int, ...]:
        """Numbers of all blocks with experts, in forward order: the rows of a step's load."""
        return self.moe_layers

    @property
    def expert_widths(self) -> tuple[int, ...]:
        """Distinct intermediate widths of routed experts, in ascending order."""
        return ()

    @property
    def routed_experts(self) -> int:
        """Routed experts of a layer; 0 without mixture-of-experts layers."""
        return 0

    @property
    def experts_per_token(self) -> int:
        """Routed experts per token (top-k); 0 without mixture-of-experts layers."""
        return 0

    @property
    def drops_tokens(self) -> bool:
        """Experts have a capacity and drop the tokens that exceed it."""
        return False

    @property
    def shares_embedding(self) -> bool:
        """The head, or a block after the last layer, also reads the word embedding."""
        return True

    @property
    def causal(self) -> bool:
        """Tokens attend only to themselves and earlier tokens."""
        return False

    @property
    def windows(self) -> tuple[int, ...]:
        """Window of each layer's attention, in keys of a position; 0 for all. The block after the last one is one."""
        return (0,) * self.num_layers

    @property
    def mixes_tasks(self) -> bool:
        """Samples of a micro-batch belong to different tasks, which run different layers."""
        return False

    @abstractmethod
    def loss_weights(self, values: Mapping[str, Any]) -> dict[str, float]:
        """Return the weight of each loss term of the model. values: Values of the flags, by name."""

    def with_layers(self, dense: int, moe: int) -> Self:
        """Return the same model with ``dense`` dense layers followed by ``moe`` mixture-of-experts layers."""
        return replace(self, num_layers=dense + moe)

    def without_training_blocks(self) -> Self:
        """Return the model without blocks that only training runs, which published parameter counts leave out."""
        return self

    def facts(self) -> dict[str, Any]:
        """Return the model's entry in ``layout.json``: its kind, and the sizes that its weights depend on."""
        unlearned = ("seq_length", "attention_dropout", "hidden_dropout", "init_std", "depth_scaled_init")
        left_out = {*unlearned, "use_flash_attn"}
        return {"kind": self.stored_kind, **{name: v for name, v in asdict(self).items() if name not in left_out}}

    @classmethod
    def fact_defaults(cls) -> dict[str, Any]:
        """Return the facts of checkpoints from before a size was added, by its name: its default."""
        return defaults_of(cls)

    @classmethod
    def from_facts(cls, facts: Mapping[str, Any]) -> Self:
        """Return the sizes that ``facts`` describes. Options that do not affect weights get their defaults.

        Raises TypeError, ValueError or KeyError if ``facts`` is malformed.
        """
        values = {name: value for name, value in facts.items() if name != "kind"}
        return cls(**values, seq_length=values["max_position_embeddings"])


def defaults_of(sizes: type[Any]) -> dict[str, Any]:
    """Return the defaults of a dataclass's fields, by name; fields without one are left out."""
    return {item.name: item.default for item in fields(sizes) if item.default is not MISSING}


def check_choices(sizes: Any) -> None:
    """Raise ValueError unless each field has one of its flag's choices: for direct callers, whom no rule refuses."""
    for item in fields(sizes):
        if legal := item.metadata.get("flag", {}).get("choices"):
            require_choice(item.name, getattr(sizes, item.name), legal)
