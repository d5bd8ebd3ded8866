"""DCP storage of a checkpoint: one safetensors file per writing rank, the scalars as JSON, and layout.json."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from megapar.core.box import Box
from megapar.core.checkpoint.folder import is_ours, move_into_place, name_aside, remove_left_over
from megapar.core.checkpoint.layout import CheckpointLayout, FileEntry, TensorEntry
from megapar.core.checkpoint.owner import Owner
from megapar.core.checkpoint.planner import SHOWN, Read, Reads
from megapar.core.checkpoint.shard_file import (
    ShardFile,
    TensorPlan,
    check_file,
    file_order,
    write_bytes,
    write_shards,
)
from megapar.core.checkpoint.tiling import tile
from megapar.core.units import Json
from megapar.errors import CheckpointError
from megapar.files.checkpoint_names import LAYOUT_FILE, SCALARS_FILE, shard_name
from megapar.files.location import Location, Place, at

MAX_SCALAR_BYTES = 1 << 26
# Space in addition to the tensors: headers, scalars, layout.json and the file system's own data.
SPARE_BYTES = 1 << 20

Verify: TypeAlias = Literal["full", "size", "off"]


@dataclass(frozen=True)
class WriterInfo:
    """The task of one writing rank.

    Attributes:
        folder: Name of the temporary folder.
        rank: Rank of the writer; part of its file's name.
    """

    folder: str
    rank: int


@dataclass(frozen=True)
class WrittenPiece:
    """A box that was written, for layout.json.

    Attributes:
        file: The file that contains it.
        box: The box in the global tensor.
    """

    file: FileEntry
    box: Box


class ShardWriter(StorageWriter):
    """Writes a checkpoint to a temporary folder and renames it to ``folder`` after every rank is done.

    Temporary folders of killed saves are removed first.

    Args:
        folder: The final folder.
        description: "model" and "grid" of layout.json.
        then: Called with the final folder on the rank that renames it, afterwards.
        owner: Owner of the folder's root, on that rank.
    """

    def __init__(
        self,
        folder: Location,
        description: Mapping[str, Mapping[str, Json]],
        then: Callable[[Location], None] | None = None,
        owner: Owner | None = None,
    ) -> None:
        self.folder = folder
        self._owner = owner
        self._description = description
        self._then = then
        self._aside: Location | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing: DCP's hook for reused writers, and this one is for a single save."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing. Called first, on every rank."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan unchanged. Called on every rank."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Name the temporary folder to all ranks. Called on one rank.

        Raises CheckpointError if ``folder`` is not a checkpoint and would be replaced, or if the disk is too full. With
        an owner nothing is replaced: if the name exists, the checkpoint gets one with the owner's epoch.
        """
        folder = self.folder
        if self._owner is None and not is_ours(folder):
            raise CheckpointError(f"{folder} exists and is not a checkpoint; it is not replaced")
        if self._owner is not None:
            self._owner.check()
        remove_left_over(folder, self._owner)
        _check_space(folder.parent, sum(_num_bytes(item) for plan in plans for item in plan.items))
        self._aside = aside = name_aside(folder, self._owner)
        return [replace(plan, storage_data=WriterInfo(aside.name, rank)) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's file, one tensor at a time."""
        place: WriterInfo = plan.storage_data
        items = {item.index.fqn: item for item in plan.items}
        done: Future[list[WriteResult]] = Future()
        file = self.folder.with_name(place.folder) / shard_name(place.rank)
        done.set_result(_write_rank(file, items, planner) if items else [])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the scalars and layout.json and rename the folder. Called on one rank after all have written."""
        aside = self._aside
        assert aside is not None, "prepare_global_plan is called first"
        text = json.dumps(metadata.planner_data, indent=1, sort_keys=True)
        scalars = write_bytes(aside / SCALARS_FILE, text.encode())
        layout = make_layout(metadata, [result for rank in results for result in rank], scalars, self._description)
        write_bytes(aside / LAYOUT_FILE, layout.to_bytes())
        folder = move_into_place(aside, self.folder, self._owner)
        if self._then is not None:
            self._then(folder)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Accept any address: DCP's hook for choosing a storage."""
        return True


def _num_bytes(item: WriteItem) -> int:
    assert item.tensor_data is not None, "Shards write tensors only"
    return prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize


def _check_space(root: Location, num_bytes: int) -> None:
    """Raise CheckpointError if the store of ``root`` has no room for a checkpoint of ``num_bytes``."""
    needed, free = num_bytes + SPARE_BYTES, root.store.free_bytes(root.path)
    if free is not None and free < needed:
        raise CheckpointError(f"no room under {root}: a checkpoint takes {needed:,} bytes and {free:,} are free")


def _write_rank(path: Location, items: Mapping[str, WriteItem], planner: SavePlanner) -> list[WriteResult]:
    boxes, plans = {}, []
    for name, item in items.items():
        assert item.tensor_data is not None, "Shards write tensors only"
        chunk = item.tensor_data.chunk
        boxes[name] = Box(tuple(chunk.offsets), tuple(chunk.sizes))
        plans.append(TensorPlan(name, item.tensor_data.properties.dtype, tuple(chunk.sizes)))

    def fetch(name: str) -> Tensor:
        data = planner.resolve_data(items[name])
        assert isinstance(data, Tensor), "Shards write tensors only"
        return data

    file = write_shards(path, file_order(plans), fetch)
    return [WriteResult(items[plan.name].index, plan.num_bytes, WrittenPiece(file, boxes[plan.name])) for plan in plans]


def make_layout(
    metadata: Metadata,
    results: Sequence[WriteResult],
    scalars: FileEntry,
    description: Mapping[str, Mapping[str, Json]],
) -> CheckpointLayout:
    """Return the layout of the written pieces. Raises CheckpointError if they do not tile their tensor."""
    files = sorted({result.storage_data.file for result in results}, key=lambda file: str(file.name))
    number = {file.name: i for i, file in enumerate(files)}
    pieces: dict[str, tuple[list[int], list[Box]]] = {name: ([], []) for name in metadata.state_dict_metadata}
    for result in results:
        held, boxes = pieces[result.index.fqn]
        held.append(number[result.storage_data.file.name])
        boxes.append(result.storage_data.box)
    tensors = {}
    for name, (held, boxes) in sorted(pieces.items()):
        meta = metadata.state_dict_metadata[name]
        assert isinstance(meta, TensorStorageMetadata), "Shards write tensors only"
        cut = tile(name, tuple(meta.size), held, boxes).to_json()
        tensors[name] = TensorEntry(name, tuple(meta.size), meta.properties.dtype, cut)
    return CheckpointLayout(description["model"], description["grid"], scalars, tensors, files)


class ShardReader(StorageReader):
    """Executes the reads of ShardLoadPlanner. All files that a rank needs are verified before any target is written.

    Attributes:
        scalars: The scalars of the checkpoint, after ``prepare_local_plan``.
    """

    def __init__(self, folder: Place, verify: Verify) -> None:
        self._folder = at(folder)
        self._verify = verify
        self._reads: Mapping[FileEntry, Sequence[Read]] = {}
        self.scalars: dict[str, Json] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing: DCP's hook for reused readers, and this one is for a single load."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return no metadata: the planner reads layout.json, which is faster to search than DCP's Metadata."""
        return Metadata({})

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing. Called on every rank."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Verify the files of this rank's reads and the tensors in them. Raises CheckpointError if any is damaged."""
        planned: Reads = plan.storage_data
        self.scalars = read_scalars(self._folder, planned.scalars, self._verify)
        self._reads = _by_file(planned.reads)
        problems = [check_file(self._folder, file, self._verify) for file in self._reads]
        problems = [problem for problem in problems if problem]
        if problems:
            more = f" and {len(problems) - SHOWN} more files" if len(problems) > SHOWN else ""
            raise CheckpointError(f"{self._folder} is damaged or incomplete: {'; '.join(problems[:SHOWN])}{more}")
        for file, reads in self._reads.items():
            with ShardFile(self._folder / file.name) as shards:
                for read in reads:
                    shards.check(read.name, read.dtype, read.piece.sizes)
        return LoadPlan([], planner_data=plan.planner_data)  # the reads are not sent: the coordinator only needs names

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans unchanged. Called on one rank."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy every planned part to its target."""
        with torch.no_grad():
            for file, reads in self._reads.items():
                with ShardFile(self._folder / file.name) as shards:
                    for read in reads:
                        target = planner.resolve_tensor(read.item)
                        shards.read(read.name, read.piece, read.part, target)
                        planner.commit_tensor(read.item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Accept any address: DCP's hook for choosing a storage."""
        return True


def _by_file(reads: Sequence[Read]) -> dict[FileEntry, list[Read]]:
    by_file: dict[FileEntry, list[Read]] = {}
    for read in reads:
        by_file.setdefault(read.file, []).append(read)
    return by_file


def _refuse_number(text: str) -> float:
    raise ValueError(f"{text} is not a number that a run saves")


def _finite(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _refuse_number(text)


def read_scalars(folder: Place, file: FileEntry, verify: Verify) -> dict[str, Json]:
    """Return the scalars of a checkpoint. Raises CheckpointError if their file is missing or damaged."""
    problem = check_file(folder, file, verify)
    if problem:
        raise CheckpointError(f"{folder} is damaged or incomplete: {problem}")
    path = at(folder) / file.name
    try:
        scalars = json.loads(path.content(MAX_SCALAR_BYTES), parse_constant=_refuse_number, parse_float=_finite)
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {str(error)[:200]}") from error
    if not isinstance(scalars, dict):
        raise CheckpointError(f"{path} is damaged: it does not contain a JSON object")
    return scalars
