"""DCP planners for shards: assign each box one writer at save, and find the stored pieces that fill a box at load."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from io import BytesIO
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
)

from megapar.core.box import Box
from megapar.core.checkpoint import layout as layout_file
from megapar.core.checkpoint.layout import DTYPE_NAMES, CheckpointLayout, FileEntry, TensorEntry
from megapar.core.checkpoint.shard import Shard
from megapar.core.checkpoint.tiling import BoxList
from megapar.core.units import Json
from megapar.errors import CheckpointError, CheckpointMismatchError
from megapar.files.location import Place

ModelCheck = Callable[[Mapping[str, Json]], str]

SHOWN = 12  # names in one message


@dataclass(frozen=True)
class Declared:
    """One rank's description of its complete state, including the boxes that other ranks write.

    Attributes:
        tensors: Name to (global shape, dtype).
        scalars: JSON values by name.
    """

    tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
    scalars: Mapping[str, Json]


class ShardSavePlanner(SavePlanner):
    """Save plans in which every primary, non-empty box has one writer, and the scalars of all ranks are merged.

    Args:
        scalars: This rank's JSON values by name.
        failure: The error because of which this rank has no state. The save then fails on all ranks.
    """

    def __init__(self, scalars: Mapping[str, Json], failure: CheckpointError | None = None) -> None:
        self._scalars = dict(scalars)
        self._failure = failure

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Keep this rank's shards. Called first, on every rank."""
        self._state: Mapping[str, Shard] = state_dict

    def create_local_plan(self) -> SavePlan:
        """Plan this rank's primary boxes. Raises CheckpointError for a name, dtype or scalar that cannot be stored."""
        if self._failure is not None:
            raise self._failure
        _check_names(self._state)
        for name, shard in self._state.items():
            if shard.tensor.dtype not in DTYPE_NAMES:
                raise CheckpointError(f"{name} has the dtype {shard.tensor.dtype}; known are {list(DTYPE_NAMES)}")
        items: list[WriteItem] = []
        for name, shard in self._state.items():
            if shard.primary and shard.box.numel:
                items += shard.__create_write_items__(name, shard)
        tensors = {name: (shard.shape, shard.tensor.dtype) for name, shard in self._state.items()}
        return SavePlan(items, planner_data=Declared(tensors, _as_json(self._scalars)))

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Assign every box one writer. Raises CheckpointError if ranks contradict each other."""
        declared = _merge("tensor", [plan.planner_data.tensors for plan in all_plans])
        scalars = _merge("scalar", [plan.planner_data.scalars for plan in all_plans])
        order = {name: number for number, name in enumerate(sorted(declared))}
        holders: dict[MetadataIndex, list[int]] = {}
        for rank, plan in enumerate(all_plans):
            for item in plan.items:
                holders.setdefault(item.index, []).append(rank)
        # Ranks with the same box alternate by tensor, so that they share the writing.
        writer = {index: ranks[order[index.fqn] % len(ranks)] for index, ranks in holders.items()}
        plans = [
            replace(plan, items=[item for item in plan.items if writer[item.index] == rank], planner_data=None)
            for rank, plan in enumerate(all_plans)
        ]
        tensors = {
            name: TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(shape), [])
            for name, (shape, dtype) in declared.items()
        }
        for plan in plans:
            for item in plan.items:
                tensors[item.index.fqn].chunks.append(_chunk(item))
        return plans, Metadata(dict(tensors), planner_data=scalars)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Return the plan unchanged. Called on every rank with its part of the global plan."""
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | BytesIO:
        """Return the local tensor to write."""
        return self._state[write_item.index.fqn].__get_tensor_shard__(write_item.index)


def _chunk(item: WriteItem) -> ChunkStorageMetadata:
    assert item.tensor_data is not None, "Shards write tensors only"
    return item.tensor_data.chunk


def _merge(kind: str, parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for rank, part in enumerate(parts):
        for name, value in part.items():
            if merged.setdefault(name, value) != value:
                raise CheckpointError(
                    f"{kind} {name} is {value} on rank {rank} and {merged[name]} on a lower one. "
                    "Put the rank into the name of a value that differs between ranks."
                )
    return merged


def _as_json(scalars: dict[str, Json]) -> dict[str, Json]:
    for name, value in scalars.items():
        try:
            same = json.loads(json.dumps(value, allow_nan=False)) == value
        except (TypeError, ValueError):
            same = False
        if not same or not isinstance(name, str):
            raise CheckpointError(f"scalar {name} is {value!r:.100}, which JSON cannot hold and return unchanged")
    return scalars


def _check_names(state: Mapping[str, Shard]) -> None:
    for name, shard in state.items():
        if name != shard.name:
            raise CheckpointError(f"the shard {shard.name} is given under the name {name}")


@dataclass(frozen=True)
class Read:
    """One copy at load.

    Attributes:
        file: The shard file to read.
        name: Name of the tensor.
        dtype: Dtype of the tensor.
        piece: The box of the global tensor that the file contains.
        part: The box to copy, within ``piece``.
        item: The same copy in DCP's form.
    """

    file: FileEntry
    name: str
    dtype: torch.dtype
    piece: Box
    part: Box
    item: ReadItem


@dataclass(frozen=True)
class Reads:
    """The reads of one rank, for the storage reader.

    Attributes:
        reads: The reads of tensors.
        scalars: The file of the scalars.
    """

    reads: Sequence[Read]
    scalars: FileEntry


class ShardLoadPlanner(LoadPlanner):
    """Load plans that fill any boxes from any stored boxes. Reads layout.json instead of using DCP's Metadata.

    Args:
        folder: Folder of the checkpoint.
        expect_model: Returns what is different from this model, given the stored facts, or ""; None skips it.
        ignore: Prefixes of tensor names that may be stored although no rank has a target for them.
    """

    def __init__(self, folder: Place, expect_model: ModelCheck | None, ignore: Sequence[str]) -> None:
        self._folder = folder
        self._expect_model = expect_model
        self._ignore = tuple(ignore)
        self._layout: CheckpointLayout | None = None

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Keep this rank's shards. Called first, on every rank."""
        self._targets: Mapping[str, Shard] = state_dict

    def create_local_plan(self) -> LoadPlan:
        """Plan the reads that fill this rank's boxes. Raises CheckpointError if the checkpoint does not fit."""
        _check_names(self._targets)
        self._layout = layout = layout_file.read(self._folder)
        if self._expect_model is not None and (text := self._expect_model(layout.model)):
            raise CheckpointMismatchError(f"{self._folder} is a checkpoint of another model: {text}")
        _check_targets(self._folder, layout, self._targets.values())
        reads = [read for shard in self._targets.values() for read in find_reads(layout, shard)]
        return LoadPlan([read.item for read in reads], Reads(reads, layout.scalars), sorted(self._targets))

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Raise CheckpointMismatchError if the checkpoint contains tensors for which no rank has a target."""
        assert self._layout is not None, "the local plan comes first"
        targets = {name for plan in global_plan for name in plan.planner_data}
        extra = [name for name in self._layout.tensors if name not in targets and not name.startswith(self._ignore)]
        if extra:
            raise CheckpointMismatchError(
                f"{self._folder} contains tensors that this run does not have: {_listed(extra)}"
            )
        return [LoadPlan([]) for _ in global_plan]

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """Return the plan unchanged. Each rank has kept its reads, so that the plan contains none."""
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: BytesIO) -> None:
        """Refuse a pickled object: checkpoints have none."""
        raise CheckpointError(f"{read_item.dest_index.fqn}: only tensors are read from shards")

    def resolve_bytes(self, read_item: ReadItem) -> BytesIO:
        """Refuse a pickled object: checkpoints have none."""
        raise CheckpointError(f"{read_item.dest_index.fqn}: only tensors are read from shards")

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """Return the view of a target that a read fills."""
        target = self._targets[read_item.dest_index.fqn].__get_tensor_shard__(read_item.dest_index)
        spans = zip(read_item.dest_offsets, read_item.lengths, strict=True)
        return target[tuple(slice(offset, offset + length) for offset, length in spans)]

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Do nothing. Called after the view is filled."""


def find_reads(layout: CheckpointLayout, shard: Shard) -> list[Read]:
    """Return reads that cover every element of a target exactly once, from files of any layout (resharding).

    Raises CheckpointError if there are none.
    """
    if not shard.box.numel:
        return []
    tiling = layout.tensors[shard.name].tiling(len(layout.files))
    reads = []
    for file, piece in tiling.meeting(shard.box):
        part = shard.box.meet(piece)
        if part is not None:
            item = _item(shard, piece, part)
            reads.append(Read(layout.files[file], shard.name, shard.tensor.dtype, piece, part, item))
    covered = sum(read.part.numel for read in reads)
    if covered != shard.box.numel or (isinstance(tiling, BoxList) and _any_meet([read.part for read in reads])):
        raise CheckpointError(
            f"{shard.name}: stored pieces hold {covered} of the {shard.box.numel} elements of {shard.box}"
            + ("" if covered < shard.box.numel else ", some of them twice")
        )
    return reads


def _any_meet(boxes: Sequence[Box]) -> bool:
    return any(box.meet(other) is not None for i, box in enumerate(boxes) for other in boxes[i + 1 :])


def _item(target: Shard, piece: Box, part: Box) -> ReadItem:
    def within(outer: Box) -> torch.Size:
        return torch.Size([p - o for p, o in zip(part.offsets, outer.offsets, strict=True)])

    return ReadItem(
        type=LoadItemType.TENSOR,
        dest_index=MetadataIndex(target.name, target.box.offsets),
        dest_offsets=within(target.box),
        storage_index=MetadataIndex(target.name, piece.offsets),
        storage_offsets=within(piece),
        lengths=torch.Size(part.sizes),
    )


def _check_targets(folder: Place, layout: CheckpointLayout, targets: Iterable[Shard]) -> None:
    missing, wrong = [], []
    for shard in targets:
        entry = layout.tensors.get(shard.name)
        if entry is None:
            missing.append(shard.name)
        elif (entry.shape, entry.dtype) != (tuple(shard.shape), shard.tensor.dtype):
            wrong.append(_mismatch(entry, shard))
    if missing:
        raise CheckpointMismatchError(f"{folder} does not contain tensors that this run has: {_listed(missing)}")
    if wrong:
        raise CheckpointMismatchError(f"{folder} contains tensors of another shape or dtype: {_listed(wrong)}")


def _mismatch(entry: TensorEntry, shard: Shard) -> str:
    here = f"{list(shard.shape)} {DTYPE_NAMES.get(shard.tensor.dtype, shard.tensor.dtype)}"
    return f"{entry.name} is {list(entry.shape)} {DTYPE_NAMES[entry.dtype]} there and {here} here"


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
