"""Hugging Face folders, the way out: a model's tensors written one by one. The way in is ``hf_folder``.

ERNIE encoders are ErnieForPreTraining; decoders are Ernie4_5_MoeForCausalLM, Qwen3MoeForCausalLM where queries and keys
have norms, or Ernie4_5ForCausalLM without experts. Which Hugging Face tensor is which part of a parameter is said by
the table's pieces.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from megapar.errors import CheckpointError
from megapar.model.decoder.sizes import DecoderSizes
from megapar.model.ernie.sizes import ErnieSizes
from megapar.model.hugging_face.config import not_exportable
from megapar.model.hugging_face.family import Family, config_of, family_of_sizes
from megapar.model.hugging_face.whole_folder import written_aside
from megapar.model.parameter import ParameterSpec
from megapar.model.spec import table_of

SHARD_BYTES = 2 << 30
INDEX = "model.safetensors.index.json"
CONFIG = "config.json"


def save_hf(
    folder: str | os.PathLike[str],
    sizes: DecoderSizes | ErnieSizes,
    tensors: Iterable[tuple[str, Tensor]],
    dtype: torch.dtype,
    *,
    token_ids: Mapping[str, int] | None = None,
    shard_bytes: int = SHARD_BYTES,
    family: Family | None = None,
    config: Mapping[str, Any] | None = None,
    beside: Callable[[Path], object] | None = None,
) -> None:
    """Writes config.json and safetensors that ``transformers`` loads.

    tensors: (megapar name, whole tensor), in any order, each row of the table once; they are read one after the other,
    so at most ``shard_bytes`` are held. dtype: of the files; what the table marks fp32 stays fp32.
    token_ids: bos_token_id, eos_token_id, pad_token_id. Other files in the folder are left alone.
    Files are written aside and take their place together when all are on disk (see whole_folder.py).
    beside: writes into a folder what goes with the model, as its tokenizer.
    family: of another architecture than the model's own; config: the content of config.json (see ``family``).
    Raises CheckpointError for models without a Hugging Face form and for missing, foreign or misshapen tensors.
    """
    if (reason := not_exportable(sizes, None if family is None else family.name)) is not None:
        raise CheckpointError(reason)
    family = family or family_of_sizes(sizes)
    folder = Path(folder)
    with written_aside(folder, _is_weights, CONFIG) as aside:
        shards = _Shards(aside, shard_bytes)
        for name, tensor in _hf_tensors(table_of(sizes), tensors, dtype, family):
            shards.add(name, tensor)
        shards.close()
        config = {**(config or config_of(family, sizes, dtype)), **(token_ids or {})}
        (aside / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        if beside is not None:
            beside(aside)


def _is_weights(name: str) -> bool:
    """Whether a file of this name belongs to an export, and not beside it."""
    return name == INDEX or fnmatch(name, "model*.safetensors")


def _hf_tensors(
    table: tuple[ParameterSpec, ...],
    tensors: Iterable[tuple[str, Tensor]],
    dtype: torch.dtype,
    family: Family,
) -> Iterator[tuple[str, Tensor]]:
    """The Hugging Face tensors of a stream of whole parameters; checks that each row comes exactly once."""
    missing = {spec.name: spec for spec in table}
    for name, tensor in tensors:
        spec = missing.pop(name, None)
        if spec is None:
            raise CheckpointError(f"{name} came twice or is no parameter of this model")
        if tuple(tensor.shape) != spec.shape:
            raise CheckpointError(f"{name} has shape {tuple(tensor.shape)}, the model's is {spec.shape}")
        stored = torch.float32 if spec.fp32 else dtype
        for piece in spec.pieces:
            hf_name, part = family.outward(spec, piece, tensor.detach())
            if hf_name is None:
                continue
            yield hf_name, part.reshape(piece.hf_shape).to(device="cpu", dtype=stored, copy=True).contiguous()
    if missing:
        raise CheckpointError(f"the export lacks {some(missing)}")


class _Shards:
    """Collects tensors and writes a file whenever ``shard_bytes`` are together; names the files at the end."""

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
        if len(self.files) == 1:
            os.replace(self.folder / "part-0", self.folder / "model.safetensors")
            return
        places: dict[str, str] = {}
        for i, names in enumerate(self.files):
            file = f"model-{i + 1:05d}-of-{len(self.files):05d}.safetensors"
            os.replace(self.folder / f"part-{i}", self.folder / file)
            places |= dict.fromkeys(names, file)
        index = {"metadata": {"total_size": self.total_bytes}, "weight_map": dict(sorted(places.items()))}
        (self.folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

    def _write(self) -> None:
        save_file(self.held, self.folder / f"part-{len(self.files)}", metadata={"format": "pt"})
        self.files.append(tuple(self.held))
        self.held, self.held_bytes = {}, 0


def some(names: Iterable[Any], most: int = 5) -> str:
    """A few names, and how many more there are."""
    ordered = sorted(map(str, names))
    return ", ".join(ordered[:most]) + (f" and {len(ordered) - most} more" if len(ordered) > most else "")
