"""Start/wait pairs on real ranks, plain and late: values, gradients, order, and tickets used wrongly."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from megapar.core.comm.accounts import CommBytes
from megapar.core.comm.async_pairs import defer, start, wait
from megapar.core.comm.axis import Axis
from megapar.core.comm.exchange import AllGather, AllToAll, Copy, Reduce, ReduceScatter, SendReceive
from megapar.core.comm.in_flight import CommContext
from megapar.core.recompute.checkpointing import Recompute
from megapar.core.recompute.choice import Interval
from megapar.core.recompute.replay import Replay
from megapar.errors import DistributedError
from tests.support import late
from tests.support.ranks import run_ranks
from tests.support.traffic import RecordedTraffic

BACKENDS = pytest.mark.parametrize("backend", ["gloo", "late"])


def world_axis(rank, world_size):
    return Axis("ep", world_size, rank, dist.group.WORLD, tuple(range(world_size)))


def rows_of(rank, count):
    """Rows [count, 2] whose values name their rank and place."""
    return (100.0 * rank + torch.arange(2.0 * count).view(count, 2)).double()


# Rows that rank r sends to rank s: some ranks send or receive nothing.
SPLITS = ((1, 2, 0), (0, 0, 0), (3, 0, 1))


def all_kinds(rank, world_size):
    """(output, gradient) of every kind, for a loss that is the sum over ranks of sum(y · (rank + 1) · y)."""
    axis, comm = world_axis(rank, world_size), CommContext()
    send, receive = SPLITS[rank], tuple(row[rank] for row in SPLITS)
    exchanges = {
        "uneven": (AllToAll(axis, send, receive), sum(send)),
        "even": (AllToAll(axis), 3),
        "gather": (AllGather(axis), 2),
        "gather nothing": (AllGather(axis), 0),
        "scatter": (ReduceScatter(axis), 6),
        "reduce": (Reduce(axis), 2),
        "reduce nothing": (Reduce(axis), 0),
        "copy": (Copy(axis), 2),
        "send": (SendReceive(axis, (rank + 1) % world_size, (rank - 1) % world_size), 2),
        "send down": (SendReceive(axis, rank + 1 if rank < 2 else None, rank - 1 if rank else None), 2),
    }
    results = {}
    for name, (exchange, count) in exchanges.items():
        x = rows_of(rank, count).requires_grad_()
        y = wait(*start(exchange, x * 1.0, comm))
        ((rank + 1) * y.square()).sum().backward()
        results[name] = (y.detach().clone(), x.grad)
    comm.check_settled()
    assert not late.in_flight()
    return results


@BACKENDS
def test_every_kind_and_its_gradient(backend):
    results = run_ranks(3, all_kinds, backend=backend)
    for rank, result in enumerate(results):
        own = rows_of(rank, sum(SPLITS[rank]))
        pieces = [rows_of(source, sum(SPLITS[source])).split(SPLITS[source])[rank] for source in range(3)]
        factors = torch.cat([torch.full((count, 1), to + 1.0) for to, count in enumerate(SPLITS[rank])])
        expect(result["uneven"], torch.cat(pieces), 2 * factors * own)
        even = torch.cat([rows_of(source, 3)[rank : rank + 1] for source in range(3)])
        expect(result["even"], even, 2 * torch.tensor([[1.0], [2.0], [3.0]]) * rows_of(rank, 3))
        everything = torch.cat([rows_of(source, 2) for source in range(3)])
        expect(result["gather"], everything, 2 * 6 * rows_of(rank, 2))
        sums = sum(rows_of(source, 6) for source in range(3))
        factors = torch.tensor([1.0, 2.0, 3.0]).repeat_interleave(2)[:, None]
        expect(result["scatter"], sums[2 * rank : 2 * rank + 2], 2 * factors * sums)
        total = sum(rows_of(source, 2) for source in range(3))
        expect(result["reduce"], total, 2 * (rank + 1) * total)
        gradient = sum(2 * (source + 1) * rows_of(source, 2) for source in range(3))
        expect(result["copy"], rows_of(rank, 2), gradient)
        before, behind = (rank - 1) % 3, (rank + 1) % 3
        expect(result["send"], rows_of(before, 2), 2 * (behind + 1) * rows_of(rank, 2))
        nothing = torch.zeros(2, 2)
        gradient = nothing if rank == 2 else 2 * (behind + 1) * rows_of(rank, 2)
        expect(result["send down"], rows_of(before, 2) if rank else nothing, gradient)
        for name in ("gather nothing", "reduce nothing"):
            expect(result[name], rows_of(rank, 0), rows_of(rank, 0))


def expect(got, output, gradient):
    assert torch.equal(got[0], output)
    assert torch.equal(got[1], gradient.double())


class Columns(RecordedTraffic):
    """Names exchanges by their number of columns."""

    def name_of(self, exchange, x):
        return str(x.shape[1])


def two_in_flight(rank, world_size):
    """Two exchanges, 1 and 2 columns wide, flying under each other's computation."""
    comm, exchange = Columns(), AllToAll(world_axis(rank, world_size))
    x = torch.ones(world_size, 3, dtype=torch.float64, requires_grad=True)
    one = start(exchange, x[:, :1] * 2.0, comm)
    two = start(exchange, x[:, 1:] * 3.0, comm)
    a = wait(*one) * 5.0
    b = wait(*two) * 7.0
    there, comm.events = comm.events, []
    (a.sum() + b.sum()).backward()
    return there, comm.events, x.grad


@BACKENDS
def test_backward_is_the_mirror_of_forward(backend):
    for there, back, gradient in run_ranks(2, two_in_flight, backend=backend):
        assert there == ["1^", "2^", "1v", "2v"]
        assert back == ["2^", "1^", "2v", "1v"]
        assert gradient.tolist() == [[10.0, 21.0, 21.0]] * 2


class Rows:
    """A message whose number of rows is known late: the first ``count`` of them, doubled."""

    def __init__(self, total, count):
        self.total, self.count = total, count

    def build(self, x):
        return 2.0 * x[: self.count]

    def gradients(self, grad):
        return (torch.cat([2.0 * grad, grad.new_zeros(self.total - self.count, *grad.shape[1:])]),)


def launched_late(rank, world_size):
    """A message of two parts whose node stands before another exchange that is launched before it."""
    comm, exchange = Columns(), AllToAll(world_axis(rank, world_size))
    x = torch.arange(10.0).view(5, 2).double().requires_grad_()
    tokens, deferred = defer((x * 1.0,), 2, comm)
    other = start(exchange, (x * 1.0).repeat(1, 2)[:4], comm)
    with pytest.raises(DistributedError, match="before its launch"):
        wait(tokens[0], deferred.tickets[0])
    deferred.launch(Rows(5, 4), (exchange, exchange), (2, 2))
    with pytest.raises(DistributedError, match="launched twice"):
        deferred.launch(Rows(5, 4), (exchange, exchange), (2, 2))
    parts = [wait(token, ticket) for token, ticket in zip(tokens, deferred.tickets, strict=True)]
    y = wait(*other)
    there, comm.events = comm.events, []
    (sum(part.sum() for part in parts) + y.sum()).backward()
    comm.check_settled()
    return there, comm.events, [part.detach() for part in parts], x.grad


@BACKENDS
def test_a_deferred_launch_keeps_its_place_in_the_backward(backend):
    for rank, (there, back, parts, gradient) in enumerate(run_ranks(2, launched_late, backend=backend)):
        assert there == ["4^", "2^", "2^", "2v", "2v", "4v"]
        # The node of the deferred message is older than the other exchange, so its gradient is asked for last.
        assert back == ["4^", "2^", "2^", "4v", "2v", "2v"]
        x = torch.arange(10.0).view(5, 2).double()
        assert torch.equal(parts[0], 2 * x[rank].expand(2, 2))
        assert torch.equal(parts[1], 2 * x[2 + rank].expand(2, 2))
        assert gradient.tolist() == [[4.0, 4.0]] * 4 + [[0.0, 0.0]]


def kinds_waited_for(rank, world_size):
    comm, axis = CommContext(), world_axis(rank, world_size)
    for exchange in (AllToAll(axis), AllGather(axis)):
        wait(*start(exchange, torch.ones(2, 2), comm))
    return comm.meter.take().seconds(), comm.meter.take().seconds()


def test_waits_are_metered_by_axis_and_kind():
    for first, second in run_ranks(2, kinds_waited_for):
        assert list(first) == ["ep/all_gather", "ep/all_to_all"]
        assert min(first.values()) > 0
        assert second == {}


def chained(rank, world_size):
    """What is in flight behind each launch on two axes that share a link, and the results."""
    ep, emp = world_axis(rank, world_size), Axis("emp", world_size, rank, dist.group.WORLD, tuple(range(world_size)))
    comm = CommContext(chained=frozenset({"ep", "emp"}))
    flying, seen = [], []
    for exchange in (AllToAll(ep), AllToAll(ep), AllGather(emp), AllToAll(ep)):
        flying.append(start(exchange, rows_of(rank, 2), comm))
        seen.append(len(late.in_flight()))
    results = [wait(*each) for each in flying]
    comm.check_settled()
    return seen, [result.isfinite().all().item() for result in results]


def waited_for_before(rank, world_size):
    """A message whose work somebody waits for before it lands."""
    axis, comm = world_axis(rank, world_size), CommContext()
    flight = comm.launch(SendReceive(axis, (rank + 1) % world_size, (rank - 1) % world_size), rows_of(rank, 2))
    flight.work.wait()
    assert flight.work.is_completed()
    return comm.wait(flight)


def test_a_message_may_be_waited_for_before_it_lands():
    """gloo itself would wait for ever the second time."""
    for rank, arrived in enumerate(run_ranks(2, waited_for_before)):
        assert torch.equal(arrived, rows_of(1 - rank, 2))


def test_chained_axes_never_use_the_link_at_once():
    for seen, finite in run_ranks(2, chained, backend="late"):
        assert seen == [1, 2, 1, 1]
        assert finite == [True] * 4


def misuse(rank, world_size):
    comm, exchange = CommContext(), AllToAll(world_axis(rank, world_size))
    x = torch.ones(world_size, 2, requires_grad=True)
    messages = []
    flying = start(exchange, x * 1.0, comm)
    with pytest.raises(DistributedError) as error:
        comm.check_settled()
    messages.append(str(error.value))
    wait(*flying)
    with pytest.raises(DistributedError) as error:
        wait(*flying)
    messages.append(str(error.value))
    return messages


def test_a_ticket_waited_twice_or_never_is_an_error():
    for never, twice in run_ranks(2, misuse):
        assert "never waited for: all_to_all over ep" in never
        assert "all_to_all over ep was waited for twice" in twice


def into_a_recomputed_unit(rank, world_size):
    """The gradient of a loss behind a unit that waits inside, plain and recomputed."""
    comm, exchange = CommContext(), AllToAll(world_axis(rank, world_size))
    gradients = []
    for recomputed in (False, True):
        x = (torch.arange(2.0 * world_size) + rank).view(world_size, 2).requires_grad_()
        token, ticket = start(exchange, x * 0.5, comm)

        replay = Replay()
        kept = []
        replay.keep_by(lambda arrived, kept=kept: kept.append(arrived), lambda _, kept=kept: kept[0])

        def unit(token, ticket=ticket, replay=replay):
            return replay.arrival(lambda: wait(token, ticket)).square().sin()

        if recomputed:
            y = Recompute(Interval(1), comm, CommBytes()).begin().run(unit, token, replay=replay)
            assert len(kept) == 1
        else:
            y = unit(token)
        y.sum().backward()
        gradients.append(x.grad)
    comm.check_settled()
    return gradients, dict(comm.launched)


@BACKENDS
def test_what_flies_into_a_recomputed_unit_arrives_once_and_is_kept(backend):
    for (plain, recomputed), launched in run_ranks(2, into_a_recomputed_unit, backend=backend):
        assert torch.equal(plain, recomputed)
        assert launched == {"all_to_all": 4}


def test_one_rank_launches_nothing():
    comm, single = CommContext(), Axis.single("ep")
    x = torch.ones(3, 2, requires_grad=True)
    for exchange in (AllToAll(single), AllGather(single), ReduceScatter(single), Reduce(single), Copy(single)):
        token, ticket = start(exchange, x, comm)
        assert wait(token, ticket) is x
        with pytest.raises(DistributedError, match="twice"):
            wait(token, ticket)
    assert not comm.launched
    assert not comm.in_flight
