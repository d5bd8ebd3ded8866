"""Description of one rank of a run, the input of the cost formulas."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class RankView:
    """One rank of a pipeline stage: degrees, positions, element sizes, kernels and other settings that affect costs.

    Attributes:
        seq_length: Tokens of a sequence.
        samples: Sequences of a micro-batch; a mean if only some of them pass a part of the model.
        item_bytes: Bytes of an element in the compute dtype.
        stored_item_bytes: Bytes of an element of the inputs that matrix products keep.
        expert_item_bytes: Bytes of an element of the inputs that experts' activations keep.
        kernels: Kernels of the device: ``cuda``, ``npu`` or ``cpu``.
        logits_bytes: Most bytes of logits that the head computes at a time.
        node_ep: Ranks of ep on each node, between which tokens travel once; 0: the dispatch of experts is plain.
        emp: Degree over which an expert's width is split: 1 or ``mp``.
        sequence_parallel: Positions are split over mp outside the matrix products.
        ulysses: Context parallelism exchanges heads.
        ring: Context parallelism passes keys and values around a ring; without this and ``ulysses`` it gathers them.
        window_rows: The most rows of a sample that a rank of cp sends or receives for a layer with a window.
        window_seen: The most keys of a sample that the rows of a rank of cp see there, summed over the slices.
        window_keys: Keys that rows see there on the rank of cp with most of them, relative to the mean.
        selective_recompute: The backward recomputes attention's core and the activations.
        ampipe_degree: Slices of a sequence, each of whose communication hides under the others' attention.
        slice_capacity: An expert has a separate capacity in every slice, so that messages have even splits.
        overlaps_mp: Collectives of linear layers over mp are cut into pieces, which hide under their products.
        pipe_experts: Experts run piece by piece under their all-to-alls.
        expert_parts: Parts of an expert's rows that are sent one at a time, with ``pipe_experts``.
        masked_share: Share of the positions that a masked language model predicts.
        repeats_heads: Keys and values are repeated for a kernel of attention that takes as many heads as of queries.
        fused_group: Most elements of the heads of a group that a kernel in Triton rotates; 0: no kernels in Triton.
        fused_router: The router keeps its input in the compute dtype: its product takes bf16 factors, the rest is a
            kernel in Triton.
        sends_latents: Context parallel ranks send the latents of multi-latent attention, not its keys and values.
        expert_imbalance: Rows of the busiest expert rank, relative to the mean of all.
        recomputed_operators: Operators that the plan assumes to be recomputed, each with its layers; None: all layers.
        task_counts: Returns the samples of each task in consecutive micro-batches until they repeat; only models with
            tasks call it.
    """

    seq_length: int
    samples: float
    item_bytes: int
    stored_item_bytes: int
    expert_item_bytes: int
    kernels: str
    logits_bytes: int
    mp: int = 1
    cp: int = 1
    ep: int = 1
    node_ep: int = 0
    emp: int = 1
    sequence_parallel: bool = False
    ulysses: bool = False
    ring: bool = False
    window_rows: int = 0
    window_seen: int = 0
    window_keys: float = 1.0
    selective_recompute: bool = False
    ampipe_degree: int = 1
    slice_capacity: bool = False
    overlaps_mp: bool = False
    pipe_experts: bool = False
    expert_parts: int = 1
    masked_share: float = 0.15
    repeats_heads: bool = False
    fused_group: int = 0
    fused_router: bool = False
    sends_latents: bool = False
    expert_imbalance: float = 1.0
    recomputed_operators: tuple[tuple[str, frozenset[int] | None], ...] = ()
    task_counts: Callable[[], Sequence[Mapping[str, float]]] = field(default=lambda: ({},), repr=False, compare=False)

    @classmethod
    def alone(cls, seq_length: int) -> RankView:
        """Return the view of one sequence on a single rank, which runs all matrix products of the model."""
        return cls(seq_length, 1, item_bytes=4, stored_item_bytes=4, expert_item_bytes=4, kernels="cpu", logits_bytes=1)

    @property
    def wide_bytes(self) -> int:
        """Bytes of an element in max(fp32, compute dtype)."""
        return max(4, self.item_bytes)

    @property
    def fuses(self) -> bool:
        """Swiglu with its weights is one kernel, in Triton, which keeps only its inputs."""
        return self.fused_group > 0

    @property
    def dropout_item_bytes(self) -> int:
        """Bytes of an element of a dropout mask. torch's dropout on a CPU keeps factors in the compute dtype."""
        return self.item_bytes if self.kernels == "cpu" else 1

    @property
    def tokens(self) -> int:
        """Positions of a micro-batch in this rank's matrix products, after the split over cp."""
        return round(self.samples * self.seq_length) // self.cp

    @property
    def local_tokens(self) -> int:
        """Positions on this rank outside the matrix products; sequence parallelism splits them over mp."""
        return self.tokens // self.mp if self.sequence_parallel else self.tokens

    @property
    def splits_sequence(self) -> bool:
        """Positions are split over several mp ranks."""
        return self.sequence_parallel and self.mp > 1

    @property
    def attends_blockwise(self) -> bool:
        """Keys and values are exchanged over cp block by block; heads are not."""
        return self.cp > 1 and not self.ulysses

    def stored_bytes(self, elements: float) -> float:
        """Return the bytes of an input that a matrix product keeps for its backward."""
        return elements * self.stored_item_bytes

    def recomputed(self, layer: int | None) -> frozenset[str]:
        """Return the operators that layer ``layer`` recomputes; None for those that all layers recompute."""
        return frozenset(name for name, layers in self.recomputed_operators if layers is None or layer in layers)
