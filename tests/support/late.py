"""The late backend: shows on a CPU the mistakes that only streams show on an accelerator.

    register()                                      # once per process; run_ranks(..., backend="late") does it
    dist.init_process_group("late", ...)            # or dist.new_group(backend="late")

The backend is gloo with the worst timing that an accelerator could have, always the same. For a collective or a
point-to-point call that is launched asynchronously:

    launch    the inputs are copied; the output contains NaN (integers: the dtype's minimum, unsigned ones its maximum)
    wait      the inputs must be bit for bit what they were at the launch, or LateError names the call;
              the result is written into the output, in place, over anything written there meanwhile;
              the inputs are overwritten like an output at launch

A program that reads early therefore computes with NaN, one that reuses a buffer in flight gets an error, and one that
uses an input afterwards computes with NaN, too. Three things are not overwritten: an input that is part of an output
(gather in place), the tensor of a broadcast's source, and what is sent point to point (activations that are sent stay
in use for the backward). Synchronous calls, and the functional collectives under DTensor, which wait by themselves, are
plain gloo. ``in_flight()`` names the calls that were launched and not waited for.

On the streams of ``tests.support.lazy`` a call runs on its own queue after the work of the stream that launched it, as
with NCCL: a stream that waits for the call has also waited for that work, and no other stream has.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

Launch = Callable[[list[Tensor], list[Tensor]], dist.Work]


class LateError(AssertionError):
    """A buffer was touched while its collective was in flight."""


class Queue:
    """The queue that a call runs on, after the work that was launched before it. This one has no streams."""

    def __init__(self, name: str, inputs: Sequence[Tensor]) -> None:
        """Create a queue. ``inputs``: tensors that the call reads until it was waited for."""

    def join(self, land: Callable[[], None] | None) -> None:
        """Wait for the call. ``land`` writes its result; None if the call was waited for before."""
        if land is not None:
            land()


def register() -> None:
    """Register the backend "late" in this process, and drop the state of an earlier test."""
    LateWork.flying = []
    LateWork.queue = Queue
    if "LATE" not in dist.Backend._plugins:
        dist.Backend.register_backend("late", _create, devices=["cpu"])


def in_flight() -> list[str]:
    """Return the names of all calls of this process that were launched and not waited for, oldest first."""
    return [work.name for work in LateWork.flying]


class LateWork(dist.Work):
    """The handle of a late launch. The result is private until ``wait``."""

    flying: list[LateWork] = []  # noqa: RUF012 (shared by all works of the process on purpose)
    queue: Callable[[str, Sequence[Tensor]], Queue] = Queue

    def __init__(
        self,
        name: str,
        inner: dist.Work,
        landings: Sequence[tuple[Tensor, Tensor]],
        inputs: Sequence[tuple[Tensor, Tensor]],
        overwrite: bool,
    ) -> None:
        """Create the handle. ``landings``: (output, private result); ``inputs``: (input, its copy at the launch)."""
        super().__init__()
        self.name = name
        self._inner = inner
        self._landings = landings
        self._inputs = inputs
        self._overwrite = overwrite
        self._done = False
        self._queue = type(self).queue(name, [tensor for tensor, _ in inputs])
        LateWork.flying.append(self)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Check the inputs, write the result, overwrite the inputs. A second call does nothing."""
        land = None if self._done else self._land
        self._done = True
        self._queue.join(land)
        return True

    def _land(self) -> None:
        LateWork.flying = [work for work in LateWork.flying if work is not self]
        self._inner.wait()
        with _disable_current_modes():
            for tensor, copy in self._inputs:
                if not _same_bits(tensor, copy):
                    raise LateError(f"{self.name}: an input of shape {list(tensor.shape)} was changed before the wait")
        for output, result in self._landings:
            output.data.copy_(result)
        with _disable_current_modes():
            for tensor, _ in self._inputs if self._overwrite else ():
                poison(tensor)

    def is_completed(self) -> bool:
        """Return True only after the wait, so that a program that polls instead of waiting fails."""
        return self._done

    def is_success(self) -> bool:
        """Return True if the call was waited for."""
        return self._done

    def result(self) -> list[Tensor]:
        """Return the outputs."""
        return [output for output, _ in self._landings]


class LateGroup(dist.ProcessGroup):
    """Gloo with late launches.

    Methods carry the names that torch.distributed calls; torch 2.13 renamed some of them, and both names are here.
    """

    def __init__(self, inner: Any, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._inner = inner
        # Methods that are not overridden below, including those for names and devices, are gloo's.
        self._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.CUSTOM, inner)
        self._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)

    def getBackendName(self) -> str:
        """Return the name that torch.distributed shows."""
        return "late"

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        opts = opts or dist.AllreduceOptions()
        return self._in_place("all_reduce", tensors, opts, self._inner.allreduce)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        opts = opts or dist.AllreduceCoalescedOptions()
        return self._in_place("all_reduce_coalesced", tensors, opts, self._inner.allreduce_coalesced)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        if opts.rootRank != self.rank():
            return self._in_place("broadcast", tensors, opts, self._inner.broadcast)
        return self._launch(
            "broadcast", [], tensors, opts, lambda _, ins: self._inner.broadcast(ins, opts), overwrite=False
        )

    def reduce(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        return self._in_place("reduce", tensors, opts, self._inner.reduce)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        opts = opts or dist.AllgatherOptions()  # type: ignore[attr-defined]
        return self._launch(
            "all_gather", outputs[0], inputs, opts, lambda outs, ins: self._inner.allgather([outs], ins, opts)
        )

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        opts = opts or dist.AllgatherOptions()  # type: ignore[attr-defined]
        return self._launch(
            "all_gather_into_tensor",
            [output],
            [input],
            opts,
            lambda outs, ins: self._inner._allgather_base(outs[0], ins[0], opts),
        )

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> dist.Work:
        opts = opts or dist.ReduceScatterOptions()
        return self._launch(
            "reduce_scatter", outputs, inputs[0], opts, lambda outs, ins: self._inner.reduce_scatter(outs, [ins], opts)
        )

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        opts = opts or dist.ReduceScatterOptions()
        return self._launch(
            "reduce_scatter_tensor",
            [output],
            [input],
            opts,
            lambda outs, ins: self._inner._reduce_scatter_base(outs[0], ins[0], opts),
        )

    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_splits: list[int], input_splits: list[int], opts: Any = None
    ) -> dist.Work:
        opts = opts or dist.AllToAllOptions()
        return self._launch(
            "all_to_all_single",
            [output],
            [input],
            opts,
            lambda outs, ins: self._inner.alltoall_base(outs[0], ins[0], output_splits, input_splits, opts),
        )

    def send(self, tensors: list[Tensor], dst: int, tag: int) -> dist.Work:
        return self._launch(
            f"send to {dst}", [], tensors, None, lambda _, ins: self._inner.send(ins, dst, tag), overwrite=False
        )

    def recv(self, tensors: list[Tensor], src: int, tag: int) -> dist.Work:
        return self._launch(f"receive from {src}", tensors, [], None, lambda outs, _: self._inner.recv(outs, src, tag))

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        raise NotImplementedError("gloo has no all_to_all of lists; use all_to_all_single")

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> dist.Work:
        return self._synchronous("gather", opts, lambda: self._inner.gather(outputs, inputs, opts))

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> dist.Work:
        return self._synchronous("scatter", opts, lambda: self._inner.scatter(outputs, inputs, opts))

    def barrier(self, opts: Any = None) -> dist.Work:
        return _by_gloo(lambda: self._inner.barrier(opts or dist.BarrierOptions()))

    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single

    def _in_place(
        self, name: str, tensors: list[Tensor], opts: Any, call: Callable[[list[Tensor], Any], dist.Work]
    ) -> dist.Work:
        """Launch a call whose tensors are input and output."""
        return self._launch(name, tensors, tensors, opts, lambda _, ins: call(ins, opts))

    def _synchronous(self, name: str, opts: Any, call: Callable[[], dist.Work]) -> dist.Work:
        if opts.asyncOp and _by_program():
            raise NotImplementedError(f"asynchronous {name} is not part of the late backend")
        return _by_gloo(call)

    def _launch(
        self, name: str, outputs: list[Tensor], inputs: list[Tensor], opts: Any, call: Launch, overwrite: bool = True
    ) -> dist.Work:
        """Launch ``call(outputs, inputs)`` on private copies; in place if both lists are the same."""
        if not (opts is None or opts.asyncOp) or not _by_program():
            return _by_gloo(lambda: call(outputs, inputs))
        with _disable_current_modes():
            copies = [tensor.detach().clone(memory_format=torch.contiguous_format) for tensor in inputs]
            if outputs is inputs:
                results = [copy.clone() for copy in copies]
                work = call(results, results)
            else:
                results = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in outputs]
                work = call(results, [copy.clone() for copy in copies])
        for tensor in outputs:
            poison(tensor)
        apart = []
        for tensor, copy in zip(inputs, copies, strict=True):
            if not any(_share(tensor, output) for output in outputs):
                apart.append((tensor, copy))
            elif outputs is not inputs:
                with _disable_current_modes():
                    tensor.data.copy_(copy)  # gather in place: the own part of the output is not written
        landings = list(zip(outputs, results, strict=True))
        return LateWork(name, work, landings, apart, overwrite)


def poison(tensor: Tensor) -> None:
    """Overwrite with NaN, or with an extreme integer. Autograd's version counter does not change."""
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.data.fill_(float("nan"))
    elif tensor.dtype == torch.bool:
        tensor.data.logical_not_()
    else:
        limits = torch.iinfo(tensor.dtype)
        tensor.data.fill_(limits.min if limits.min < 0 else limits.max)


def _create(store: dist.Store, rank: int, size: int, timeout: timedelta) -> LateGroup:
    return LateGroup(dist.ProcessGroupGloo(store, rank, size, timeout), rank, size)


def _by_gloo(call: Callable[[], dist.Work]) -> dist.Work:
    """Call gloo without dispatch modes: its threads inherit those of this thread, which watch only the program."""
    with _disable_current_modes():
        return call()


def _by_program() -> bool:
    """Return True if a function of torch.distributed calls the group, and not a functional collective."""
    frame = sys._getframe(1)
    while frame.f_globals["__name__"] == __name__ and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_globals["__name__"] == "torch.distributed.distributed_c10d"


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(
        a.detach().contiguous().reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8)
    )


def _share(a: Tensor, b: Tensor) -> bool:
    """Return True if two tensors share a storage."""
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr() and a.numel() > 0
