"""The weights of a checkpoint for those who read it without a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from megapar.config.from_hf import BESIDE
from megapar.core.box import Box
from megapar.core.checkpoint.layout import read as read_layout
from megapar.core.checkpoint.shard_file import ShardFile, check_file
from megapar.core.checkpoint.storage import read_scalars
from megapar.errors import CheckpointError
from megapar.model.decoder.sizes import DecoderSizes
from megapar.model.ernie.sizes import ErnieSizes
from megapar.model.hugging_face.config import not_exportable
from megapar.model.hugging_face.family import Family
from megapar.model.hugging_face.save import some
from megapar.model.initialize import piece_box
from megapar.model.parameter import ParameterSpec
from megapar.model.spec import STORED
from megapar.rules.exports import ERNIE4_5_MOE

Sizes = DecoderSizes | ErnieSizes


class Saved:
    """The weights of a checkpoint, whatever layout it was saved on. sizes: of its model; scalars: of its run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._layout = read_layout(folder)
        self.sizes = sizes_of(self._layout.model, folder)
        self.scalars = read_scalars(folder, self._layout.scalars, "full")

    @property
    def trained(self) -> bool:
        """Whether a run saved it, and not a conversion."""
        return int(self.scalars.get("iteration", 0)) > 0

    def check(self, table: tuple[ParameterSpec, ...], family: Family) -> None:
        """Files undamaged, every parameter there in its shape, nothing lost in a family that has no place for it."""
        problems = [problem for file in self._layout.files if (problem := check_file(self._folder, file, "full"))]
        for spec in table:
            entry = self._layout.tensors.get(f"model/{spec.name}")
            if entry is None or entry.shape != spec.shape:
                there = "is missing" if entry is None else f"has shape {entry.shape}, the model's is {spec.shape}"
                problems.append(f"{spec.name} {there}")
        if problems:
            raise CheckpointError(f"{self._folder}: {some(problems)}")
        for spec in table:
            gone = [piece for piece in spec.pieces if family.hf_name(piece.hf_name) is None]
            if any(bool(self.read(spec, piece_box(spec, piece)).any()) for piece in gone):
                raise CheckpointError(
                    f"{spec.name} is not zero, and {family.name} has no place for it. {_way(self.sizes)}"
                )

    def read(self, spec: ParameterSpec, region: Box) -> Tensor:
        """A part of a parameter."""
        entry = self._layout.tensors[f"model/{spec.name}"]
        out = torch.empty(region.sizes, dtype=entry.dtype)
        for number, piece in entry.tiling(len(self._layout.files)).meeting(region):
            part = piece.meet(region)
            assert part is not None
            with ShardFile(self._folder / self._layout.files[number].name) as file:
                file.read(entry.name, piece, part, out[part.within(region)])
        return out


def _way(sizes: Sizes) -> str:
    """Where a model goes whose correction bias has moved."""
    if isinstance(sizes, DecoderSizes) and not_exportable(sizes, ERNIE4_5_MOE) is None:
        return (
            f"{ERNIE4_5_MOE} has one, and is what a checkpoint without a folder {BESIDE} beside it is written as: "
            "rename that folder for the export"
        )
    return "No class known here has one; the checkpoint keeps every weight"


def sizes_of(facts: Mapping[str, Any], where: Path) -> Sizes:
    """The sizes that ``Sizes.facts`` described; numbers that it leaves out do not matter for weights."""
    spec = STORED.get(str(facts.get("kind", "")))
    if spec is None:
        raise CheckpointError(f"{where} is of an unknown model, {facts.get('kind')!r}")
    try:
        return cast(Sizes, spec.sizes.from_facts(facts))
    except (TypeError, ValueError, KeyError) as error:
        raise CheckpointError(f"{where} describes its model in a way that is not known here: {error}") from error
