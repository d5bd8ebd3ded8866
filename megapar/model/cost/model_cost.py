"""Costs of a micro-batch on a rank: matrix products, communication, operators, units and the whole model.

Each operator of a model is one ``OpCost``. Memory, traffic and time of a plan, and the FLOPs of utilization figures,
are sums over the same operators, so that they always describe the same model.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from megapar.model.cost.rank_view import RankView

INDEX_BYTES = 8  # of an int64
FORWARD_AND_BACKWARD = 3  # in forwards: a backward has twice the FLOPs of a forward
MASKED_PERCENT = 15  # default percentage of masked positions


@dataclass(frozen=True)
class Product:
    """A matrix product [rows, inner] x [inner, columns] of the forward.

    Attributes:
        rows: Rows of the input, of all groups together.
        inner: Features that are summed over.
        columns: Features of the output.
        groups: Products that one kernel computes (grouped GEMM).
        mlp: Part of a feed-forward layer or an expert, which a plan may assume in fp8.
        wide: In the compute dtype even if all linear layers are assumed in fp8, as routers and vocabulary heads are.
        fp8: The flag that computes the forward and the input gradient in fp8: ``fp8`` (column and row parallel layers),
            ``fp8_experts``, or "".
    """

    rows: float
    inner: int
    columns: int
    groups: int = 1
    mlp: bool = False
    wide: bool = False
    fp8: str = ""

    @property
    def flops(self) -> float:
        """FLOPs of the forward."""
        return 2 * self.rows * self.inner * self.columns


@dataclass(frozen=True)
class CommCost:
    """Bytes that a rank sends in one micro-batch.

    Attributes:
        axis: Mesh axis, as in the communication counters of a run.
        kind: The collective, or ``send``.
        phase: ``forward`` or ``backward``.
        hidden: Overlaps a matrix product of the same layer.
    """

    axis: str
    kind: str
    bytes: float
    phase: str
    hidden: bool = False


@dataclass(frozen=True)
class OpCost:
    """One operator.

    Attributes:
        name: Its name; ``--assume operator-recompute`` accepts some of these.
        kept: Bytes kept for its backward.
        scores: FLOPs of attention's core in the forward.
        moved: Bytes that the forward reads and writes.
        sent: Its communication.
        transient: Most bytes in its backward beyond what it and the earlier operators keep, with the gradient that
            passes the layer by its residual.
        working: Most bytes in its forward beyond what it and the earlier operators keep.
        kept_again: More bytes that it keeps when its unit runs again, because they need not be made once more.
        recomputed: Its forward runs again before its backward.
        extra: Matrix products beyond the mathematics of a step, each with its phase, ``forward`` or ``backward``.
    """

    name: str
    kept: float = 0.0
    products: tuple[Product, ...] = ()
    scores: float = 0.0
    moved: float = 0.0
    sent: tuple[CommCost, ...] = ()
    transient: float = 0.0
    working: float = 0.0
    kept_again: float = 0.0
    recomputed: bool = False
    extra: tuple[tuple[str, Product], ...] = ()

    @property
    def flops(self) -> float:
        """FLOPs of the forward: matrix products and attention's core."""
        return sum(product.flops for product in self.products) + self.scores

    @property
    def extra_flops(self) -> float:
        """FLOPs of ``extra``, which no utilization counts."""
        return sum(product.flops for _, product in self.extra)


@dataclass(frozen=True)
class UnitCost:
    """A unit of the model: the embedding, a layer or the head.

    Attributes:
        name: ``embedding``, ``head``, or the kind of layer: dense, moe, universal, branches.
        operators: Its operators, in forward order.
        input_kept: Bytes of what its operators keep that are the input itself.
        arriving: Bytes of gradients that are in flight while it runs again.
    """

    name: str
    operators: tuple[OpCost, ...]
    input: float
    input_kept: float = 0.0
    arriving: float = 0.0

    @property
    def is_layer(self) -> bool:
        """True for layers, which may be recomputed, in contrast to embedding and head."""
        return self.name not in ("embedding", "head")

    @cached_property
    def kept(self) -> float:
        """Bytes kept from the forward to the backward."""
        return sum(operator.kept for operator in self.operators)

    @cached_property
    def kept_again(self) -> float:
        """Bytes beyond ``kept`` that it keeps when it runs again."""
        return sum(operator.kept_again for operator in self.operators)

    @cached_property
    def transient(self) -> float:
        """Most bytes that its backward needs in addition to ``kept``."""
        return self.peak - self.kept

    @cached_property
    def peak(self) -> float:
        """Most bytes alive in its backward, which frees what each operator keeps."""
        return self._most([operator.transient for operator in self.operators])

    @cached_property
    def working(self) -> float:
        """Most bytes alive in its forward."""
        return self._most([operator.working for operator in self.operators])

    def _most(self, temporary: Sequence[float]) -> float:
        most = kept = 0.0
        for operator, more in zip(self.operators, temporary, strict=True):
            kept += operator.kept
            most = max(most, kept + more)
        return most

    @cached_property
    def flops(self) -> int:
        """FLOPs of the forward."""
        return round(sum(operator.flops for operator in self.operators))

    def sent(self) -> list[CommCost]:
        """Return the communication of all operators."""
        return [sent for operator in self.operators for sent in operator.sent]


class ModelCost(ABC):
    """Costs of one micro-batch on a rank, unit by unit. Each model derives a class from this.

    FLOPs for utilization count the mathematics of a step: a matrix product [m, k] x [k, n] is 2 m k n, a backward is
    two forwards, and of causal attention's scores only the lower half counts. Recomputation, norms and activations are
    not counted, and no token is dropped. Source: the appendix of "Reducing Activation Recomputation in Large
    Transformer Models" (arXiv 2205.05198), with the causal half as Megatron-LM has counted it since 2025.
    """

    def __init__(self, sizes: Any, view: RankView) -> None:
        self.sizes, self.view = sizes, view

    @property
    @abstractmethod
    def embedding(self) -> UnitCost:
        """Cost of the embedding."""

    @abstractmethod
    def layer(self, number: int) -> UnitCost:
        """Return the cost of layer ``number``. Equal layers are computed once and share an object."""

    @property
    @abstractmethod
    def head(self) -> UnitCost:
        """Cost of everything after the last layer, including the losses."""

    @property
    @abstractmethod
    def attention(self) -> Sequence[OpCost]:
        """Operators of a layer's attention, including the norm before it."""

    @property
    def context(self) -> float:
        """Bytes of what all layers of a micro-batch share, which recomputed layers need until their backward."""
        return 0.0

    @property
    def tied(self) -> bool:
        """The head uses the word embedding's weight."""
        return True

    @property
    def largest(self) -> ModelCost:
        """Costs of the micro-batch that needs the most memory."""
        return self

    @classmethod
    def forward_flops(cls, sizes: Any, seq_length: int) -> list[int]:
        """Return the forward FLOPs of one sequence: embedding, each layer, head."""
        cost = cls(replace(sizes, seq_length=seq_length), RankView.alone(seq_length))
        return [0, *(cost.layer(number).flops for number in range(sizes.num_blocks)), cost.head.flops]

    @classmethod
    def step_flops(cls, sizes: Any, sequences: int, seq_length: int, predicted: int | None = None) -> int:
        """Return the FLOPs of forward and backward.

        Args:
            seq_length: Tokens of a sequence.
            predicted: Masked positions of all sequences, for a model whose vocabulary head runs only there.
        """
        return FORWARD_AND_BACKWARD * sequences * sum(cls.forward_flops(sizes, seq_length))
