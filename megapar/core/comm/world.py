"""A grid's process groups; the only place where a run makes groups.

Every group is made eagerly, in rounds that are the same on every rank (``rounds.py``), after a roll call, and is
followed by a collective or a message, so that a bad network or a missing rank shows at start-up with the group's name
and the ranks that did not answer. An axis of size 1 has no group, and axes with the same ranks share one communicator.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from megapar.config.launched import starts_before
from megapar.core.comm.axis import Axis
from megapar.core.comm.comm_bytes import CommBytes
from megapar.core.comm.flight_recorder import FlightRecorder
from megapar.core.comm.meter import WaitMeter
from megapar.core.comm.rounds import AXES, axis_ranks, axis_rounds, queue_rounds
from megapar.core.comm.run_store import loopback_advice, meet
from megapar.core.device.base import Device
from megapar.core.device.communicators import COMMUNICATORS
from megapar.core.grid import DENSE_AXES, Grid
from megapar.core.torch_names import abort_process_groups
from megapar.errors import DistributedError

GRACE = timedelta(seconds=3)


class World:
    """This rank among the ranks of a grid: ``axis(name)`` is its place on any axis, as ``"dp"``, data parallel.

    rank and grid number the ranks in the order dp, pp, sharding, cp, mp, whatever order they were launched in: torch
    sorts a group's ranks by number, and the ranks of every axis, of the expert view's too, must be in the order of
    their coordinates there. Rank 0 is the same in both. launched: by rank, the number it was launched with.
    on_leave: called when this rank leaves, be it after a failure.

    Every axis has the accounts of its world: sent_bytes: what this rank has sent. meter: the time it waited for
    collectives. recorder: the last collectives it launched.
    """

    def __init__(
        self,
        grid: Grid,
        rank: int,
        device: Device,
        store: dist.Store | None,
        timeout: timedelta,
        launched: Sequence[int] = (0,),
    ) -> None:
        self.grid = grid
        self.rank = rank
        self.device = device
        self.launched = tuple(launched)
        self._store = store
        self._timeout = timeout
        self.sent_bytes = CommBytes()
        self.meter = WaitMeter(device.timed_event())
        self.recorder = FlightRecorder()
        self.on_leave: list[Callable[[], None]] = []
        self._rounds = 0
        self._queues: dict[tuple[int, int], Axis] = {}
        self._axes = {name: self._axis(name, (rank,), None) for name in AXES}
        rounds = axis_rounds(grid)
        for names in rounds:
            ranks = axis_ranks(grid, names[0], rank)
            made = self._make_group(names, ranks)
            self._axes |= {name: self._axis(name, ranks, made) for name in names}
        self._rounds_of_axes = rounds
        group = dist.group.WORLD if grid.world_size > 1 else None
        self._axes["world"] = self._axis("world", tuple(range(grid.world_size)), group)

    @classmethod
    def start(
        cls,
        grid: Grid,
        device: Device,
        timeout: timedelta,
        rendezvous_url: str | None = None,
        agree: Callable[[dist.Store, int, int, timedelta], None] | None = None,
    ) -> World:
        """Join the other ranks and make all groups.

        rendezvous_url: where ranks meet (``file://PATH``), with RANK and WORLD_SIZE from the environment; by default
        as ``megapar launch`` or torchrun sets it. One process needs neither. agree: called by all ranks that have met,
        before any group, with a store, rank and number of ranks as launched, and the timeout; whatever it raises ends
        the start. Raises DistributedError naming the group and the ranks that did not answer within ``timeout``.
        """
        if grid.world_size == 1:
            return cls(grid, 0, device, None, timeout)
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        if world_size != grid.world_size:
            raise DistributedError(f"the grid has {grid.world_size} ranks, WORLD_SIZE is {world_size}")
        store = meet(rendezvous_url, rank, world_size, timeout)
        # torch's agent keeps the store when it starts ranks again; what those that died left must not be found in it.
        store = dist.PrefixStore(f"start-{starts_before(os.environ)}", store)
        store.set_timeout(timeout)
        roll_call(dist.PrefixStore("start", store), "world", tuple(range(world_size)), rank, timeout)
        if agree is not None:
            agree(dist.PrefixStore("agree", store), rank, world_size, timeout)
        ordered = replace(grid, order=DENSE_AXES)
        launched = [grid.rank(**ordered.dense(number)) for number in range(world_size)]
        rank = launched.index(rank)
        try:
            dist.init_process_group(
                device.backend,
                store=dist.PrefixStore("world", store),
                rank=rank,
                world_size=world_size,
                timeout=timeout,
                device_id=device.device_id,
            )
        except RuntimeError as error:
            raise DistributedError(
                f"the group of all {world_size} ranks could not be made, though all had answered, so look at the "
                f"network. {str(error).splitlines()[0]}.{loopback_advice()}"
            ) from error
        return cls(ordered, rank, device, store, timeout, launched)

    @classmethod
    def pretend(cls, grid: Grid, device: Device, rank: int) -> World:
        """The world as rank ``rank`` of the grid would see it, alone, on torch's fake process groups.

        Collectives return at once and move nothing; with fake tensors the real training code runs as any rank of any
        cluster. rank: as launched, as in ``start``.
        """
        from torch.testing._internal.distributed.fake_pg import FakeStore

        if grid.world_size == 1:
            return cls(grid, 0, device, None, GRACE)
        ordered = replace(grid, order=DENSE_AXES)
        launched = [grid.rank(**ordered.dense(number)) for number in range(grid.world_size)]
        rank = launched.index(rank)
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=grid.world_size)
        return cls(ordered, rank, device, None, GRACE, launched)

    @property
    def num_groups(self) -> int:
        """Communicators of this rank, the world's and the pipeline's queues included."""
        return len(self._rounds_of_axes) + len(self._queues) + (self.grid.world_size > 1)

    @property
    def group_bytes(self) -> int:
        """About what these communicators keep on the device."""
        world = [("world",)] if self.grid.world_size > 1 else []
        node = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        here = [self.launched[rank] // node for rank in self.axis("ep").ranks]
        peers = here.count(self.launched[self.rank] // node) - 1
        return COMMUNICATORS[self.device.type].of([*world, *self._rounds_of_axes], len(self._queues), peers)

    def axis(self, name: str) -> Axis:
        """This rank's place on an axis: dp, pp, sharding, cp, mp, edp, ep, emp, data, shard, replica, ..."""
        return self._axes[name]

    def axes(self) -> list[Axis]:
        """All axes, the world's included."""
        return list(self._axes.values())

    @property
    def queues(self) -> list[Axis]:
        """The pipeline's queues that this rank has an end of, once they have been made."""
        return list(self._queues.values())

    def make_queues(self, *, closed: bool) -> dict[tuple[int, int], Axis]:
        """A queue for each ordered pair of neighbouring stages: (sender, receiver) -> both, the sender first.

        Those of which this rank is an end. closed: the last stage and the first are neighbours too. Every rank calls
        this at the same place, once.
        """
        assert not self._queues, "queues are made once"
        for groups in queue_rounds(self.grid.pp, closed=closed):
            stage = self.axis("pp").rank
            ends = next(group for group in groups if stage in group)
            ranks = tuple(self.axis("pp").ranks[end] for end in ends)
            group = self._make_group(("pp",), ranks, self.device.queue_backend, queue=True)
            if len(ends) == 2:
                name = "{}>{}".format(*ends)
                self._queues[ends] = self._axis("pp", ranks, group, queue=name)
        return dict(self._queues)

    def _axis(self, name: str, ranks: tuple[int, ...], group: dist.ProcessGroup | None, *, queue: str = "") -> Axis:
        """Make this rank's view of an axis, with the accounts of this world."""
        accounts = self.sent_bytes, self.meter, self.recorder
        return Axis(name, len(ranks), ranks.index(self.rank), group, ranks, *accounts, queue=queue)

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Leave what is sent and waited for inside out of the accounts of steps: an evaluation, a check.

        The flight recorder goes on: these collectives can hang like any other.
        """
        with self.sent_bytes.uncounted(), self.meter.paused():
            yield

    def mesh(self, *names: str) -> DeviceMesh:
        """A device mesh over named axes, outermost first, for the parts of torch that want one."""
        axes = [self.axis(name) for name in names]
        groups = [axis.group for axis in axes if axis.group is not None]
        if len(groups) < len(axes):
            raise ValueError(f"a mesh over {names} needs more than one rank on each axis")
        kind = self.device.type
        if len(axes) == 1:
            return DeviceMesh.from_group(groups[0], kind, mesh_dim_names=names)
        ranks = torch.tensor([axis_ranks(self.grid, names[1], r) for r in axes[0].ranks])
        return DeviceMesh.from_group(groups, kind, mesh=ranks, mesh_dim_names=names)

    def close(self) -> None:
        """Wait for all ranks and leave. After a failure ``abandon`` is the way out."""
        if self.grid.world_size > 1 and dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()
        self._leave()

    def _leave(self) -> None:
        while self.on_leave:
            self.on_leave.pop()()

    def abandon(self) -> None:
        """Leave after a failure, without waiting for ranks that may be gone.

        Groups on an accelerator are aborted: to destroy them would wait for what they have launched.
        """
        self._leave()
        if self.grid.world_size == 1 or not dist.is_initialized():
            return
        if self.device.type == "cpu":
            dist.destroy_process_group()
            return
        with suppress(RuntimeError):  # where the vendor's library knows no abort, they end with the process
            abort_process_groups()

    @property
    def pretended(self) -> bool:
        """True where this rank runs alone as one of many (``tools/tracing/pretend.py``): collectives move nothing."""
        return self._store is None and self.grid.world_size > 1

    def spare_store(self, name: str) -> dist.Store | None:
        """A connection to the ranks' store for threads beside the training; None where there is one rank."""
        return None if self._store is None else dist.PrefixStore(name, self._store.clone())  # type: ignore[attr-defined]

    def spare_group(self, name: str) -> dist.ProcessGroup | None:
        """A group of all ranks for threads beside the training, on the host; None where there is one rank.

        Every rank calls this for the same groups in the same order.
        """
        if self.grid.world_size == 1:
            return None
        return self._make_group((name,), tuple(range(self.grid.world_size)), "gloo")

    def _make_group(
        self, names: tuple[str, ...], ranks: tuple[int, ...], backend: str | None = None, *, queue: bool = False
    ) -> dist.ProcessGroup:
        """This rank's group of the next round.

        names: of the axes that share it. queue: between the ranks, sender first, or of this rank alone.
        """
        self._rounds += 1
        name = names[0]
        if self._store is None:  # pretended
            alone: dist.ProcessGroup = dist.new_group(ranks, use_local_synchronization=True, group_desc=name)
            return alone
        # A split of the world's communicator waits for all of its ranks.
        splits = self.device.device_id is not None and backend != "gloo"
        called = self.launched if splits else tuple(self.launched[rank] for rank in ranks)
        here = self.launched[self.rank]
        store = dist.PrefixStore(f"round/{self._rounds}/{'all' if splits else ranks[0]}", self._store)
        roll_call(store, f"{name}, in round {self._rounds}," if splits else name, called, here, self._timeout)
        try:
            group: dist.ProcessGroup = dist.new_group(
                ranks,
                timeout=self._timeout,
                backend=backend,
                pg_options=self.device.group_options(names, self._timeout, queue=queue) if backend != "gloo" else None,
                use_local_synchronization=True,
                group_desc=name,
            )
            place = self.device.torch_device if backend != "gloo" else torch.device("cpu")
            self._try(group, ranks, torch.ones(1, device=place), queue=queue)
        except RuntimeError as error:
            silent = silent_ranks(store, called, here)
            who = f"ranks {silent} are silent" if silent else "all its ranks are there, so look at the network"
            if splits:
                who += (
                    f". This is round {self._rounds}, a split of the communicator of all {len(called)} ranks: "
                    "what failed may be another group of this round"
                )
            numbers = [self.launched[rank] for rank in ranks]
            raise DistributedError(
                f"group {name} of ranks {numbers} failed its first collective; {who}. {error}{loopback_advice()}"
            ) from error
        return group

    def _try(self, group: dist.ProcessGroup, ranks: tuple[int, ...], x: torch.Tensor, *, queue: bool) -> None:
        """One collective, or what else the group is for: a queue's message needs less room than a sum."""
        if not queue:
            dist.all_reduce(x, group=group)
        elif len(ranks) == 2 and self.rank == ranks[0]:
            dist.send(x, ranks[1], group=group)
        elif len(ranks) == 2:
            dist.recv(x, ranks[0], group=group)
        self.device.synchronize()


def silent_ranks(store: dist.Store, ranks: Sequence[int], rank: int, grace: timedelta = GRACE) -> list[int]:
    """After a failure that all of these ranks see: those that do not say within ``grace`` that they saw it too."""
    store.set(f"failed/{rank}", "1")
    keys = {other: f"failed/{other}" for other in ranks}
    try:
        store.wait(list(keys.values()), grace)
    except (RuntimeError, dist.DistStoreError):
        return [other for other, key in keys.items() if not store.check([key])]
    return []


def roll_call(store: dist.Store, name: str, ranks: Sequence[int], rank: int, timeout: timedelta) -> None:
    """Every one of ``ranks`` says it is here and waits for the others: three requests each, however many they are.

    Raises DistributedError naming the group, its ranks and those that stayed silent for ``timeout``.
    """
    store.set(f"here/{rank}", "1")
    if store.add("number", 1) == len(ranks):
        store.set("complete", "1")
    try:
        store.wait(["complete"], timeout)
    except (RuntimeError, dist.DistStoreError) as error:
        silent = [r for r in ranks if not store.check([f"here/{r}"])]
        raise DistributedError(
            f"group {name} of ranks {list(ranks)}: ranks {silent} did not answer within {timeout.total_seconds():g} s. "
            "Look at their logs, or raise --distributed-timeout-minutes."
        ) from error
