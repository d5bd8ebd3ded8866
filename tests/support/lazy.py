"""A device with streams, simulated on the CPU: shows the mistakes that only a host ahead of its device shows.

    with LazyDevice() as device:                    # collectives: under the late backend
        ...                                         # the program, on ``device``
        device.settle()                             # at the end of a step

Work on a stream runs at once, because a queue would keep its inputs alive and so hide mistakes. It sees what its stream
has waited for. Other streams see what it has written only after they have waited for it: for an event after it, for its
stream, or for a collective that it launched. Until then that memory contains NaN (integers: see
``tests.support.late``). LazyError names operator, shape and the line of the launch for

    read early          an operator reads what another stream has written and was not waited for, on any stream
    overwritten         an operator writes what another stream may still read or write
    freed               memory of one stream was freed while another one, which had not adopted it, may still use it
    never landed        nothing of the step waited for what a stream was given

Order is that of vector clocks: a stream that waits for another one has waited for all that this one had waited for.
Source of the idea: torch's sanitizer of streams (torch.cuda._sanitizer), which needs a GPU and looks at no lifetimes.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from megapar.core.device.base import Device
from tests.support.late import LateWork, Queue
from tests.support.memory import Access, Hidden, LazyError, Memory, span_of, tensors, uses

OWN_FILES = ("tests/support/lazy.py", "tests/support/late.py", "megapar/core/device/base.py", "/torch/", "<")


class LazyStream:
    """A queue of work.

    Attributes:
        clock: Position of each other stream when this one last waited for it.
    """

    def __init__(self, device: LazyDevice, name: str, urgent: bool = False) -> None:
        self._device, self.name, self.urgent = device, name, urgent
        self.clock: dict[LazyStream, int] = {}
        self.position = 0
        self.line = ""
        self.newest: Access | None = None
        self.lent: list[tuple[Memory, Access]] = []  # uses of this stream's memory by others

    def sees(self, access: Access) -> bool:
        """Return True if this stream has waited for an access."""
        return access.stream is self or self.clock.get(access.stream, 0) >= access.position

    @property
    def place(self) -> dict[LazyStream, int]:
        """The clock after all of its work."""
        return {**self.clock, self: self.position}

    def wait_stream(self, other: LazyStream) -> None:
        """Wait for all work of another stream."""
        self._device.order(self, other.place)

    def wait_event(self, event: LazyEvent) -> None:
        """Wait for the work before an event."""
        self._device.order(self, event.clock)

    def record_event(self) -> LazyEvent:
        """Return an event after all work of this stream."""
        return LazyEvent(self._device, self.place)

    def synchronize(self) -> None:
        """Let the host wait for all work of this stream."""
        self._device.host_waits(self.place)

    def __enter__(self) -> LazyStream:
        self.line = _line()
        self._device.enter(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._device.leave()


class LazyEvent:
    """A position in all streams."""

    def __init__(self, device: LazyDevice, clock: dict[LazyStream, int]) -> None:
        self._device, self.clock = device, clock

    def synchronize(self) -> None:
        """Let the host wait for the event."""
        self._device.host_waits(self.clock)


class LazyQueue(Queue):
    """A collective's own stream, as with NCCL."""

    def __init__(self, device: LazyDevice, name: str, inputs: Sequence[Tensor]) -> None:
        self._device = device
        self._stream = LazyStream(device, name)
        self._stream.line = _line()
        self._stream.wait_stream(device.current_stream())
        for x in inputs:
            device.note(x, self._stream, name, Memory.read)

    def join(self, land: Callable[[], None] | None) -> None:
        """See ``Queue``."""
        if land is not None:
            with self._device.checked_by_late(self._stream):
                land()
        self._device.current_stream().wait_stream(self._stream)


class LazyDevice(Device):
    """A CPU that acts as a device whose host runs ahead."""

    is_async = True
    backend = "late"

    def __init__(self) -> None:
        super().__init__()
        self.main = LazyStream(self, "main")
        self.streams: list[LazyStream] = []
        self._host: dict[LazyStream, int] = {}  # what the host has waited for
        self._memories: dict[int, Memory] = {}
        self._hidden: list[Hidden] = []
        self._landing: LazyStream | None = None
        # The thread of a save has a current stream of its own; while it copies, others do not see the memory.
        self._lock = threading.RLock()
        self._local = _Local()

    # Methods that the package calls

    def new_stream(self, *, urgent: bool = False) -> LazyStream:
        """Create a stream."""
        self.streams.append(LazyStream(self, str(len(self.streams)), urgent))
        return self.streams[-1]

    def current_stream(self) -> LazyStream:
        """Return the current stream of this thread."""
        return self._local.entered[-1] if self._local.entered else self.main

    def adopt(self, x: Tensor) -> None:
        """Make the allocator wait for the current stream before it reuses the memory of ``x``."""
        self._memory(x).adopted.add(self.current_stream())

    def host_copy(self, x: Tensor) -> tuple[Tensor, LazyEvent]:
        """Return a copy on the host, which is hidden until the host has waited for it, and its event."""
        with self._lock:
            host = x.detach().clone()
            event = self.current_stream().record_event()
            copy = LazyStream(self, "host copy")
            copy.line = _line()
            event.clock[copy] = 1
            for part in tensors(host):
                self._hide(self.note(part, copy, "copy to the host", Memory.land), part)
            self._turn(self.current_stream())
        return host, event

    def synchronize(self) -> None:
        """Let the host wait for all work."""
        for stream in (self.main, *self.streams):
            stream.synchronize()

    # Methods of the test kit

    def __enter__(self) -> LazyDevice:
        LateWork.queue = lambda name, inputs: LazyQueue(self, name, inputs)
        self._local.watch(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._local.unwatch()
        LateWork.queue = Queue

    def settle(self) -> None:
        """End a step. Raises LazyError if the main stream has not waited for the work of another stream."""
        for stream in self.streams:
            if stream.newest is not None and not self.main.sees(stream.newest):
                raise LazyError(f"never landed: nothing waited for {stream.newest}")
        lasting = {self.main, *self.streams}
        for key, memory in list(self._memories.items()):
            if memory.freed:
                del self._memories[key]
            else:
                memory.forget(lasting, self.main)
        for stream in lasting:
            gone = [access.stream not in lasting and self.main.sees(access) for _, access in stream.lent]
            lent = zip(stream.lent, gone, strict=True)
            stream.lent = [(memory, access.by(self.main) if old else access) for (memory, access), old in lent]
        for stream in lasting:
            stream.clock = {other: position for other, position in stream.clock.items() if other in lasting}

    def enter(self, stream: LazyStream) -> None:
        """Make a stream the current one of this thread."""
        self._lock.acquire()
        if not self._local.entered:
            self._local.watch(self)
        self._local.entered.append(stream)
        self.order(stream, self._host)

    def leave(self) -> None:
        """Return to the previous current stream."""
        self._local.entered.pop()
        if not self._local.entered:
            self._local.unwatch()
        try:
            self._turn(self.current_stream())
        finally:
            self._lock.release()

    def checked_by_late(self, stream: LazyStream) -> AbstractContextManager[object]:
        """Return a context for the landing of a collective, whose buffers the late backend checks."""
        return _Landing(self, stream)

    def order(self, stream: LazyStream, clock: dict[LazyStream, int]) -> None:
        """Make a stream wait for a clock."""
        with self._lock:
            for other, position in clock.items():
                if other is not stream:
                    stream.clock[other] = max(position, stream.clock.get(other, 0))
            if stream is self.main:
                self._check_freed(stream)
            if stream is self.current_stream():
                self._turn(stream)

    def host_waits(self, clock: dict[LazyStream, int]) -> None:
        """Make all work that the host enqueues from now on wait for a clock."""
        for other, position in clock.items():
            self._host[other] = max(position, self._host.get(other, 0))
        for stream in (self.main, self.current_stream()):
            self.order(stream, clock)

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operator on the current stream."""
        with self._lock:
            stream = self.current_stream()
            used = uses(func, args, kwargs)
            stream.position += 1
            for x in used.reads if self._landing is not stream else ():
                if (
                    x.dim() or x.untyped_storage()._cdata in self._memories
                ):  # else a number, which a kernel takes by value
                    self.note(x, stream, str(func), Memory.read)
            for x in used.writes:
                access = self.note(x, stream, str(func), Memory.land if self._landing is stream else Memory.write)
                self._hide(access, x)
            result = func(*args, **kwargs)
            given = {x.untyped_storage()._cdata for x in tensors([*args, *kwargs.values()])}
            for x in tensors(result):
                if x.untyped_storage()._cdata not in given:
                    self._allocated(x, stream, str(func))
            return result

    def note(self, x: Tensor, stream: LazyStream, operator: str, kind: Callable[[Memory, Access], None]) -> Access:
        """Record one use of a tensor."""
        memory = self._memory(x)
        stream.position = max(stream.position, 1)
        access = Access(stream, stream.position, span_of(x), operator, tuple(x.shape), stream.line)
        try:
            kind(memory, access)
        except LazyError:
            if stream is self.main:
                kind(memory, access._replace(line=_line()))
            raise
        stream.newest = access
        if memory.owner is not stream:
            memory.owner.lent.append((memory, access))
        return access

    def _allocated(self, x: Tensor, stream: LazyStream, operator: str) -> None:
        if x.untyped_storage()._cdata in self._memories:
            return
        if stream is not self.main:
            self._check_freed(stream)
        self._memories[x.untyped_storage()._cdata] = Memory(x, stream)
        self._hide(self.note(x, stream, operator, Memory.write), x)

    def _check_freed(self, stream: LazyStream) -> None:
        """Raise LazyError if freed memory returns to its stream while another stream may still use it.

        The main stream allocates at any time, so its memory must not be freed before the wait. The others allocate
        only where an operator shows it.
        """
        lent, stream.lent = stream.lent, []
        for memory, access in lent:
            seen, covered = stream.sees(access), memory.covered(access)
            if memory.freed and not covered and seen == (stream is self.main):
                self._hidden = [hidden for hidden in self._hidden if not hidden.access.follows(access)]  # for good
                raise LazyError(f"freed on stream {stream.name} before anything there had waited for {access}")
            if not seen and not (memory.freed and covered):
                stream.lent.append((memory, access))

    def _memory(self, x: Tensor) -> Memory:
        """Return the memory of a tensor; memory that was never seen before is the main stream's."""
        key = x.untyped_storage()._cdata
        if key not in self._memories:
            self._memories[key] = Memory(x, self.main)
        return self._memories[key]

    def _hide(self, access: Access, x: Tensor) -> None:
        """Hide what a stream other than the main one has written from the others, as soon as it is left."""
        memory = self._memory(x)
        if access.stream is self.main:
            return
        new = Hidden(memory, access, x.dtype)
        for old in [hidden for hidden in self._hidden if hidden.overlaps(memory, access.span)]:
            new.absorb(old)
            self._hidden.remove(old)
        self._hidden.append(new)

    def _turn(self, stream: LazyStream) -> None:
        """Make memory contain what a stream sees of it."""
        with _disable_current_modes(), torch.no_grad():
            for hidden in list(self._hidden):
                if stream.sees(hidden.access):
                    hidden.show()
                else:
                    hidden.hide()
                if hidden.memory.freed or (stream is self.main and self.main.sees(hidden.access)):
                    self._hidden.remove(hidden)


class _Landing:
    """Makes a collective's stream the current one while its result is written."""

    def __init__(self, device: LazyDevice, stream: LazyStream) -> None:
        self._device, self._stream = device, stream

    def __enter__(self) -> None:
        self._device.enter(self._stream)
        self._before, self._device._landing = self._device._landing, self._stream

    def __exit__(self, *_: object) -> None:
        self._device._landing = self._before
        self._device.leave()


class _Local(threading.local):
    """State of one thread: the streams that it has entered, and the modes that watch it."""

    def __init__(self) -> None:
        self.entered: list[LazyStream] = []
        self._watching: list[_Watch | None] = []

    def watch(self, device: LazyDevice) -> None:
        """Watch this thread's operators, unless they are watched."""
        self._watching.append(_Watch(device) if not self._watching else None)
        if (watch := self._watching[-1]) is not None:
            watch.__enter__()

    def unwatch(self) -> None:
        """Undo the newest ``watch``."""
        if (watch := self._watching.pop()) is not None:
            watch.__exit__(None, None, None)


class _Watch(TorchDispatchMode):
    """Shows the device every operator of a thread."""

    def __init__(self, device: LazyDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # what a DTensor does comes back as operators on its piece
        return self._device.run(func, args, kwargs or {})


def _line() -> str:
    """Return the innermost line of the program on the stack."""
    frame = sys._getframe(1)
    while any(part in frame.f_code.co_filename for part in OWN_FILES) and frame.f_back is not None:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
