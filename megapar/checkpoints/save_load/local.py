"""Local checkpoints: each rank's state in the memory of its node with a copy on the next node, for restarts of a job.

root/job/iter_0000120/
  rank-00003.safetensors      all shards of rank 3
  rank-00003.json             {"sha256": of all below, facts, start, scalars, the file's size and SHA-256}; written last
root/job/owner-4f2a.json      one for each rank on this node, see local_owner.py; a job without live owners is removed

A local checkpoint can only be loaded on the layout that wrote it. All of its files come from one start of the job,
because another start may have reached the same iteration with other numbers. After the death of a process all files
survive; after the death of a node, the copies on the next node do.
"""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megapar.checkpoints.format.layout import FileEntry, seal
from megapar.checkpoints.format.shards import (
    Shard,
    ShardFile,
    TensorPlan,
    check_file,
    file_order,
    write_bytes,
    write_shards,
)
from megapar.checkpoints.ownership.local_owner import LocalOwner, private_folder, remove_job
from megapar.core.comm import host_messages, json_messages
from megapar.errors import CheckpointError
from megapar.files.disk import DiskWriting
from megapar.files.paths import path_part
from megapar.files.regular_file import read_regular

KEPT = 2  # if a rank dies while it writes the newest, the previous one is still complete
MAX_HEADER_BYTES = 1 << 26
CHUNK_BYTES = 64 << 20
Facts = Mapping[str, Any]


@dataclass(frozen=True)
class LocalCheckpoint:
    """A complete local checkpoint.

    Attributes:
        iteration: The iteration after which it was saved.
        start: Id of the start of the job that wrote it.
        holders: Rank to the rank whose node has its files.
    """

    iteration: int
    start: str
    holders: Mapping[int, int]


class LocalCheckpoints:
    """One rank's local checkpoints of a job. Raises TrainingError if another run uses the name of the job.

    Args:
        neighbour: (rank that receives this rank's copy, rank whose copy is kept here); None on one node.
        facts: Model, grid and dtypes of states; a checkpoint is loaded only if its facts are equal.
        group: All ranks, for use from a thread; None with one rank.
        private: ``root`` must be this user's, too.

    Attributes:
        folder: The folder of this job on this node.

    Raises OSError, on every rank, if the memory of a node cannot be written.
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
        private: bool = False,
    ) -> None:
        self.folder = root / path_part(job)
        self._rank = rank
        self._world_size = world_size
        self._neighbour = neighbour
        self._facts = json.loads(json.dumps(facts))
        self._group = group
        problem = ""
        try:
            private_folder(root, mine=private)
            self._owner = LocalOwner(root, self.folder, launch)
        except OSError as error:
            problem = str(error)
        problems = [problem] if group is None else json_messages.all_gather(problem, group)
        if any(problems):
            if not problem:
                self._owner.release()
            raise OSError(next(filter(None, problems)))
        for path in self.folder.glob("iter_*/rank-*"):
            if path.name >= f"rank-{world_size:05d}":  # from a start with more ranks: no rank would ever overwrite it
                _remove(path)
        start = uuid.uuid4().hex
        self._start = str(start if group is None else json_messages.broadcast(start, group))

    # Saving

    def save(self, iteration: int, state: Mapping[str, Shard] | CheckpointError, scalars: Facts) -> None:
        """Write this rank's state and copy it to the neighbour. Every rank calls this, each from one thread.

        If a rank cannot write, for example because the memory is full, it first sends its neighbour an empty copy; the
        checkpoint is removed on all ranks, the older ones are kept, and every rank raises OSError. Every rank also
        raises it for a checkpoint that is kept without a copy of some part.

        Args:
            iteration: The iteration after which the state was taken.
            state: Tensor name to shard, or the error because of which this rank has no state.
            scalars: JSON values by name.
        """
        with suppress(OSError):  # the root is gone, or another rank removes the same job; the others wait below
            self._owner.remove_orphans()
        folder = self.folder / f"iter_{iteration:07d}"
        failure: OSError | None = None
        copied = True
        try:
            folder.mkdir(exist_ok=True)
            if isinstance(state, CheckpointError):
                raise OSError(str(state))
            self._write(folder, iteration, state, scalars)
        except OSError as error:
            failure = error
        if self._neighbour is not None:
            to, source = self._neighbour
            for name_of in (_data, _head):  # the header last: a copy is valid only with it
                copied &= self._swap(folder / name_of(self._rank), folder / name_of(source), to, source)
        complete = host_messages.true_for_all(failure is None, self._group)
        # A checkpoint that lacks one rank's part is useless: remove that one and keep the older ones.
        useless = self._useless(iteration) if complete else [folder]
        for old in useless:
            _remove_files(old, [self._rank] + ([self._neighbour[1]] if self._neighbour else []))
        if not complete:
            raise failure or OSError("the memory of another node cannot be written")
        if not host_messages.true_for_all(copied, self._group):  # it survives the death of a process all the same
            raise OSError(f"that of iteration {iteration} has no copy of all its parts: the memory of a node is full")

    def _useless(self, newest: int) -> list[Path]:
        """Return all but the last KEPT up to ``newest``, and later ones, from which this start went back."""
        paths = sorted(self._iterations().items())
        until = [path for iteration, path in paths if iteration <= newest]
        return [*until[:-KEPT], *(path for iteration, path in paths if iteration > newest)]

    def _write(self, folder: Path, iteration: int, state: Mapping[str, Shard], scalars: Facts) -> None:
        plans = [TensorPlan(name, shard.tensor.dtype, tuple(shard.tensor.shape)) for name, shard in state.items()]
        data, aside = _data(self._rank), _aside(folder / _data(self._rank))
        entry = write_shards(aside, file_order(plans), lambda name: state[name].tensor, sync=False)
        aside.rename(folder / data)
        head = {
            "facts": self._facts,
            "iteration": iteration,
            "start": self._start,
            "scalars": scalars,
            "file": [data, entry.size, entry.sha256],
        }
        aside = _aside(folder / _head(self._rank))
        write_bytes(aside, seal(json.dumps(head).encode()[1:]))
        aside.rename(folder / _head(self._rank))

    def _swap(self, sent: Path | None, received: Path | None, to: int | None, source: int | None) -> bool:
        """Send a file to one rank and receive one from another; None skips either. A missing file is sent as empty.

        Returns False if this node has no room for what came.
        """
        send_size = torch.tensor([sent.stat().st_size if sent and sent.exists() else 0])
        receive_size = torch.zeros(1, dtype=torch.int64)
        host_messages.send_receive(
            send_size if sent else None, receive_size if received else None, to, source, self._group
        )
        sizes = int(send_size.item()), int(receive_size.item())
        aside = _aside(received) if received else None
        reader = sent.open("rb") if sent and sizes[0] else None
        writer, full = None, False
        try:
            writer = DiskWriting(aside) if aside else None
        except OSError:
            full = True  # the other rank still sends
        try:
            for start in range(0, max(sizes), CHUNK_BYTES):
                to_send, to_receive = (max(0, min(CHUNK_BYTES, size - start)) for size in sizes)
                data = bytearray(reader.read(to_send)) if reader and to_send else None
                chunk = None if data is None else torch.frombuffer(data, dtype=torch.uint8)
                room = torch.empty(to_receive, dtype=torch.uint8) if to_receive else None
                host_messages.send_receive(chunk, room, to, source, self._group)
                if writer and room is not None and not full:
                    try:
                        writer.write(room.numpy().data)
                    except OSError:
                        full = True  # the other rank continues to send
        finally:
            if reader is not None:
                reader.close()
            if writer is not None:
                writer.finish(durable=False)
        if aside is not None and received is not None:
            _remove(aside) if full else aside.rename(received)
        return not full

    # Loading

    def find(self, limit: int | None = None) -> LocalCheckpoint | None:
        """Return the newest local checkpoint, up to ``limit``, of which the ranks still have all files. Collective."""
        files = {
            (iteration, str(head["start"]), rank)
            for iteration, folder in self._iterations().items()
            if limit is None or iteration <= limit
            for rank in range(self._world_size)
            if (head := self._head(folder, rank)) is not None
        }
        everyone = [files]
        if self._group is not None:
            parts = json_messages.all_gather([list(file) for file in sorted(files)], self._group)
            everyone = [{(int(iteration), str(start), int(rank)) for iteration, start, rank in part} for part in parts]
        for iteration, start in sorted({file[:2] for part in everyone for file in part}, reverse=True):
            holders = {}
            for rank in range(self._world_size):
                nodes = [holder for holder, part in enumerate(everyone) if (iteration, start, rank) in part]
                if nodes:
                    holders[rank] = rank if rank in nodes else nodes[0]
            if len(holders) == self._world_size:
                return LocalCheckpoint(iteration, start, holders)
        return None

    def load(self, checkpoint: LocalCheckpoint, targets: Mapping[str, Shard]) -> dict[str, Any]:
        """Fill the targets and return the scalars. Every rank calls this. Raises CheckpointError for a damaged file."""
        folder = self.folder / f"iter_{checkpoint.iteration:07d}"
        folder.mkdir(exist_ok=True)
        for rank, holder in sorted(checkpoint.holders.items()):
            if rank == holder or self._rank not in (rank, holder):
                continue
            for name in (_data(rank), _head(rank)):
                if self._rank == holder:
                    self._swap(folder / name, None, rank, None)
                else:
                    self._swap(None, folder / name, None, holder)
        head = self._head(folder, self._rank)
        if head is None or head["start"] != checkpoint.start:
            raise CheckpointError(f"{folder / _data(self._rank)} is damaged")
        with ShardFile(folder / _data(self._rank)) as shards:
            if sorted(shards.names()) != sorted(targets):
                raise CheckpointError(f"{shards.path} contains other tensors than this run")
            for name, shard in targets.items():
                shards.check(name, shard.tensor.dtype, shard.box.sizes)
            with torch.no_grad():
                for name, shard in targets.items():
                    if shard.tensor.numel():
                        shards.read(name, shard.box, shard.box, shard.tensor)
        return dict(head["scalars"])

    def _iterations(self) -> dict[int, Path]:
        folders = ((path.name.removeprefix("iter_"), path) for path in self.folder.glob("iter_*"))
        return {int(number): path for number, path in folders if number.isdecimal()}

    def _head(self, folder: Path, rank: int) -> Facts | None:
        """Return the header of a rank, or None if it or its file is damaged or of another model or grid."""
        try:
            content = read_regular(folder / _head(rank), MAX_HEADER_BYTES)
            head = json.loads(content)
            entry = FileEntry(*head["file"])
            valid = content == seal(content.partition(b"\n")[2]) and head["facts"] == self._facts and "start" in head
            valid = valid and entry.name == _data(rank) and not check_file(folder, entry, "full")
        except (OSError, ValueError, TypeError, KeyError, RecursionError, CheckpointError):
            return None
        return head if valid else None

    def remove_after(self, iteration: int) -> None:
        """Remove this node's checkpoints of later iterations."""
        for later, folder in self._iterations().items():
            if later > iteration:
                shutil.rmtree(folder, ignore_errors=True)

    def release(self) -> None:
        """Release the job's folder at the end of this rank. Its checkpoints stay for a restart."""
        self._owner.release()

    def remove(self) -> None:
        """Remove all checkpoints of the job at the end of the run. Every rank calls this, in any order."""
        self.release()
        remove_job(self.folder)


def _data(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def _head(rank: int) -> str:
    return f"rank-{rank:05d}.json"


def _aside(path: Path) -> Path:
    return path.with_name(f"{path.name}.tmp-{uuid.uuid4().hex[:12]}")


def _remove(path: Path) -> None:
    with suppress(OSError):  # already removed, or its parent is not a folder
        path.unlink()


def _remove_files(folder: Path, ranks: Sequence[int]) -> None:
    """Remove some ranks' files, each header first, and then the folder if it is empty."""
    for rank in ranks:
        for name in (_head(rank), _data(rank)):
            _remove(folder / name)
    for unfinished in folder.glob("*.tmp-*"):
        _remove(unfinished)
    with suppress(OSError):  # other ranks' files are still there
        folder.rmdir()
