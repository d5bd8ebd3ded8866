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
    messages one way between two ranks. source: where the figures come from."""

    axis: int
    light: int
    queue: int
    source: str

    def of(self, rounds: Collection[Collection[str]], queues: int) -> int:
        """Of the axes' communicators, the world's among them, and of so many queues."""
        light = sum(is_light(names) for names in rounds)
        return (len(rounds) - light) * self.axis + light * self.light + queues * self.queue


def is_light(names: Collection[str]) -> bool:
    """Whether a communicator that axes share carries little."""
    return LIGHT.issuperset(names)


_CHANNEL = 12 * MEBIBYTE

COMMUNICATORS: Mapping[str, CommunicatorBytes] = MappingProxyType(
    {
        "cpu": CommunicatorBytes(0, 0, 0, "gloo keeps nothing but sockets"),
        "cuda": CommunicatorBytes(
            24 * _CHANNEL,
            24 * _CHANNEL,
            QUEUE_CHANNELS * _CHANNEL,
            "NCCL: 10 MiB to receive and 2 MiB to send for each channel of a connection (H100, nccl issue 1685), 24 "
            "channels of a ring, and as many of a queue as it has blocks",
        ),
        "npu": CommunicatorBytes(
            2 * HCCL_MIB * MEBIBYTE,
            2 * SMALL_HCCL_MIB * MEBIBYTE,
            2 * SMALL_HCCL_MIB * MEBIBYTE,
            "HCCL: twice its buffer, HCCL_BUFFSIZE (200 MB unless set) or what the group asks for",
        ),
    }
)
