"""One of four ranks: steps of the real trainer, plain and by node, on one set of process groups.

Requests: one of ``shape.WAYS``; ``bytes WAY`` (a step whose routing is recorded: what all ranks sent by their counters,
and what the routing needs).
"""

from __future__ import annotations

import argparse
import os
import time
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.node_dispatch.shape import HIDDEN, NODE, RANKS, SHAPES, WAYS
from benchmarks.support.contest import Figures, serve
from megapar.arguments import parse
from megapar.core.comm.world import World
from megapar.core.device.pick import pick
from megapar.moe.dispatch_bytes import node_row_bytes, row_columns
from megapar.trainer import Trainer
from megapar.training.building.corpus import make_corpus
from megapar.training.step.observer import StepObserver
from tests.support.sent_rows import plain_rows, rows_by_node


class Routing(StepObserver):
    """Observer that keeps the experts of each token while ``messages`` is a list."""

    def __init__(self) -> None:
        self.messages: list[list[list[int]]] | None = None

    def experts_chosen(self, layer: int, experts_Tk: Tensor) -> Tensor:
        """Keep the choice."""
        if self.messages is not None:
            self.messages.append(experts_Tk.tolist())
        return experts_Tk


class Steps:
    """Steps by request: a way, or ``bytes`` and a way."""

    def __init__(self, rank: int, rendezvous: str, shape: str) -> None:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank % NODE), WORLD_SIZE=str(RANKS))
        self._shape, self._routing = SHAPES[shape], Routing()
        configs = {way: parse("moe", self._shape.flags(way), dict(os.environ)) for way in WAYS}
        first = configs[WAYS[0]]
        self._world = World.start(first.grid, pick("cpu"), timedelta(minutes=10), rendezvous)
        corpus = make_corpus(first)
        self._trainers = {
            way: Trainer(made, self._world, corpus, observer=self._routing) for way, made in configs.items()
        }
        for trainer in self._trainers.values():
            trainer.start()

    def __call__(self, request: str) -> Figures:
        """Return the seconds of a step, those of waits for experts' messages, and the norm of the gradient."""
        kind, _, way = request.rpartition(" ")
        if kind == "bytes":
            return self._bytes(way)
        dist.barrier()
        start = time.perf_counter()
        step = self._trainers[way].step()
        seconds = time.perf_counter() - start
        waits = {} if step.exposed is None else step.exposed.seconds()
        waited = sum(size for kind, size in waits.items() if kind.startswith(("ep/", "ep_")))
        return {"seconds": seconds, "norm": float(step.norm), "waited": waited}

    def _bytes(self, way: str) -> Figures:
        """Return all ranks' bytes: sent by their counters, needed by their routing; and those that leave a node."""
        self._routing.messages = []
        sent = self._trainers[way].step().sent_bytes
        every: list[tuple[dict[str, int], list[list[list[int]]]]] = [({}, [])] * RANKS
        dist.all_gather_object(every, (sent, self._routing.messages))
        self._routing.messages = None
        count = rows_by_node if way == "node" else plain_rows
        messages = [count(one, self._shape.experts, NODE) for one in zip(*(kept for _, kept in every), strict=True)]
        between, within = (
            sum(getattr(rank, where) for message in messages for rank in message) for where in ("between", "within")
        )
        rows = node_row_bytes(HIDDEN, self._shape.topk, 4, 4) if way == "node" else 4 * row_columns(HIDDEN, 4, 4)
        four = 2 * (rows + 4 * HIDDEN)
        found = {"needed": four * (between + within), "between": four * between, "tokens": float(self._tokens(every))}
        total = {
            name: sum(sent.get(name, 0) for sent, _ in every) for name in {name for sent, _ in every for name in sent}
        }
        if way == "node":
            counters = total["ep_between/all_to_all"] + total["ep_within/all_to_all"]
            return {**found, "sent": counters, "sent_between": total["ep_between/all_to_all"]}
        counts = len(messages) * 8 * self._shape.experts * (RANKS - 1)  # of rows, in the same kind of collective
        return {**found, "sent": total["ep/all_to_all"] - counts, "sent_between": four * between}

    def _tokens(self, every: list[tuple[dict[str, int], list[list[list[int]]]]]) -> int:
        return sum(len(tokens) for _, kept in every for tokens in kept)


def main() -> None:
    """Join the other ranks and serve turns."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=int)
    parser.add_argument("--rendezvous")
    parser.add_argument("--shape", choices=SHAPES)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    serve(Steps(options.rank, options.rendezvous, options.shape))


if __name__ == "__main__":
    main()
