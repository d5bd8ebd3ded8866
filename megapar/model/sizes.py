"""The numbers a model is built from. Standard library only, no torch; every size is global, whatever the layout."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megapar.moe.sizes import MoeSizes
from megapar.rules.tasks import CLASSES, DISTANCES, GENERATION, REORDER, TASKS, reorder_classes

NORMALIZATIONS = ("rmsnorm", "layernorm")
POSITION_EMBEDDINGS = ("rope", "learned")
ACTIVATIONS = ("swiglu", "gelu")


@dataclass(frozen=True)
class DecoderSizes:
    """A decoder: dense (``moe`` is None) or with mixture-of-experts layers after ``first_k_dense`` dense ones.

    num_query_groups: key-value heads (G); head_dim: features of a head (D), need not be hidden / heads.
    ffn_hidden_size: width of a dense MLP (F). seq_length: tokens of a training sequence (S).
    max_position_embeddings: rows of learned positions, and what an export states; rope has no limit itself.
    init_std: standard deviation of the initial weights. depth_scaled_init: those that write into the residual stream
    have it divided by the root of 2 x layers. use_flash_attn: off means the math reference.
    moe_widths: intermediate features of an expert, of every mixture-of-experts layer in order; empty: ``moe``'s.
    mtp_depth: multi-token prediction blocks behind the last layer, 0 or 1.
    """

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    head_dim: int
    ffn_hidden_size: int
    vocab_size: int
    seq_length: int
    max_position_embeddings: int
    normalization: str = "rmsnorm"
    position_embedding_type: str = "rope"
    activation: str = "swiglu"
    add_bias_linear: bool = False
    qk_norm: bool = False
    layernorm_epsilon: float = 1e-5
    rope_theta: float = 10000.0
    tie_embeddings: bool = True
    attention_dropout: float = 0.0
    hidden_dropout: float = 0.0
    init_std: float = 0.02
    depth_scaled_init: bool = False
    use_flash_attn: bool = True
    first_k_dense: int = 0
    moe: MoeSizes | None = None
    moe_widths: tuple[int, ...] = ()
    mtp_depth: int = 0

    def __post_init__(self) -> None:
        # The command line has refused wrong values with a full report; this guards direct users.
        _choose("normalization", self.normalization, NORMALIZATIONS)
        _choose("position_embedding_type", self.position_embedding_type, POSITION_EMBEDDINGS)
        _choose("activation", self.activation, ACTIVATIONS)
        if self.num_attention_heads % self.num_query_groups:
            raise ValueError(
                f"num_attention_heads ({self.num_attention_heads}) is not a multiple of "
                f"num_query_groups ({self.num_query_groups})"
            )
        if self.position_embedding_type == "rope" and self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}; rope turns pairs, so it must be even")
        if self.moe is not None and self.moe.hidden_size != self.hidden_size:
            raise ValueError(f"moe.hidden_size ({self.moe.hidden_size}) is not hidden_size ({self.hidden_size})")
        if self.moe_widths and len(self.moe_widths) != len(self.moe_layers):
            raise ValueError(f"{len(self.moe_widths)} moe_widths for {len(self.moe_layers)} layers with experts")
        if self.mtp_depth not in (0, 1):
            raise ValueError(f"mtp_depth is {self.mtp_depth}; there is at most one block")

    @property
    def num_blocks(self) -> int:
        """Layers one behind the other."""
        return self.num_layers

    @property
    def queries_per_group(self) -> int:
        """Query heads that share one key-value head."""
        return self.num_attention_heads // self.num_query_groups

    @property
    def gated(self) -> bool:
        """The MLP has a gate beside the up projection."""
        return self.activation == "swiglu"

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Global numbers of the mixture-of-experts layers."""
        return () if self.moe is None else tuple(range(self.first_k_dense, self.num_layers))

    def moe_at(self, layer: int) -> MoeSizes | None:
        """The experts of layer number ``layer``; None where it is dense."""
        if self.moe is None or not self.first_k_dense <= layer < self.num_layers:
            return None
        if not self.moe_widths:
            return self.moe
        return replace(self.moe, ffn_hidden_size=self.moe_widths[layer - self.first_k_dense])


@dataclass(frozen=True)
class ErnieSizes:
    """An ERNIE encoder with its two heads: masked language model, and (``sop``) sentence order.

    type_vocab_size, task_type_vocab_size: rows of the token-type (sentence) and task-type embeddings.
    """

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    ffn_hidden_size: int
    vocab_size: int
    seq_length: int
    max_position_embeddings: int
    type_vocab_size: int = 4
    task_type_vocab_size: int = 3
    sop: bool = True
    layernorm_epsilon: float = 1e-12
    attention_dropout: float = 0.0
    hidden_dropout: float = 0.0
    init_std: float = 0.02
    depth_scaled_init: bool = False
    use_flash_attn: bool = True

    def __post_init__(self) -> None:
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size ({self.hidden_size}) is not a multiple of "
                f"num_attention_heads ({self.num_attention_heads})"
            )

    @property
    def num_blocks(self) -> int:
        """Layers one behind the other."""
        return self.num_layers

    @property
    def head_dim(self) -> int:
        """Features of an attention head."""
        return self.hidden_size // self.num_attention_heads


@dataclass(frozen=True)
class Ernie3Sizes(ErnieSizes):
    """ERNIE 3.0: ``num_layers`` universal layers, then ``task_layers`` in each of two branches.

    task_hidden_size, task_heads, task_ffn_hidden_size: of both branches. segments: that a generation sample is cut
    into; memory: positions of the segment before that a segment sees. tasks: those that are trained, by name.
    reorder_pieces: most parts of sentence reordering.
    """

    sop: bool = False
    task_layers: int = 12
    task_hidden_size: int = 768
    task_heads: int = 12
    task_ffn_hidden_size: int = 3072
    segments: int = 1
    memory: int = 128
    tasks: tuple[str, ...] = TASKS
    reorder_pieces: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.task_hidden_size % self.task_heads:
            raise ValueError(f"task_hidden_size ({self.task_hidden_size}) is no multiple of task_heads")
        if self.task_type_vocab_size < len(TASKS):
            raise ValueError(f"task_type_vocab_size is {self.task_type_vocab_size}; there are {len(TASKS)} tasks")

    @property
    def num_blocks(self) -> int:
        """Layers one behind the other: a branch layer is one of both branches together."""
        return self.num_layers + self.task_layers

    @property
    def branch(self) -> ErnieSizes:
        """The numbers of a layer in a branch."""
        return ErnieSizes(
            self.task_layers,
            self.task_hidden_size,
            self.task_heads,
            self.task_ffn_hidden_size,
            self.vocab_size,
            self.seq_length,
            self.max_position_embeddings,
            layernorm_epsilon=self.layernorm_epsilon,
            attention_dropout=self.attention_dropout,
            hidden_dropout=self.hidden_dropout,
            init_std=self.init_std,
            depth_scaled_init=self.depth_scaled_init,
            use_flash_attn=self.use_flash_attn,
        )

    @property
    def word_branches(self) -> tuple[str, ...]:
        """Branches with a head over the vocabulary."""
        generates = set(GENERATION) & set(self.tasks)
        understands = set(self.tasks) - set(CLASSES) - set(GENERATION)
        return ("understanding",) * bool(understands) + ("generation",) * bool(generates)

    def classes(self, task: str) -> int:
        """Classes of a task that asks for one."""
        return reorder_classes(self.reorder_pieces) if task == REORDER else DISTANCES


def _choose(field: str, value: str, legal: tuple[str, ...]) -> None:
    if value not in legal:
        raise ValueError(f"{field} is {value!r}; choose one of {', '.join(legal)}")
