"""Who reads and writes a piece of memory, on which stream, and in what order they must be.

Two accesses of one place, one of them a write, must be ordered: the later one's stream has waited for the earlier's.
Memory belongs to the stream that allocated it; freed, it is that stream's again at once, whoever else still reads it.
Storages are held weakly, so that whatever the program frees is free.
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
    """Something was read, written or freed without a wait for the stream that still works on it."""


class Access(NamedTuple):
    """One operator's use of a place in memory. position: how far its stream was. line: where that was launched."""

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
        """As if that stream had done it now."""
        return self._replace(stream=stream, position=stream.position)

    def follows(self, other: Access) -> bool:
        """Whether it was enqueued on the same stream, with it or later."""
        return self.stream is other.stream and self.position >= other.position


class Memory:
    """A storage: whose it is, what each stream reads and writes of it, and what the current stream may not see yet.

    adopted: streams for whose sake the allocator waits before it gives the memory away.
    """

    def __init__(self, tensor: Tensor, owner: LazyStream) -> None:
        self._reference = StorageWeakRef(tensor.untyped_storage())
        self.owner = owner
        self.adopted: set[LazyStream] = set()
        self.reads: dict[tuple[LazyStream, Span], Access] = {}
        self.writes: dict[tuple[LazyStream, Span], Access] = {}

    @property
    def freed(self) -> bool:
        """Whether nobody holds it any more."""
        return bool(self._reference.expired())

    def covered(self, access: Access) -> bool:
        """Whether the allocator waits for an access: for its stream, or for one that has waited for it."""
        return any(stream is access.stream or stream.sees(access) for stream in self.adopted)

    def read(self, access: Access) -> None:
        """Note a read. Raises LazyError where it is not behind a write of another stream."""
        for write in self._unseen(self.writes, access):
            raise LazyError(f"{access} reads too early: nobody has waited for {write}")
        self.reads[access.stream, access.span] = access

    def write(self, access: Access) -> None:
        """Note a write. Raises LazyError where another stream may still read or write there."""
        for earlier in self._unseen(self.reads, access):
            raise LazyError(f"{access} writes what is still read: nobody has waited for {earlier}")
        for earlier in self._unseen(self.writes, access):
            raise LazyError(f"{access} writes what is still written: nobody has waited for {earlier}")
        self.land(access)

    def land(self, access: Access) -> None:
        """Note a write that somebody else has checked."""
        self.writes[access.stream, access.span] = access

    def _unseen(self, accesses: dict[tuple[LazyStream, Span], Access], access: Access) -> Iterator[Access]:
        for (stream, span), other in accesses.items():
            if stream is not access.stream and _overlap(span, access.span) and not access.stream.sees(other):
                yield other

    def forget(self, lasting: Collection[LazyStream], main: LazyStream) -> None:
        """What streams that are gone did, and the main one has waited for, counts as its own."""
        for accesses in (self.reads, self.writes):
            for access in [access for access in accesses.values() if access.stream not in lasting]:
                if main.sees(access):
                    del accesses[access.stream, access.span]
                    accesses[main, access.span] = access.by(main)

    def bytes(self, span: Span) -> Tensor | None:
        """[n] uint8: the memory itself; None where it has been freed."""
        storage = torch.UntypedStorage._new_with_weak_ptr(self._reference.cdata)
        if storage is None:
            return None
        return torch.empty(0, dtype=torch.uint8).set_(storage, span[0], (span[1] - span[0],), (1,))


class Hidden:
    """What a stream has written and others must not see. The true bytes are kept here while they are hidden."""

    def __init__(self, memory: Memory, access: Access, dtype: torch.dtype | None) -> None:
        """dtype: of the elements; None where they are of several."""
        self.memory, self.access, self.dtype = memory, access, dtype
        self._true: Tensor | None = None
        self._poison: Tensor | None = None

    def absorb(self, other: Hidden) -> None:
        """Stand for both, which overlap; both are shown."""
        low, high = self.access.span
        span = (min(low, other.access.span[0]), max(high, other.access.span[1]))
        self.access = self.access._replace(span=span)
        self.dtype = self.dtype if self.dtype == other.dtype else None

    def overlaps(self, memory: Memory, span: Span) -> bool:
        """Whether a place is part of this one."""
        return self.memory is memory and _overlap(self.access.span, span)

    def hide(self) -> None:
        """Put a pattern of bits there that is no number, or none that a program means."""
        here = self.memory.bytes(self.access.span)
        if self._true is None and here is not None:
            self._true = here.clone()
            if self.dtype is None or (self.access.span[0] % self.dtype.itemsize):
                here.fill_(0xFF)
            else:
                poison(here.view(self.dtype))
            self._poison = here.clone()

    def show(self) -> None:
        """Put the true bytes there. Raises LazyError where somebody has written over the pattern."""
        here = self.memory.bytes(self.access.span)
        true, self._true = self._true, None
        if true is None or here is None:
            return
        if not torch.equal(here, self._poison):  # type: ignore[arg-type]
            raise LazyError(f"written over before anybody had waited for {self.access}")
        here.copy_(true)


class Uses(NamedTuple):
    """What an operator reads and writes of its arguments."""

    reads: list[Tensor]
    writes: list[Tensor]


def uses(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Uses:
    """By its schema; nothing for views, and for what only looks at shapes."""
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
    """(whether it reads no elements, places and names of the arguments that it writes)."""
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
    """All with elements in a value, in lists too."""
    if isinstance(value, Tensor):
        if value.layout is torch.strided and value.device.type == "cpu" and value.numel():
            yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors(item)


def span_of(tensor: Tensor) -> Span:
    """From its first byte up to behind its last one."""
    first = tensor.storage_offset() * tensor.itemsize
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return first, first + (last + 1) * tensor.itemsize


def _overlap(a: Span, b: Span) -> bool:
    return a[0] < b[1] and b[0] < a[1]
