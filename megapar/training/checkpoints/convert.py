"""Conversion between Hugging Face folders and checkpoints, streaming a few blocks of a tensor at a time."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path, PurePath
from typing import Any

import torch
from torch import Tensor

from megapar.arguments import parse
from megapar.config.foreign import FIX, foreign_checkpoint
from megapar.config.from_hf import BESIDE, TOKENIZER_FILES
from megapar.config.published import Unsupported, architecture_of, flags_of, read_config
from megapar.core.box import Box
from megapar.core.checkpoint import folder as folders
from megapar.core.checkpoint import shard_file
from megapar.core.checkpoint.layout import CheckpointLayout, TensorEntry
from megapar.core.checkpoint.shard_file import (
    DTYPES,
    TensorPlan,
    file_order,
    write_bytes,
    write_shards,
)
from megapar.core.checkpoint.tiling import tile
from megapar.data.tokenizers.stored_tokenizer import load_stored_tokenizer
from megapar.data.tokenizers.tokenizer import Tokenizer, token_ids
from megapar.errors import CheckpointError
from megapar.files.checkpoint_names import LAYOUT_FILE, SCALARS_FILE, shard_name
from megapar.files.location import Location, Place, at, copy, written_locally
from megapar.files.published_names import CONFIG_FILE, INDEX_FILE, weights_name
from megapar.files.regular_file import INDEX_BYTES
from megapar.model.architectures import ARCHITECTURES, not_exportable, own_architecture
from megapar.model.hugging_face.folder import HfFolder
from megapar.model.hugging_face.save import SHARD_BYTES, config_of
from megapar.model.hugging_face.tensors import rotated_dim, to_halves
from megapar.model.initialize import piece_box
from megapar.model.parameter import ParameterSpec
from megapar.model.published_tensors import pieces_of
from megapar.model.sizes import ModelSizes
from megapar.model.spec import spec_of, table_of
from megapar.schema.published import PublishedArchitecture
from megapar.training.checkpoints.model_match import blocks_lacking
from megapar.training.checkpoints.saved import Saved
from megapar.training.step.progress import Progress

CARRIED = "carried.safetensors"
FACTS = "megapar.json"
_LEFT = (".safetensors", ".bin", ".py", ".pt", ".pth", ".h5", ".msgpack", ".onnx", ".gguf")


@dataclass(frozen=True)
class Converted:
    """The result of a conversion.

    Attributes:
        folder: Folder that was written.
        architecture: The published class.
        tensors: Number of tensors.
        bytes: Size of the weights in bytes.
        carried: Tensors that the model has no place for, copied as they are.
        tokenizer: True if the folder has a tokenizer.
        in_fp8: Tensors that were stored in FP8 and are now dequantized.
        drops_tokens: True if the run dropped tokens over the capacity, which the exported model does not.
    """

    folder: Location
    architecture: PublishedArchitecture
    tensors: int
    bytes: int
    carried: tuple[str, ...]
    tokenizer: bool
    drops_tokens: bool = False
    in_fp8: int = 0


def _refuse_foreign(source: Location) -> None:
    path = source.local_path()
    if path is not None and (foreign := foreign_checkpoint(path)):
        raise CheckpointError(f"{source} is {foreign}. {FIX}")


def published(source: Path) -> tuple[PublishedArchitecture, ModelSizes]:
    """Return class and sizes of a Hugging Face folder. Raises CheckpointError, or ConfigError for impossible sizes."""
    try:
        config = read_config(source)
        kind, flags = flags_of(config)
        architecture = architecture_of(config)
    except Unsupported as error:
        raise CheckpointError(f"{source}: {error}") from error
    length = str(min(256, flags["max_position_embeddings"]))
    sizes = parse(kind, ["--load-hf", str(source), "--seq-length", length], {}).model
    sizes = replace(sizes, **architecture.fixed_sizes)
    # transformers writes the number of multi-token prediction blocks, but not the blocks.
    lacking = blocks_lacking(architecture, table_of(sizes), HfFolder(source).tensors)
    left: dict[str, Any] = {block.fact: 0 for block in lacking}
    return architecture, replace(sizes, **left)


def hf_to_megapar(source: str | os.PathLike[str], out: Place) -> Converted:
    """Convert a Hugging Face folder to a checkpoint, which ``--load OUT`` reads on any layout.

    Weights become fp32 master weights, which is exact for bf16 and fp16. OUT/hf contains config.json, the tokenizer,
    the dtype of every tensor, and the tensors that the model has no place for, so that the conversion back reproduces
    the folder. OUT appears when it is complete. Raises CheckpointError.
    """
    source, out = Path(source), at(out)
    _refuse_foreign(at(source))
    beside = files_beside(at(source), lambda name: PurePath(name).suffix in _LEFT or name == INDEX_FILE)
    architecture, sizes = published(source)
    weights = HfFolder(source)
    table = table_of(sizes)
    foreign = weights.check(table, architecture)
    weights.check_tied(architecture, pieces_of(table, architecture))
    write = partial(_write_checkpoint, out=out, beside=beside, weights=weights, architecture=architecture)
    return _aside(out, partial(write, sizes=sizes, table=table, foreign=foreign))


def _write_checkpoint(
    aside: Location,
    out: Location,
    beside: list[Location],
    weights: HfFolder,
    architecture: PublishedArchitecture,
    sizes: ModelSizes,
    table: tuple[ParameterSpec, ...],
    foreign: list[str],
) -> Converted:
    _write_beside(aside / BESIDE, beside, weights, architecture, table, foreign)
    folder = folders.iteration_folder(aside, 0)
    rows = {f"model/{spec.name}": spec for spec in table}
    wide = torch.float64 if any(t.code == "F64" for t in weights.tensors.values()) else torch.float32

    def fetch(name: str) -> Iterator[Tensor]:
        spec = rows[name]
        for slab in Box.whole(spec.shape).slabs(shard_file.BLOCK_BYTES // wide.itemsize):
            target = torch.empty(slab.sizes, dtype=wide)
            weights.fill(target, spec, slab, architecture)
            yield target

    plans = file_order(TensorPlan(name, wide, spec.shape) for name, spec in rows.items())
    file = write_shards(folder / shard_name(0), plans, fetch)
    tensors = {}
    for name, spec in sorted(rows.items()):
        cut = tile(name, spec.shape, [0], [Box.whole(spec.shape)]).to_json()
        tensors[name] = TensorEntry(name, spec.shape, wide, cut)
    scalars = {**asdict(Progress()), "optimizer_steps": 0, "schedule": {}}
    text = json.dumps(scalars, indent=1, sort_keys=True).encode()
    layout = CheckpointLayout(sizes.facts(), {}, write_bytes(folder / SCALARS_FILE, text), tensors, [file])
    write_bytes(folder / LAYOUT_FILE, layout.to_bytes())
    folders.publish(aside, 0)
    has_tokenizer = not {*TOKENIZER_FILES}.isdisjoint((aside / BESIDE).list())
    carried = tuple(foreign)
    return Converted(out, architecture, len(rows), file.size, carried, has_tokenizer, in_fp8=weights.in_fp8)


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
        plans = [TensorPlan(name, DTYPES[weights.tensors[name].code], weights.tensors[name].shape) for name in foreign]
        write_shards(folder / CARRIED, file_order(plans), weights.whole, metadata={"format": "pt"})
    own = pieces_of(table, architecture)
    tied = [name for name in architecture.doubled if name in weights.tensors and name not in own]
    facts = {"family": architecture.name, "absent": architecture.absent, "dtypes": weights.dtypes(), "tied": tied}
    write_bytes(folder / FACTS, json.dumps(facts, indent=1, sort_keys=True).encode())


def megapar_to_hf(
    source: Place,
    out: Place,
    *,
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
    tokenizer: Tokenizer | None = None,
) -> Converted:
    """Convert a checkpoint of any layout to a Hugging Face folder.

    The folder appears when it is complete. Raises CheckpointError.

    Args:
        source: A folder of checkpoints, whose latest one is converted, or a single checkpoint.
        out: Folder to write.
        dtype: dtype of the weights, except parameters that are always fp32. By default a tensor has the dtype of the
            Hugging Face folder that it came from, or fp32 without one.
        shard_bytes: Maximum size of a file.
        tokenizer: By default the tokenizer saved with the checkpoints, or that of the published folder.
    """
    source, out = at(source), at(out)
    _refuse_foreign(source)
    folder = source if (source / LAYOUT_FILE).is_file() else folders.find(source)
    saved = Saved(folder)
    beside = next((p for p in (source / BESIDE, folder.parent / BESIDE) if (p / FACTS).is_file()), None)
    facts = {} if beside is None else _facts(beside / FACTS)
    architecture = _architecture(facts, saved)
    tokenizer = tokenizer or load_stored_tokenizer(folder.parent)
    if tokenizer is not None and tokenizer.size > saved.sizes.vocab_size:
        raise CheckpointError(
            f"the tokenizer has {tokenizer.size} ids and the model {saved.sizes.vocab_size}: "
            "pass the one that the model was trained with"
        )
    export = partial(_write_hf, out=out, saved=saved, architecture=architecture, facts=facts, beside=beside)
    return _aside(out, partial(export, tokenizer=tokenizer, dtype=dtype, shard_bytes=shard_bytes))


def _facts(path: Location) -> dict[str, Any]:
    """Read the file that ``_write_beside`` wrote. It may have been edited since. Raises CheckpointError."""
    try:
        facts = path.json(INDEX_BYTES)
        if (architecture := ARCHITECTURES.get(facts["family"])) is None:
            known = ", ".join(ARCHITECTURES)
            raise CheckpointError(f"{path} names the family {facts['family']!r}; known families are {known}")
        doubled = architecture.of_folder(read_config(path.parent)).doubled
        valid = set(facts["dtypes"].values()) <= set(DTYPES) and set(facts["tied"]) <= set(doubled)
        valid = valid and all(isinstance(pattern, str) for pattern in facts["absent"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is damaged: {type(error).__name__} {str(error)[:200]}") from error
    if not valid:
        raise CheckpointError(f"{path} is damaged: it contains unknown dtypes or tied tensors")
    return dict(facts)


def _architecture(facts: Mapping[str, Any], saved: Saved) -> PublishedArchitecture:
    """Return the class to write the checkpoint as. Raises CheckpointError if no class fits its model."""
    architecture = ARCHITECTURES[facts["family"]] if facts else own_architecture(saved.sizes)
    if facts and architecture is not None:
        if not saved.trained:
            architecture = replace(architecture, absent=tuple(facts["absent"]))
        elif architecture.trained_as:
            architecture = ARCHITECTURES[architecture.trained_as]
    if (reason := not_exportable(saved.sizes, architecture)) is not None:
        raise CheckpointError(reason)
    assert architecture is not None, "a model that can be exported has a class"
    return architecture


def _write_hf(
    aside: Location,
    out: Location,
    saved: Saved,
    architecture: PublishedArchitecture,
    facts: Mapping[str, Any],
    beside: Location | None,
    tokenizer: Tokenizer | None,
    dtype: torch.dtype | None,
    shard_bytes: int,
) -> Converted:
    table = table_of(saved.sizes)
    saved.check(table, architecture)
    pieces = pieces_of(table, architecture)
    carried = HfFolder(beside, CARRIED) if beside is not None and (beside / CARRIED).is_file() else None
    stored = {name: DTYPES[code] for name, code in facts.get("dtypes", {}).items()}
    plans: list[TensorPlan] = []
    for name, (_, piece) in pieces.items():
        own = torch.float32 if dtype is None or architecture.is_fp32(name) else dtype
        plans.append(TensorPlan(name, stored.get(name, own) if dtype is None else own, piece.hf_shape))
    by_name = {plan.name: plan for plan in plans}
    copies = _copies(architecture, saved, facts)
    plans += [replace(by_name[original], name=name) for name, original in copies.items()]
    extra = {} if carried is None else {name: entry for name, entry in carried.tensors.items() if name not in pieces}
    plans += [TensorPlan(name, DTYPES[entry.code], entry.shape) for name, entry in extra.items()]

    def fetch(name: str) -> Iterator[Tensor]:
        if carried is not None and name in extra:
            yield carried.whole(name)
            return
        name = copies.get(name, name)
        spec, piece = pieces[name]
        rotated = rotated_dim(architecture, spec, piece)
        for slab in piece_box(spec, piece).slabs(shard_file.BLOCK_BYTES // torch.float32.itemsize, rotated):
            part = saved.read(spec, slab)
            yield (part if rotated is None else to_halves(part, rotated, spec.rotated)).to(by_name[name].dtype)

    total = _write_files(aside, plans, fetch, shard_bytes)
    if beside is not None:
        for path in files_beside(beside, lambda name: name in (CARRIED, FACTS)):
            copy(path, aside / path.name)
    _write_config(aside / CONFIG_FILE, saved, architecture, tokenizer, dtype)
    if tokenizer is not None:
        with written_locally(aside) as place:
            tokenizer.save_hf(place)
    dropped = saved.scalars.get("drops_tokens") is True
    has_tokenizer = not {*TOKENIZER_FILES}.isdisjoint(aside.list())
    return Converted(out, architecture, len(plans), total, tuple(extra), has_tokenizer, dropped)


def _copies(architecture: PublishedArchitecture, saved: Saved, facts: Mapping[str, Any]) -> dict[str, str]:
    """Return the tensors to write twice, with the original of each: those of the folder, and a trained block's."""
    shared = architecture.of_folder(config_of(architecture, saved.sizes, torch.float32)).shared
    names = {*facts.get("tied", ()), *(shared if saved.trained or not facts else ())}
    return {name: original for name, original in {**architecture.tied, **shared}.items() if name in names}


def _write_config(
    path: Location,
    saved: Saved,
    architecture: PublishedArchitecture,
    tokenizer: Tokenizer | None,
    dtype: torch.dtype | None,
) -> None:
    """Write config.json: the published folder's own bytes unless something has changed since, or a new one."""
    own = config_of(architecture, saved.sizes, dtype or torch.float32)
    exists = path.is_file()
    config = read_config(path.parent) if exists else dict(own)
    before = dict(config)
    config = architecture.without_code(config)
    config.pop("quantization_config", None)  # weights that were in FP8 are written in bf16
    if saved.trained:
        config |= architecture.retrained(config, spec_of(saved.sizes).published.settings(saved.sizes))
        if architecture.name not in (config.get("architectures") or []):
            config["architectures"] = [architecture.name]
    if dtype is not None:
        config |= {name: own["dtype"] for name in ("dtype", "torch_dtype") if name in config}
    config |= token_ids(tokenizer, config)
    if not exists or config != before:
        path.remove()
        write_bytes(path, (json.dumps(config, indent=2) + "\n").encode())


def _write_files(
    folder: Location, plans: list[TensorPlan], fetch: Callable[[str], Iterator[Tensor]], shard_bytes: int
) -> int:
    """Write files of at most ``shard_bytes`` (or one tensor) and an index, named as in transformers.

    Returns the total number of bytes.
    """
    groups: list[list[TensorPlan]] = [[]]
    held = 0
    for plan in plans:
        if groups[-1] and held + plan.num_bytes > shard_bytes:
            groups.append([])
            held = 0
        groups[-1].append(plan)
        held += plan.num_bytes
    places: dict[str, str] = {}
    for number, group in enumerate(groups, start=1):
        name = weights_name(number, len(groups))
        write_shards(folder / name, file_order(group), fetch, metadata={"format": "pt"})
        places |= {plan.name: name for plan in group}
    total = sum(plan.num_bytes for plan in plans)
    if len(groups) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
        write_bytes(folder / INDEX_FILE, (json.dumps(index, indent=2) + "\n").encode())
    return total


def _aside(out: Location, write: Callable[[Location], Converted]) -> Converted:
    """Call ``write`` with a temporary folder, and give it the name ``out`` when it is complete."""
    if out.is_file() or out.list():
        raise CheckpointError(f"{out} already exists; choose a new folder")
    out = out.resolve()  # "." has no name
    aside = out.with_name(f".{out.name}.unfinished-{os.getpid()}")
    aside.remove()
    try:
        done = write(aside)
        aside.publish(out)
        return done
    finally:
        aside.remove()


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
        place = path.resolve()
    except (OSError, RuntimeError):  # links in a circle
        return False
    return any(place.is_relative_to(root) for root in roots)
