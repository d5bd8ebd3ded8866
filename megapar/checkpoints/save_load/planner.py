"""Plans of saves and loads: each box is written by one rank, and stored pieces are found that fill a box at load."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, TypeAlias

import torch

from megapar.checkpoints.format.layout import (
    DTYPE_NAMES,
    DTYPES_BY_NAME,
    CheckpointLayout,
    FileEntry,
    TensorEntry,
    read_layout,
)
from megapar.checkpoints.format.shards import Shard
from megapar.checkpoints.format.tiling import BoxList
from megapar.core.box import Box
from megapar.core.units import Json
from megapar.errors import CheckpointError, CheckpointMismatchError, listed
from megapar.files.location import Place

ModelCheck = Callable[[Mapping[str, Json]], str]
Tensors: TypeAlias = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Name of a tensor to (global shape, dtype)."""

SHOWN = 12  # names in one message
_CAST = {torch.float64, torch.float32, torch.bfloat16}


@dataclass(frozen=True)
class SavePlan:
    """One rank's description of its state.

    Attributes:
        tensors: Its complete state, including the boxes that other ranks write.
        boxes: Tensor name to the box that it may write.
    """

    tensors: Tensors
    boxes: Mapping[str, Box]
    scalars: Mapping[str, Json]

    def to_json(self) -> Json:
        """Return the form in which it is sent."""
        return {
            "tensors": {name: [list(shape), DTYPE_NAMES[dtype]] for name, (shape, dtype) in self.tensors.items()},
            "boxes": {name: [list(box.offsets), list(box.sizes)] for name, box in self.boxes.items()},
            "scalars": dict(self.scalars),
        }

    @classmethod
    def from_json(cls, value: Json) -> SavePlan:
        """Return the plan that was sent."""
        tensors = {name: (tuple(shape), DTYPES_BY_NAME[dtype]) for name, (shape, dtype) in value["tensors"].items()}
        boxes = {name: Box(tuple(offsets), tuple(sizes)) for name, (offsets, sizes) in value["boxes"].items()}
        return cls(tensors, boxes, value["scalars"])


@dataclass(frozen=True)
class GlobalPlan:
    """The plans of all ranks in one. ``boxes``: for each rank, tensor name -> the box that it writes."""

    tensors: Tensors
    boxes: Sequence[Mapping[str, Box]]
    scalars: Mapping[str, Json]

    @property
    def num_bytes(self) -> int:
        """The size of all tensors."""
        sizes = (box.numel * self.tensors[name][1].itemsize for boxes in self.boxes for name, box in boxes.items())
        return sum(sizes)


def plan_save(state: Mapping[str, Shard], scalars: Mapping[str, Json]) -> SavePlan:
    """Plan this rank's primary boxes. Raises CheckpointError for a name, dtype or scalar that cannot be stored."""
    _check_names(state)
    for name, shard in state.items():
        if shard.tensor.dtype not in DTYPE_NAMES:
            raise CheckpointError(f"{name} has the dtype {shard.tensor.dtype}; known are {list(DTYPE_NAMES)}")
    _check_scalars(scalars)
    tensors = {name: (tuple(shard.shape), shard.tensor.dtype) for name, shard in state.items()}
    return SavePlan(tensors, {n: shard.box for n, shard in state.items() if shard.primary and shard.box.numel}, scalars)


def merge_plans(plans: Sequence[SavePlan]) -> GlobalPlan:
    """Assign every box one writer. Raises CheckpointError if ranks contradict each other."""
    tensors = _merge("tensor", [plan.tensors for plan in plans])
    scalars = _merge("scalar", [plan.scalars for plan in plans])
    order = {name: number for number, name in enumerate(sorted(tensors))}
    holders: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    for rank, plan in enumerate(plans):
        for name, box in plan.boxes.items():
            holders.setdefault((name, box.offsets), []).append(rank)
    # Ranks with the same box alternate by tensor, so that they share the writing.
    writer = {key: ranks[order[key[0]] % len(ranks)] for key, ranks in holders.items()}
    boxes = [
        {name: box for name, box in plan.boxes.items() if writer[name, box.offsets] == rank}
        for rank, plan in enumerate(plans)
    ]
    return GlobalPlan(tensors, boxes, scalars)


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


def _check_scalars(scalars: Mapping[str, Json]) -> None:
    for name, value in scalars.items():
        try:
            same = json.loads(json.dumps(value, allow_nan=False)) == value
        except (TypeError, ValueError):
            same = False
        if not same or not isinstance(name, str):
            raise CheckpointError(f"scalar {name} is {value!r:.100}, which JSON cannot hold and return unchanged")


def _check_names(state: Mapping[str, Shard]) -> None:
    for name, shard in state.items():
        if name != shard.name:
            raise CheckpointError(f"the shard {shard.name} is given under the name {name}")


@dataclass(frozen=True)
class Read:
    """One copy at load: ``part`` of the box ``piece`` of a global tensor, which is what the file contains."""

    file: FileEntry
    name: str
    dtype: torch.dtype
    piece: Box
    part: Box


@dataclass(frozen=True)
class LoadPlan:
    """The reads, by file, that fill one rank's boxes from any stored boxes, and the layout of the checkpoint."""

    layout: CheckpointLayout
    reads: Mapping[FileEntry, Sequence[Read]]


def plan_load(folder: Place, targets: Mapping[str, Shard], expect_model: ModelCheck | None) -> LoadPlan:
    """Plan the reads that fill this rank's boxes. Raises CheckpointError if the checkpoint does not fit.

    ``expect_model`` returns what is different from this model, given the stored facts, or ""; None skips it.
    """
    _check_names(targets)
    layout = read_layout(folder)
    if expect_model is not None and (text := expect_model(layout.model)):
        raise CheckpointMismatchError(f"{folder} is a checkpoint of another model: {text}")
    _check_targets(folder, layout, targets.values())
    reads: dict[FileEntry, list[Read]] = {}
    for shard in targets.values():
        for read in find_reads(layout, shard):
            reads.setdefault(read.file, []).append(read)
    return LoadPlan(layout, reads)


def refuse_extra(
    folder: Place, layout: CheckpointLayout, targets: Iterable[Sequence[str]], ignore: Sequence[str]
) -> None:
    """Raise CheckpointMismatchError if the checkpoint contains tensors for which no rank has a target.

    Args:
        targets: For each rank, the names of its targets.
        ignore: Prefixes of names that may be stored without a target.
    """
    names = {name for part in targets for name in part}
    extra = [name for name in layout.tensors if name not in names and not name.startswith(tuple(ignore))]
    if extra:
        raise CheckpointMismatchError(f"{folder} contains tensors that this run does not have: {listed(extra, SHOWN)}")


def find_reads(layout: CheckpointLayout, shard: Shard) -> list[Read]:
    """Return reads that cover a target's elements once, from files of any layout. Raises CheckpointError if none do."""
    if not shard.box.numel:
        return []
    entry = layout.tensors[shard.name]
    tiling = entry.tiling(len(layout.files))
    reads = []
    for file, piece in tiling.meeting(shard.box):
        part = shard.box.meet(piece)
        if part is not None:
            reads.append(Read(layout.files[file], shard.name, entry.dtype, piece, part))
    covered = sum(read.part.numel for read in reads)
    meet = (a.part.meet(b.part) is not None for a, b in combinations(reads, 2))
    if covered != shard.box.numel or (isinstance(tiling, BoxList) and any(meet)):
        raise CheckpointError(
            f"{shard.name}: stored pieces hold {covered} of the {shard.box.numel} elements of {shard.box}"
            + ("" if covered < shard.box.numel else ", some of them twice")
        )
    return reads


def _check_targets(folder: Place, layout: CheckpointLayout, targets: Iterable[Shard]) -> None:
    missing, wrong = [], []
    for shard in targets:
        entry = layout.tensors.get(shard.name)
        if entry is None:
            missing.append(shard.name)
            continue
        dtypes = {entry.dtype, shard.tensor.dtype}
        if entry.shape != tuple(shard.shape) or not (len(dtypes) == 1 or (shard.casts and dtypes <= _CAST)):
            wrong.append(_mismatch(entry, shard))
    if missing:
        raise CheckpointMismatchError(f"{folder} does not contain tensors that this run has: {listed(missing, SHOWN)}")
    if wrong:
        raise CheckpointMismatchError(f"{folder} contains tensors of another shape or dtype: {listed(wrong, SHOWN)}")


def _mismatch(entry: TensorEntry, shard: Shard) -> str:
    wanted = f"{list(shard.shape)} {DTYPE_NAMES.get(shard.tensor.dtype, shard.tensor.dtype)}"
    return f"{entry.name} is {list(entry.shape)} {DTYPE_NAMES[entry.dtype]} there and {wanted} here"
