"""Weights of a checkpoint, read without a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megapar.config.from_hf import BESIDE
from megapar.core.box import Box
from megapar.core.checkpoint.layout import read as read_layout
from megapar.core.checkpoint.shard_file import ShardFile, check_file
from megapar.core.checkpoint.storage import read_scalars
from megapar.errors import CheckpointError
from megapar.files.location import Place, at
from megapar.model.architectures import not_exportable, own_architecture
from megapar.model.initialize import piece_box
from megapar.model.parameter import HfPiece, ParameterSpec
from megapar.model.published_tensors import some
from megapar.model.sizes import ModelSizes
from megapar.model.spec import STORED
from megapar.schema.published import PublishedArchitecture


class Saved:
    """Weights of a checkpoint that was saved on any layout.

    Attributes:
        sizes: Sizes of its model.
        scalars: Scalars of its run.
    """

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
            gone = [piece for piece in spec.pieces if architecture.hf_name(piece.hf_name) is None]
            if any(bool(self.read(spec, piece_box(spec, piece)).any()) for piece in gone):
                raise CheckpointError(
                    f"{spec.name} is not zero, and {architecture.name} has no place for it. {_advice(self.sizes, gone)}"
                )

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
