"""The lazy-stream device: each fault is found, with operator, shape and line, and programs without one run."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megapar.core.comm.async_pairs import defer, wait
from megapar.core.comm.axis import Axis
from megapar.core.comm.exchange import AllToAll
from megapar.core.comm.in_flight import CommContext
from tests.support.lazy import LazyDevice, LazyStream
from tests.support.memory import LazyError
from tests.support.ranks import run_ranks

HERE = r"test_lazy\.py:\d+"


def launched(device: LazyDevice, stream: LazyStream, x: Tensor) -> Tensor:
    """Twice ``x``, on a stream of its own."""
    return device.launch(lambda: x * 2, stream)


def unseen(x: Tensor) -> bool:
    """Whether it holds nothing that a program means, as the host would read it."""
    return all(value != value or abs(value) > 1e15 for value in x.flatten().tolist())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64])
def test_what_was_launched_is_there_for_whoever_has_waited(dtype: torch.dtype) -> None:
    """Of the main stream, of another one, and of the host; behind the stream and behind an event."""
    with LazyDevice() as device:
        one, two = device.new_stream(), device.new_stream()
        x = torch.ones(2, 3, dtype=dtype)
        y = launched(device, one, x)
        assert unseen(y)
        z = device.launch(lambda: y + 1, one)  # behind the first by itself
        assert unseen(z)
        w = device.launch(lambda: z + 1, two, one.record_event())
        assert unseen(y)
        assert unseen(w)
        device.main.wait_stream(two)  # and so for what that one had waited for
        assert [t.flatten().tolist() for t in (x, y, z, w)] == [[number] * 6 for number in (1, 2, 3, 4)]
        v = launched(device, one, x)
        one.record_event().synchronize()
        assert v.flatten().tolist() == [2] * 6
        device.settle()


def test_two_streams_may_use_two_places_of_one_memory() -> None:
    """As slots of one buffer are filled and emptied."""
    with LazyDevice() as device:
        stream, slots = device.new_stream(), torch.zeros(2, 4)
        device.launch(lambda: slots[0].fill_(1.0), stream)
        slots[1].fill_(2.0)
        assert unseen(slots[0])
        device.main.wait_stream(stream)
        assert slots.tolist() == [[1.0] * 4, [2.0] * 4]


def test_a_copy_to_the_host_is_there_when_the_host_has_waited() -> None:
    """On the main stream too, where a wait of the stream would not do."""
    with LazyDevice() as device:
        host, ready = device.host_copy(torch.ones(3))
        assert unseen(host)
        with pytest.raises(LazyError, match=rf"reads too early.*copy to the host of \[3\].*{HERE}"):
            host.sum()
        ready.synchronize()
        assert host.tolist() == [1.0] * 3


def test_read_early() -> None:
    with LazyDevice() as device:
        y = launched(device, device.new_stream(), torch.ones(2, 3))
        launch = rf"nobody has waited for aten\.mul\.Tensor of \[2, 3\] on stream 0, launched at .*{HERE}"
        with pytest.raises(LazyError, match=rf"aten\.add\.Tensor of \[2, 3\] on stream main.*{HERE} reads.*{launch}"):
            y + 1
        with pytest.raises(LazyError, match=launch):  # an event from before the launch is not enough
            device.launch(lambda: y + 1, device.new_stream(), device.event())
    with LazyDevice() as device:  # by a stream before the main one has written
        stream, routed = device.new_stream(), device.event()
        x = torch.ones(2, 3)
        with pytest.raises(LazyError, match=rf"aten\.mul\.Tensor of \[2, 3\] on stream 0.*{HERE} reads too early"):
            device.launch(lambda: x * 2, stream, routed)


def test_freed() -> None:
    """An input that only the launch held; what was launched stays unseen, whoever waits for it."""
    with LazyDevice() as device:
        stream, kept = device.new_stream(), torch.ones(2, 3)
        y = device.launch(lambda: torch.ones(2, 3) + kept, stream)  # a stream's own memory may go at any time
        device.main.wait_stream(stream)
        assert y.tolist() == [[2.0] * 3] * 2
        y = launched(device, stream, torch.ones(2, 3))
        with pytest.raises(LazyError, match=rf"freed on stream main.*aten\.mul\.Tensor of \[2, 3\].*{HERE}"):
            device.main.wait_stream(stream)
        device.main.wait_stream(stream)
        assert unseen(y)
    with LazyDevice() as device:  # an input that was adopted may be freed, and the result is there
        stream, x = device.new_stream(), torch.ones(2, 3)
        with stream:
            stream.wait_stream(device.main)
            device.adopt(x)
            y = x * 2
        del x
        device.main.wait_stream(stream)
        assert y.tolist() == [[2.0] * 3] * 2


@pytest.mark.parametrize("adopted", [False, True])
def test_the_main_stream_adopts_what_another_one_allocated(adopted: bool) -> None:
    """Or that one takes its memory again while the main stream still computes with it."""
    with LazyDevice() as device:
        stream, before = device.new_stream(), device.event()
        y = device.launch(lambda: torch.ones(2, 3), stream, before)
        device.main.wait_stream(stream)
        if adopted:
            device.adopt(y)
        y.sum()
        del y
        if adopted:
            device.launch(lambda: torch.ones(2), stream, before)
        else:
            with pytest.raises(LazyError, match=r"freed on stream 0 .*aten\.sum\.default of \[2, 3\] on stream main"):
                device.launch(lambda: torch.ones(2), stream, before)


@pytest.mark.parametrize("waited", [False, True])
def test_memory_is_kept_for_whoever_the_stream_that_adopted_it_has_waited_for(waited: bool) -> None:
    """A receipt's buffer: of one stream, filled by a second, used on the main one, which has waited for the second."""
    with LazyDevice() as device:
        stream, filling, before = device.new_stream(), device.new_stream(), device.event()
        y = device.launch(lambda: torch.ones(2, 3), stream, before)
        with filling:
            filling.wait_stream(stream)
            y.mul_(2)
        if waited:
            device.main.wait_stream(filling)
        device.adopt(y)
        del y
        if waited:
            device.launch(lambda: torch.ones(2), stream, before)
        else:
            with pytest.raises(LazyError, match=r"freed on stream 0 .*aten\.mul_\.Tensor of \[2, 3\] on stream 1"):
                device.launch(lambda: torch.ones(2), stream, before)


@pytest.mark.parametrize("through_data", [False, True])
def test_overwritten(through_data: bool) -> None:
    """Also where no version is counted."""
    with LazyDevice() as device:
        x = torch.ones(2, 3)
        y = launched(device, device.new_stream(), x)
        wrong = rf"aten\.fill_\.Scalar of \[2, 3\] on stream main.*writes what is still read.*aten\.mul\.Tensor.*{HERE}"
        with pytest.raises(LazyError, match=wrong):
            (x.data if through_data else x).fill_(5.0)
        assert unseen(y)


def test_written_over_what_a_stream_writes() -> None:
    """By an operator, and by what no operator shows."""
    with LazyDevice() as device:
        stream, x = device.new_stream(), torch.ones(2, 3)
        device.launch(lambda: x.add_(1), stream)
        with pytest.raises(LazyError, match=r"writes what is still written"):
            x.zero_()
        x.numpy()[:] = 0
        with pytest.raises(LazyError, match=rf"written over before anybody had waited for aten\.add_.*{HERE}"):
            device.main.wait_stream(stream)


def test_never_landed() -> None:
    with LazyDevice() as device:
        y = launched(device, device.new_stream(), torch.ones(2, 3))
        with pytest.raises(LazyError, match=rf"never landed.*aten\.mul\.Tensor of \[2, 3\] on stream 0.*{HERE}"):
            device.settle()
        assert unseen(y)


class Weights:
    """A message of rows and their weights, which nothing but the message needs."""

    def build(self, *inputs: Tensor) -> Tensor:
        """[R, H] rows times weights."""
        return inputs[0] * inputs[1]

    def gradients(self, grad: Tensor) -> tuple[Tensor | None, ...]:
        """As of a sum."""
        return grad, grad


def deferred(rank: int, world_size: int, axis_size: int) -> list[float]:
    """A deferred message whose weights nobody keeps, over ``axis_size`` ranks."""
    with LazyDevice() as device:
        comm = CommContext(device=device)
        axis = Axis("ep", 2, rank, dist.group.WORLD, (0, 1)) if axis_size > 1 else Axis.single("ep")
        x = torch.full((2, 3), 1.0 + rank, requires_grad=True)
        tokens, later = defer((x, torch.full((2, 3), 2.0)), 1, comm)
        routed = device.event()
        later.launch(Weights(), [AllToAll(axis)], [2], routed)
        y = wait(tokens[0], later.tickets[0])
        y.sum().backward()
        device.settle()
        return [value for row in y.tolist() for value in row]


def test_a_deferred_message_adopts_its_inputs_and_is_waited_for() -> None:
    """Weights that nobody keeps are read by the stream that packs them, which an axis of one rank has, too."""
    assert run_ranks(2, deferred, 2, backend="late") == [[2.0] * 3 + [4.0] * 3] * 2
    assert deferred(0, 1, 1) == [2.0] * 6


def collective(rank: int, world_size: int, aside: bool) -> tuple[list[float], list[str]]:
    """An all-to-all from a stream: (its result, what was wrong with reading it early)."""
    with LazyDevice() as device:
        stream, axis = device.new_stream(), Axis("ep", 2, rank, dist.group.WORLD, (0, 1))
        x = torch.full((2, 3), 1.0 + rank)

        def send() -> tuple[Tensor, dist.Work]:
            y, work = AllToAll(axis).launch(x * 2)
            assert work is not None
            if aside:
                work.wait()  # of this stream only
            return y, work

        y, work = device.launch(send, stream)
        found = []
        try:
            y + 1
        except LazyError as error:
            found.append(str(error))
        work.wait()
        return [value for row in (y + 1).tolist() for value in row], found


@pytest.mark.parametrize("aside", [False, True])
def test_a_collective_reads_at_its_launch_and_is_there_for_whoever_waits_for_it(aside: bool) -> None:
    """What launched it may have waited for it before."""
    for got, found in run_ranks(2, collective, aside, backend="late"):
        assert got == [3.0] * 3 + [5.0] * 3
        assert len(found) == 1
        assert "reads too early" in found[0]
