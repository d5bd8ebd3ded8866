"""The numbers that every model has, whatever it is made of. Standard library only, no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """The numbers that all models have; each model adds those of its own layers. Every size is global.

    Attributes:
        num_layers: Transformer layers.
        hidden_size: Features of a token (H).
        num_attention_heads: Query heads.
        ffn_hidden_size: Intermediate features of a dense MLP (F).
        vocab_size: Rows of the word embedding (V).
        seq_length: Tokens of a training sequence (S).
        max_position_embeddings: Rows of learned positions, and what an export states; rope has no limit itself.
        layernorm_epsilon: Added to the variance in norms.
        attention_dropout: Probability of dropout on attention weights.
        hidden_dropout: Probability of dropout on the outputs of attention and MLP.
        init_std: Standard deviation of the initial weights.
        depth_scaled_init: Weights that write into the residual stream have it divided by the root of 2 x layers.
        use_flash_attn: False runs the math reference.
        stored_kind: The name of the model in ``layout.json``, part of the checkpoint format.
    """

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    ffn_hidden_size: int
    vocab_size: int
    seq_length: int
    max_position_embeddings: int
    layernorm_epsilon: float = 1e-5
    attention_dropout: float = 0.0
    hidden_dropout: float = 0.0
    init_std: float = 0.02
    depth_scaled_init: bool = False
    use_flash_attn: bool = True

    stored_kind: ClassVar[str]

    @property
    def num_blocks(self) -> int:
        """Layers in a row."""
        return self.num_layers

    @property
    def layer_names(self) -> tuple[str, ...]:
        """Class names of the embedding, of each layer with what is inside it, and of the head."""
        raise NotImplementedError

    @property
    def attention_widths(self) -> tuple[int, int]:
        """Features of all query heads, and of all key and value heads together."""
        return self.hidden_size, 2 * self.hidden_size

    @property
    def mlp_widths(self) -> tuple[int, ...]:
        """The distinct widths of the MLPs that every token passes; 0 where a layer has none."""
        return (self.ffn_hidden_size,)

    @property
    def gated(self) -> bool:
        """The MLP has a gate beside the up projection."""
        return False

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Global numbers of the mixture-of-experts layers."""
        return ()

    @property
    def expert_widths(self) -> tuple[int, ...]:
        """The distinct intermediate widths of routed experts, in rising order."""
        return ()

    @property
    def expert_share(self) -> tuple[int, int]:
        """(routed experts that a token is sent to, all of them); (1, 1) without experts."""
        return 1, 1

    @property
    def shares_embedding(self) -> bool:
        """The head, or a block after it, reads the word embedding too."""
        return True

    @property
    def calls_vary(self) -> bool:
        """How often the parts of a layer are called depends on the samples of a micro-batch."""
        return False

    def without_training_blocks(self) -> Self:
        """The model without blocks that only training runs, as published parameter counts take it."""
        return self

    def facts(self) -> dict[str, Any]:
        """The description of the model in ``layout.json``: its kind, and the numbers that its weights depend on."""
        unlearned = ("seq_length", "attention_dropout", "hidden_dropout", "init_std", "depth_scaled_init")
        left_out = {*unlearned, "use_flash_attn"}
        return {"kind": self.stored_kind, **{name: v for name, v in asdict(self).items() if name not in left_out}}

    @classmethod
    def from_facts(cls, facts: Mapping[str, Any]) -> Self:
        """The sizes that ``facts`` describes; numbers that it leaves out do not matter for weights.

        Raises TypeError, ValueError or KeyError for facts of another form.
        """
        values = {name: value for name, value in facts.items() if name != "kind"}
        return cls(**values, seq_length=values["max_position_embeddings"])


def require_choice(field: str, value: str, legal: Iterable[str]) -> None:
    """Raise ValueError unless ``value`` is one of ``legal``."""
    if value not in legal:
        raise ValueError(f"{field} is {value!r}; choose one of {', '.join(legal)}")
