"""The pieces that plans are sums of: products, messages, operators, layers.

Every operator of a model is one ``Part``; the memory, the traffic and the time of a plan are sums over parts, so that
they cannot disagree about the model.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from megapar.planning.layout import Layout

INDEX = 8  # bytes of an int64


@dataclass(frozen=True)
class Product:
    """A matrix product [rows, inner] x [inner, columns] in the forward; groups of them run as one kernel. fp8: may."""

    rows: float
    inner: int
    columns: int
    groups: int = 1
    mlp: bool = False

    @property
    def flops(self) -> float:
        """Of the forward."""
        return 2.0 * self.rows * self.inner * self.columns


@dataclass(frozen=True)
class Message:
    """What a rank sends in one micro-batch. axis, kind: as in ``CommBytes`` of a run. phase: forward or backward.
    hidden: travels under a product of the same layer."""

    axis: str
    kind: str
    bytes: float
    phase: str
    hidden: bool = False


@dataclass(frozen=True)
class Part:
    """One operator. kept: bytes that live until its backward. moved: bytes that it reads and writes in the forward.
    scores: FLOPs of attention's core. transient: bytes that live only while its backward runs. again: its forward runs
    again in front of its backward."""

    name: str
    kept: float = 0.0
    products: tuple[Product, ...] = ()
    scores: float = 0.0
    moved: float = 0.0
    messages: tuple[Message, ...] = ()
    transient: float = 0.0
    again: bool = False


@dataclass(frozen=True)
class Unit:
    """A layer (dense, moe, universal, branches), the embedding or the head. input: bytes of what comes in."""

    name: str
    parts: tuple[Part, ...]
    input: float

    @property
    def layer(self) -> bool:
        """One of those that recomputed units consist of."""
        return self.name not in ("embedding", "head")

    @cached_property
    def kept(self) -> float:
        """Bytes that live from the forward to the backward."""
        return sum(part.kept for part in self.parts)

    @cached_property
    def transient(self) -> float:
        """The most that the backward of one part needs beside what is kept."""
        return max((part.transient for part in self.parts), default=0.0)

    def messages(self) -> list[Message]:
        """Of all parts."""
        return [message for part in self.parts for message in part.messages]


def norm_kept(layout: Layout, rows: float, width: int, normalization: str) -> float:
    """Bytes that a norm keeps beside its output."""
    e, w = layout.item, layout.wide
    if normalization == "layernorm":
        return e * rows * width + 2 * w * rows
    if layout.kind.kernels == "cuda":
        return e * rows * width + 4 * rows
    # Plain products: x in fp32, the scale, and what the weight multiplies; in fp32 the first is x itself.
    return (2 * w if e == w else w + e) * rows * width + w * rows
