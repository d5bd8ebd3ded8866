"""Hugging Face folders, the writer: exports a model tensor by tensor. ``folder.py`` is the reader.

``PublishedForms.own`` chooses the class if none is given. The pieces of the parameter table map each Hugging Face
tensor to its part of a parameter.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from megapar.errors import CheckpointError
from megapar.files.location import Place
from megapar.files.tensor_file import CONFIG_FILE, INDEX_FILE, weights_name
from megapar.model.architectures import not_exportable, own_architecture
from megapar.model.hugging_face.tensors import export_piece
from megapar.model.hugging_face.whole_folder import written_aside
from megapar.model.parameter import ParameterSpec
from megapar.model.published_tensors import some, stored_pieces
from megapar.model.sizes import ModelSizes
from megapar.model.spec import spec_of, table_of
from megapar.schema.published import PublishedArchitecture

SHARD_BYTES = 2 << 30


def save_hf(
    folder: Place,
    sizes: ModelSizes,
    tensors: Iterable[tuple[str, Tensor]],
    dtype: torch.dtype,
    *,
    token_ids: Mapping[str, int] | None = None,
    shard_bytes: int = SHARD_BYTES,
    architecture: PublishedArchitecture | None = None,
    published: Mapping[str, Any] = MappingProxyType({}),
    beside: Callable[[Path], object] | None = None,
) -> None:
    """Write config.json and safetensors that ``transformers`` loads.

    The files are written to a temporary folder and replace the old ones together once all are on disk (see
    whole_folder.py). Other files in the folder are kept.
    Raises CheckpointError for models without a Hugging Face form and for missing, unknown or misshapen tensors.

    Args:
        tensors: (megapar name, whole tensor), each row of the table once, in any order; they are consumed one at a
            time, so at most ``shard_bytes`` are in memory.
        dtype: Dtype of the files; what the class keeps in fp32 stays fp32.
        token_ids: bos_token_id, eos_token_id, pad_token_id for config.json.
        architecture: Class to write; None for the model's default.
        published: config.json of the folder that the model was loaded from, whose other keys remain; {} without one.
        beside: Function that writes further files, for example the tokenizer, into the folder it is passed.
    """
    if (reason := not_exportable(sizes, architecture)) is not None:
        raise CheckpointError(reason)
    architecture = architecture or own_architecture(sizes)
    assert architecture is not None, "a model that can be exported has a class"
    with written_aside(folder, _is_weights, CONFIG_FILE) as aside:
        shards = _Shards(aside, shard_bytes)
        config = {**config_of(architecture, sizes, dtype, published), **(token_ids or {})}
        shared = architecture.of_folder(config).shared
        for name, tensor in _hf_tensors(table_of(sizes), tensors, dtype, architecture):
            shards.add(name, tensor)
            for copy in (copy for copy, original in shared.items() if original == name):
                shards.add(copy, tensor.clone())
        shards.close()
        (aside / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        if beside is not None:
            beside(aside)


def config_of(
    architecture: PublishedArchitecture,
    sizes: ModelSizes,
    dtype: torch.dtype,
    published: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Any]:
    """Return the content of config.json for a model of these sizes, loaded from a folder with ``published``, if any."""
    settings = {**spec_of(sizes).published.settings(sizes), "dtype": str(dtype).removeprefix("torch.")}
    return architecture.continued(published, settings) if published else architecture.config(settings)


def _is_weights(name: str) -> bool:
    """Return True if a file of this name belongs to an export, so that a new one removes it."""
    return name == INDEX_FILE or fnmatch(name, "model*.safetensors")


def _hf_tensors(
    table: tuple[ParameterSpec, ...],
    tensors: Iterable[tuple[str, Tensor]],
    dtype: torch.dtype,
    architecture: PublishedArchitecture,
) -> Iterator[tuple[str, Tensor]]:
    """Yield the Hugging Face tensors of a stream of whole parameters. Check that each row occurs exactly once."""
    missing = {spec.name: spec for spec in table}
    for name, tensor in tensors:
        spec = missing.pop(name, None)
        if spec is None:
            raise CheckpointError(f"{name} occurs twice or is not a parameter of this model")
        if tuple(tensor.shape) != spec.shape:
            raise CheckpointError(f"{name} has shape {tuple(tensor.shape)}, the model's is {spec.shape}")
        for piece in stored_pieces(spec, architecture):
            hf_name, part = export_piece(architecture, spec, piece, tensor.detach())
            if hf_name is None:
                continue
            stored = torch.float32 if architecture.is_fp32(hf_name) else dtype
            part = part.reshape(architecture.hf_shape(piece.hf_name, piece.hf_shape))
            yield hf_name, part.to(device="cpu", dtype=stored, copy=True).contiguous()
    if missing:
        raise CheckpointError(f"the export lacks {some(missing)}")


class _Shards:
    """Collects tensors and writes a file for each ``shard_bytes`` of them; renames the files at the end."""

    def __init__(self, folder: Path, shard_bytes: int) -> None:
        self.folder, self.shard_bytes = folder, shard_bytes
        self.held: dict[str, Tensor] = {}
        self.held_bytes = self.total_bytes = 0
        self.files: list[tuple[str, ...]] = []

    def add(self, name: str, tensor: Tensor) -> None:
        if self.held and self.held_bytes + tensor.nbytes > self.shard_bytes:
            self._write()
        self.held[name] = tensor
        self.held_bytes += tensor.nbytes
        self.total_bytes += tensor.nbytes

    def close(self) -> None:
        self._write()
        places: dict[str, str] = {}
        for i, names in enumerate(self.files):
            file = weights_name(i + 1, len(self.files))
            os.replace(self.folder / f"part-{i}", self.folder / file)
            places |= dict.fromkeys(names, file)
        if len(self.files) == 1:
            return
        index = {"metadata": {"total_size": self.total_bytes}, "weight_map": dict(sorted(places.items()))}
        (self.folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

    def _write(self) -> None:
        save_file(self.held, self.folder / f"part-{len(self.files)}", metadata={"format": "pt"})
        self.files.append(tuple(self.held))
        self.held, self.held_bytes = {}, 0
