"""The bytes of both dispatches in a step of the trainer: the counters, and the routing that the routers made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from megapar.moe.dispatch_bytes import Sent, node_row_bytes, row_columns
from megapar.training.step.observer import StepObserver
from tests.support.ranks import run_ranks
from tests.support.sent_rows import plain_rows, rows_by_node
from tests.support.training import COMMON, SMALL, last_wins, make_trainer

HIDDEN, TOPK, EXPERTS, RANKS, NODE = 32, 3, 8, 4, 2
FLAGS = (
    "--ep-degree",
    "4",
    "--num-experts",
    "8",
    "--moe-router-topk",
    "3",
    "--global-batch-size",
    "8",
    "--dtype",
    "fp32",
)


@dataclass
class StepTraffic:
    """What a rank sent in a step, by axis and kind, and the experts of its tokens, message by message."""

    sent: dict[str, int]
    routing: list[list[list[int]]]


class Recorded(StepObserver):
    """Keeps the experts of each token, message by message."""

    def __init__(self) -> None:
        self.messages: list[list[list[int]]] = []

    def experts_chosen(self, layer: int, experts_Tk: Tensor) -> Tensor:
        self.messages.append(experts_Tk.tolist())
        return experts_Tk


def step(rank: int, world_size: int, rendezvous: str, flags: Sequence[str]) -> StepTraffic:
    seen = Recorded()
    line = last_wins((*SMALL["moe"], *COMMON), (*FLAGS, *flags))
    trainer = make_trainer("moe", line, rendezvous, observer=seen)
    sent = trainer.step().sent_bytes
    trainer.job.sharding.wait()
    trainer.loader.close()
    trainer.watch.close()
    trainer.world.close()
    return StepTraffic(sent, seen.messages)


def needed(ranks: Sequence[StepTraffic], count: Callable[..., tuple[Sent, ...]]) -> Sent:
    """Rows of all ranks in one pass of all messages of the step."""
    messages = [count(routing, EXPERTS, NODE) for routing in zip(*(rank.routing for rank in ranks), strict=True)]
    sent = [one for message in messages for one in message]
    return Sent(sum(one.between for one in sent), sum(one.within for one in sent))


def test_by_node_ranks_send_the_rows_that_the_routing_needs() -> None:
    ranks = run_ranks(RANKS, step, ("--moe-dispatch", "node", "--ranks-per-node", str(NODE)), group=False)
    four_passes = 2 * (node_row_bytes(HIDDEN, TOPK, 4, 4) + 4 * HIDDEN)
    rows = needed(ranks, rows_by_node)
    assert sum(rank.sent["ep_between/all_to_all"] for rank in ranks) == four_passes * rows.between
    assert sum(rank.sent["ep_within/all_to_all"] for rank in ranks) == four_passes * rows.within
    assert not any("ep/all_to_all" in rank.sent for rank in ranks)


def test_plain_ranks_send_a_row_for_each_pair() -> None:
    ranks = run_ranks(RANKS, step, ("--moe-dispatch", "plain"), group=False)
    four_passes = 2 * 4 * (row_columns(HIDDEN, 4, 4) + HIDDEN)
    rows = needed(ranks, plain_rows)
    counts = len(ranks[0].routing) * 8 * EXPERTS * (RANKS - 1)
    sent = sum(rank.sent["ep/all_to_all"] for rank in ranks)
    assert sent == four_passes * (rows.between + rows.within) + counts
