"""Sizes and tasks of ERNIE 3.0, and the parser of ``--ernie-tasks``. All sizes are global."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from math import factorial
from typing import TYPE_CHECKING, Any, ClassVar

from megapar.model.ernie.sizes import ErnieSizes
from megapar.schema.flag import flag, follows

if TYPE_CHECKING:
    from typing_extensions import Self


KNOWLEDGE_MLM, DOCUMENT_LM, REORDER = "knowledge_mlm", "document_lm", "sentence_reorder"
DISTANCE, KNOWLEDGE_TEXT = "sentence_distance", "knowledge_text"
TASKS = (KNOWLEDGE_MLM, DOCUMENT_LM, REORDER, DISTANCE, KNOWLEDGE_TEXT)
CLASSES = (REORDER, DISTANCE)  # predict one class per sample; the other tasks predict tokens
GENERATION = (DOCUMENT_LM,)  # run the causal branch; the other tasks run the bidirectional one
DISTANCES = 3  # adjacent, of one document, of different documents
DEFAULT_TASKS = "knowledge_mlm:1.0,document_lm:1.0,sentence_reorder:0.5,sentence_distance:0.5"


def tasks_of(text: str | None) -> Mapping[str, Fraction]:
    """Parse ``knowledge_mlm:1.0,document_lm:0.5`` to shares of the samples, in TASKS's order. Raises ValueError."""
    weights: dict[str, Fraction] = {}
    for item in (text or DEFAULT_TASKS).split(","):
        name, _, weight = item.strip().partition(":")
        if name not in TASKS:
            raise ValueError(f"{name!r} is not one of {', '.join(TASKS)}")
        if name in weights:
            raise ValueError(f"{name} occurs twice")
        try:
            weights[name] = Fraction(weight or "1")
            if float(weights[name]) == 0 != weights[name]:
                raise OverflowError
        except (ValueError, ArithmeticError):
            raise ValueError(f"{item.strip()!r} is not NAME:WEIGHT") from None
        if weights[name] < 0:
            raise ValueError(f"the weight of {name} is below 0")
    if not any(weights.values()):
        raise ValueError("no task has a weight above 0")
    return {name: weights[name] for name in TASKS if weights.get(name)}


def reorder_classes(pieces: int) -> int:
    """Return the number of classes of sentence reordering: all permutations of up to ``pieces`` pieces."""
    return sum(factorial(n) for n in range(1, pieces + 1))


def accuracy_of(task: str) -> str:
    """Return the name of the term that counts a task's correct predictions."""
    return f"{task}_accuracy"


BRANCHES = ("understanding", "generation")


@dataclass(frozen=True, kw_only=True)
class Ernie3Sizes(ErnieSizes):
    """Sizes of ERNIE 3.0: ``num_layers`` universal layers, then ``task_layers`` in each of two branches.

    Attributes:
        tasks: Names of the tasks that are trained.
        reorder_pieces: Most pieces of sentence reordering.
    """

    sop: bool = False
    task_layers: int = flag(
        12, "layers of each task branch of ERNIE 3.0", name="task_num_layers", unit="layers", low=1, other=2
    )
    task_hidden_size: int = flag(768, "features of a token in the task branches", unit="features", low=1, other=16)
    task_heads: int = flag(12, "heads of the task branches", name="task_num_attention_heads", unit="heads", low=1)
    task_ffn_hidden_size: int = flag(
        None,
        "intermediate features of the task branches' MLPs",
        unit="features",
        low=1,
        derived="4 x task-hidden-size",
        value=3072,
        other=16,
    )
    segments: int = flag(
        1,
        "segments of a generation sample, each with a memory of the previous one",
        name="generation_segments",
        unit="segments",
        low=1,
    )
    memory: int = flag(
        128,
        "positions of the previous segment that a segment attends to",
        name="memory_length",
        unit="tokens",
        low=1,
        other=16,
    )
    tasks: tuple[str, ...] = follows(lambda values: tuple(tasks_of(values["ernie_tasks"])), value=TASKS)
    reorder_pieces: int = follows(lambda values: values["sentence_reorder_pieces"], value=3)

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
        """Number of consecutive layers; the layers of both branches at the same depth count as one."""
        return self.num_layers + self.task_layers

    @property
    def layer_names(self) -> tuple[str, ...]:
        """See ``ModelSizes``."""
        universal = ("UniversalBlock(Mlp)",) * self.num_layers
        return ("ErnieEmbedding", *universal, *("BranchLayer(ErnieBlock, Mlp)",) * self.task_layers, "TaskHeads")

    @property
    def mixes_tasks(self) -> bool:
        """True, because a branch layer runs only for the samples of its branch."""
        return True

    def loss_weights(self, values: Mapping[str, Any]) -> dict[str, float]:
        """Return the weight of each task, and 0 for its correct predictions, which are only counted."""
        # Each task has its own denominator, so its share of the samples does not weight its loss.
        weights = {name: float(weight) for name, weight in tasks_of(values["ernie_tasks"]).items()}
        return {**weights, **{accuracy_of(name): 0.0 for name in weights if name in CLASSES}}

    def with_layers(self, dense: int, moe: int) -> Self:
        """See ``ModelSizes``. The branches keep at most one layer."""
        return replace(super().with_layers(dense, moe), task_layers=min(self.task_layers, 1))

    @property
    def universal(self) -> ErnieSizes:
        """Sizes of the universal module as those of an encoder."""
        return ErnieSizes(**{item.name: getattr(self, item.name) for item in fields(ErnieSizes)})

    @property
    def branch(self) -> ErnieSizes:
        """Sizes of a branch as those of an encoder."""
        return replace(
            self.universal,
            num_layers=self.task_layers,
            hidden_size=self.task_hidden_size,
            num_attention_heads=self.task_heads,
            ffn_hidden_size=self.task_ffn_hidden_size,
        )

    @property
    def word_branches(self) -> tuple[str, ...]:
        """Branches with a vocabulary head."""
        generates = set(GENERATION) & set(self.tasks)
        understands = set(self.tasks) - set(CLASSES) - set(GENERATION)
        return ("understanding",) * bool(understands) + ("generation",) * bool(generates)

    def classes(self, task: str) -> int:
        """Return the number of classes of a classification task."""
        return reorder_classes(self.reorder_pieces) if task == REORDER else DISTANCES
