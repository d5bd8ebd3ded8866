"""The choice between plain dispatch and dispatch by node, from a configuration and a device. Does not import torch.

Every rank makes it from its flags, its launcher's variables and its device, and declares it before any process group
exists (``health/start/declared.py``).
"""

from __future__ import annotations

from dataclasses import dataclass

from megapar.arguments import Config
from megapar.core.device.kinds import DeviceKind
from megapar.errors import Complaint, ConfigError
from megapar.model.decoder.sizes import DecoderSizes
from megapar.moe.dispatch_bytes import MOST_EXPERTS, DispatchBytes
from megapar.moe.row_counts import dispatched_rows
from megapar.moe.sizes import MoeSizes
from megapar.training.building.segments import ITEM_BYTES

LEAST_GAIN = 1.1  # of the time of plain dispatch over that by node, for ``auto``
NODE, PLAIN = "node", "plain"


@dataclass(frozen=True)
class DispatchChoice:
    """The dispatch of a run.

    Attributes:
        node_ranks: Ranks of ep on each node, between which tokens travel once; 0: the dispatch is plain.
        reason: Why, for people.
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

    Raises ConfigError if ``--moe-dispatch node`` is requested and the nodes do not fit.

    Args:
        node: Ranks of a node if neither a flag nor the launcher tells; None: all ranks are on one.
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
    return DispatchChoice(local if gain >= LEAST_GAIN else 0, reason)


def estimated_gain(config: Config, moe: MoeSizes, kind: DeviceKind, dtype: str, local: int) -> float:
    """Return the time of the four passes of plain dispatch, relative to that by node.

    A plain pass is one collective on both links, a pass by node is two, one after the other.

    Args:
        moe: Sizes of the layer.
        local: Ranks of ep on each node.
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
    latency = kind.device_class.latency_seconds
    plain = by_node = 0.0
    for sent in layer.plain(tokens).values():
        plain += max(sent.between / kind.between, sent.within / kind.inside) + latency
    for sent in layer.by_node(tokens).values():
        by_node += sent.between / kind.between + sent.within / kind.inside + latency * (2 if local > 1 else 1)
    return plain / by_node


def assumed_node(kind: DeviceKind, world_size: int) -> int:
    """Return the ranks of a node of a planned run. A machine whose kind has one device may run any number of ranks."""
    return kind.node if kind.node > 1 else world_size
