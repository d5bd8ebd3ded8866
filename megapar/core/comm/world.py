"""The process groups of a device mesh. A run creates groups only here.

Every group is created eagerly, in rounds that are the same on every rank (``rounds.py``), after a roll call. A first
collective or message tests it. A bad network or a missing rank therefore fails at start-up, with the name of the group
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

from megapar.core.comm.accounts import CommBytes, FlightRecorder, WaitMeter
from megapar.core.comm.axis import Axis, AxisNodes
from megapar.core.comm.rounds import AXES, axis_ranks, axis_rounds, queue_rounds
from megapar.core.comm.run_store import loopback_advice, meet
from megapar.core.device.base import Device
from megapar.core.device.kinds import COMMUNICATORS, device_class, is_light
from megapar.core.grid import DENSE_AXES, Grid
from megapar.core.torch_names import abort_process_groups
from megapar.errors import DistributedError
from megapar.launch_environment import starts_before

GRACE = timedelta(seconds=3)


class World:
    """This rank's view of the device mesh: ``axis(name)`` is its place on any axis, such as ``"dp"``, data parallel.

    Ranks are renumbered in the order dp, pp, sharding, cp, mp, regardless of the order in which they were launched.
    torch sorts a group's ranks by number. Renumbering makes that order equal to the order of coordinates, on every axis
    and in the expert view. Rank 0 is the same in both orders.

    Attributes:
        rank: This rank's number in that order.
        launched: For each rank, the number that it was launched with.
        sent_bytes: Bytes that this rank has sent. Every axis shares this and the next two.
        meter: Time that this rank waited for blocking collectives.
        recorder: The last collectives that this rank launched.
        on_leave: Called when this rank leaves, also after a failure; the last one first.
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
            group = self._make_group(names, ranks)
            self._axes |= {name: self._axis(name, ranks, group) for name in names}
        self._rounds_of_axes = rounds
        world_group = dist.group.WORLD if grid.world_size > 1 else None
        self._axes["world"] = self._axis("world", tuple(range(grid.world_size)), world_group)

    @classmethod
    def start(
        cls,
        grid: Grid,
        device: Device,
        timeout: timedelta,
        rendezvous_url: str | None = None,
        agree: Callable[[dist.Store, int, int, timedelta], None] | None = None,
    ) -> World:
        """Join the other ranks and create all groups.

        Args:
            rendezvous_url: Where the ranks meet (``file://PATH``), with RANK and WORLD_SIZE from the environment. By
                default as ``megapar launch`` or torchrun sets it. A single process needs neither.
            agree: Called on all ranks after the roll call and before any group, with a store, the rank and the number
                of ranks as launched, and the timeout. Any exception that it raises ends the start.

        Raises DistributedError with the group and the ranks that did not answer within ``timeout``.
        """
        if grid.world_size == 1:
            return cls(grid, 0, device, None, timeout)
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        if world_size != grid.world_size:
            raise DistributedError(f"the grid has {grid.world_size} ranks, WORLD_SIZE is {world_size}")
        store = meet(rendezvous_url, rank, world_size, timeout)
        # torch's agent keeps the store when it restarts the ranks, so each start needs a prefix that hides old keys.
        store = dist.PrefixStore(f"start-{starts_before(os.environ)}", store)
        store.set_timeout(timeout)
        roll_call(dist.PrefixStore("start", store), "world", tuple(range(world_size)), rank, timeout)
        if agree is not None:
            agree(dist.PrefixStore("agree", store), rank, world_size, timeout)
        ordered, launched = _renumbered(grid)
        rank = launched.index(rank)
        try:
            dist.init_process_group(
                device.backend,
                store=dist.PrefixStore("world", store),
                rank=rank,
                world_size=world_size,
                timeout=timeout,
                pg_options=device.group_options(("world",), timeout, queue=False),
                device_id=device.device_id,
            )
        except RuntimeError as error:
            raise DistributedError(
                f"the group of all {world_size} ranks could not be created, though all had answered, so check the "
                f"network. {str(error).splitlines()[0]}.{loopback_advice()}"
            ) from error
        return cls(ordered, rank, device, store, timeout, launched)

    @classmethod
    def pretend(cls, grid: Grid, device: Device, rank: int) -> World:
        """Create the world of one rank of the grid in a single process, on torch's fake process groups.

        Collectives return at once and move nothing. With fake tensors the real training code runs as any rank of any
        cluster. ``rank`` is the number that it would be launched with, as in ``start``.
        """
        from torch.testing._internal.distributed.fake_pg import FakeStore

        if grid.world_size == 1:
            return cls(grid, 0, device, None, GRACE)
        ordered, launched = _renumbered(grid)
        rank = launched.index(rank)
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=grid.world_size)
        return cls(ordered, rank, device, None, GRACE, launched)

    @property
    def num_groups(self) -> int:
        """Number of communicators of this rank, including the world's and the pipeline's queues."""
        return len(self._rounds_of_axes) + len(self._queues) + (self.grid.world_size > 1)

    @property
    def group_bytes(self) -> int:
        """Estimated bytes that these communicators occupy on the device."""
        world = [("world",)] if self.grid.world_size > 1 else []
        node_size = int(os.environ.get("LOCAL_WORLD_SIZE") or "1")
        nodes = [self.launched[rank] // node_size for rank in self.axis("ep").ranks]
        peers = nodes.count(self.launched[self.rank] // node_size) - 1
        blocks = len(self._queues) * device_class(self.device.type).queue_blocks
        return COMMUNICATORS[self.device.type].of([*world, *self._rounds_of_axes], blocks, peers)

    def axis(self, name: str) -> Axis:
        """Return this rank's place on an axis, one of ``rounds.AXES``."""
        return self._axes[name]

    def axes(self) -> list[Axis]:
        """Return all axes, including the world's."""
        return list(self._axes.values())

    @property
    def queues(self) -> list[Axis]:
        """The pipeline's queues that end at this rank; empty before ``make_queues``."""
        return list(self._queues.values())

    def make_queues(self, *, closed: bool) -> dict[tuple[int, int], Axis]:
        """Create a queue for each ordered pair of neighbouring stages. Every rank calls this once, at the same place.

        The last stage and the first are neighbours if ``closed``. Returns (sender, receiver) -> an axis of these two
        ranks, sender first, for the queues that end at this rank.
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
        """Create this rank's view of an axis, which shares the counters of this world."""
        counters = self.sent_bytes, self.meter, self.recorder
        return Axis(name, len(ranks), ranks.index(self.rank), group, ranks, *counters, queue=queue)

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Exclude the bytes and waits inside from the counters of steps, such as those of an evaluation or a check.

        The flight recorder keeps recording, because these collectives can hang like any other.
        """
        with self.sent_bytes.uncounted(), self.meter.paused():
            yield

    def mesh(self, *names: str) -> DeviceMesh:
        """Return a device mesh over named axes, outermost first, for the parts of torch that require one."""
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
        """Wait for all ranks and leave. After a failure, call ``abandon`` instead."""
        if self.grid.world_size > 1 and dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()
        self._leave()

    def _leave(self) -> None:
        while self.on_leave:
            self.on_leave.pop()()

    def abandon(self) -> None:
        """Leave after a failure, without waiting for ranks that may be gone.

        Groups on an accelerator are aborted, because destroying them would wait for the collectives in flight.
        """
        self._leave()
        if self.grid.world_size == 1 or not dist.is_initialized():
            return
        if self.device.type == "cpu":
            dist.destroy_process_group()
            return
        with suppress(RuntimeError):  # If the vendor's library has no abort, the groups end with the process.
            abort_process_groups()

    @property
    def pretended(self) -> bool:
        """True if one process runs as one of many ranks (``tools/tracing/pretend.py``), so collectives move nothing."""
        return self._store is None and self.grid.world_size > 1

    def spare_store(self, name: str) -> dist.Store | None:
        """Return a separate connection to the ranks' store for background threads; None for a single rank."""
        return None if self._store is None else dist.PrefixStore(name, self._store.clone())  # type: ignore[attr-defined]

    def spare_group(self, name: str) -> dist.ProcessGroup | None:
        """Create a group of all ranks on the host for background threads, None for a single rank. Collective."""
        if self.grid.world_size == 1:
            return None
        return self._make_group((name,), tuple(range(self.grid.world_size)), "gloo")

    def make_nodes(self, node_ranks: int) -> None:
        """Divide the axis ``ep`` by node: ``axis("ep").nodes`` is then set, for dispatch by node.

        Every rank calls this once, at the same place, before it builds a model.

        Raises DistributedError if ep is not several nodes of ``node_ranks`` ranks.
        """
        ep = self.axis("ep")
        if ep.size % node_ranks or ep.size == node_ranks:
            raise DistributedError(f"the {ep.size} ranks of ep are not several nodes of {node_ranks} ranks of ep")
        start = ep.rank - ep.rank % node_ranks
        members = {
            "ep_between": ep.ranks[ep.rank % node_ranks :: node_ranks],
            "ep_within": ep.ranks[start : start + node_ranks],
        }
        axes = []
        for name, group_ranks in members.items():
            group = self._make_group((name,), group_ranks) if len(group_ranks) > 1 else None
            axes.append(self._axis(name, group_ranks, group))
            self._rounds_of_axes += ((name,),) if group is not None else ()
        self._axes |= {axis.name: axis for axis in axes} | {"ep": replace(ep, nodes=AxisNodes(*axes))}

    def make_stage(self) -> Axis:
        """Return the axis ``stage``, of all ranks of this rank's pipeline stage. Every rank must call it.

        It shares the communicator of another axis of the same ranks, unless that has small buffers.
        """
        ranks = self.grid.group(("dp", "sharding", "cp", "mp"), self.rank)
        same = next((axis for axis in self._axes.values() if axis.ranks == ranks and not is_light((axis.name,))), None)
        group = same.group if same is not None else self._make_group(("stage",), ranks)
        self._rounds_of_axes += (("stage",),) if same is None else ()
        self._axes["stage"] = self._axis("stage", ranks, group)
        return self._axes["stage"]

    def _make_group(
        self, names: tuple[str, ...], ranks: tuple[int, ...], backend: str | None = None, *, queue: bool = False
    ) -> dist.ProcessGroup:
        """Create this rank's group of the next round.

        Args:
            ranks: Ranks of the group; for a queue, the sender first, or this rank alone.
            backend: Backend of the group; the device's by default.
        """
        self._rounds += 1
        name = names[0]
        if self._store is None:  # pretended
            return dist.new_group(ranks, use_local_synchronization=True, group_desc=name)
        # A split of the world's communicator waits for all ranks of the world.
        splits = self.device.device_id is not None and backend != "gloo"
        called = self.launched if splits else tuple(self.launched[rank] for rank in ranks)
        number = self.launched[self.rank]
        store = dist.PrefixStore(f"round/{self._rounds}/{'all' if splits else ranks[0]}", self._store)
        roll_call(store, f"{name}, in round {self._rounds}," if splits else name, called, number, self._timeout)
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
            silent = silent_ranks(store, called, number)
            cause = f"ranks {silent} are silent" if silent else "all its ranks answered, so check the network"
            if splits:
                cause += (
                    f". This is round {self._rounds}, a split of the communicator of all {len(called)} ranks, so "
                    "another group of this round may have failed"
                )
            numbers = [self.launched[rank] for rank in ranks]
            raise DistributedError(
                f"group {name} of ranks {numbers} failed its first collective; {cause}. {error}{loopback_advice()}"
            ) from error
        return group

    def _try(self, group: dist.ProcessGroup, ranks: tuple[int, ...], x: torch.Tensor, *, queue: bool) -> None:
        """Run one collective, or for a queue one message, whose buffers are smaller than those of a sum."""
        if not queue:
            dist.all_reduce(x, group=group)
        elif len(ranks) == 2 and self.rank == ranks[0]:
            dist.send(x, ranks[1], group=group)
        elif len(ranks) == 2:
            dist.recv(x, ranks[0], group=group)
        self.device.synchronize()


def _renumbered(grid: Grid) -> tuple[Grid, list[int]]:
    """Return the grid with the axes in this module's order, and the number that each of its ranks was launched with."""
    ordered = replace(grid, order=DENSE_AXES)
    return ordered, [grid.rank(**ordered.dense(number)) for number in range(grid.world_size)]


def silent_ranks(store: dist.Store, ranks: Sequence[int], rank: int) -> list[int]:
    """Report a failure of ``rank``, and return those of ``ranks`` that do not report it, too, within ``GRACE``."""
    store.set(f"failed/{rank}", "1")
    keys = {other: f"failed/{other}" for other in ranks}
    try:
        store.wait(list(keys.values()), GRACE)
    except (RuntimeError, dist.DistStoreError):
        return [other for other, key in keys.items() if not store.check([key])]
    return []


def roll_call(store: dist.Store, name: str, ranks: Sequence[int], rank: int, timeout: timedelta) -> None:
    """Report this rank as present and wait for the others, by three requests per rank regardless of their number.

    Raises DistributedError with the group, its ranks and those that were silent for ``timeout``.
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
            "Check their logs, or raise --distributed-timeout-minutes."
        ) from error
