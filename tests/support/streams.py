"""Streams with the worst timing an accelerator could have, on a CPU.

A copy that is enqueued on a ``LateStream`` fills its target with a pattern of bits that is no number and happens only
when somebody waits for the stream or for an event behind it. Whoever reads a target early, or writes a source before
the copy has happened, computes with wrong numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from megapar.core.device.base import Device
from megapar.core.exchange import Exchange
from megapar.core.traffic import Flight, Traffic


class LateStream:
    """A queue of copies."""

    current: ClassVar[LateStream | None] = None

    def __init__(self) -> None:
        self._queue: list[Callable[[], None]] = []
        self._length = 0
        self.running = False
        self._done = 0

    def wait_stream(self, other: object) -> None:
        """Everything in the other queue happens before anything that is enqueued here later."""
        if isinstance(other, LateStream):
            other.run(other._length)

    def record_event(self) -> tuple[LateStream, int]:
        """This place in the queue."""
        return self, self._length

    def wait_event(self, event: Any) -> None:
        """Everything up to that place happens before anything that is enqueued here later."""
        if event is not None:
            stream, place = event
            stream.run(place)

    def run(self, place: int) -> None:
        """Let the first ``place`` copies happen."""
        self.running = True
        while self._done < place:
            self._queue.pop(0)()
            self._done += 1
        self.running = False

    def add(self, target: Tensor, source: Tensor) -> None:
        """A copy for later."""
        with torch.no_grad():
            target.view(torch.uint8).fill_(0xFF)

        def happen() -> None:
            with torch.no_grad():
                target.copy_(source)

        self._queue.append(happen)
        self._length += 1

    def __enter__(self) -> LateStream:
        self._mode = _Deferred(self)
        self._mode.__enter__()
        LateStream.current = self
        return self

    def __exit__(self, *error: Any) -> None:
        LateStream.current = None
        self._mode.__exit__(*error)


class _Deferred(TorchFunctionMode):
    def __init__(self, stream: LateStream) -> None:
        super().__init__()
        self._stream = stream

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is Tensor.copy_ and not self._stream.running:
            target, source = args[:2]
            self._stream.add(target, source)
            return target
        return func(*args, **(kwargs or {}))


class LateTraffic(Traffic):
    """Collectives wait for what is enqueued on the stream they are launched from, as on an accelerator."""

    def launch(self, exchange: Exchange, x: Tensor, aside: bool = False, owned: bool = False) -> Flight:
        """See ``Traffic``."""
        if LateStream.current is not None:
            LateStream.current.run(LateStream.current.record_event()[1])
        return super().launch(exchange, x, aside, owned)


class LateDevice(Device):
    """A CPU whose new streams are late; the current one, where operators run, is on time."""

    def __init__(self) -> None:
        super().__init__()
        self._current = LateStream()

    def new_stream(self) -> LateStream:
        """A late queue."""
        return LateStream()

    def current_stream(self) -> LateStream:
        """The queue that nothing is enqueued on: what operators do is done."""
        return self._current
