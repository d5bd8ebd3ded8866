"""Local checkpoints: every rank's state in its node's memory with a copy on the next node, for restarts of one job.

root/job/iter_0000120/
  rank-00003.safetensors      all shards that rank 3 holds
  rank-00003.json             {"sha256": of all below, facts, start, scalars, the file's size and SHA-256}; written last
root/job/owner-4f2a.json      of each rank here, see local_owner.py; a job whose owners are gone is removed

They fit the layout that wrote them and no other, and what is put together was written by one start of the job: another
start may have gone another way to the same iteration. What survives a death: of a process, everything; of a node, the
copies on the node behind it.
"""

from __future__ import annotations

import io
import json
import shutil
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import torch
import torch.distributed as dist

from megapar.core.checkpoint.layout import FileEntry, seal
from megapar.core.checkpoint.local_owner import LocalOwner
from megapar.core.checkpoint.shard import Shard
from megapar.core.checkpoint.shard_file import (
    ShardFile,
    TensorPlan,
    check_file,
    file_order,
    write_bytes,
    write_shards,
)
from megapar.core.comm import json_messages as messages
from megapar.errors import CheckpointError

KEPT = 2  # a rank that dies while it writes the newest leaves the one before it
MAX_HEADER_BYTES = 1 << 26
CHUNK_BYTES = 64 << 20
Facts = Mapping[str, Any]


@dataclass(frozen=True)
class FoundLocal:
    """A whole local checkpoint. start: that wrote it. holders: rank -> the rank whose node has its files."""

    iteration: int
    start: str
    holders: Mapping[int, int]


class LocalCheckpoints:
    """The local checkpoints of one job, as one rank keeps them.

    root: memory of this node. facts: must agree for state to be taken back: model and grid. neighbour: (rank that gets
    a copy, rank whose copy is kept); None on one node. group: of all ranks, for threads; None for one rank. launch: of
    the launcher. Raises TrainingError where another run keeps its own under the job's name.
    """

    def __init__(
        self,
        root: Path,
        job: str,
        rank: int,
        world_size: int,
        neighbour: tuple[int, int] | None,
        facts: Facts,
        group: dist.ProcessGroup | None,
        launch: str = "",
    ) -> None:
        self._folder = root / quote(job, safe="")
        self._rank = rank
        self._world_size = world_size
        self._neighbour = neighbour
        self._facts = json.loads(json.dumps(facts))
        self._group = group
        self._owner = LocalOwner(root, self._folder, launch)
        for path in self._folder.glob("iter_*/rank-*"):
            if path.name >= f"rank-{world_size:05d}":  # of a larger start: nobody would ever write over it
                _remove(path)
        name = uuid.uuid4().hex
        self._start = str(name if group is None else messages.broadcast(name, group))

    @property
    def folder(self) -> Path:
        """Of this job, on this node."""
        return self._folder

    # Saving

    def save(self, iteration: int, state: Mapping[str, Shard] | CheckpointError, scalars: Facts) -> None:
        """Write this rank's state and copy it to the neighbour; every rank calls it, from one thread.

        state: or why this rank has none to write.

        Raises OSError where the memory is full, after the neighbour has been told of it by an empty copy. A checkpoint
        that one rank could not write is removed on all of them, and no older one for it.
        """
        self._owner.remove_orphans()
        place = self._folder / f"iter_{iteration:07d}"
        failure: OSError | None = None
        try:
            place.mkdir(exist_ok=True)
            if isinstance(state, CheckpointError):
                raise OSError(str(state))
            self._write(place, iteration, state, scalars)
        except OSError as error:
            failure = error
        if self._neighbour is not None:
            to, source = self._neighbour
            for name_of in (_data, _head):  # the header last: it makes the copy count
                self._swap(place / name_of(self._rank), place / name_of(source), to, source)
        whole = self._everywhere(failure is None)
        # What one rank lacks nobody can go back to; the ones before it stay then.
        useless = sorted(self._folder.glob("iter_*"))[:-KEPT] if whole else [place]
        for old in useless:
            _remove_files(old, [self._rank] + ([self._neighbour[1]] if self._neighbour else []))
        if failure is not None:
            raise failure

    def _write(self, place: Path, iteration: int, state: Mapping[str, Shard], scalars: Facts) -> None:
        plans = [TensorPlan(name, shard.tensor.dtype, tuple(shard.tensor.shape)) for name, shard in state.items()]
        aside = place / f"{_data(self._rank)}.tmp-{uuid.uuid4().hex[:12]}"
        entry = write_shards(aside, file_order(plans), lambda name: state[name].tensor, sync=False)
        aside.rename(place / _data(self._rank))
        head = {
            "facts": self._facts,
            "iteration": iteration,
            "start": self._start,
            "scalars": scalars,
            "file": [_data(self._rank), entry.size, entry.sha256],
        }
        aside = place / f"{_head(self._rank)}.tmp-{uuid.uuid4().hex[:12]}"
        write_bytes(aside, seal(json.dumps(head).encode()[1:]))
        aside.rename(place / _head(self._rank))

    def _everywhere(self, done: bool) -> bool:
        """Whether it is done on every rank."""
        votes = torch.tensor([int(done)])
        if self._group is not None:
            dist.all_reduce(votes, dist.ReduceOp.MIN, group=self._group)
        return bool(votes.item())

    def _swap(self, sent: Path | None, received: Path | None, to: int | None, source: int | None) -> None:
        """Send a file (an empty one where it is missing) to one rank and take one from another; None: not."""
        out = torch.tensor([sent.stat().st_size if sent and sent.exists() else 0])
        back = torch.zeros(1, dtype=torch.int64)
        self._exchange(out if sent else None, back if received else None, to, source)
        sizes = int(out.item()), int(back.item())
        aside = received.with_name(f"{received.name}.tmp-{uuid.uuid4().hex[:12]}") if received else None
        reader = sent.open("rb") if sent and sizes[0] else None
        writer, full = None, False
        try:
            writer = aside.open("xb", buffering=0) if aside else None
        except OSError:
            full = True  # the other rank sends all the same
        try:
            for start in range(0, max(sizes), CHUNK_BYTES):
                here, there = (max(0, min(CHUNK_BYTES, size - start)) for size in sizes)
                piece = torch.frombuffer(bytearray(reader.read(here)), dtype=torch.uint8) if reader and here else None
                room = torch.empty(there, dtype=torch.uint8) if there else None
                self._exchange(piece, room, to, source)
                if writer and room is not None and not full:
                    full = not _all_written(writer, room.numpy().data)  # the other rank goes on sending
        finally:
            for file in (reader, writer):
                if file is not None:
                    file.close()
        if aside is not None and received is not None:
            _remove(aside) if full else aside.rename(received)

    def _exchange(
        self, out: torch.Tensor | None, back: torch.Tensor | None, to: int | None, source: int | None
    ) -> None:
        works = []
        if out is not None:
            works.append(dist.isend(out, to, group=self._group))
        if back is not None:
            works.append(dist.irecv(back, source, group=self._group))
        for work in works:
            assert work is not None
            work.wait()

    # Loading

    def find(self, limit: int | None = None) -> FoundLocal | None:
        """The newest local checkpoint that all ranks together still have whole; every rank calls it.

        limit: the last iteration that may be.
        """
        held = {
            (iteration, str(head["start"]), rank)
            for iteration, place in self._iterations().items()
            if limit is None or iteration <= limit
            for rank in range(self._world_size)
            if (head := self._head(place, rank)) is not None
        }
        everyone = [held]
        if self._group is not None:
            told = messages.all_gather([list(one) for one in sorted(held)], self._group)
            everyone = [{(int(iteration), str(start), int(rank)) for iteration, start, rank in part} for part in told]
        for iteration, start in sorted({one[:2] for part in everyone for one in part}, reverse=True):
            holders = {}
            for rank in range(self._world_size):
                having = [holder for holder, part in enumerate(everyone) if (iteration, start, rank) in part]
                if having:
                    holders[rank] = rank if rank in having else having[0]
            if len(holders) == self._world_size:
                return FoundLocal(iteration, start, holders)
        return None

    def load(self, found: FoundLocal, targets: Mapping[str, Shard]) -> dict[str, Any]:
        """Fill the targets and return the scalars; every rank calls it. Raises CheckpointError."""
        place = self._folder / f"iter_{found.iteration:07d}"
        place.mkdir(exist_ok=True)
        for rank, holder in sorted(found.holders.items()):
            if rank == holder or self._rank not in (rank, holder):
                continue
            for name in (_data(rank), _head(rank)):
                if self._rank == holder:
                    self._swap(place / name, None, rank, None)
                else:
                    self._swap(None, place / name, None, holder)
        head = self._head(place, self._rank)
        if head is None or head["start"] != found.start:
            raise CheckpointError(f"{place / _data(self._rank)} is damaged")
        with ShardFile(place / _data(self._rank)) as shards:
            if sorted(shards.names()) != sorted(targets):
                raise CheckpointError(f"{shards.path} holds other tensors than this run")
            for name, shard in targets.items():
                shards.check(name, shard.tensor.dtype, shard.box.sizes)
            with torch.no_grad():
                for name, shard in targets.items():
                    if shard.tensor.numel():
                        shards.read(name, shard.box, shard.box, shard.tensor)
        return dict(head["scalars"])

    def _iterations(self) -> dict[int, Path]:
        found = {}
        for path in self._folder.glob("iter_*"):
            if path.name.removeprefix("iter_").isdecimal():
                found[int(path.name.removeprefix("iter_"))] = path
        return found

    def _head(self, place: Path, rank: int) -> Facts | None:
        """A rank's header, where it and the file that it tells of are sound and of this run."""
        path = place / _head(rank)
        try:
            if not path.is_file() or path.stat().st_size > MAX_HEADER_BYTES:
                return None
            content = path.read_bytes()
            head = json.loads(content)
            entry = FileEntry(*head["file"])
            sound = content == seal(content.partition(b"\n")[2]) and head["facts"] == self._facts and "start" in head
            sound = sound and entry.name == _data(rank) and not check_file(place, entry, "full")
        except (OSError, ValueError, TypeError, KeyError, RecursionError, CheckpointError):
            return None
        return head if sound else None

    def remove_after(self, iteration: int) -> None:
        """Remove what this node has of later iterations."""
        for at, place in self._iterations().items():
            if at > iteration:
                shutil.rmtree(place, ignore_errors=True)

    def release(self) -> None:
        """This rank ends; its local checkpoints stay for a restart."""
        self._owner.release()

    def remove(self) -> None:
        """The run is over: give the memory back; every rank calls it, the last one finds nothing left."""
        self.release()
        shutil.rmtree(self._folder, ignore_errors=True)


def _all_written(file: io.FileIO, data: memoryview) -> bool:
    try:
        while len(data):
            data = data[file.write(data) :]
    except OSError:
        return False
    return True


def _data(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def _head(rank: int) -> str:
    return f"rank-{rank:05d}.json"


def _remove(path: Path) -> None:
    with suppress(OSError):  # it is gone, or its folder never was one
        path.unlink()


def _remove_files(place: Path, ranks: Sequence[int]) -> None:
    """Remove some ranks' files, the header first, and the folder when it is empty."""
    for rank in ranks:
        for name in (_head(rank), _data(rank)):
            _remove(place / name)
    for left in place.glob("*.tmp-*"):
        _remove(left)
    try:
        place.rmdir()
    except OSError:
        return  # other ranks' files are still there
