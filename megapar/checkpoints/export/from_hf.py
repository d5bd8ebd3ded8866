"""Hugging Face folders as checkpoints, converted a few blocks of a tensor at a time, and as the start of a run."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path, PurePath
from typing import Any

import torch
from torch import Tensor

from megapar.arguments import parse
from megapar.checkpoints.format import shards
from megapar.checkpoints.format.names import FOREIGN_FIX, foreign_checkpoint, shard_name
from megapar.checkpoints.format.shards import DTYPES_BY_CODE, TensorPlan, file_order, write_bytes, write_shards
from megapar.checkpoints.ownership.identity import MTP, blocks_lacking, match_folder
from megapar.checkpoints.save_load import folder as folders
from megapar.checkpoints.save_load.planner import GlobalPlan
from megapar.checkpoints.save_load.storage import write_layout
from megapar.config.published import BESIDE, Unsupported, architecture_of, flags_of, has_tokenizer, read_config
from megapar.core.box import Box
from megapar.core.sharding.sharding import changed_masters
from megapar.core.status_line import Status, silent
from megapar.errors import CheckpointError
from megapar.files.location import Location, Place, at, copy
from megapar.files.tensor_file import INDEX_FILE
from megapar.model.architectures import ARCHITECTURES
from megapar.model.hugging_face.folder import HfFolder
from megapar.model.parameter import ParameterSpec
from megapar.model.published_tensors import pieces_of, some
from megapar.model.sizes import ModelSizes
from megapar.model.spec import table_of
from megapar.schema.published import PublishedArchitecture
from megapar.training.step.job import Job
from megapar.training.step.progress import Progress

CARRIED = "carried.safetensors"
FACTS = "megapar.json"
_LEFT = (".safetensors", ".bin", ".py", ".pt", ".pth", ".h5", ".msgpack", ".onnx", ".gguf")


@dataclass(frozen=True)
class Converted:
    """The result of a conversion.

    Attributes:
        bytes: Size of the weights in bytes.
        carried: Tensors that the model has no place for, copied as they are.
        tokenizer: True if the folder has a tokenizer.
        quantized: Numbers of tensors that were stored in FP8 or MXFP4 and are now dequantized.
        drops_tokens: True if the run dropped tokens over the capacity, which the exported model does not.
    """

    folder: Location
    architecture: PublishedArchitecture
    tensors: int
    bytes: int
    carried: tuple[str, ...]
    tokenizer: bool
    drops_tokens: bool = False
    quantized: Mapping[str, int] = field(default_factory=dict)


def refuse_foreign(source: Location) -> None:
    """Raise CheckpointError for a checkpoint of another framework."""
    if foreign := foreign_checkpoint(source):
        raise CheckpointError(f"{source} is {foreign}. {FOREIGN_FIX}")


def published(source: Place) -> tuple[PublishedArchitecture, ModelSizes]:
    """Return class and sizes of a Hugging Face folder. Raises CheckpointError, or ConfigError for impossible sizes."""
    try:
        config = read_config(source)
    except Unsupported as error:
        raise CheckpointError(str(error)) from error
    try:
        kind, flags = flags_of(config)
        architecture = architecture_of(config)
    except Unsupported as error:
        raise CheckpointError(f"{source}: {error}") from error
    length = str(min(256, flags["max_position_embeddings"]))
    sizes = parse(kind, ["--load-hf", str(source), "--seq-length", length], {}).model
    sizes = replace(sizes, **architecture.fixed_sizes)
    # transformers writes the number of multi-token prediction blocks, but not the blocks.
    lacking = blocks_lacking(architecture, table_of(sizes), HfFolder(source).tensors)
    absent: dict[str, Any] = {block.fact: 0 for block in lacking}
    return architecture, replace(sizes, **absent)


def hf_to_megapar(source: Place, out: Place, status: Status = silent) -> Converted:
    """Convert a Hugging Face folder to a checkpoint, which ``--load OUT`` reads on any layout.

    Weights become fp32 master weights, which is exact for bf16 and fp16. OUT/hf contains config.json, the tokenizer,
    the dtype of every tensor, and the tensors that the model has no place for, so that the conversion back reproduces
    the folder. OUT appears when it is complete. Raises CheckpointError.
    """
    source, out = at(source), at(out)
    refuse_foreign(source)
    beside = files_beside(source, lambda name: PurePath(name).suffix in _LEFT or name == INDEX_FILE)
    architecture, sizes = published(source)
    weights = HfFolder(source)
    table = table_of(sizes)
    foreign = weights.check(table, architecture)
    weights.check_tied(architecture, pieces_of(table, architecture))

    def write(aside: Location) -> Converted:
        _write_beside(aside / BESIDE, beside, weights, architecture, table, foreign)
        num_bytes = _write_checkpoint(aside, weights, architecture, sizes, table, status)
        tokenizer = has_tokenizer(aside / BESIDE)
        counts = len(table), num_bytes
        return Converted(out, architecture, *counts, tuple(foreign), tokenizer, quantized=weights.quantized)

    return written_aside(out, write)


def _write_checkpoint(
    root: Location,
    weights: HfFolder,
    architecture: PublishedArchitecture,
    sizes: ModelSizes,
    table: tuple[ParameterSpec, ...],
    status: Status,
) -> int:
    """Write the weights as iteration 0 and return their bytes."""
    folder = folders.iteration_folder(root, 0)
    rows = {f"model/{spec.name}": spec for spec in table}
    own = pieces_of(table, architecture)
    wide = torch.float64 if any(weights.tensors[name].code == "F64" for name in own) else torch.float32

    numbers = itertools.count()

    def fetch(name: str) -> Iterator[Tensor]:
        status("converting", next(numbers), len(rows), "tensors")
        spec = rows[name]
        for slab in Box.whole(spec.shape).slabs(shards.BLOCK_BYTES // wide.itemsize):
            target = torch.empty(slab.sizes, dtype=wide)
            weights.fill(target, spec, slab, architecture)
            yield target

    plans = file_order(TensorPlan(name, wide, spec.shape) for name, spec in rows.items())
    file = write_shards(folder / shard_name(0), plans, fetch)
    tensors = {name: (spec.shape, wide) for name, spec in rows.items()}
    scalars = {**asdict(Progress()), "optimizer_steps": 0, "schedule": {}}
    plan = GlobalPlan(tensors, [{name: Box.whole(spec.shape) for name, spec in rows.items()}], scalars)
    write_layout(folder, plan, [file], {"model": sizes.facts(), "grid": {}})
    folders.publish(root, 0)
    return file.size


def _write_beside(
    folder: Location,
    beside: list[Location],
    weights: HfFolder,
    architecture: PublishedArchitecture,
    table: tuple[ParameterSpec, ...],
    foreign: list[str],
) -> None:
    for path in beside:
        copy(path, folder / path.name)
    if foreign:
        plans = [
            TensorPlan(name, DTYPES_BY_CODE[weights.tensors[name].code], weights.tensors[name].shape)
            for name in foreign
        ]
        write_shards(folder / CARRIED, file_order(plans), weights.whole, metadata={"format": "pt"})
    pieces = pieces_of(table, architecture)
    tied = [name for name in architecture.doubled if name in weights.tensors and name not in pieces]
    facts = {"family": architecture.name, "absent": architecture.absent, "dtypes": weights.dtypes(), "tied": tied}
    write_bytes(folder / FACTS, json.dumps(facts, indent=1, sort_keys=True).encode())


def written_aside(out: Location, write: Callable[[Location], Converted]) -> Converted:
    """Call ``write`` with a temporary folder, and give it the name ``out`` when it is complete.

    In a store that is not a disk, ``out`` is written itself: each of its files appears complete, and what makes the
    folder a model or a checkpoint (config.json, layout.json) appears after the weights.
    """
    if out.is_file() or out.list():
        raise CheckpointError(f"{out} already exists; choose a new folder")
    out = aside = out.resolve()  # "." has no name
    if out.local_path() is not None:
        aside = out.with_name(f".{out.name}.unfinished-{os.getpid()}")
        aside.remove()
    try:
        done = write(aside)
        if aside != out:
            aside.publish(out)
        return done
    except BaseException:
        aside.remove()
        raise


def files_beside(folder: Location, left_out: Callable[[str], bool]) -> list[Location]:
    """Return the files of a folder, sorted by name, except hidden files and those for which ``left_out`` is True.

    Converted models are often published, so links must not leak other files: a link is followed only within the folder,
    and from a snapshot in the Hub's cache to its blobs. Raises CheckpointError for other links.
    """
    files = {name: size for name, size in folder.list().items() if not name.startswith(".") and not left_out(name)}
    if (local := folder.local_path()) is not None:
        _refuse_links(local, [local / name for name in sorted(files)])
    return [folder / name for name, size in sorted(files.items()) if size is not None]


def _refuse_links(folder: Path, paths: list[Path]) -> None:
    root = folder.resolve()
    snapshots = (parent for parent in root.parents if parent.name == "snapshots")
    roots = [root, *(snapshot.parent / "blobs" for snapshot in snapshots)]
    outside = [path for path in paths if path.is_symlink() and not _within(path, roots)]
    if outside:
        more = f", and {len(outside) - 1} more links lead outside of it" if len(outside) > 1 else ""
        raise CheckpointError(
            f"{outside[0]} is a link to {os.readlink(outside[0])}, which is not in that folder{more}; a conversion "
            "does not copy files of other folders: remove the link, or replace it with the file itself"
        )


def _within(path: Path, roots: list[Path]) -> bool:
    try:
        target = path.resolve()
    except (OSError, RuntimeError):  # links in a circle
        return False
    return any(target.is_relative_to(root) for root in roots)


def trained_architecture(folder: Place) -> PublishedArchitecture:
    """Return the class that a run exports if it started from the folder."""
    name = architecture_of(read_config(folder)).name
    return ARCHITECTURES[ARCHITECTURES[name].trained_as or name]


def load_hf(folder: Place, job: Job) -> tuple[str, ...]:
    """Fill the weights and return notes for the log.

    A masked language model has no sentence-order head, and many decoders' folders have no multi-token prediction block.
    The model then keeps its initial one. Raises CheckpointError, before anything is filled, for missing, misshapen or
    unreadable tensors.
    """
    folder = at(folder)
    architecture, weights = architecture_of(read_config(folder)), HfFolder(folder)
    lacking, foreign = match_folder(weights, job.table, architecture)
    separate: set[str] = {*pieces_of(job.table, architecture)}
    if not any(spec.name.startswith(MTP.prefixes) for spec in job.table):
        separate |= {*architecture.shared}  # copies that belong to a block which is not trained
    weights.check_tied(architecture, separate, job.world.rank, job.world.grid.world_size)
    rows = {spec.name: spec for spec in job.table}
    with changed_masters(job.sharding) as masters:
        for view in job.sharding.views(masters):
            spec = rows[view.spec.name]
            if weights.holds(spec, architecture):
                weights.fill(view.tensor, spec, view.box, architecture)
    buffers = dict(job.model.named_buffers())
    for spec in job.table:
        # A pipeline stage has only the buffers of its layers.
        if not spec.trainable and spec.name in buffers and weights.holds(spec, architecture):
            weights.fill(buffers[spec.name], spec, Box.whole(spec.shape), architecture)
    job.sharding.start_param_gather()
    notes = [f"weights: {folder} ({architecture.name})"]
    for kind, count in weights.quantized.items():
        notes.append(f"{count} tensors of {folder} are in {kind}; they are dequantized, and never exported in {kind}")
    if foreign:
        notes.append(f"{len(foreign)} tensors of {folder} have no place in the model: {some(foreign)}")
    notes += [f"{folder} has no {block.name}; training starts from its initial weights" for block in lacking]
    return tuple(notes)
