"""The numbers that ERNIE 3.0 is built from. Standard library only, no torch; every size is global."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from megapar.model.ernie.sizes import ErnieSizes
from megapar.model.ernie3.tasks import CLASSES, DISTANCES, GENERATION, REORDER, TASKS, reorder_classes

if TYPE_CHECKING:
    from typing_extensions import Self

BRANCHES = ("understanding", "generation")


@dataclass(frozen=True, kw_only=True)
class Ernie3Sizes(ErnieSizes):
    """ERNIE 3.0: ``num_layers`` universal layers, then ``task_layers`` in each of two branches.

    Attributes:
        task_layers: Layers of each branch.
        task_hidden_size: Features of a token in the branches.
        task_heads: Attention heads of the branches.
        task_ffn_hidden_size: Intermediate features of the branches' MLPs.
        segments: Segments that a generation sample is cut into.
        memory: Positions of the previous segment that a segment attends to.
        tasks: Names of the tasks that are trained.
        reorder_pieces: Most pieces of sentence reordering.
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

    stored_kind: ClassVar[str] = "Ernie3Sizes"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.task_hidden_size % self.task_heads:
            raise ValueError(f"task_hidden_size ({self.task_hidden_size}) is not a multiple of task_heads")
        if self.task_type_vocab_size < len(TASKS):
            raise ValueError(f"task_type_vocab_size is {self.task_type_vocab_size}; there are {len(TASKS)} tasks")

    @classmethod
    def from_facts(cls, facts: Mapping[str, Any]) -> Self:
        """See ``ModelSizes``."""
        return super().from_facts({**facts, "tasks": tuple(facts["tasks"])})

    @property
    def num_blocks(self) -> int:
        """Layers in a row; a branch layer is one of both branches together."""
        return self.num_layers + self.task_layers

    @property
    def layer_names(self) -> tuple[str, ...]:
        """See ``ModelSizes``."""
        universal = ("UniversalBlock(Mlp)",) * self.num_layers
        return ("ErnieEmbedding", *universal, *("BranchLayer(ErnieBlock, Mlp)",) * self.task_layers, "TaskHeads")

    @property
    def calls_vary(self) -> bool:
        """A branch layer runs for the samples of its branch only."""
        return True

    @property
    def branch(self) -> ErnieSizes:
        """The numbers of a layer in a branch."""
        return ErnieSizes(
            num_layers=self.task_layers,
            hidden_size=self.task_hidden_size,
            num_attention_heads=self.task_heads,
            ffn_hidden_size=self.task_ffn_hidden_size,
            vocab_size=self.vocab_size,
            seq_length=self.seq_length,
            max_position_embeddings=self.max_position_embeddings,
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
        """Classes of a task that is a classification."""
        return reorder_classes(self.reorder_pieces) if task == REORDER else DISTANCES
