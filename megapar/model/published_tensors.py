"""Tensors of a published folder, by its headers, and by their names in a model's parameter table.

The table has the Hugging Face names and the row order of Ernie4_5 and Ernie. A ``PublishedArchitecture`` describes how
a class differs. Standard library only: a folder that does not fit is refused before torch is imported.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from megapar.errors import CheckpointError, listed
from megapar.files.location import Location, Place, at
from megapar.files.regular_file import HEAD_BYTES, INDEX_BYTES, json_object, not_this
from megapar.files.tensor_file import INDEX_FILE, ITEM_BYTES, WEIGHTS_FILE, TensorFile
from megapar.model.parameter import ALL, HfPiece, ParameterSpec
from megapar.schema.published import PublishedArchitecture

BLOCK = 128  # rows and columns that share a scale in FP8
SUFFIX = "_scale_inv"  # ending of a scale's name, behind the name of its weight
PACKED, PACKED_SCALES = "_blocks", "_scales"
"""Endings of the names of a tensor in MXFP4 and of its scales."""
PAIRS = 16  # bytes of a block in MXFP4, each of two features
FP8 = "F8_E4M3"
WEIGHTS = ("F32", "F16", "BF16", "F64")
_READ = f"{', '.join(WEIGHTS)}, or FP8 or MXFP4 with scales"
_MOST_NAMES = 5  # in a message
_MOST_PROBLEMS = 8


class FolderTensor(NamedTuple):
    """Location and type of a stored tensor.

    Attributes:
        code: The dtype as others see it: BF16 for a tensor that is stored in FP8 or MXFP4.
        shape: The shape as others see it: that of the tensor in BF16.
        scales: The file of the scales of a tensor that is stored in FP8 or MXFP4; None for others.
        packed: It is stored in MXFP4.
    """

    file: Location
    name: str
    code: str
    shape: tuple[int, ...]
    scales: Location | None = None
    packed: bool = False


class PublishedTensors:
    """Tensors of a folder: one file, or several shards with an index.

    Opening a folder reads only the headers. Raises CheckpointError for a file that is missing or damaged, for an index
    that lists a tensor which its file does not contain, and for a tensor in FP8 whose scales are missing or misshapen.

    Attributes:
        tensors: Location and type of each tensor, by name. Scales are not among them.

    Args:
        single: Name of the file that contains all tensors if the folder has no index.
    """

    def __init__(self, folder: Place, single: str = WEIGHTS_FILE) -> None:
        self.folder = at(folder)
        self.tensors: dict[str, FolderTensor] = {}
        index = self.folder / INDEX_FILE
        if index.is_file():
            places = _weight_map(index)
            for file in sorted(set(places.values())):
                self._add(self.folder / file, {name for name, where in places.items() if where == file})
        elif (self.folder / single).is_file():
            self._add(self.folder / single, None)
        else:
            raise CheckpointError(f"{folder} has neither {INDEX_FILE} nor {single}")
        for name in [name for name, stored in self.tensors.items() if stored.code == FP8]:
            self._pair(name)
        for name in [name for name, stored in self.tensors.items() if name.endswith(PACKED) and stored.code == "U8"]:
            self._unpack(name.removesuffix(PACKED))

    @property
    def quantized(self) -> dict[str, int]:
        """Numbers of tensors that are stored in FP8 and in MXFP4."""
        kinds = ["MXFP4" if stored.packed else "FP8" for stored in self.tensors.values() if stored.scales is not None]
        return {kind: kinds.count(kind) for kind in sorted({*kinds})}

    def _unpack(self, name: str) -> None:
        """Put a tensor in the place of its blocks and scales. Raises CheckpointError if these do not fit."""
        blocks, scales = self.tensors.pop(name + PACKED), self.tensors.pop(name + PACKED_SCALES, None)
        if len(blocks.shape) != 4 or blocks.shape[-1] != PAIRS:
            wanted = f"experts, rows, blocks and {PAIRS} bytes"
            raise CheckpointError(f"{self.folder}: {name}{PACKED} has shape {blocks.shape}, not that of {wanted}")
        found = None if scales is None else (scales.code, scales.shape)
        if scales is None or found != ("U8", blocks.shape[:-1]):
            raise CheckpointError(f"{self.folder}: {name} is in MXFP4 and its scales {name}{PACKED_SCALES} are {found}")
        experts, rows, groups, pairs = blocks.shape
        shape = (experts, 2 * pairs * groups, rows)
        self.tensors[name] = FolderTensor(blocks.file, name, "BF16", shape, scales.file, packed=True)

    def _pair(self, name: str) -> None:
        """Find the scales of a tensor in FP8. Raises CheckpointError if they are missing or misshapen."""
        stored, scales = self.tensors[name], self.tensors.pop(name + SUFFIX, None)
        if len(stored.shape) != 2:
            raise CheckpointError(f"{self.folder}: {name} is in FP8 and has shape {stored.shape}, not that of a matrix")
        if scales is None:
            raise CheckpointError(f"{self.folder}: {name} is in FP8, and the folder lacks its scales {name}{SUFFIX}")
        wanted = scale_shape(stored.shape)
        if (scales.code, scales.shape) != ("F32", wanted):
            found = f"{name}{SUFFIX} is {scales.code} {scales.shape}, where F32 {wanted} is needed"
            raise CheckpointError(f"{self.folder}: {found}, a scale for each block of {BLOCK} x {BLOCK}")
        self.tensors[name] = stored._replace(code="BF16", scales=scales.file)

    def _add(self, path: Location, wanted: set[str] | None) -> None:
        with TensorFile(path) as file:
            names = set(file.names()) if wanted is None else wanted
            missing = names - set(file.names())
            if missing:
                raise CheckpointError(f"{path} lacks {some(missing)}, which {INDEX_FILE} lists as part of it")
            for name in names:
                code, shape = file.describe(name)
                if code not in ITEM_BYTES:
                    raise CheckpointError(f"{path}: {name} has the dtype {code:.20}, which is not supported")
                file.position(name, code, shape)  # so that a header cannot reserve memory without data
                self.tensors[name] = FolderTensor(path, name, code, shape)

    def check(
        self, table: Iterable[ParameterSpec], architecture: PublishedArchitecture, optional: Iterable[str] = ()
    ) -> list[str]:
        """Check that the folder has all tensors of the table, with their shapes. Return names that the model lacks.

        A tied tensor that is stored only by the name of its copy is taken from there. Raises CheckpointError with all
        problems.

        optional: Names of parameters that may be missing.
        """
        pieces, problems = pieces_of(table, architecture), []
        for copy, original in architecture.tied.items():
            if copy in self.tensors and copy not in pieces:  # transformers reads the copy, too
                self.tensors.setdefault(original, self.tensors[copy])
        for name, (spec, piece) in pieces.items():
            stored = self.tensors.get(name)
            if stored is None and spec.name not in optional:
                problems.append(f"it lacks {name}, which is part of {spec.name}")
            elif stored is not None and stored.shape != piece.hf_shape:
                problems.append(f"{name} has shape {stored.shape}, the model's is {piece.hf_shape}")
            elif stored is not None and stored.code not in WEIGHTS:
                problems.append(f"{name} is stored as {stored.code}; weights are {_READ}")
        if problems:
            raise CheckpointError(f"{self.folder}: {listed(problems, _MOST_PROBLEMS, '; ')}")
        return sorted(set(self.tensors) - {*pieces, *architecture.doubled})

    def dtypes(self) -> Mapping[str, str]:
        """Return the dtype code of each tensor, as in the files; BF16 for those in FP8."""
        return {name: stored.code for name, stored in self.tensors.items()}


def pieces_of(
    table: Iterable[ParameterSpec], architecture: PublishedArchitecture
) -> dict[str, tuple[ParameterSpec, HfPiece]]:
    """Map each tensor name of the class to the parameter and its piece, of the class's shape, in the table's order."""
    pieces: dict[str, tuple[ParameterSpec, HfPiece]] = {}
    for spec in table:
        for piece in stored_pieces(spec, architecture):
            name = architecture.hf_name(piece.hf_name)
            if name is not None:
                pieces[name] = (spec, replace(piece, hf_shape=architecture.hf_shape(piece.hf_name, piece.hf_shape)))
    return pieces


def stored_pieces(spec: ParameterSpec, architecture: PublishedArchitecture) -> tuple[HfPiece, ...]:
    """Return the parameter's pieces as the class stores them: those of the table, or one."""
    for pattern, replacement in architecture.whole:
        if re.search(pattern, spec.name):
            shape: tuple[int, ...] = (spec.shape[0], prod(spec.shape[1:-1]), spec.shape[-1])
            if architecture.inputs_first:
                biases = spec.name.endswith("_bias")
                shape = (shape[0], prod(shape[1:])) if biases else (shape[0], shape[2], shape[1])
            return (HfPiece(re.sub(pattern, replacement, spec.name), shape, (ALL,)),)
    return spec.pieces


def inputs_first(spec: ParameterSpec, architecture: PublishedArchitecture) -> bool:
    """Return True if the class stores the parameter with the dims of an expert in reverse order."""
    return architecture.inputs_first and any(re.search(pattern, spec.name) for pattern, _ in architecture.whole)


def scale_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of the scales of a tensor that is stored in FP8."""
    return tuple(-(-size // BLOCK) for size in shape)


def _weight_map(index: Location) -> dict[str, str]:
    """Read the file name of each tensor. Raises CheckpointError for a damaged index."""
    try:
        content = index.content(INDEX_BYTES)
        other = not_this(content[:HEAD_BYTES])
        places = {} if other else json_object(content)["weight_map"]
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{index} is damaged: {str(error)[:200]}") from error
    if other:
        raise CheckpointError(f"{index} {other}")
    if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
        raise CheckpointError(f"{index} is damaged: its weight_map does not name a file for each tensor")
    if any(Path(file).name != file or file.startswith(".") for file in places.values()):
        raise CheckpointError(f"{index} names files outside of its folder")
    return places


def some(names: Iterable[Any]) -> str:
    """Format the first names, and the number of the others."""
    return listed(sorted(map(str, names)), _MOST_NAMES)
