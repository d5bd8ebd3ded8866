"""Reads and writes of pieces of memory by streams, and the order that they need.

Two accesses of one place, one of them a write, must be ordered: the later one's stream has waited for the earlier's.
Memory belongs to the stream that allocated it. When it is freed, that stream may reuse it at once, even if another one
still reads it. Storages are held weakly, so that memory that the program frees is free.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from tests.support.late import poison

if TYPE_CHECKING:
    from tests.support.lazy import LazyStream

Span = tuple[int, int]  # bytes of a storage, from and up to


class LazyError(AssertionError):
    """Memory was read, written or freed without a wait for the stream that still uses it."""


class Access(NamedTuple):
    """One operator's use of a place in memory.

    Attributes:
        stream: The stream.
        position: Position of the stream.
        span: The bytes.
        operator: Name of the operator.
        shape: Shape of the tensor.
        line: Line of the launch.
    """

    stream: LazyStream
    position: int
    span: Span
    operator: str
    shape: tuple[int, ...]
    line: str

    def __str__(self) -> str:
        launched = f", launched at {self.line}" if self.line else ""
        return f"{self.operator} of {list(self.shape)} on stream {self.stream.name}{launched}"

    def by(self, stream: LazyStream) -> Access:
        """Return the access as one of that stream, now."""
        return self._replace(stream=stream, position=stream.position)

    def follows(self, other: Access) -> bool:
        """Return True if it was enqueued on the same stream, with the other one or later."""
        return self.stream is other.stream and self.position >= other.position


class Memory:
    """A storage with its owner and the reads and writes of each stream.

    Attributes:
        owner: The stream that allocated it.
        adopted: Streams that the allocator waits for before it reuses the memory.
        reads: The last read of each stream and span.
        writes: The last write of each stream and span.
    """

    def __init__(self, tensor: Tensor, owner: LazyStream) -> None:
        self._reference = StorageWeakRef(tensor.untyped_storage())
        self.owner = owner
        self.adopted: set[LazyStream] = set()
        self.reads: dict[tuple[LazyStream, Span], Access] = {}
        self.writes: dict[tuple[LazyStream, Span], Access] = {}

    @property
    def freed(self) -> bool:
        """True if the program has freed it."""
        return bool(self._reference.expired())

    def covered(self, access: Access) -> bool:
        """Return True if the allocator waits for an access: for its stream, or for one that has waited for it."""
        return any(stream is access.stream or stream.sees(access) for stream in self.adopted)

    def read(self, access: Access) -> None:
        """Record a read. Raises LazyError if its stream has not waited for a write of another stream."""
        for write in self._unseen(self.writes, access):
            raise LazyError(f"{access} reads too early: nobody has waited for {write}")
        self.reads[access.stream, access.span] = access

    def write(self, access: Access) -> None:
        """Record a write. Raises LazyError if another stream may still read or write there."""
        for earlier in self._unseen(self.reads, access):
            raise LazyError(f"{access} writes what is still read: nobody has waited for {earlier}")
        for earlier in self._unseen(self.writes, access):
            raise LazyError(f"{access} writes what is still written: nobody has waited for {earlier}")
        self.land(access)

    def land(self, access: Access) -> None:
        """Record a write that the caller has checked."""
        self.writes[access.stream, access.span] = access

    def _unseen(self, accesses: dict[tuple[LazyStream, Span], Access], access: Access) -> Iterator[Access]:
        for (stream, span), other in accesses.items():
            if stream is not access.stream and _overlap(span, access.span) and not access.stream.sees(other):
                yield other

    def forget(self, lasting: Collection[LazyStream], main: LazyStream) -> None:
        """Attribute accesses of streams that are gone to the main stream, if it has waited for them."""
        for accesses in (self.reads, self.writes):
            for access in [access for access in accesses.values() if access.stream not in lasting]:
                if main.sees(access):
                    del accesses[access.stream, access.span]
                    accesses[main, access.span] = access.by(main)

    def bytes(self, span: Span) -> Tensor | None:
        """Return the bytes of a span, uint8 [n], which share the memory; None if it has been freed."""
        storage = torch.UntypedStorage._new_with_weak_ptr(self._reference.cdata)
        if storage is None:
            return None
        return torch.empty(0, dtype=torch.uint8).set_(storage, span[0], (span[1] - span[0],), (1,))


class Hidden:
    """Bytes that a stream has written and others must not see. The true bytes are kept here while they are hidden."""

    def __init__(self, memory: Memory, access: Access, dtype: torch.dtype | None) -> None:
        """Create a record of written bytes. ``dtype``: dtype of the elements; None if there are several."""
        self.memory, self.access, self.dtype = memory, access, dtype
        self._true: Tensor | None = None
        self._poison: Tensor | None = None

    def absorb(self, other: Hidden) -> None:
        """Extend this record to an overlapping one. Neither may be hidden now."""
        low, high = self.access.span
        span = (min(low, other.access.span[0]), max(high, other.access.span[1]))
        self.access = self.access._replace(span=span)
        self.dtype = self.dtype if self.dtype == other.dtype else None

    def overlaps(self, memory: Memory, span: Span) -> bool:
        """Return True if a span overlaps this one."""
        return self.memory is memory and _overlap(self.access.span, span)

    def hide(self) -> None:
        """Replace the bytes by NaN, or by an extreme integer."""
        here = self.memory.bytes(self.access.span)
        if self._true is None and here is not None:
            self._true = here.clone()
            if self.dtype is None or (self.access.span[0] % self.dtype.itemsize):
                here.fill_(0xFF)
            else:
                poison(here.view(self.dtype))
            self._poison = here.clone()

    def show(self) -> None:
        """Restore the true bytes. Raises LazyError if the replacement was overwritten."""
        here = self.memory.bytes(self.access.span)
        true, self._true = self._true, None
        if true is None or here is None:
            return
        if not torch.equal(here, self._poison):  # type: ignore[arg-type]
            raise LazyError(f"written over before anybody had waited for {self.access}")
        here.copy_(true)


class Uses(NamedTuple):
    """The arguments that an operator reads, and those that it writes."""

    reads: list[Tensor]
    writes: list[Tensor]


def uses(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Uses:
    """Return what an operator uses by its schema: nothing for views, and for operators that read only shapes."""
    looks, written = _signature(func)
    reads: list[Tensor] = []
    writes: list[Tensor] = []
    for name, value in (*enumerate(args), *kwargs.items()):
        if name in written:
            writes += tensors(value)
        elif not looks:
            reads += tensors(value)
    return Uses(reads, writes)


@functools.cache
def _signature(func: Any) -> tuple[bool, frozenset[int | str]]:
    """Return (True if it reads no elements, positions and names of the arguments that it writes)."""
    schema = getattr(func, "_schema", None)
    if schema is None:
        return False, frozenset()
    infos = [info for info in (each.alias_info for each in schema.returns) if info is not None]
    operator = schema.name.rpartition("::")[2]
    looks = operator.endswith("_like") or operator.startswith(("new_", "empty")) or operator == "_unsafe_view"
    looks = looks or any(not info.is_write for info in infos)
    written = [
        (at, each.name) for at, each in enumerate(schema.arguments) if each.alias_info and each.alias_info.is_write
    ]
    return looks, frozenset(key for pair in written for key in pair)


def tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors with elements in a value, also those in lists."""
    if isinstance(value, Tensor):
        if value.layout is torch.strided and value.device.type == "cpu" and value.numel():
            yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors(item)


def span_of(tensor: Tensor) -> Span:
    """Return the bytes of a tensor, from the first to the one after the last."""
    first = tensor.storage_offset() * tensor.itemsize
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return first, first + (last + 1) * tensor.itemsize


def _overlap(a: Span, b: Span) -> bool:
    return a[0] < b[1] and b[0] < a[1]
