"""Kinds of devices: memory, compute, bandwidths, the sizes at which their kernels are efficient, communicators.

The run and the planner read the same rows, with their sources, from ``kinds.yaml``. Imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megapar.core.units import GIBIBYTE, MEGABYTE
from megapar.errors import Complaint, ConfigError

GIGA, TERA, MICRO = 10**9, 10**12, 1e-6
LINK_SHARE = 0.80  # Fraction of the data sheet's bandwidth that links reach; predictions are fitted with it.
# Fraction of the data sheet's FLOP/s with all units busy, and time to start and end a product (a model, not measured).
_TILE_SHARE, _START_SECONDS = 0.80, 2e-6
# The row that is used for an unknown device of each class.
_UNNAMED = MappingProxyType({"cuda": "h100-80g", "npu": "ascend-910b", "cpu": "cpu"})
# HCCL's buffers of groups with small messages: its own default for messages between two ranks (P2P_HCCL_BUFFSIZE).
SMALL_HCCL_MIB = 20
HCCL_MIB = 200
# Axes that sum only a few numbers, or one embedding, per step.
LIGHT = frozenset({"pp", "data"})
BLOCKWISE, TENSORWISE = "blockwise", "tensorwise"  # recipes of fp8


@dataclass(frozen=True)
class DeviceClass:
    """Parameters that devices with the same kernels share. ``kinds.yaml`` gives their sources.

    Attributes:
        tile: Rows and columns of a tile of a matrix product.
        launch_seconds: Minimum time between two kernels.
        latency_seconds: Minimum time of a collective.
        pieces: Maximum number of pieces of a collective that is hidden under a product.
        piece_bytes: Minimum bytes that a piece sends to each rank.
        least_rows: Minimum rows of a product that is cut, all its batches together.
        batched: Products of several batches with one weight are one kernel.
        hides: Collectives of linear layers are always hidden; otherwise only if predicted to be faster.
        compiler: Generates torch.compile's code: triton, c++ or none.
        logits_bytes: Bytes of fp32 logits that the loss computes at a time.
        one_hot_rows: Most rows of an embedding whose gradient is a product with one-hot indices.
        least_product_elements: Smallest weight whose gradient is added to its bucket by its product. For smaller ones
            the host takes longer for the product's node than for a copy.
        packs_rows: The gradients of a sharded bucket are copied into it by one kernel, once it has all of them.
        whole_elements: Most elements of the matrices that a rank puts together at a time, unless one is larger (Muon).
        queue_blocks: Multiprocessors that a kernel holds while it waits for or moves a message between two stages.
        receives_ahead: Computations between the launch of a pipeline's receive and its use; None for any number.
        least_document: Least positions of causal documents that are calls of whole samples instead of one for variable
            lengths, if none is shorter; 0 for none.
        document_step: Multiple of positions to which such documents are filled.
        beside_blocks: Time of a step while this many multiprocessors are held, relative to that alone.
    """

    tile: tuple[int, int]
    launch_seconds: float
    latency_seconds: float
    pieces: int
    piece_bytes: int
    least_rows: int
    batched: bool
    hides: bool
    compiler: str
    logits_bytes: int
    one_hot_rows: int
    least_product_elements: int
    packs_rows: bool
    whole_elements: int
    queue_blocks: int
    receives_ahead: int | None
    beside_blocks: Mapping[int, float]
    least_document: int
    document_step: int

    @property
    def beside_queues(self) -> tuple[float, ...]:
        """Factors of a computation's time beside the kernels of 0 to 4 queues: to and from both neighbours."""
        held = [queues * self.queue_blocks for queues in range(5)]
        return tuple(max([1.0, *(f for n, f in self.beside_blocks.items() if n <= blocks)]) for blocks in held)


@dataclass(frozen=True)
class DeviceKind:
    """One row of the device table.

    Attributes:
        flops: FLOP/s of matrix products, by dtype.
        inside: Bytes per second that one device can send inside its node.
        pair: Those that it can send to a single device of its node: fewer where links are a mesh.
        between: Bytes per second that one device can send to other nodes.
        host: Bytes per second that one device can copy to or from its host's memory, in each direction.
        kernels: Class of the device, whose forms of operators it runs: cuda, npu or cpu.
        capability: Compute capability of an NVIDIA GPU, (major, minor); None for other devices.
        driver_names: Regular expressions that match a part of the names that drivers report.
        family: The row stands for all models of a name, and may not be that of the device.
        replaced: Figures that are not the row's, for people.
    """

    name: str
    memory_bytes: int
    memory_bandwidth: float
    flops: Mapping[str, float]
    units: int
    node: int
    inside: float
    pair: float
    between: float
    host: float
    kernels: str
    capability: tuple[int, int] | None
    source: str
    driver_names: tuple[str, ...]
    family: bool = False
    replaced: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """Name of the row, with the figures that are not the row's."""
        return self.name + (f" with {', '.join(self.replaced)}" if self.replaced else "")

    def with_figures(
        self,
        dtype: str,
        *,
        tflops: float | None = None,
        memory_gib: float | None = None,
        link_gb: float | None = None,
        network_gb: float | None = None,
    ) -> DeviceKind:
        """Return the row with other figures, in the units of ``kinds.yaml``; None keeps the row's.

        Args:
            dtype: Dtype of the products that ``tflops`` is for. Nothing is known of those in other dtypes then.
            link_gb: GB/s to other devices of the node, in one direction.
            network_gb: GB/s to other nodes, in one direction.
        """
        figures: dict[str, Any] = {}
        texts = []
        if tflops is not None:
            figures["flops"] = MappingProxyType({dtype: tflops * TERA})
            texts.append(f"{tflops:g} TFLOP/s in {dtype}")
        if memory_gib is not None:
            figures["memory_bytes"] = round(memory_gib * GIBIBYTE)
            texts.append(f"{memory_gib:g} GiB")
        if link_gb is not None:
            figures["inside"] = figures["pair"] = link_gb * GIGA
            texts.append(f"{link_gb:g} GB/s in a node")
        if network_gb is not None:
            figures["between"] = network_gb * GIGA
            texts.append(f"{network_gb:g} GB/s between nodes")
        return replace(self, **figures, replaced=tuple(texts)) if figures else self

    def peak(self, dtype: str) -> float:
        """Return the FLOP/s of matrix products. Raises ConfigError if the device has none in this dtype."""
        if dtype not in self.flops:
            known = ", ".join(self.flops)
            raise ConfigError([Complaint("device-dtype", f"{self.name} has no {dtype} products; it has {known}.")])
        return self.flops[dtype]

    @property
    def default_dtype(self) -> str:
        """Dtype that --dtype auto would choose."""
        return "fp32" if self.kernels == "cpu" else "bf16" if "bf16" in self.flops else "fp16"

    @property
    def device_class(self) -> DeviceClass:
        """Class of the device."""
        return _tables()[1][self.kernels]

    def product_seconds(self, rows: int, inner: int, columns: int, dtype: str) -> float:
        """Return the seconds of one product [rows, inner] @ [inner, columns].

        The units compute tiles in waves. A partial wave takes as long as a full one.
        """
        tile_rows, tile_columns = self.device_class.tile
        tiles = -(-rows // tile_rows) * -(-columns // tile_columns)
        tile_seconds = 2 * tile_rows * tile_columns * inner / (self.peak(dtype) * _TILE_SHARE / self.units)
        waves = -(-tiles // self.units)
        return max(waves * tile_seconds + _START_SECONDS, self.device_class.launch_seconds)

    def inside_to(self, others: int) -> float:
        """Return the bytes per second that one device can send to this many others of its node."""
        return min(self.inside, self.pair * max(1, others))

    def send_seconds(self, size: float, ranks: int) -> float:
        """Return the seconds of a collective of ``ranks`` ranks that send ``size`` bytes each inside their node."""
        seconds = size / (self.inside_to(ranks - 1) * LINK_SHARE)
        return seconds + self.device_class.latency_seconds if size else 0.0


def kinds() -> Mapping[str, DeviceKind]:
    """Return all rows by name."""
    return _tables()[0]


def device_class(device_type: str) -> DeviceClass:
    """Return the class of torch's device type; the CPU's for other types, such as meta."""
    classes = _tables()[1]
    return classes.get(device_type, classes["cpu"])


def kind_called(device: str) -> DeviceKind | None:
    """Return the row for the name that a driver reports, by the longest match of a part; None for a MIG slice."""
    if " MIG " in device:  # a part of a GPU, with a part of its memory and units
        return None
    fits = {
        found.group(): kind
        for kind in kinds().values()
        for part in kind.driver_names
        if (found := re.search(part, device, re.IGNORECASE))
    }
    return fits[max(fits, key=len)] if fits else None


def kind_of(device_type: str, name: str) -> DeviceKind:
    """Return the row of a device: by the name that its driver reports, or the default of its type (cuda, npu, cpu)."""
    return kind_called(name) or kinds()[_UNNAMED[device_type]]


def fp8_needs(capability: tuple[int, int] | None, recipe: str) -> str:
    """Return what products in fp8 by this recipe need; "" if GPUs of this capability have them. None: no such GPU."""
    if recipe == BLOCKWISE:
        return "" if capability == (9, 0) else "compute capability 9.0 (Hopper)"
    return "" if (capability or (0, 0)) >= (8, 9) else "compute capability 8.9 or more (Ada)"


@cache
def _tables() -> tuple[Mapping[str, DeviceKind], Mapping[str, DeviceClass]]:
    import yaml

    text = Path(__file__).with_name("kinds.yaml").read_text(encoding="utf-8")
    rows, classes = yaml.safe_load_all(text)
    return (
        MappingProxyType({name: _kind(name, row) for name, row in rows.items()}),
        MappingProxyType({name: _class(row) for name, row in classes.items()}),
    )


def _kind(name: str, row: dict[str, Any]) -> DeviceKind:
    major, minor = row.pop("capability", (0, 0))
    row.setdefault("pair", row["inside"])
    return DeviceKind(
        name=name,
        memory_bytes=round(row.pop("memory_gib") * GIBIBYTE),
        flops=MappingProxyType({dtype: rate * TERA for dtype, rate in row.pop("flops").items()}),
        capability=(major, minor) if major else None,
        driver_names=tuple(row.pop("driver_names")),
        **{speed: row.pop(speed) * GIGA for speed in ("memory_bandwidth", "inside", "pair", "between", "host")},
        **row,
    )


def _class(row: dict[str, Any]) -> DeviceClass:
    del row["source"]
    rows, columns = row.pop("tile")
    return DeviceClass(
        tile=(rows, columns),
        launch_seconds=row.pop("launch") * MICRO,
        latency_seconds=row.pop("latency") * MICRO,
        piece_bytes=row.pop("piece_mib") * MEGABYTE,
        logits_bytes=row.pop("logits_mib") * MEGABYTE,
        **row,
    )


@dataclass(frozen=True)
class CommunicatorBytes:
    """Device memory of one communicator on one rank, in addition to the tensors that it moves: estimates, not measured.

    Attributes:
        axis: Bytes of a communicator of collectives.
        light: Bytes of one with small messages only.
        queue: Bytes of a one-way queue between two ranks, for each of its blocks.
        peer: Bytes for each rank of the same node to which rows of experts are sent.
    """

    axis: int
    light: int
    queue: int
    peer: int
    source: str

    def of(self, rounds: Collection[Collection[str]], queues: int, peers: int) -> int:
        """Return the bytes of all communicators of a rank.

        Args:
            queues: Blocks of all queues (``DeviceClass.queue_blocks``).
            rounds: For each communicator, including the world's, the names of the axes that share it.
            peers: Number of other ranks of the ``ep`` axis on this node.
        """
        light = sum(is_light(names) for names in rounds)
        axes = (len(rounds) - light) * self.axis + light * self.light
        return axes + queues * self.queue + peers * self.peer


def is_light(names: Collection[str]) -> bool:
    """Return True if a communicator that these axes share has small messages only."""
    return LIGHT.issuperset(names)


_CHANNEL = 12 * MEGABYTE

COMMUNICATORS: Mapping[str, CommunicatorBytes] = MappingProxyType(
    {
        "cpu": CommunicatorBytes(0, 0, 0, 0, "gloo keeps only sockets"),
        "cuda": CommunicatorBytes(
            24 * _CHANNEL,
            24 * _CHANNEL,
            _CHANNEL,
            32 * _CHANNEL,
            "NCCL: 10 MiB to receive and 2 MiB to send for each channel of a connection; 24 channels of a ring, as "
            "many of a queue as it has blocks, and 32 to each GPU of the node of an all-to-all, where 3.28 GB were "
            "measured for 7 of them (H100, nccl issue 1685)",
        ),
        "npu": CommunicatorBytes(
            2 * HCCL_MIB * MEGABYTE,
            2 * SMALL_HCCL_MIB * MEGABYTE,
            2 * SMALL_HCCL_MIB * MEGABYTE,
            0,
            "HCCL: twice its buffer, HCCL_BUFFSIZE (200 MB unless set) or the size that the group requests",
        ),
    }
)
