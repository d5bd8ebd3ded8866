"""Hugging Face folders, the reader: loads weights piece by piece into a rank's shards of the parameters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NoReturn

import torch
from torch import Tensor

from megapar.checkpoints.format.shards import DTYPES_BY_CODE, ShardFile
from megapar.core.box import Box
from megapar.errors import CheckpointError
from megapar.files.tensor_file import ITEM_BYTES
from megapar.model.hugging_face.tensors import dequantized, reversed_dims, rotated_dim, stored_rows, to_pairs, unpacked
from megapar.model.initialize import piece_box
from megapar.model.parameter import ParameterSpec
from megapar.model.published_tensors import (
    FP8,
    PACKED,
    PACKED_SCALES,
    PAIRS,
    SUFFIX,
    PublishedTensors,
    inputs_first,
    scale_shape,
    stored_pieces,
)
from megapar.schema.published import PublishedArchitecture

BLOCK_BYTES = 16 << 20


class HfFolder(PublishedTensors):
    """Tensors of a folder, which are read in parts; those in FP8 or MXFP4 are dequantized as they are read."""

    _latest: tuple[tuple[str, int], Tensor] | None = None  # the expert that was read last

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
            own: Names for which the model has separate parameters, which are not checked.
            share: Number of this caller among ``shares``, which divide the blocks among themselves.
        """
        for copy in sorted(set(architecture.doubled) & set(self.tensors) - set(own)):
            original = architecture.doubled[copy]
            stored_copy, stored = self.tensors[copy], self.tensors.get(original)
            if stored is None or (stored.code, stored.shape) != (stored_copy.code, stored_copy.shape):
                self._refuse_copy(architecture, copy)
            slab_elements = block_bytes // ITEM_BYTES[stored_copy.code]
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
        return self._read(name, Box.whole(stored.shape), block).to(DTYPES_BY_CODE[stored.code])

    def _read(self, name: str, region: Box, part: Box) -> Tensor:
        """Read ``part`` of a tensor that is ``region`` of its parameter, in the file's dtype; float32 for FP8."""
        stored = self.tensors[name]
        out = torch.empty(part.sizes, dtype=DTYPES_BY_CODE[stored.code if stored.scales is None else FP8])
        if out.numel():
            with ShardFile(stored.file) as file:
                file.read_as(stored.name, stored.shape, region, part, out)
        if stored.scales is None or not out.numel():
            return out
        whole = Box.whole(scale_shape(stored.shape))
        scales = torch.empty(whole.sizes, dtype=torch.float32)
        with ShardFile(stored.scales) as file:
            file.read(stored.name + SUFFIX, whole, whole, scales)
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
            elif inputs_first(spec, architecture):
                for row, number in zip(out, range(part.offsets[0], part.offsets[0] + part.sizes[0]), strict=True):
                    row.copy_(self._expert_of(name, region.sizes, number)[part.slices[1:]])
            else:
                out.copy_(self._part(name, region, part, rotated_dim(architecture, spec, piece), spec.rotated))

    def _part(self, name: str, region: Box, part: Box, rotated: int | None, leading: int) -> Tensor:
        """Read ``part`` as ``_read`` does, in the order of the parameter's rows.

        rotated: Dim whose first ``leading`` rows are stored in another order; None for none.
        """
        read = part
        if rotated is not None:  # the rows are stored in another order, so read all of them
            read = part.with_dim(rotated, region.offsets[rotated], region.sizes[rotated])
        out = self._read(name, region, read)
        if rotated is None:
            return out
        return to_pairs(out, rotated, leading)[part.within(read)]

    def _expert_of(self, name: str, sizes: tuple[int, ...], number: int) -> Tensor:
        """Return ``_expert``, kept for the next part of the same one."""
        if self._latest is None or self._latest[0] != (name, number):
            self._latest = None  # first, so that there is one at a time
            self._latest = (name, number), self._expert(name, sizes, number)
        return self._latest[1]

    def _expert(self, name: str, sizes: tuple[int, ...], number: int) -> Tensor:
        """Read expert ``number`` of a parameter [sizes] that is stored with inputs first."""
        reverse = (sizes[0], *reversed(sizes[1:]))
        if self.tensors[name].packed:
            return reversed_dims(self._unpacked(name, number).view(1, *reverse[1:]))[0]
        place = Box((number, *(0,) * len(reverse[1:])), (1, *reverse[1:]))
        return reversed_dims(self._read(name, Box.whole(reverse), place))[0]

    def _unpacked(self, name: str, number: int) -> Tensor:
        """Read expert ``number`` of a tensor in MXFP4, as [inputs, outputs] in bfloat16."""
        stored, parts = self.tensors[name], []
        experts, columns, rows = stored.shape
        sizes = (rows, columns // (2 * PAIRS))
        for file, ending, more in ((stored.file, PACKED, (PAIRS,)), (stored.scales, PACKED_SCALES, ())):
            assert file is not None
            shape = (*sizes, *more)
            out = torch.empty((1, *shape), dtype=torch.uint8)
            with ShardFile(file) as open_file:
                open_file.read(
                    name + ending, Box.whole((experts, *shape)), Box((number, *(0,) * len(shape)), out.shape), out
                )
            parts.append(out[0])
        return unpacked(parts[0], parts[1]).t().contiguous()

    def whole(self, name: str) -> Tensor:
        """Read one tensor as it is stored; in bfloat16 if that is FP8 or MXFP4."""
        if self.tensors[name].packed:
            return torch.stack([self._unpacked(name, number) for number in range(self.tensors[name].shape[0])])
        return self._block(name, Box.whole(self.tensors[name].shape))


def _same_bytes(a: Tensor, b: Tensor) -> bool:
    """Return True if two tensors of one dtype and shape have the same bytes, NaN included."""
    return bool((a.contiguous().view(torch.uint8) == b.contiguous().view(torch.uint8)).all())
