"""Folders of published weights that a run cannot start from are refused by their headers, before any rank starts."""

from __future__ import annotations

import json
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import pytest

from megapar.arguments import parse
from megapar.errors import ConfigError
from megapar.training.loop.outline import outline

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
LAYER = "model.layers.0."
NAMES: dict[str, list[int]] = {
    "model.embed_tokens.weight": [512, 32],
    "lm_head.weight": [512, 32],
    "model.norm.weight": [32],
    f"{LAYER}input_layernorm.weight": [32],
    f"{LAYER}post_attention_layernorm.weight": [32],
    f"{LAYER}self_attn.q_proj.weight": [32, 32],
    f"{LAYER}self_attn.k_proj.weight": [16, 32],
    f"{LAYER}self_attn.v_proj.weight": [16, 32],
    f"{LAYER}self_attn.o_proj.weight": [32, 32],
    f"{LAYER}mlp.gate_proj.weight": [64, 32],
    f"{LAYER}mlp.up_proj.weight": [64, 32],
    f"{LAYER}mlp.down_proj.weight": [32, 64],
}
DOWN = f"{LAYER}mlp.down_proj.weight"
SHARD = "model-00001-of-00001.safetensors"
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 976762384\n"


def _write(path: Path, tensors: dict[str, list[int]], codes: dict[str, str]) -> None:
    header, at = {}, 0
    for name, shape in tensors.items():
        code = codes.get(name, "F32")
        end = at + prod(shape) * {"F32": 4}.get(code, 1)
        header[name] = {"dtype": code, "shape": shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(at))


def _folder(
    folder: Path, file: str = "model.safetensors", tensors: dict[str, list[int]] = NAMES, code: str = "F32"
) -> Path:
    (folder / "config.json").write_text(json.dumps(LLAMA))
    _write(folder / file, tensors, {DOWN: code})
    return folder


def _index(folder: Path, text: str) -> None:
    _folder(folder, SHARD)
    (folder / "model.safetensors.index.json").write_text(text)


def _pointer(folder: Path) -> None:
    (_folder(folder) / "model.safetensors").write_text(POINTER)


def _long(folder: Path) -> None:
    (_folder(folder) / "model.safetensors").write_bytes((1 << 40).to_bytes(8, "little") + b"{}")


LOST = json.dumps({"weight_map": {name: SHARD for name in NAMES if name != "lm_head.weight"}})
FOLDERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "pointer": (_pointer, r"model.safetensors is a Git LFS pointer, not the file itself \(976,762,384 bytes\)"),
    "index": (lambda folder: _index(folder, POINTER), r"index\.json is a Git LFS pointer"),
    "lost": (lambda folder: _index(folder, LOST), r"it lacks lm_head\.weight"),
    "noindex": (lambda folder: _folder(folder, SHARD), r"has neither model\.safetensors\.index\.json nor"),
    "prefixed": (
        lambda folder: _folder(folder, tensors={f"_orig_mod.{name}": shape for name, shape in NAMES.items()}),
        r"it lacks model\.embed_tokens\.weight",
    ),
    "rows": (
        lambda folder: _folder(folder, tensors={**NAMES, "lm_head.weight": [640, 32]}),
        r"lm_head\.weight has shape \(640, 32\), the model's is \(512, 32\)",
    ),
    "long": (_long, "claims a header of 1099511627776 bytes"),
    **{
        code: (
            lambda folder, code=code: _folder(folder, code=code),  # type: ignore[misc]
            f"down_proj.weight is stored as {code}; weights are F32, F16, BF16, F64, or FP8 or MXFP4 with scales",
        )
        for code in ("I8", "U8", "BOOL")
    },
}


def _start(folder: Path) -> None:
    outline(parse("moe", ["--load-hf", str(folder), "--mock-data", "--seq-length", "32"], {}))


@pytest.mark.parametrize("name", FOLDERS)
def test_what_the_start_would_refuse_is_refused_before_the_ranks(name: str, tmp_path: Path) -> None:
    make, message = FOLDERS[name]
    make(tmp_path)
    with pytest.raises(ConfigError, match=message) as refused:
        _start(tmp_path)
    assert str(refused.value).startswith("[load-hf] --load-hf ")


def test_a_tied_embedding_may_be_stored_as_the_head_alone(tmp_path: Path) -> None:
    _folder(tmp_path)
    _start(tmp_path)
    head = {name: shape for name, shape in NAMES.items() if name != "model.embed_tokens.weight"}
    _write(tmp_path / "model.safetensors", head, {})
    with pytest.raises(ConfigError, match=r"it lacks model\.embed_tokens\.weight"):
        _start(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "tie_word_embeddings": True}))
    _start(tmp_path)


def test_a_folder_that_is_not_a_whole_model_is_called_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"is an adapter \(LoRA\).* merge_and_unload"):
        _start(tmp_path)
    (_folder(tmp_path) / "config.json").write_text(json.dumps({**LLAMA, "partial_rotary_factor": 0.5}))
    with pytest.raises(ConfigError, match=r"partial_rotary_factor is 0\.5") as refused:
        _start(tmp_path)
    assert "rope_parameters is None" not in str(refused.value)
