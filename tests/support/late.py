"""The late backend: makes visible on a CPU what only streams show on an accelerator.

    register()                                      # once per process; run_ranks(..., backend="late") does it
    dist.init_process_group("late", ...)            # or dist.new_group(backend="late")

The backend is gloo with the worst timing an accelerator could have, and always the same one. Of a collective or a
point-to-point call that is launched asynchronously:

    launch    the inputs are taken; the output holds NaN (integers: the dtype's minimum, unsigned ones its maximum)
    wait      the inputs must be bit for bit what they were at the launch, or LateError names the call;
              the result lands in the output, in place, over whatever was written there meanwhile;
              the inputs are overwritten like an output at launch

so a program that reads early computes with NaN, one that reuses a buffer in flight is told, and one that counts on
an input afterwards computes with NaN too. Three things are exempt from the overwriting: an input that is part of an
output (gather in place), the tensor of a broadcast's source, and what is sent point to point (activations that are
sent stay in use for the backward). ``keep_inputs()`` lifts it for a stretch of the program whose inputs live on by
design. Synchronous calls, and the functional collectives under DTensor, which wait by themselves, are plain gloo.
``in_flight()`` names what was launched and not waited for.

On the streams of ``tests.support.lazy`` a call runs on a queue of its own behind the stream that launched it, as NCCL's
do: whoever waits for it has waited for what stood before it, and nobody else has.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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
    """Where a call runs beside the program, behind what was launched before it. This one knows of no streams."""

    def __init__(self, name: str, inputs: Sequence[Tensor]) -> None:
        """inputs: what it reads until somebody has waited for it."""

    def join(self, land: Callable[[], None] | None) -> None:
        """Wait for it. land: what it still has to do; None where somebody else has waited before."""
        if land is not None:
            land()


def register() -> None:
    """Make the backend "late" known to torch.distributed in this process, and forget what an earlier test left."""
    LateWork.flying = []
    LateWork.queue = Queue
    LateGroup.overwrite = True
    if "LATE" not in dist.Backend._plugins:
        dist.Backend.register_backend("late", _create, devices=["cpu"])


def in_flight() -> list[str]:
    """The names of all calls of this process that were launched late and not waited for, oldest first."""
    return [work.name for work in LateWork.flying]


@contextmanager
def keep_inputs() -> Iterator[None]:
    """Calls launched inside keep their inputs after the wait (changing them before it stays an error)."""
    previous, LateGroup.overwrite = LateGroup.overwrite, False
    try:
        yield
    finally:
        LateGroup.overwrite = previous


class LateWork(dist.Work):
    """What a late launch returns. The result is private until ``wait``."""

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
        """landings: (output, private result). inputs: (input, its copy at the launch)."""
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
        """Check the inputs, land the result, overwrite the inputs; the second time nothing."""
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
        """True only after the wait: a program that polls instead of waiting is not helped by luck."""
        return self._done

    def is_success(self) -> bool:
        """Whether the call was waited for."""
        return self._done

    def result(self) -> list[Tensor]:
        """The outputs."""
        return [output for output, _ in self._landings]


class LateGroup(dist.ProcessGroup):
    """Gloo behind late launches.

    Methods carry the names that torch.distributed calls; torch 2.13 renamed some of them, and both names are here.
    """

    overwrite = True

    def __init__(self, inner: Any, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._inner = inner
        # What is not overridden below, names and devices among it, is asked of gloo.
        self._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.CUSTOM, inner)
        self._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)

    def getBackendName(self) -> str:
        """The name that torch.distributed shows."""
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
        opts = opts or dist.AllgatherOptions()
        return self._launch(
            "all_gather", outputs[0], inputs, opts, lambda outs, ins: self._inner.allgather([outs], ins, opts)
        )

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        opts = opts or dist.AllgatherOptions()
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
            f"send to {dst}",
            [],
            tensors,
            None,
            lambda _, ins: self._inner.send(ins, dst, tag),
            overwrite=False,
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
        """A call whose tensors are input and output."""
        return self._launch(name, tensors, tensors, opts, lambda _, ins: call(ins, opts))

    def _synchronous(self, name: str, opts: Any, call: Callable[[], dist.Work]) -> dist.Work:
        if opts.asyncOp and _by_program():
            raise NotImplementedError(f"asynchronous {name} is not part of the late backend")
        return _by_gloo(call)

    def _launch(
        self,
        name: str,
        outputs: list[Tensor],
        inputs: list[Tensor],
        opts: Any,
        call: Launch,
        overwrite: bool = True,
    ) -> dist.Work:
        """Launch ``call(outputs, inputs)`` on private copies; in place where both lists are the same."""
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
        return LateWork(name, work, landings, apart, overwrite and LateGroup.overwrite)


def poison(tensor: Tensor) -> None:
    """Overwrite with NaN, or with an integer that no program means; autograd's version counter is not touched."""
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
    """What watches the program's operators must not watch gloo's threads, which take the modes of this one over."""
    with _disable_current_modes():
        return call()


def _by_program() -> bool:
    """Whether the group is called by torch.distributed's own functions, and not by a functional collective."""
    frame = sys._getframe(1)
    while frame.f_globals["__name__"] == __name__ and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_globals["__name__"] == "torch.distributed.distributed_c10d"


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(
        a.detach().contiguous().reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8)
    )


def _share(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors use one storage."""
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr() and a.numel() > 0
