"""Device memory of communicators, in addition to the tensors that they move. Standard library only, for the planner.

None of it is measured here. The figures are estimates from the documentation of the libraries and from their users.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType

MEBIBYTE = 2**20
# Blocks of a kernel that waits for or moves a message between two stages: enough for a network card or half of a
# node's link, and few enough to leave room for the products that run at the same time. Not measured yet.
QUEUE_CHANNELS = 4
# HCCL's buffers of groups with small messages: its own default for messages between two ranks (P2P_HCCL_BUFFSIZE).
SMALL_HCCL_MIB = 20
HCCL_MIB = 200
# Axes that sum only a few numbers, or one embedding, per step.
LIGHT = frozenset({"pp", "data"})


@dataclass(frozen=True)
class CommunicatorBytes:
    """Bytes of one communicator on one rank.

    Attributes:
        axis: Bytes of a communicator of collectives.
        light: Bytes of one with small messages only.
        queue: Bytes of a one-way queue between two ranks.
        peer: Bytes for each rank of the same node to which rows of experts are sent.
        source: Source of the figures.
    """

    axis: int
    light: int
    queue: int
    peer: int
    source: str

    def of(self, rounds: Collection[Collection[str]], queues: int, peers: int) -> int:
        """Return the bytes of all communicators of a rank.

        Args:
            rounds: For each communicator, including the world's, the names of the axes that share it.
            queues: Number of queues.
            peers: Number of other ranks of the ``ep`` axis on this node.
        """
        light = sum(is_light(names) for names in rounds)
        axes = (len(rounds) - light) * self.axis + light * self.light
        return axes + queues * self.queue + peers * self.peer


def is_light(names: Collection[str]) -> bool:
    """Return True if a communicator that these axes share has small messages only."""
    return LIGHT.issuperset(names)


_CHANNEL = 12 * MEBIBYTE

COMMUNICATORS: Mapping[str, CommunicatorBytes] = MappingProxyType(
    {
        "cpu": CommunicatorBytes(0, 0, 0, 0, "gloo keeps only sockets"),
        "cuda": CommunicatorBytes(
            24 * _CHANNEL,
            24 * _CHANNEL,
            QUEUE_CHANNELS * _CHANNEL,
            32 * _CHANNEL,
            "NCCL: 10 MiB to receive and 2 MiB to send for each channel of a connection; 24 channels of a ring, as "
            "many of a queue as it has blocks, and 32 to each GPU of the node of an all-to-all, where 3.28 GB were "
            "measured for 7 of them (H100, nccl issue 1685)",
        ),
        "npu": CommunicatorBytes(
            2 * HCCL_MIB * MEBIBYTE,
            2 * SMALL_HCCL_MIB * MEBIBYTE,
            2 * SMALL_HCCL_MIB * MEBIBYTE,
            0,
            "HCCL: twice its buffer, HCCL_BUFFSIZE (200 MB unless set) or the size that the group requests",
        ),
    }
)
