"""Work of a training step on a GPU as its trace counts it: a sequence of operators, in the order of their launch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

BF16_BYTES = 2
# Layers of the two counts. The first layer also hides or shows the start of a step.
DEPTHS = (2, 3)


class Gemm(NamedTuple):
    """Matrix product [rows, inner] x [inner, columns].

    Attributes:
        rows: Rows of the result, of all groups together.
        columns: Columns of the result.
        inner: Dimension that is summed over.
        groups: Products of the kernel, whose results are separate (grouped GEMM).
    """

    rows: float
    columns: int
    inner: float
    groups: int = 1

    @property
    def flops(self) -> float:
        """FLOPs of all groups."""
        return 2 * self.rows * self.columns * self.inner

    @property
    def bytes(self) -> float:
        """Bytes of inputs and result in bf16, each once."""
        inputs = self.rows * self.inner + self.groups * self.inner * self.columns
        return BF16_BYTES * (inputs + self.rows * self.columns)


@dataclass(frozen=True)
class Operation:
    """One operator, or several of which only the sums are known.

    Attributes:
        name: "OPERATOR in CALLER".
        kernels: Kernels that it launches.
        bytes: Bytes that it reads and writes in order, apart from products, attention and messages.
        gathered_bytes: The same of operators that pick rows.
        gemms: Its products.
        attention_flops: FLOPs of its attention, of causal scores only the lower half.
        message: Its collective, or "".
        message_bytes: Bytes that the message sends to other ranks.
        unaligned: Parts of the message are not aligned to 16 bytes.
        waits: Times that the host waits for the device before it.
    """

    name: str
    kernels: int = 0
    bytes: float = 0.0
    gathered_bytes: float = 0.0
    gemms: tuple[Gemm, ...] = ()
    attention_flops: float = 0.0
    message: str = ""
    message_bytes: float = 0.0
    unaligned: bool = False
    waits: int = 0


@dataclass(frozen=True)
class Counted:
    """A run, counted at both depths.

    Attributes:
        name: Name of the layer in ``scripts/trace_cuda_budgets.py``.
        few: Operators of a step of the last rank, at the smaller depth.
        more: The same with one more layer.
        layer_flops: Model FLOPs of a layer in a step of one rank, forward and backward.
        beside_flops: The same of everything beside the layers.
    """

    name: str
    few: tuple[Operation, ...]
    more: tuple[Operation, ...]
    layer_flops: float
    beside_flops: float

    def to_dict(self) -> dict[str, Any]:
        """Return the counts for JSON, without the fields that are 0."""

        def short(operations: Sequence[Operation]) -> list[dict[str, Any]]:
            return [{key: value for key, value in asdict(one).items() if value} for one in operations]

        return {**asdict(self), "few": short(self.few), "more": short(self.more)}

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> Counted:
        """Return the counts that ``to_dict`` gave."""
        sequences = {key: tuple(_operation(one) for one in found[key]) for key in ("few", "more")}
        return cls(**{**found, **sequences})


@dataclass(frozen=True)
class Totals:
    """Sums over operators.

    Attributes:
        kernels: Kernels.
        bytes: Bytes outside products, attention and messages.
        gemms: Products.
        gemm_flops: FLOPs of the products.
        attention_flops: FLOPs of attention.
        message_bytes: Bytes sent, by collective.
        waits: Waits of the host.
    """

    kernels: int
    bytes: float
    gemms: int
    gemm_flops: float
    attention_flops: float
    message_bytes: Mapping[str, float] = field(default_factory=dict)
    waits: int = 0


def totals(operations: Sequence[Operation]) -> Totals:
    """Return the sums."""
    gemms = [gemm for one in operations for gemm in one.gemms]
    sent = {one.message: 0.0 for one in operations if one.message}
    for one in operations:
        if one.message:
            sent[one.message] += one.message_bytes
    return Totals(
        sum(one.kernels for one in operations),
        sum(one.bytes + one.gathered_bytes for one in operations),
        len(gemms),
        sum(gemm.flops for gemm in gemms),
        sum(one.attention_flops for one in operations),
        sent,
        sum(one.waits for one in operations),
    )


def _operation(found: Mapping[str, Any]) -> Operation:
    return Operation(**{**found, "gemms": tuple(Gemm(*gemm) for gemm in found.get("gemms", ()))})
