"""What communicators keep on a device beside the tensors they move. Standard library only: the plan counts it too.

None of it is measured here: the figures are the libraries' own and those of their users, and a run can only be told
about how much it is.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType

MEBIBYTE = 2**20
# Blocks of a kernel that waits for or moves a message between two stages: enough for a network card or half of a
# node's link, and few enough beside the products that run meanwhile. To be measured where there are such devices.
QUEUE_CHANNELS = 4
# HCCL's buffers of groups that carry little: its own default for messages between two ranks (P2P_HCCL_BUFFSIZE).
SMALL_HCCL_MIB = 20
HCCL_MIB = 200
# Axes that sum a few numbers, or one embedding, a step.
LIGHT = frozenset({"pp", "data"})


@dataclass(frozen=True)
class CommunicatorBytes:
    """Of one communicator on one rank. axis: that sums, gathers and scatters. light: that carries little. queue: of
    messages one way between two ranks. peer: for each rank of the same node to which experts' rows go. source: where
    the figures come from."""

    axis: int
    light: int
    queue: int
    peer: int
    source: str

    def of(self, rounds: Collection[Collection[str]], queues: int, peers: int) -> int:
        """Of the axes' communicators, the world's among them, of so many queues, and of peers on the node."""
        light = sum(is_light(names) for names in rounds)
        kept = (len(rounds) - light) * self.axis + light * self.light
        return kept + queues * self.queue + peers * self.peer


def is_light(names: Collection[str]) -> bool:
    """Whether a communicator that axes share carries little."""
    return LIGHT.issuperset(names)


_CHANNEL = 12 * MEBIBYTE

COMMUNICATORS: Mapping[str, CommunicatorBytes] = MappingProxyType(
    {
        "cpu": CommunicatorBytes(0, 0, 0, 0, "gloo keeps nothing but sockets"),
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
            "HCCL: twice its buffer, HCCL_BUFFSIZE (200 MB unless set) or what the group asks for",
        ),
    }
)
