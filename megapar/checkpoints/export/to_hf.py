"""Checkpoints of any layout as Hugging Face folders, converted a few blocks of a tensor at a time."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megapar.checkpoints.export.from_hf import CARRIED, FACTS, Converted, files_beside, refuse_foreign, written_aside
from megapar.checkpoints.format import shards
from megapar.checkpoints.format.layout import read_layout
from megapar.checkpoints.format.names import LAYOUT_FILE
from megapar.checkpoints.format.shards import (
    DTYPES_BY_CODE,
    ShardFile,
    TensorPlan,
    check_file,
    file_order,
    read_scalars,
    write_bytes,
    write_shards,
)
from megapar.checkpoints.save_load import folder as folders
from megapar.config.published import BESIDE, has_tokenizer, read_config
from megapar.core.box import Box
from megapar.core.status_line import Status, silent
from megapar.data.tokenizers.load import load_stored_tokenizer
from megapar.data.tokenizers.tokenizer import Tokenizer, token_ids
from megapar.errors import CheckpointError
from megapar.files.location import Location, Place, at, copy, written_locally
from megapar.files.regular_file import INDEX_BYTES
from megapar.files.tensor_file import CONFIG_FILE, INDEX_FILE, weights_name
from megapar.model.architectures import ARCHITECTURES, not_exportable, own_architecture
from megapar.model.hugging_face.folder import HfFolder
from megapar.model.hugging_face.save import SHARD_BYTES, config_of
from megapar.model.hugging_face.tensors import reversed_dims, rotated_dim, to_halves
from megapar.model.initialize import piece_box
from megapar.model.parameter import HfPiece, ParameterSpec
from megapar.model.published_tensors import inputs_first, pieces_of, some
from megapar.model.sizes import ModelSizes
from megapar.model.spec import STORED, spec_of, table_of
from megapar.schema.published import PublishedArchitecture


class Saved:
    """Weights of a checkpoint that was saved on any layout."""

    def __init__(self, folder: Place) -> None:
        self._folder = at(folder)
        self._layout = read_layout(folder)
        self.sizes = sizes_of(self._layout.model, folder)
        self.scalars = read_scalars(folder, self._layout.scalars, "full")

    @property
    def trained(self) -> bool:
        """True if a training run saved the checkpoint, False if a conversion did."""
        return int(self.scalars.get("iteration", 0)) > 0

    def check(self, table: tuple[ParameterSpec, ...], architecture: PublishedArchitecture) -> None:
        """Check files and shapes, and that the class has a place for every nonzero weight. Raises CheckpointError."""
        problems = [problem for file in self._layout.files if (problem := check_file(self._folder, file, "full"))]
        for spec in table:
            entry = self._layout.tensors.get(f"model/{spec.name}")
            if entry is None or entry.shape != spec.shape:
                problem = "is missing" if entry is None else f"has shape {entry.shape}, the model's is {spec.shape}"
                problems.append(f"{spec.name} {problem}")
        if problems:
            raise CheckpointError(f"{self._folder}: {some(problems)}")
        for spec in table:
            extra = [piece for piece in spec.pieces if architecture.hf_name(piece.hf_name) is None]
            if any(bool(self.read(spec, piece_box(spec, piece)).any()) for piece in extra):
                problem = f"{spec.name} is not zero, and {architecture.name} has no place for it"
                raise CheckpointError(f"{problem}. {_advice(self.sizes, extra)}")

    def read(self, spec: ParameterSpec, region: Box) -> Tensor:
        """Read a region of a parameter."""
        entry = self._layout.tensors[f"model/{spec.name}"]
        out = torch.empty(region.sizes, dtype=entry.dtype)
        for number, piece in entry.tiling(len(self._layout.files)).meeting(region):
            part = piece.meet(region)
            assert part is not None
            with ShardFile(self._folder / self._layout.files[number].name) as file:
                file.read(entry.name, piece, part, out[part.within(region)])
        return out


def _advice(sizes: ModelSizes, pieces: Sequence[HfPiece]) -> str:
    """Return what to do if the class of a checkpoint's Hugging Face folder has no place for some of its weights."""
    own = own_architecture(sizes)
    if own is not None and not_exportable(sizes) is None and all(own.hf_name(piece.hf_name) for piece in pieces):
        return (
            f"{own.name} has one, and is the class of a checkpoint without a folder {BESIDE} next to it: "
            "rename that folder for the export"
        )
    return "No class known here has one; the checkpoint keeps every weight"


def sizes_of(facts: Mapping[str, Any], where: Place) -> ModelSizes:
    """Return the sizes from the output of ``ModelSizes.facts``. Sizes that it leaves out do not affect weights."""
    spec = STORED.get(str(facts.get("kind", "")))
    if spec is None:
        raise CheckpointError(f"{where} is of an unknown model, {facts.get('kind')!r}")
    try:
        return spec.sizes.from_facts(facts)
    except (TypeError, ValueError, KeyError) as error:
        raise CheckpointError(f"{where} describes its model in a way that is not known here: {error}") from error


def megapar_to_hf(
    source: Place,
    out: Place,
    *,
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
    tokenizer: Tokenizer | None = None,
    status: Status = silent,
) -> Converted:
    """Convert a checkpoint of any layout to a Hugging Face folder.

    The folder appears when it is complete. Raises CheckpointError.

    Args:
        source: A folder of checkpoints, whose latest one is converted, or a single checkpoint.
        dtype: dtype of the weights, except parameters that are always fp32. By default a tensor has the dtype of the
            Hugging Face folder that it came from, or fp32 without one.
        tokenizer: By default the tokenizer saved with the checkpoints, or that of the published folder.
    """
    source, out = at(source), at(out)
    refuse_foreign(source)
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
    settings = facts, beside, tokenizer, dtype, shard_bytes, status
    return written_aside(out, lambda aside: _write_hf(aside, out, saved, architecture, *settings))


def _facts(path: Location) -> dict[str, Any]:
    """Read the file that ``_write_beside`` wrote. It may have been edited since. Raises CheckpointError."""
    try:
        facts = path.json(INDEX_BYTES)
        if (architecture := ARCHITECTURES.get(facts["family"])) is None:
            known = ", ".join(ARCHITECTURES)
            raise CheckpointError(f"{path} names the family {facts['family']!r}; known families are {known}")
        doubled = architecture.of_folder(read_config(path.parent)).doubled
        valid = set(facts["dtypes"].values()) <= set(DTYPES_BY_CODE) and set(facts["tied"]) <= set(doubled)
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
        raise CheckpointError(f"{reason}; the checkpoint keeps every weight")
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
    status: Status,
) -> Converted:
    table = table_of(saved.sizes)
    saved.check(table, architecture)
    pieces = pieces_of(table, architecture)
    carried = HfFolder(beside, CARRIED) if beside is not None and (beside / CARRIED).is_file() else None
    stored = {name: DTYPES_BY_CODE[code] for name, code in facts.get("dtypes", {}).items()}
    plans: list[TensorPlan] = []
    for name, (_, piece) in pieces.items():
        default = torch.float32 if dtype is None or architecture.is_fp32(name) else dtype
        plans.append(TensorPlan(name, stored.get(name, default) if dtype is None else default, piece.hf_shape))
    by_name = {plan.name: plan for plan in plans}
    copies = _copies(architecture, saved, facts)
    plans += [replace(by_name[original], name=name) for name, original in copies.items()]
    extra = {} if carried is None else {name: entry for name, entry in carried.tensors.items() if name not in pieces}
    plans += [TensorPlan(name, DTYPES_BY_CODE[entry.code], entry.shape) for name, entry in extra.items()]

    numbers = itertools.count()

    def fetch(name: str) -> Iterator[Tensor]:
        status("converting", next(numbers), len(plans), "tensors")
        if carried is not None and name in extra:
            yield carried.whole(name)
            return
        name = copies.get(name, name)
        spec, piece = pieces[name]
        rotated = rotated_dim(architecture, spec, piece)
        if inputs_first(spec, architecture):
            for number in range(spec.shape[0]):
                yield (
                    reversed_dims(saved.read(spec, Box.at(spec.shape, (number,)))).to(by_name[name].dtype).contiguous()
                )
            return
        for slab in piece_box(spec, piece).slabs(shards.BLOCK_BYTES // torch.float32.itemsize, rotated):
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
    return Converted(out, architecture, len(plans), total, tuple(extra), has_tokenizer(aside), dropped)


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
    settings = config_of(architecture, saved.sizes, dtype or torch.float32)
    exists = path.is_file()
    config = read_config(path.parent) if exists else dict(settings)
    before = dict(config)
    config = architecture.without_code(config)
    config.pop("quantization_config", None)  # weights that were in FP8 are written in bf16
    if saved.trained:
        config |= architecture.retrained(config, spec_of(saved.sizes).published.settings(saved.sizes))
        if architecture.name not in (config.get("architectures") or []):
            config["architectures"] = [architecture.name]
    if dtype is not None:
        config |= {name: settings["dtype"] for name in ("dtype", "torch_dtype") if name in config}
    config |= token_ids(tokenizer, config)
    if not exists or config != before:
        path.remove()
        write_bytes(path, (json.dumps(config, indent=2) + "\n").encode())


def _write_files(
    folder: Location, plans: list[TensorPlan], fetch: Callable[[str], Iterator[Tensor]], shard_bytes: int
) -> int:
    """Write files of up to ``shard_bytes`` (or one tensor) and an index, named as in transformers; return the bytes."""
    groups: list[list[TensorPlan]] = [[]]
    group_bytes = 0
    for plan in plans:
        if groups[-1] and group_bytes + plan.num_bytes > shard_bytes:
            groups.append([])
            group_bytes = 0
        groups[-1].append(plan)
        group_bytes += plan.num_bytes
    files: dict[str, str] = {}
    for number, group in enumerate(groups, start=1):
        name = weights_name(number, len(groups))
        write_shards(folder / name, file_order(group), fetch, metadata={"format": "pt"})
        files |= {plan.name: name for plan in group}
    total = sum(plan.num_bytes for plan in plans)
    if len(groups) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(files.items()))}
        write_bytes(folder / INDEX_FILE, (json.dumps(index, indent=2) + "\n").encode())
    return total
