"""One rank of a run in plain numbers, which the costs of a model are computed from. Standard library only."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class LatentAttention:
    """The shape of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434).

    Attributes:
        query: Rank of the compressed queries.
        shared: Rank of the compressed keys and values.
        plain: Features of a head that no rotary embedding turns.
        rotated: Features of a head that a rotary embedding turns.
        value: Features of a head's values.
    """

    query: int
    shared: int
    plain: int
    rotated: int
    value: int


def _no_tasks() -> Sequence[Mapping[str, float]]:
    """One micro-batch without tasks."""
    return ({},)


@dataclass(frozen=True)
class RankView:
    """A rank of a pipeline stage: degrees, positions, bytes of elements, kernels and the settings that costs depend on.

    Attributes:
        seq_length: Tokens of a sequence.
        samples: Sequences of a micro-batch; a mean where only some of them pass a part of the model.
        item_bytes: Bytes of an element in the compute dtype.
        stored_item_bytes: Bytes of an element of the inputs that matrix products keep.
        kernels: The forms of operators that run on the device: ``cuda``, ``npu`` or ``cpu``.
        logits_bytes: The most that the head's logits take at a time.
        mp: Tensor parallel degree.
        cp: Context parallel degree.
        ep: Expert parallel degree.
        emp: Degree over which an expert's width is split: 1 or ``mp``.
        sequence_parallel: Positions are split over mp outside the matrix products.
        ulysses: Context parallelism exchanges heads.
        ring: Context parallelism passes keys and values around a ring; without this and ``ulysses`` it gathers them.
        selective_recompute: Attention's core and the activations are computed again in the backward.
        ampipe_degree: Slices of a sequence whose communication hides under one another's attention.
        pipe_experts: Experts run piece by piece under their all-to-alls.
        masked_share: Share of the positions that a masked language model predicts.
        latent: Attention is planned as latent attention of this shape.
        recomputed_operators: Operators that are planned to be computed again, with the layers; None: in all layers.
        task_counts: Samples of each task in consecutive micro-batches, until they repeat; called by models of tasks.
    """

    seq_length: int
    samples: float
    item_bytes: int
    stored_item_bytes: int
    kernels: str
    logits_bytes: int
    mp: int = 1
    cp: int = 1
    ep: int = 1
    emp: int = 1
    sequence_parallel: bool = False
    ulysses: bool = False
    ring: bool = False
    selective_recompute: bool = False
    ampipe_degree: int = 1
    pipe_experts: bool = False
    masked_share: float = 0.15
    latent: LatentAttention | None = None
    recomputed_operators: tuple[tuple[str, frozenset[int] | None], ...] = ()
    task_counts: Callable[[], Sequence[Mapping[str, float]]] = field(default=_no_tasks, repr=False, compare=False)

    @classmethod
    def alone(cls, seq_length: int) -> RankView:
        """One sequence on one rank, whose matrix products are those of the whole model."""
        return cls(seq_length, 1, item_bytes=4, stored_item_bytes=4, kernels="cpu", logits_bytes=1)

    @property
    def wide_bytes(self) -> int:
        """Bytes of an element in max(fp32, compute dtype)."""
        return max(4, self.item_bytes)

    @property
    def tokens(self) -> int:
        """Positions of a micro-batch that matrix products of this rank see: those of its context parallel part."""
        return round(self.samples * self.seq_length) // self.cp

    @property
    def local_tokens(self) -> int:
        """Positions on this rank outside the matrix products, which sequence parallelism splits over mp."""
        return self.tokens // self.mp if self.sequence_parallel else self.tokens

    @property
    def splits_sequence(self) -> bool:
        """Several mp ranks share the positions."""
        return self.sequence_parallel and self.mp > 1

    @property
    def attends_blockwise(self) -> bool:
        """Keys and values of other cp ranks arrive block by block, while heads stay where they are."""
        return self.cp > 1 and not self.ulysses

    def stored_bytes(self, elements: float) -> float:
        """Bytes of an input that a matrix product keeps for its backward."""
        return elements * self.stored_item_bytes

    def recomputed(self, layer: int | None) -> frozenset[str]:
        """Operators that a layer computes again; None: those that all layers do."""
        return frozenset(name for name, layers in self.recomputed_operators if layers is None or layer in layers)
