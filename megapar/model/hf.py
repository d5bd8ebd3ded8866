"""Hugging Face folders, the way out: a model's tensors written one by one. The way in is ``hf_folder``.

ERNIE encoders are ErnieForPreTraining; decoders are Ernie4_5_MoeForCausalLM, or Ernie4_5ForCausalLM without experts.
Which Hugging Face tensor is which part of a parameter is said by the table's pieces.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from megapar.errors import CheckpointError
from megapar.model.sizes import DecoderSizes, Ernie3Sizes, ErnieSizes
from megapar.model.table import ParameterSpec, table_of

if TYPE_CHECKING:
    from megapar.model.family import Family

SHARD_BYTES = 2 << 30
INDEX = "model.safetensors.index.json"


def not_exportable(sizes: DecoderSizes | ErnieSizes) -> str | None:
    """Why the model has no Hugging Face form; None where it has one."""
    if isinstance(sizes, Ernie3Sizes):
        return "ERNIE 3.0 has no Hugging Face form"
    if isinstance(sizes, ErnieSizes):
        return None if sizes.sop else "ErnieForPreTraining has a sentence-order head and this model has none"
    wanted = (
        ("normalization", sizes.normalization, "rmsnorm"),
        ("position_embedding_type", sizes.position_embedding_type, "rope"),
        ("activation", sizes.activation, "swiglu"),
        ("qk_norm", sizes.qk_norm, False),
    )
    reasons = [f"{name} is {value}, not {legal}" for name, value, legal in wanted if value != legal]
    moe = sizes.moe if sizes.moe_layers else None
    if moe is not None and (sizes.add_bias_linear or moe.add_bias):
        reasons.append("experts have biases")
    if moe is not None and not moe.gated:
        reasons.append(f"the experts' activation is {moe.activation}, not swiglu")
    if moe is not None and (moe.score != "softmax" or moe.groups > 1 or moe.scaling != 1.0):
        reasons.append("routing is not a plain softmax's: Ernie4_5_Moe has no sigmoid, groups or scaling")
    if sizes.moe_widths:
        reasons.append("experts' widths differ from layer to layer")
    if moe is not None and moe.topk == 1:
        reasons.append("top-1 routing weighs by the raw probability, where Ernie4_5_Moe divides it by itself")
    return "no Hugging Face form: " + "; ".join(reasons) if reasons else None


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
) -> None:
    """Writes config.json and safetensors that ``transformers`` loads.

    tensors: (megapar name, whole tensor), in any order, each row of the table once; they are read one after the other,
    so at most ``shard_bytes`` are held. dtype: of the files; what the table marks fp32 stays fp32.
    token_ids: bos_token_id, eos_token_id, pad_token_id. Other files in the folder are left alone.
    Files are written aside and renamed when all are complete, config.json last.
    family, config: of another architecture than the model's own (see model/family.py).
    Raises CheckpointError for models without a Hugging Face form and for missing, foreign or misshapen tensors.
    """
    if family is None and (reason := not_exportable(sizes)) is not None:
        raise CheckpointError(reason)
    folder = Path(folder)
    aside = folder / ".unfinished"
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        shards = _Shards(aside, shard_bytes)
        for name, tensor in _hf_tensors(table_of(sizes), tensors, dtype, family):
            shards.add(name, tensor)
        shards.close()
        config = {**(config or hf_config(sizes, dtype)), **(token_ids or {})}
        (aside / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        for old in (*folder.glob("model*.safetensors"), folder / INDEX):
            old.unlink(missing_ok=True)
        for new in sorted(aside.iterdir(), key=lambda path: path.name == "config.json"):
            os.replace(new, folder / new.name)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def hf_config(sizes: DecoderSizes | ErnieSizes, dtype: torch.dtype) -> dict[str, Any]:
    """The content of config.json."""
    if isinstance(sizes, ErnieSizes):
        return {**_ernie_config(sizes), "dtype": str(dtype).removeprefix("torch.")}
    config: dict[str, Any] = {
        "architectures": ["Ernie4_5ForCausalLM"],
        "model_type": "ernie4_5",
        "vocab_size": sizes.vocab_size,
        "hidden_size": sizes.hidden_size,
        "intermediate_size": sizes.ffn_hidden_size,
        "num_hidden_layers": sizes.num_layers,
        "num_attention_heads": sizes.num_attention_heads,
        "num_key_value_heads": sizes.num_query_groups,
        "head_dim": sizes.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": sizes.max_position_embeddings,
        "initializer_range": sizes.init_std,
        "rms_norm_eps": sizes.layernorm_epsilon,
        "rope_parameters": {"rope_type": "default", "rope_theta": sizes.rope_theta},
        "use_bias": sizes.add_bias_linear,
        "tie_word_embeddings": sizes.tie_embeddings,
        "dtype": str(dtype).removeprefix("torch."),
    }
    if sizes.mtp_depth:
        config["num_nextn_predict_layers"] = sizes.mtp_depth
    if sizes.moe is not None and sizes.moe_layers:
        config |= {
            "architectures": ["Ernie4_5_MoeForCausalLM"],
            "model_type": "ernie4_5_moe",
            "moe_num_experts": sizes.moe.num_experts,
            "moe_k": sizes.moe.topk,
            "moe_intermediate_size": sizes.moe.ffn_hidden_size,
            "moe_num_shared_experts": sizes.moe.shared_experts,
            "moe_layer_start_index": sizes.first_k_dense,
            "moe_layer_end_index": sizes.num_layers - 1,
            "moe_layer_interval": 1,
        }
    return config


def _ernie_config(sizes: ErnieSizes) -> dict[str, Any]:
    return {
        "architectures": ["ErnieForPreTraining"],
        "model_type": "ernie",
        "vocab_size": sizes.vocab_size,
        "hidden_size": sizes.hidden_size,
        "num_hidden_layers": sizes.num_layers,
        "num_attention_heads": sizes.num_attention_heads,
        "intermediate_size": sizes.ffn_hidden_size,
        "hidden_act": "gelu",
        "hidden_dropout_prob": sizes.hidden_dropout,
        "attention_probs_dropout_prob": sizes.attention_dropout,
        "max_position_embeddings": sizes.max_position_embeddings,
        "type_vocab_size": sizes.type_vocab_size,
        "task_type_vocab_size": sizes.task_type_vocab_size,
        "use_task_id": True,
        "initializer_range": sizes.init_std,
        "layer_norm_eps": sizes.layernorm_epsilon,
        "tie_word_embeddings": True,
    }


def _hf_tensors(
    table: tuple[ParameterSpec, ...],
    tensors: Iterable[tuple[str, Tensor]],
    dtype: torch.dtype,
    family: Family | None = None,
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
            part = tensor.detach()[piece.index]
            hf_name: str | None = piece.hf_name
            if family is not None:
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
