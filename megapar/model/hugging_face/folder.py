"""Hugging Face folders, the reader: loads weights piece by piece into a rank's shards of the parameters.

Tested in ``tests/model/hugging_face/test_save.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

from megapar.core.box import Box
from megapar.core.checkpoint.shard_file import CODES, DTYPES, ShardFile
from megapar.errors import CheckpointError
from megapar.files.published_names import INDEX_FILE, WEIGHTS_FILE
from megapar.files.regular_file import INDEX_BYTES, read_json
from megapar.model.hugging_face.block_fp8 import BLOCK, SUFFIX, dequantized, scale_shape, stored_rows
from megapar.model.hugging_face.save import some
from megapar.model.hugging_face.tensors import pieces_of, rotated_dim, stored_pieces, to_pairs
from megapar.model.initialize import piece_box
from megapar.model.parameter import ParameterSpec
from megapar.schema.published import PublishedArchitecture

BLOCK_BYTES = 16 << 20


class FolderTensor(NamedTuple):
    """Location and type of a stored tensor.

    Attributes:
        file: The file.
        dtype: The dtype as others see it: bfloat16 for a tensor that is stored in FP8 by blocks (``block_fp8``).
        shape: The shape.
        scales: The file of the scales of a tensor that is stored in FP8; None for others.
    """

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    scales: Path | None = None


class HfFolder:
    """Tensors of a folder: one file, or several shards with an index.

    Opening a folder reads only the headers. Raises CheckpointError for a file that is missing or damaged, and for an
    index that lists a tensor which its file does not contain. Tensors in FP8 by blocks are dequantized when they are
    read; it also raises CheckpointError for one whose scales are missing or misshapen.

    Attributes:
        folder: The folder.
        tensors: Location and type of each tensor, by name. Scales are not among them.

    Args:
        folder: The folder.
        single: Name of the file that contains all tensors if the folder has no index.
    """

    def __init__(self, folder: str | Path, single: str = WEIGHTS_FILE) -> None:
        self.folder = Path(folder)
        self.tensors: dict[str, FolderTensor] = {}
        index = self.folder / INDEX_FILE
        if index.exists():
            places = _weight_map(index)
            for file in sorted(set(places.values())):
                self._add(self.folder / file, {name for name, where in places.items() if where == file})
        elif (self.folder / single).exists():
            self._add(self.folder / single, None)
        else:
            raise CheckpointError(f"{folder} has neither {INDEX_FILE} nor {single}")
        for name in [name for name, stored in self.tensors.items() if stored.dtype == torch.float8_e4m3fn]:
            self._pair(name)

    @property
    def in_fp8(self) -> int:
        """Number of tensors that are stored in FP8."""
        return sum(stored.scales is not None for stored in self.tensors.values())

    def _pair(self, name: str) -> None:
        """Find the scales of a tensor in FP8. Raises CheckpointError if they are missing or misshapen."""
        stored, scales = self.tensors[name], self.tensors.pop(name + SUFFIX, None)
        if len(stored.shape) != 2:
            raise CheckpointError(f"{self.folder}: {name} is in FP8 and has shape {stored.shape}, not that of a matrix")
        if scales is None:
            raise CheckpointError(f"{self.folder}: {name} is in FP8, and the folder lacks its scales {name}{SUFFIX}")
        wanted = scale_shape(stored.shape)
        if (scales.dtype, scales.shape) != (torch.float32, wanted):
            found = f"{name}{SUFFIX} is {CODES[scales.dtype]} {scales.shape}, where F32 {wanted} is needed"
            raise CheckpointError(f"{self.folder}: {found}, a scale for each block of {BLOCK} x {BLOCK}")
        self.tensors[name] = FolderTensor(stored.file, torch.bfloat16, stored.shape, scales.file)

    def _add(self, path: Path, wanted: set[str] | None) -> None:
        with ShardFile(path) as file:
            names = set(file.names()) if wanted is None else wanted
            missing = names - set(file.names())
            if missing:
                raise CheckpointError(f"{path} lacks {some(missing)}, which {INDEX_FILE} lists as part of it")
            for name in names:
                code, shape = file.describe(name)
                if code not in DTYPES:
                    raise CheckpointError(f"{path}: {name} has the dtype {code:.20}, which is not supported")
                file.check(name, DTYPES[code], shape)  # so that a header cannot reserve memory without data
                self.tensors[name] = FolderTensor(path, DTYPES[code], shape)

    def check(
        self, table: Iterable[ParameterSpec], architecture: PublishedArchitecture, optional: Iterable[str] = ()
    ) -> list[str]:
        """Check that the folder has all tensors of the table, with their shapes. Return names that the model lacks.

        Raises CheckpointError with all problems.

        Args:
            table: Parameters of the model.
            architecture: Class of the folder.
            optional: Names of parameters that may be missing.
        """
        known, problems = set(architecture.doubled), []
        for name, (spec, piece) in pieces_of(table, architecture).items():
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

    def check_tied(
        self,
        architecture: PublishedArchitecture,
        own: Iterable[str],
        share: int = 0,
        shares: int = 1,
        block_bytes: int = BLOCK_BYTES,
    ) -> None:
        """Check that each stored copy of a tied tensor equals it byte by byte. Raises CheckpointError otherwise.

        Args:
            architecture: Class of the folder.
            own: Names for which the model has separate parameters, which are not checked.
            share: Number of this caller among ``shares``, which divide the blocks among themselves.
            shares: Number of callers.
            block_bytes: Size of a block.
        """
        for copy in sorted(set(architecture.doubled) & set(self.tensors) - set(own)):
            original = architecture.doubled[copy]
            stored_copy, stored = self.tensors[copy], self.tensors.get(original)
            if stored is None or (stored.dtype, stored.shape) != (stored_copy.dtype, stored_copy.shape):
                self._refuse_copy(architecture, copy)
            slab_elements = block_bytes // stored_copy.dtype.itemsize
            for number, block in enumerate(Box.whole(stored_copy.shape).slabs(slab_elements)):
                if number % shares != share:
                    continue
                if not _same_bytes(self._block(copy, block), self._block(original, block)):
                    self._refuse_copy(architecture, copy)

    def _refuse_copy(self, architecture: PublishedArchitecture, copy: str) -> NoReturn:
        if copy in architecture.shared:
            raise CheckpointError(
                f"{self.folder}: {copy} differs from {architecture.shared[copy]}, with which the multi-token "
                "prediction block shares it. Pass a folder in which the two are equal, or leave the block out: set "
                "num_nextn_predict_layers to 0 in config.json"
            )
        original = architecture.tied[copy]
        fix = "The encoders trained here tie them. Pass a folder in which the two are equal, or without the copy"
        if architecture.sets("untie_embeddings_and_output_weights"):
            fix = "Set tie_word_embeddings to false in config.json. Transformers, too, uses the stored one"
        raise CheckpointError(
            f"{self.folder}: config.json ties {copy} to {original}, but the {copy} stored there differs. {fix}"
        )

    def _block(self, name: str, block: Box) -> Tensor:
        stored = self.tensors[name]
        return self._read(name, Box.whole(stored.shape), block).to(stored.dtype)

    def _read(self, name: str, region: Box, part: Box) -> Tensor:
        """Read ``part`` of a tensor that is ``region`` of its parameter, in the file's dtype; float32 for FP8."""
        stored = self.tensors[name]
        quantized = stored.scales is not None
        out = torch.empty(part.sizes, dtype=torch.float8_e4m3fn if quantized else stored.dtype)
        if out.numel():
            with ShardFile(stored.file) as file:
                file.read_as(name, stored.shape, region, part, out)
        if stored.scales is None or not out.numel():
            return out
        whole = Box.whole(scale_shape(stored.shape))
        scales = torch.empty(whole.sizes, dtype=torch.float32)
        with ShardFile(stored.scales) as file:
            file.read(name + SUFFIX, whole, whole, scales)
        return dequantized(out, scales, stored_rows(region, part), part.offsets[-1] - region.offsets[-1])

    def holds(self, spec: ParameterSpec, architecture: PublishedArchitecture) -> bool:
        """Return True if the folder has all tensors of the parameter."""
        names = [architecture.hf_name(piece.hf_name) for piece in stored_pieces(spec, architecture)]
        return all(name is None or name in self.tensors for name in names)

    @torch.no_grad()
    def fill(self, target: Tensor, spec: ParameterSpec, box: Box, architecture: PublishedArchitecture) -> None:
        """Write ``box`` of a parameter into ``target`` [box.sizes], in its dtype; zeros if the class lacks it."""
        for piece in stored_pieces(spec, architecture):
            region = piece_box(spec, piece)
            part = region.meet(box)
            if part is None:
                continue
            out = target[part.within(box)]
            name = architecture.hf_name(piece.hf_name)
            if name is None:
                out.zero_()
            else:
                out.copy_(self._part(name, region, part, rotated_dim(architecture, spec, piece), spec.rotated))

    def _part(self, name: str, region: Box, part: Box, rotated: int | None, leading: int) -> Tensor:
        """Read ``part`` as ``_read`` does, in the order of the parameter's rows.

        Args:
            name: Name of the tensor.
            region: Place of the tensor in its parameter.
            part: Place of the elements to read.
            rotated: Dim whose first ``leading`` rows are stored in another order; None for none.
            leading: Number of these rows.
        """
        read = part
        if rotated is not None:  # the rows are stored in another order, so read all of them
            offsets, sizes = list(part.offsets), list(part.sizes)
            offsets[rotated], sizes[rotated] = region.offsets[rotated], region.sizes[rotated]
            read = Box(tuple(offsets), tuple(sizes))
        out = self._read(name, region, read)
        if rotated is None:
            return out
        return to_pairs(out, rotated, leading)[part.within(read)]

    def dtypes(self) -> Mapping[str, str]:
        """Return the dtype code of each tensor, as in the files; BF16 for those in FP8."""
        return {name: CODES[stored.dtype] for name, stored in self.tensors.items()}

    def whole(self, name: str) -> Tensor:
        """Read one tensor as it is stored; in bfloat16 if that is FP8."""
        return self._block(name, Box.whole(self.tensors[name].shape))


def _same_bytes(a: Tensor, b: Tensor) -> bool:
    """Return True if two tensors of one dtype and shape have the same bytes, NaN included."""
    return bool((a.contiguous().view(torch.uint8) == b.contiguous().view(torch.uint8)).all())


def _weight_map(index: Path) -> dict[str, str]:
    """Read the file name of each tensor. Raises CheckpointError for a damaged index."""
    try:
        places = read_json(index, INDEX_BYTES)["weight_map"]
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{index} is damaged: {str(error)[:200]}") from error
    if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
        raise CheckpointError(f"{index} is damaged: its weight_map does not name a file for each tensor")
    if any(Path(file).name != file or file.startswith(".") for file in places.values()):
        raise CheckpointError(f"{index} names files outside of its folder")
    return places
