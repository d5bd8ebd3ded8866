"""The models of this benchmark, and the arithmetic of its link: what a rate makes of a step."""

from __future__ import annotations

from dataclasses import dataclass

from megapar.moe.dispatch_bytes import DispatchBytes

RANKS, NODE = 4, 2
LAYERS, HIDDEN, LENGTH, MICRO_BATCHES = 4, 512, 512, 2
WAYS = ("plain", "node")
_BASE = (
    *("--num-layers", str(LAYERS), "--hidden-size", str(HIDDEN), "--num-attention-heads", "8"),
    *("--ffn-hidden-size", "1024", "--micro-batch-size", "1", "--gradient-merge-acc-step", str(MICRO_BATCHES)),
    *("--seq-length", str(LENGTH), "--vocab-size", "512", "--ep-degree", str(RANKS), "--sharding-degree", str(RANKS)),
    *("--data-path", "mock", "--dtype", "fp32", "--lr", "1e-6", "--train-iters", "1000", "--eval-interval", "0"),
    *("--log-interval", "1000", "--replica-check-interval", "0"),
)


@dataclass(frozen=True)
class Shape:
    """Number of experts per token, number of experts, and width of an expert."""

    topk: int
    experts: int
    ffn: int

    @property
    def layer(self) -> DispatchBytes:
        """Messages of a layer in fp32, as expected of balanced routing."""
        return DispatchBytes(HIDDEN, self.topk, self.experts, RANKS, NODE, 4, 4)

    def between(self, way: str) -> float:
        """Return the bytes that a step sends between the nodes, of all ranks and layers together."""
        tokens = RANKS * LAYERS * LENGTH * MICRO_BATCHES
        passes = self.layer.by_node(tokens) if way == "node" else self.layer.plain(tokens)
        return sum(sent.between for sent in passes.values())

    def flags(self, way: str) -> list[str]:
        """Return the command line of one of ``WAYS``."""
        nodes = ["--ranks-per-node", str(NODE)] if way == "node" else []
        moe = ["--num-experts", str(self.experts), "--moe-router-topk", str(self.topk)]
        return [*_BASE, *moe, "--moe-ffn-hidden-size", str(self.ffn), "--moe-dispatch", way, *nodes]


SHAPES = {"top-8 of 16": Shape(8, 16, 128), "top-4 of 8": Shape(4, 8, 256)}
ROWS = {f"{shape}, {way}": (shape, way) for shape in SHAPES for way in WAYS}


def flags(row: str) -> list[str]:
    """Return the command line of a row."""
    shape, way = ROWS[row]
    return SHAPES[shape].flags(way)


def rate_for(share: float, alone: float, bytes_between: float) -> int:
    """Return the bits per second at which messages between nodes are ``share`` of a step in which nothing hides them.

    Args:
        share: Share of the step.
        alone: Seconds of the step without limits.
        bytes_between: Bytes that one node sends to the other in the step.
    """
    return round(8 * bytes_between * (1 - share) / (share * alone))


def ideal(share: float, plain: float, by_node: float) -> float:
    """Return the speedup of a step whose messages between nodes, ``share`` of it, shrink to ``by_node``."""
    return 1 / (1 - share + share * by_node / plain)
