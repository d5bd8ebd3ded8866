"""Choices that depend on a kind of device and its figures: the overlap of linear layers, the dispatch of experts.

Does not import torch. Every rank chooses the dispatch from its flags, its launcher's variables and its device, and
declares it before any process group exists (``health/declaration.py``).
"""

from __future__ import annotations

from dataclasses import dataclass

from megapar.arguments import Config
from megapar.core.device.kinds import DeviceKind, kind_called, kind_of
from megapar.core.tensor_parallel.overlap_price import OFF, ON, CutLinear, Price
from megapar.errors import Complaint, ConfigError
from megapar.model.attention import kinds as attention_kinds
from megapar.model.decoder.sizes import DecoderSizes
from megapar.model.sizes import ModelSizes
from megapar.moe.dispatch_bytes import MOST_EXPERTS, DispatchBytes, dispatched_rows
from megapar.moe.sizes import MoeSizes
from megapar.training.building.partition import ITEM_BYTES

FIGURES = ("device_tflops", "device_memory_gib", "link_gb", "network_gb")  # flags that give a figure of a device

LEAST_SPEEDUP = 1.1  # of the time of plain dispatch over that by node, for ``auto``
NODE, PLAIN = "node", "plain"


def with_figures(kind: DeviceKind, config: Config) -> DeviceKind:
    """Return the row with the figures that the flags of ``FIGURES`` give."""
    given = config.runtime
    dtype = kind.default_dtype if config.training.dtype == "auto" else config.training.dtype
    return kind.with_figures(
        dtype,
        tflops=given.device_tflops,
        memory_gib=given.device_memory_gib,
        link_gb=given.link_gb,
        network_gb=given.network_gb,
    )


def kind_of_run(config: Config, device_type: str, name: str) -> DeviceKind:
    """Return the row of a run's devices, with figures of flags. ``name``: by its driver, "" for one not here."""
    return with_figures(kind_of(device_type, name), config)


def unknown_device(config: Config, device_type: str, name: str) -> str:
    """Return a sentence about a device that has no row, whose figures are then another row's; "" if it has one."""
    called, assumed = kind_called(name), kind_of_run(config, device_type, name)
    if called is not None and not called.family:
        return ""
    mfu = "and MFU that of --device-tflops or a measured one" if called is None else "and so does MFU"
    return (
        f"device: {name} is not in the device table; choices that depend on speed take the figures of {assumed.title}, "
        f"{mfu}"
    )


def tensor_overlap(config: Config, kind: DeviceKind, dtype: str, sizes: ModelSizes | None = None) -> str:
    """Return off, on or fused: the requested overlap, or for ``auto`` the faster one in ``dtype`` by estimate.

    ``auto`` never chooses torch's fused operators, because they are not confirmed to be faster on any device.
    It is on where a class of devices is measured to gain (a CPU), and off without a speed for ``dtype``.
    """
    requested = config.parallel.tp_comm_overlap
    if requested != "auto":
        return requested
    if kind.device_class.hides or dtype not in kind.flops:
        return ON if kind.device_class.hides else OFF
    mp = config.grid.mp
    sizes = sizes or config.model
    rows = config.training.micro_batch_size * sizes.seq_length // config.grid.cp
    price = Price(kind, dtype, ITEM_BYTES[dtype], mp, rows, config.parallel.sequence_parallel)
    return price.best(cut_linears(sizes, mp))


def cut_linears(sizes: ModelSizes, mp: int) -> tuple[CutLinear, ...]:
    """Return a rank's column and row parallel layers, for one block of each kind in the model."""
    H, (qkv_width, output_width) = sizes.hidden_size, attention_kinds.kind_of(sizes.attention).widths(sizes.attention)
    gates = 2 if sizes.gated else 1
    linears = []
    for width in sizes.mlp_widths:
        linears += [CutLinear(True, H, qkv_width // mp), CutLinear(False, output_width // mp, H)]
        if width:
            linears += [CutLinear(True, H, gates * width // mp), CutLinear(False, width // mp, H)]
    return tuple(linears)


@dataclass(frozen=True)
class DispatchChoice:
    """The dispatch of a run.

    Attributes:
        node_ranks: Ranks of ep on each node, between which tokens travel once; 0: the dispatch is plain.
    """

    node_ranks: int
    reason: str

    @property
    def name(self) -> str:
        """The value of ``--moe-dispatch`` that asks for it."""
        return NODE if self.node_ranks else PLAIN

    def describe(self) -> str:
        """Return the dispatch and its reason as one line."""
        return f"{self.name} ({self.reason})"


def dispatch_choice(config: Config, kind: DeviceKind, dtype: str, node: int | None = None) -> DispatchChoice:
    """Return the dispatch of a run on devices of this kind, in ``dtype``.

    ``node``: Ranks of a node if neither a flag nor the launcher tells; None: all ranks are on one. Raises ConfigError
    if ``--moe-dispatch node`` is requested and the nodes do not fit.
    """
    grid, sizes, requested = config.grid, config.model, config.moe.moe_dispatch
    moe = sizes.moe if isinstance(sizes, DecoderSizes) else None
    if moe is None or grid.ep == 1:
        return DispatchChoice(0, "ep has one rank")
    if requested == PLAIN:
        return DispatchChoice(0, "by --moe-dispatch")
    ranks = config.parallel.ranks_per_node or node or grid.world_size
    local = grid.ep_node_ranks(ranks)
    if requested == NODE:
        if local is None or local == grid.ep:
            unknown = "" if config.parallel.ranks_per_node or node else ", as far as this rank's launcher tells"
            message = f"--moe-dispatch node, but the {grid.ep} ranks of ep are not several nodes of {ranks}{unknown}."
            raise ConfigError([Complaint("moe-dispatch-nodes", message, "Use --moe-dispatch plain.")])
        return DispatchChoice(local, "by --moe-dispatch")
    if local is None:
        return DispatchChoice(0, f"the {grid.ep} ranks of ep are not whole nodes of {ranks} ranks")
    if local == grid.ep:
        return DispatchChoice(0, f"the {grid.ep} ranks of ep are on one node")
    if moe.num_experts > MOST_EXPERTS:
        return DispatchChoice(0, f"by node takes {MOST_EXPERTS:,} experts at most")
    gain = estimated_gain(config, moe, kind, dtype, local)
    reason = f"{gain:.2f} times the speed of plain by estimate on {kind.title}, {grid.ep // local} nodes"
    return DispatchChoice(local if gain >= LEAST_SPEEDUP else 0, reason)


def estimated_gain(config: Config, moe: MoeSizes, kind: DeviceKind, dtype: str, local: int) -> float:
    """Return the time of the four passes of plain dispatch, relative to that by node.

    A plain pass is one collective on both links, a pass by node is two, one after the other. ``local`` is the number of
    ranks of ep on each node.
    """
    grid, item = config.grid, ITEM_BYTES[dtype]
    shared = grid.cp * (grid.mp if config.parallel.sequence_parallel else 1) * max(1, config.ampipe.ampipe_degree)
    tokens = config.training.micro_batch_size * config.model.seq_length // shared
    kept = dispatched_rows(moe, tokens, tokens, even=False) / max(1, tokens * moe.topk)
    layer = DispatchBytes.of(
        moe,
        ep=grid.ep,
        node_ranks=local,
        item_bytes=item,
        weight_bytes=max(4, item),
        kept=kept,
        by_expert=config.ampipe.use_pipe_experts,
    )
    latency, inside = kind.device_class.latency_seconds, kind.inside_to(local - 1)
    plain = by_node = 0.0
    for sent in layer.plain(tokens).values():
        plain += max(sent.between / kind.between, sent.within / inside) + latency
    for sent in layer.by_node(tokens).values():
        by_node += sent.between / kind.between + sent.within / inside + latency * (2 if local > 1 else 1)
    return plain / by_node


def assumed_node(kind: DeviceKind, world_size: int) -> int:
    """Return the ranks of a node of a planned run. A machine whose kind has one device may run any number of ranks."""
    return kind.node if kind.node > 1 else world_size
