"""DCP's storage for megapar: one safetensors file per writing rank, scalars in JSON, layout.json beside them."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from megapar.config.regular_file import read_regular
from megapar.core.box import Box
from megapar.core.checkpoint import layout as layout_file
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

SCALARS_NAME = "scalars.json"
MAX_SCALAR_BYTES = 1 << 26
# Beside the tensors: headers, scalars, layout.json and what a file system takes for itself.
SPARE_BYTES = 1 << 20

Verify: TypeAlias = Literal["full", "size", "off"]


@dataclass(frozen=True)
class WriterInfo:
    """Where a rank writes: the folder aside, and its place among the ranks."""

    folder: Path
    rank: int


@dataclass(frozen=True)
class WrittenPiece:
    """Where a piece went, for layout.json."""

    file: FileEntry
    box: Box


def shard_name(rank: int) -> str:
    """The file that a rank writes."""
    return f"shard-{rank:05d}.safetensors"


class ShardWriter(StorageWriter):
    """Writes a checkpoint aside and renames it to ``folder`` when every rank is done.

    description: "model" and "grid" of layout.json. then: called on the rank that renames, after it, with the name that
    the folder got. owner: of the folder's root, on that rank. What killed saves left aside is removed first.
    """

    def __init__(
        self,
        folder: Path,
        description: Mapping[str, Mapping[str, Json]],
        then: Callable[[Path], None] | None = None,
        owner: Owner | None = None,
    ) -> None:
        self.folder = folder
        self._owner = owner
        self._description = description
        self._then = then
        self._aside: Path | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """DCP's hook for writers that are used again; this one is for one save."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Called first, on every rank."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Called on every rank."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Make the folder aside; called on one rank. Raises CheckpointError where it cannot be made.

        An owner has a name of its own where this one is taken, by whatever it is.
        """
        folder = self.folder
        if self._owner is None and folder.exists() and not is_ours(folder):
            raise CheckpointError(f"{folder} exists and is not a checkpoint; it is not replaced")
        if self._owner is not None:
            self._owner.check()
        remove_left_over(folder, self._owner)
        folder.parent.mkdir(parents=True, exist_ok=True)
        _check_space(folder.parent, sum(_num_bytes(item) for plan in plans for item in plan.items))
        aside = name_aside(folder, self._owner)
        aside.mkdir(parents=True)
        self._aside = aside
        return [replace(plan, storage_data=WriterInfo(aside, rank)) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's file, tensor by tensor."""
        place: WriterInfo = plan.storage_data
        items = {item.index.fqn: item for item in plan.items}
        done: Future[list[WriteResult]] = Future()
        done.set_result(_write_rank(place, items, planner) if items else [])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write scalars and layout.json and rename the folder; called on one rank when all have written."""
        aside = self._aside
        assert aside is not None, "DCP plans before it finishes"
        text = json.dumps(metadata.planner_data, indent=1, sort_keys=True)
        scalars = write_bytes(aside / SCALARS_NAME, text.encode())
        layout = make_layout(metadata, [result for rank in results for result in rank], scalars, self._description)
        write_bytes(aside / layout_file.FILE_NAME, layout.to_bytes())
        folder = move_into_place(aside, self.folder, self._owner)
        if self._then is not None:
            self._then(folder)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """DCP's hook for choosing a storage by its address."""
        return True


def _num_bytes(item: WriteItem) -> int:
    assert item.tensor_data is not None, "Shards write tensors only"
    return prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize


def _check_space(root: Path, num_bytes: int) -> None:
    """Raise CheckpointError where the disk under ``root`` has no room for a checkpoint of so many bytes."""
    needed, free = num_bytes + SPARE_BYTES, shutil.disk_usage(root).free
    if free < needed:
        raise CheckpointError(f"no room under {root}: a checkpoint takes {needed:,} bytes and {free:,} are free")


def _write_rank(place: WriterInfo, items: Mapping[str, WriteItem], planner: SavePlanner) -> list[WriteResult]:
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

    file = write_shards(place.folder / shard_name(place.rank), file_order(plans), fetch)
    return [WriteResult(items[plan.name].index, plan.num_bytes, WrittenPiece(file, boxes[plan.name])) for plan in plans]


def make_layout(
    metadata: Metadata,
    results: Sequence[WriteResult],
    scalars: FileEntry,
    description: Mapping[str, Mapping[str, Json]],
) -> CheckpointLayout:
    """The layout of what was written. Raises CheckpointError where pieces do not tile their tensor."""
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
    """Reads what ShardLoadPlanner planned: all files a rank needs are verified before any target is touched.

    scalars: the checkpoint's, once planned.
    """

    def __init__(self, folder: Path, verify: Verify) -> None:
        self._folder = folder
        self._verify = verify
        self._reads: Mapping[FileEntry, Sequence[Read]] = {}
        self.scalars: dict[str, Json] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """DCP's hook for readers that are used again; this one is for one load."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Nothing: the planner reads layout.json, which is searched faster than DCP's Metadata."""
        return Metadata({})

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Called on every rank."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Verify all files of this rank's reads, and that each holds what it should. Raises CheckpointError."""
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
        return LoadPlan([], planner_data=plan.planner_data)  # the reads stay here; the coordinator needs names only

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Called on one rank."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy every planned part into its target."""
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
        """DCP's hook for choosing a storage by its address."""
        return True


def _by_file(reads: Sequence[Read]) -> dict[FileEntry, list[Read]]:
    by_file: dict[FileEntry, list[Read]] = {}
    for read in reads:
        by_file.setdefault(read.file, []).append(read)
    return by_file


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no number that a run saves")


def _finite(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _no_number(text)


def read_scalars(folder: Path, file: FileEntry, verify: Verify) -> dict[str, Json]:
    """The scalars of a checkpoint. Raises CheckpointError where their file is missing or damaged."""
    problem = check_file(folder, file, verify)
    if problem:
        raise CheckpointError(f"{folder} is damaged or incomplete: {problem}")
    path = folder / file.name
    try:
        scalars = json.loads(read_regular(path, MAX_SCALAR_BYTES), parse_constant=_no_number, parse_float=_finite)
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {str(error)[:200]}") from error
    if not isinstance(scalars, dict):
        raise CheckpointError(f"{path} is damaged: it holds no object")
    return scalars
