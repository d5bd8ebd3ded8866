"""Pipeline stages: the cut of a model's layers into the chunks that pipeline ranks hold.

A model is a list of layers between an embedding and a head:

    embedding | 0 1 2 3 | 4 5 6 7 | .. | head          pp x vpp chunks of consecutive layers
      chunk       0         1       ..

Chunk c is on rank c mod pp ("loop": 1F1B, GPipe, interleaved), or chunks descend through the ranks and come back up
("v": two chunks per rank, the first and the last chunk on rank 0).

Source of the cut methods: PipelineLayer of PaddlePaddle (seg_method "uniform", "layer:REGEX" and explicit starts).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

UNIFORM, BALANCED, PATTERN = "uniform", "balanced", "layer:"


class CutError(ValueError):
    """A cut that the layers do not allow."""


@dataclass(frozen=True)
class Chunk:
    """Consecutive layers that a rank runs as one: a stage, or one of several stages of a rank.

    Attributes:
        index: Position in forward order, 0 <= index < pp x vpp.
        first: Also contains the embedding.
        last: Also contains the head and the losses.
    """

    index: int
    rank: int
    layers: range
    first: bool
    last: bool


@dataclass(frozen=True)
class RankLayers:
    """The part of a model that one rank builds."""

    layers: tuple[int, ...]
    first: bool
    last: bool

    @classmethod
    def whole(cls, num_layers: int) -> RankLayers:
        """Return the layers of a single rank: the whole model."""
        return cls(tuple(range(num_layers)), True, True)


@dataclass(frozen=True)
class PipelineLayers:
    """The entries of a model that are cut into chunks: the embedding, every layer, and the head, in this order.

    Attributes:
        names: The kind of each entry.
        costs: The cost of each entry, in any one unit, for ``balanced``.
    """

    names: tuple[str, ...]
    costs: tuple[float, ...]

    @property
    def num_layers(self) -> int:
        """The number of layers between the embedding and the head."""
        return len(self.names) - 2

    def starts(self, parts: int, method: str = UNIFORM) -> tuple[int, ...]:
        """Return the first layer of each of ``parts`` chunks. Raises CutError with what is wrong and what is legal.

        ``method`` is ``uniform`` (equal numbers of layers, longer chunks last), ``balanced`` (the least cost of the
        most expensive chunk), ``layer:REGEX`` (the entries that match, ignoring case, are distributed evenly, and those
        before the first match belong to the first chunk), or explicit starts such as ``0,5,10``.
        """
        if parts > self.num_layers:
            raise CutError(f"{self.num_layers} layers cannot fill {parts} chunks; every chunk holds at least one layer")
        if method == UNIFORM:
            starts = _uniform(self.num_layers, parts)
        elif method == BALANCED:
            starts = _balanced(self.costs, parts)
        elif method.startswith(PATTERN):
            starts = self._matching(method.removeprefix(PATTERN), parts)
        else:
            starts = _explicit(method)
        if len(starts) != parts:
            raise CutError(f"{method} gives {len(starts)} starts for {parts} chunks (pp x vpp); pass {parts}")
        ends = (*starts[1:], self.num_layers)
        if starts[0] != 0 or any(start >= end for start, end in zip(starts, ends, strict=True)):
            raise CutError(
                f"{method} starts chunks at layers {', '.join(map(str, starts))} of {self.num_layers}: the first start "
                "is 0 and every chunk holds at least one layer"
            )
        return starts

    def _matching(self, pattern: str, parts: int) -> tuple[int, ...]:
        try:
            regex = re.compile(pattern, re.IGNORECASE)
        except re.error as error:
            raise CutError(f"layer:{pattern} is not a regular expression: {error}") from error
        hits = [number for number, name in enumerate(self.names) if regex.search(name)]
        kinds = ", ".join(dict.fromkeys(self.names))
        if not hits:
            raise CutError(f"layer:{pattern} matches none of the layers, whose kinds are {kinds}")
        if len(hits) % parts:
            raise CutError(
                f"layer:{pattern} matches {len(hits)} layers, which do not divide into {parts} chunks (pp x vpp); "
                f"the kinds are {kinds}"
            )
        share = len(hits) // parts
        # Entry 0 is the embedding, so that layer l is entry l + 1.
        return (0, *(hits[part * share] - 1 for part in range(1, parts)))

    def cost(self, chunk: Chunk) -> float:
        """Return the cost of all entries of a chunk."""
        inner = sum(self.costs[layer + 1] for layer in chunk.layers)
        return inner + (self.costs[0] if chunk.first else 0) + (self.costs[-1] if chunk.last else 0)


@dataclass(frozen=True)
class Stages:
    """The chunks of a pipeline and their ranks."""

    chunks: tuple[Chunk, ...]
    num_ranks: int

    @classmethod
    def of(cls, starts: Sequence[int], num_layers: int, num_ranks: int, style: str = "loop") -> Stages:
        """Make chunks that begin at layers ``starts``. style: "loop" or "v" (``rank_of_chunk``)."""
        count = len(starts)
        bounds = pairwise((*starts, num_layers))
        return cls(
            tuple(
                Chunk(i, rank_of_chunk(i, num_ranks, style), range(*bound), i == 0, i == count - 1)
                for i, bound in enumerate(bounds)
            ),
            num_ranks,
        )

    @classmethod
    def single(cls, num_layers: int) -> Stages:
        """Make one chunk of all layers on one rank."""
        return cls.of((0,), num_layers, 1)

    @property
    def last_sends_to_first(self) -> bool:
        """True if a chunk of the last rank sends its output to a chunk of the first."""
        ends = {(chunk.rank, following.rank) for chunk, following in pairwise(self.chunks)}
        return self.num_ranks > 1 and (self.num_ranks - 1, 0) in ends

    def on(self, rank: int) -> tuple[Chunk, ...]:
        """Return the chunks of a pp coordinate, in forward order."""
        return tuple(chunk for chunk in self.chunks if chunk.rank == rank)

    def rank_layers(self, rank: int) -> RankLayers:
        """Return the part of the model that a pp coordinate builds."""
        chunks = self.on(rank)
        layers = tuple(layer for chunk in chunks for layer in chunk.layers)
        return RankLayers(layers, any(chunk.first for chunk in chunks), any(chunk.last for chunk in chunks))

    def rank_of_unit(self, unit: str) -> int:
        """Return the pp coordinate that owns a unit of the parameter table: embedding, layers.N or head."""
        return self.chunk_of_unit(unit).rank

    def chunk_of_unit(self, unit: str) -> Chunk:
        """Return the chunk that contains a unit of the parameter table."""
        if unit == "embedding":
            return self.chunks[0]
        if unit == "head":
            return self.chunks[-1]
        layer = int(unit.removeprefix("layers."))
        return next(chunk for chunk in self.chunks if layer in chunk.layers)


def rank_of_chunk(index: int, num_ranks: int, style: str) -> int:
    """Return the rank of chunk ``index``: cyclic ("loop"), or down the ranks and back up ("v")."""
    turn, place = divmod(index, num_ranks)
    return num_ranks - 1 - place if style == "v" and turn % 2 else place


def _uniform(num_layers: int, parts: int) -> tuple[int, ...]:
    length, longer = divmod(num_layers, parts)
    return tuple(part * length + max(0, part - (parts - longer)) for part in range(parts))


def _explicit(method: str) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in method.split(","))
    except ValueError:
        raise CutError(f"{method} is none of uniform, balanced, layer:REGEX and starts such as 0,4,8") from None


@lru_cache(maxsize=256)  # a search divides one model again and again
def _balanced(costs: tuple[float, ...], parts: int) -> tuple[int, ...]:
    """Return the starts that minimize the cost of the most expensive chunk; among ties, with the longest first chunks.

    best[n] is the cost of the most expensive chunk in the best cut of the first n layers into the chunks so far.
    """
    inner = costs[1:-1]
    total = [0.0]
    for cost in inner:
        total.append(total[-1] + cost)
    count = len(inner)

    def span(start: int, end: int) -> float:
        return total[end] - total[start] + (costs[0] if start == 0 else 0) + (costs[-1] if end == count else 0)

    best = [span(0, end) if end else 0.0 for end in range(count + 1)]
    cuts: list[list[int]] = []
    for part in range(1, parts):
        following, cut = [float("inf")] * (count + 1), [0] * (count + 1)
        for end in range(part + 1, count + 1):
            for start in range(part, end):
                highest = max(best[start], span(start, end))
                if highest <= following[end]:
                    following[end], cut[end] = highest, start
        best = following
        cuts.append(cut)
    starts, end = [], count
    for cut in reversed(cuts):
        end = cut[end]
        starts.append(end)
    return (0, *reversed(starts))
