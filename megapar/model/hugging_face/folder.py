"""Weights of a Hugging Face folder, read piece by piece into whatever part of a parameter somebody holds."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

from megapar.config.regular_file import INDEX_BYTES, read_regular
from megapar.core.box import Box
from megapar.core.checkpoint.shard_file import CODES, ShardFile
from megapar.errors import CheckpointError
from megapar.model.hugging_face.family import Family, to_pairs
from megapar.model.hugging_face.save import INDEX, some
from megapar.model.initialize import piece_box
from megapar.model.parameter import ParameterSpec, Piece

_DTYPES = {code: dtype for dtype, code in CODES.items()}
TIED: Mapping[str, str] = {
    "lm_head.weight": "model.embed_tokens.weight",
    "cls.predictions.decoder.weight": "ernie.embeddings.word_embeddings.weight",
    "cls.predictions.decoder.bias": "cls.predictions.bias",
}
"""Copies of tied tensors that some writers store beside the original."""
BLOCK_BYTES = 16 << 20


class Stored(NamedTuple):
    """Where a tensor is, and what it is."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]


class HfFolder:
    """The tensors of a folder: of one file, or shards with their index.

    tensors: name -> Stored. Only headers are read on opening. Raises CheckpointError for a file that is missing or
    damaged, and for an index that names what its file does not hold.
    """

    def __init__(self, folder: str | Path, single: str = "model.safetensors") -> None:
        """single: the file that holds all of them where there is no index."""
        self.folder = Path(folder)
        self.tensors: dict[str, Stored] = {}
        index = self.folder / INDEX
        if index.exists():
            places = _weight_map(index)
            for file in sorted(set(places.values())):
                self._add(self.folder / file, {name for name, where in places.items() if where == file})
        elif (self.folder / single).exists():
            self._add(self.folder / single, None)
        else:
            raise CheckpointError(f"{folder} has neither {INDEX} nor {single}")

    def _add(self, path: Path, wanted: set[str] | None) -> None:
        with ShardFile(path) as file:
            names = set(file.names()) if wanted is None else wanted
            missing = names - set(file.names())
            if missing:
                raise CheckpointError(f"{path} lacks {some(missing)}, which {INDEX} says it holds")
            for name in names:
                code, shape = file.describe(name)
                if code not in _DTYPES:
                    raise CheckpointError(f"{path}: {name} has the dtype {code:.20}, which is not read")
                file.check(name, _DTYPES[code], shape)  # nobody makes room for what the file does not hold
                self.tensors[name] = Stored(path, _DTYPES[code], shape)

    def check(self, table: Iterable[ParameterSpec], family: Family, optional: Iterable[str] = ()) -> list[str]:
        """Every piece of the table is there and has its shape; the names that the model has no place for.

        optional: parameters that may be missing as a whole. Raises CheckpointError with all that is wrong.
        """
        known, problems = set(TIED), []
        for spec in table:
            for piece in spec.pieces:
                name = family.hf_name(piece.hf_name)
                if name is None:
                    continue
                known.add(name)
                stored = self.tensors.get(name)
                if stored is None and spec.name not in optional:
                    problems.append(f"it lacks {name}, which is part of {spec.name}")
                elif stored is not None and stored.shape != piece.hf_shape:
                    problems.append(f"{name} has shape {stored.shape}, the model's is {piece.hf_shape}")
        if problems:
            more = f"; and {len(problems) - 8} more" if len(problems) > 8 else ""
            raise CheckpointError(f"{self.folder}: {'; '.join(problems[:8])}{more}")
        return sorted(set(self.tensors) - known)

    def check_tied(self, own: Iterable[str], share: int = 0, shares: int = 1, block_bytes: int = BLOCK_BYTES) -> None:
        """Every stored copy of a tied tensor is one, byte by byte. Raises CheckpointError.

        own: names that the model has parameters of its own for. share: of ``shares``, which blocks are looked at here;
        a block has at most ``block_bytes``.
        """
        for copy in sorted(set(TIED) & set(self.tensors) - set(own)):
            original = TIED[copy]
            there, here = self.tensors[copy], self.tensors.get(original)
            if here is None or (here.dtype, here.shape) != (there.dtype, there.shape):
                self._refuse_copy(copy, original)
            for number, block in enumerate(Box.whole(there.shape).slabs(block_bytes // there.dtype.itemsize)):
                if number % shares != share:
                    continue
                if not _same_bytes(self._block(copy, block), self._block(original, block)):
                    self._refuse_copy(copy, original)

    def _refuse_copy(self, copy: str, original: str) -> NoReturn:
        fix = "The encoders trained here tie them: give a folder whose copy is one, or without it"
        if copy == "lm_head.weight":
            fix = "Set tie_word_embeddings to false in config.json: transformers, too, takes the stored one"
        raise CheckpointError(
            f"{self.folder}: config.json ties {copy} to {original}, and the {copy} stored there is another one. {fix}"
        )

    def _block(self, name: str, block: Box) -> Tensor:
        stored = self.tensors[name]
        out = torch.empty(block.sizes, dtype=stored.dtype)
        if out.numel():
            with ShardFile(stored.file) as file:
                file.read_as(name, stored.shape, Box.whole(stored.shape), block, out)
        return out

    def holds(self, spec: ParameterSpec, family: Family) -> bool:
        """Whether the folder has what the parameter is made from."""
        names = [family.hf_name(piece.hf_name) for piece in spec.pieces]
        return all(name is None or name in self.tensors for name in names)

    @torch.no_grad()
    def fill(self, target: Tensor, spec: ParameterSpec, box: Box, family: Family) -> None:
        """Write ``box`` of a parameter into ``target`` [box.sizes] in its dtype; what the family lacks is zero."""
        for piece in spec.pieces:
            region = piece_box(spec, piece)
            part = region.meet(box)
            if part is None:
                continue
            out = target[part.within(box)]
            name = family.hf_name(piece.hf_name)
            if name is None:
                out.zero_()
            else:
                out.copy_(self._part(name, region, part, family.rotated_dim(spec, piece)))

    def _part(self, name: str, region: Box, part: Box, rotated: int | None) -> Tensor:
        """``part`` of a tensor that lies at ``region`` of its parameter, in the file's dtype."""
        stored = self.tensors[name]
        read = part
        if rotated is not None:  # its rows stand in another order: read all of them
            offsets, sizes = list(part.offsets), list(part.sizes)
            offsets[rotated], sizes[rotated] = region.offsets[rotated], region.sizes[rotated]
            read = Box(tuple(offsets), tuple(sizes))
        out = torch.empty(read.sizes, dtype=stored.dtype)
        with ShardFile(stored.file) as file:
            file.read_as(name, stored.shape, region, read, out)
        if rotated is None:
            return out
        return to_pairs(out, rotated)[part.within(read)]

    def dtypes(self) -> Mapping[str, str]:
        """The dtype of every tensor, by the codes of the files."""
        return {name: CODES[stored.dtype] for name, stored in self.tensors.items()}

    def whole(self, name: str) -> Tensor:
        """One tensor as it is stored."""
        return self._block(name, Box.whole(self.tensors[name].shape))


def _same_bytes(a: Tensor, b: Tensor) -> bool:
    """Of one dtype and shape; a NaN is itself."""
    return bool((a.contiguous().view(torch.uint8) == b.contiguous().view(torch.uint8)).all())


def _weight_map(index: Path) -> dict[str, str]:
    """Tensor -> plain name of its file. Raises CheckpointError."""
    try:
        places = json.loads(read_regular(index, INDEX_BYTES))["weight_map"]
    except (OSError, ValueError, RecursionError, KeyError, TypeError) as error:
        raise CheckpointError(f"{index} is damaged: {str(error)[:200]}") from error
    if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
        raise CheckpointError(f"{index} is damaged: its weight_map does not say of each tensor which file holds it")
    if any(Path(file).name != file or file.startswith(".") for file in places.values()):
        raise CheckpointError(f"{index} names files outside of its folder")
    return places


def pieces_of(table: Iterable[ParameterSpec], family: Family) -> dict[str, tuple[ParameterSpec, Piece]]:
    """Name in the family's folders -> the parameter and its piece, in the table's order."""
    found: dict[str, tuple[ParameterSpec, Piece]] = {}
    for spec in table:
        for piece in spec.pieces:
            name = family.hf_name(piece.hf_name)
            if name is not None:
                found[name] = (spec, piece)
    return found
