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
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.gpu_model.inputs import Inputs
from benchmarks.gpu_model.work import DEPTHS, Counted, Gemm, Operation
from megapar.core.device.kinds import DeviceKind, kinds

GPU = "h200-141g"
DTYPE = "bf16"
ALL_TO_ALL, ALL_REDUCE = "alltoall_base_", "allreduce_"
EXPOSED = frozenset({ALL_TO_ALL, ALL_REDUCE})
PRODUCTS, ATTENTION, BYTES, GAPS, EXPOSED_MESSAGES = "products", "attention", "bytes", "gaps", "messages"


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
