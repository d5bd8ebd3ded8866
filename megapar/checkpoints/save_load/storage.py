"""Files of a save or load: one safetensors file for each writing rank, the scalars as JSON, and layout.json."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import torch

from megapar.checkpoints.format.layout import CheckpointLayout, FileEntry, TensorEntry
from megapar.checkpoints.format.names import LAYOUT_FILE, SCALARS_FILE, shard_name
from megapar.checkpoints.format.shards import (
    Shard,
    ShardFile,
    TensorPlan,
    Verify,
    check_file,
    file_order,
    read_scalars,
    write_bytes,
    write_shards,
)
from megapar.checkpoints.format.tiling import tile
from megapar.checkpoints.ownership.owner import Owner
from megapar.checkpoints.save_load.folder import may_replace, name_aside, remove_left_over
from megapar.checkpoints.save_load.planner import SHOWN, GlobalPlan, LoadPlan
from megapar.core.box import Box
from megapar.core.units import Json
from megapar.errors import CheckpointError
from megapar.files.location import Location, Place, at

# Space in addition to the tensors: headers, scalars, layout.json and the file system's own data.
SPARE_BYTES = 1 << 20


def begin_save(folder: Location, num_bytes: int, owner: Owner | None) -> str:
    """Return the name of a temporary folder for a save of ``folder``, and remove those of killed saves.

    Called on one rank, with the size of all tensors and the owner of the folder's root. Raises CheckpointError if
    ``folder`` is not a checkpoint and would be replaced, or if the disk is too full. With an owner nothing is replaced:
    if the name exists, the checkpoint gets one with the owner's epoch.
    """
    if owner is None and not may_replace(folder):
        raise CheckpointError(f"{folder} exists and is not a checkpoint; it is not replaced")
    if owner is not None:
        owner.check()
    remove_left_over(folder, owner)
    _check_space(folder.parent, num_bytes)
    return name_aside(folder, owner).name


def write_rank(folder: Location, rank: int, shards: Sequence[Shard]) -> FileEntry | None:
    """Write a rank's file, one tensor at a time; none without shards."""
    tensors = {shard.name: shard.tensor.detach() for shard in shards}
    plans = [TensorPlan(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
    return write_shards(folder / shard_name(rank), file_order(plans), tensors.__getitem__) if plans else None


def _check_space(root: Location, num_bytes: int) -> None:
    """Raise CheckpointError if the store of ``root`` has no room for a checkpoint of ``num_bytes``."""
    needed, free = num_bytes + SPARE_BYTES, root.free_bytes()
    if free is not None and free < needed:
        raise CheckpointError(f"no room under {root}: a checkpoint takes {needed:,} bytes and {free:,} are free")


def write_layout(
    folder: Location, plan: GlobalPlan, files: Sequence[FileEntry | None], description: Mapping[str, Mapping[str, Json]]
) -> None:
    """Write the scalars and layout.json next to each rank's file, as ``make_layout``."""
    scalars = write_bytes(folder / SCALARS_FILE, json.dumps(plan.scalars, indent=1, sort_keys=True).encode())
    write_bytes(folder / LAYOUT_FILE, make_layout(plan, files, scalars, description).to_bytes())


def make_layout(
    plan: GlobalPlan,
    files: Sequence[FileEntry | None],
    scalars: FileEntry,
    description: Mapping[str, Mapping[str, Json]],
) -> CheckpointLayout:
    """Return the layout of each rank's file. Raises CheckpointError if the boxes do not tile their tensors."""
    written = sorted((file for file in files if file is not None), key=lambda file: file.name)
    number = {file.name: i for i, file in enumerate(written)}
    pieces: dict[str, tuple[list[int], list[Box]]] = {name: ([], []) for name in plan.tensors}
    for file, boxes in zip(files, plan.boxes, strict=True):
        for name, box in boxes.items():
            assert file is not None, "a rank with boxes has written a file"
            pieces[name][0].append(number[file.name])
            pieces[name][1].append(box)
    tensors = {}
    for name, (numbers, tiles) in sorted(pieces.items()):
        shape, dtype = plan.tensors[name]
        tensors[name] = TensorEntry(name, shape, dtype, tile(name, shape, numbers, tiles).to_json())
    return CheckpointLayout(description["model"], description["grid"], scalars, tensors, written)


def verify_files(folder: Place, plan: LoadPlan, check: Verify) -> dict[str, Json]:
    """Verify the files and tensors that a rank reads; return the scalars. Raises CheckpointError for damage."""
    folder = at(folder)
    scalars = read_scalars(folder, plan.layout.scalars, check)
    problems = [problem for file in plan.reads if (problem := check_file(folder, file, check))]
    if problems:
        more = f" and {len(problems) - SHOWN} more files" if len(problems) > SHOWN else ""
        raise CheckpointError(f"{folder} is damaged or incomplete: {'; '.join(problems[:SHOWN])}{more}")
    for file, reads in plan.reads.items():
        with ShardFile(folder / file.name) as shards:
            for read in reads:
                shards.check(read.name, read.dtype, read.piece.sizes)
    return scalars


def fill_targets(folder: Place, plan: LoadPlan, targets: Mapping[str, Shard]) -> None:
    """Copy every planned part to its target."""
    with torch.no_grad():
        for file, reads in plan.reads.items():
            with ShardFile(at(folder) / file.name) as shards:
                for read in reads:
                    target = targets[read.name]
                    out = target.tensor.detach()[read.part.within(target.box)]
                    if read.dtype == out.dtype:
                        shards.read(read.name, read.piece, read.part, out)
                    else:
                        stored = torch.empty(out.shape, dtype=read.dtype)
                        shards.read(read.name, read.piece, read.part, stored)
                        out.copy_(stored)
