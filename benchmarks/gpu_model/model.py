"""Time of a sequence of operators on one GPU: the host launches, the device computes in order, messages on a link.

* A kernel starts when the host has launched it and the device is free. So each stretch between two waits of the host
  takes the longer of host and device.
* When the host waits, everything that it has launched ends first; the device is idle until the next launch.
* Products compute tiles in waves: a partial wave takes as long as a full one.
* All-to-alls are exposed. The reduce-scatters of gradients run next to the backward until the gradient norm, whose
  all-reduce waits for them. The all-gathers of parameters run next to the following forward.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from benchmarks.gpu_model.inputs import Inputs
from megapar.core.device.kinds import DeviceKind, kinds

BF16_BYTES = 2
# Layers of the two counts. The first layer also hides or shows the start of a step.
DEPTHS = (2, 3)
GPU = "h200-141g"
DTYPE = "bf16"
ALL_TO_ALL, ALL_REDUCE = "alltoall_base_", "allreduce_"
EXPOSED = frozenset({ALL_TO_ALL, ALL_REDUCE})
PRODUCTS, ATTENTION, BYTES, GAPS, EXPOSED_MESSAGES = "products", "attention", "bytes", "gaps", "messages"


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

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> Counted:
        """Return the counts that ``dataclasses.asdict`` gave."""
        return cls(**{**found, **{key: tuple(map(_operation, found[key])) for key in ("few", "more")}})


def _operation(found: Mapping[str, Any]) -> Operation:
    return Operation(**{**found, "gemms": tuple(Gemm(*gemm) for gemm in found["gemms"])})


def totals(operations: Sequence[Operation]) -> dict[str, float]:
    """Return the sums over operators; of messages their bytes, by collective."""
    gemms = [gemm for operation in operations for gemm in operation.gemms]
    sums = {
        "kernels": sum(operation.kernels for operation in operations),
        "bytes": sum(operation.bytes + operation.gathered_bytes for operation in operations),
        "gemms": len(gemms),
        "gemm_flops": sum(gemm.flops for gemm in gemms),
        "attention_flops": sum(operation.attention_flops for operation in operations),
        "waits": sum(operation.waits for operation in operations),
    }
    for operation in operations:
        if operation.message:
            sums[operation.message] = sums.get(operation.message, 0) + operation.message_bytes
    return sums


def of_a_layer(counted: Counted) -> dict[str, float]:
    """Return the sums over the operators of one more layer."""
    few = totals(counted.few)
    return {name: size - few.get(name, 0) for name, size in totals(counted.more).items()}


@dataclass(frozen=True)
class Prediction:
    """Times of a layer and of what is beside it.

    Attributes:
        layer_seconds: One more layer in a step.
        beside_seconds: The rest of a step.
        layer_mfu: Model FLOPs of a layer over what the device could do in its time.
        device: Device seconds of a layer by part; they add up to more than the layer where the host is hidden, and to
            less where the device waits for it.
        host_seconds: Host time of a layer's launches.
    """

    layer_seconds: float
    beside_seconds: float
    layer_mfu: float
    device: dict[str, float]
    host_seconds: float


class Gpu:
    """A GPU with these inputs, all read in one way (slow, middle or fast)."""

    def __init__(self, inputs: Inputs, way: str, kind: DeviceKind | None = None) -> None:
        self._rate = {name: figure.si(way) for name, figure in inputs.items()}
        self._kind = kind or kinds()[GPU]

    @property
    def peak(self) -> float:
        """FLOP/s on the data sheet, of which MFU is a share."""
        return self._kind.peak(DTYPE)

    def gemm_seconds(self, gemm: Gemm) -> float:
        """Return the time of a product: of its waves of tiles, or of its bytes if they take longer."""
        tile_rows, tile_columns = self._kind.device_class.tile
        rows = math.ceil(gemm.rows / gemm.groups / tile_rows)
        tiles = gemm.groups * rows * math.ceil(gemm.columns / tile_columns)
        waves = math.ceil(tiles / self._kind.units)
        rate = self._rate["gemm" if gemm.groups == 1 else "grouped_gemm"]
        computing = waves * self._kind.units * 2 * tile_rows * tile_columns * gemm.inner / rate
        return max(computing, gemm.bytes / self._rate["bandwidth"])

    def message_seconds(self, operation: Operation) -> float:
        """Return the time of a message."""
        rate = self._rate["all_to_all" if operation.message == ALL_TO_ALL else "collectives"]
        if operation.unaligned:
            rate *= self._rate["unaligned_share"]
        return self._rate["latency"] + operation.message_bytes / rate

    def parts(self, operation: Operation) -> dict[str, float]:
        """Return the device time of an operator by part, without a hidden message."""
        exposed = operation.message in EXPOSED
        return {
            PRODUCTS: sum(map(self.gemm_seconds, operation.gemms)),
            ATTENTION: operation.attention_flops / self._rate["attention"],
            BYTES: operation.bytes / self._rate["bandwidth"]
            + operation.gathered_bytes / self._rate["gather_bandwidth"],
            GAPS: 0.0 if operation.message else operation.kernels * self._rate["gap"],
            EXPOSED_MESSAGES: self.message_seconds(operation) if exposed else 0.0,
        }

    def host_seconds(self, operation: Operation) -> float:
        """Return the host time of an operator's launches."""
        return operation.kernels * self._rate["launch"]

    def step_seconds(self, operations: Sequence[Operation]) -> float:
        """Return the time from the first launch to the end of the last kernel."""
        host = device = link = 0.0
        for one in operations:
            if one.waits:
                host = max(host, device) + one.waits * self._rate["wait"]
            first = host + self.host_seconds(one) / max(1, one.kernels)
            host += self.host_seconds(one)
            if one.message and one.message not in EXPOSED:
                link = max(link, device, first) + self.message_seconds(one)
                continue
            if one.message == ALL_REDUCE:
                device = max(device, link)
            busy = sum(self.parts(one).values())
            # Of several kernels the last one cannot start before its launch.
            device = max(max(device, first) + busy, host + busy / max(1, one.kernels))
        return max(host, device)

    def predict(self, counted: Counted) -> Prediction:
        """Return the times of a counted run."""
        few, more = self.step_seconds(counted.few), self.step_seconds(counted.more)
        layer = more - few
        device: Counter[str] = Counter()
        for sign, operations in ((1, counted.more), (-1, counted.few)):
            for operation in operations:
                for part, seconds in self.parts(operation).items():
                    device[part] += sign * seconds
        host = sum(map(self.host_seconds, counted.more)) - sum(map(self.host_seconds, counted.few))
        mfu = counted.layer_flops / layer / self.peak
        return Prediction(layer, few - DEPTHS[0] * layer, mfu, dict(device), host)

    def step(self, counted: Counted, layers: int) -> tuple[float, float]:
        """Return (seconds, MFU) of a step with this many layers."""
        found = self.predict(counted)
        seconds = layers * found.layer_seconds + found.beside_seconds
        return seconds, (layers * counted.layer_flops + counted.beside_flops) / seconds / self.peak
