"""The flags that a Hugging Face ``config.json`` stands for, and the settings of published models that are refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megapar.config.class_defaults import CLASS_DEFAULTS
from megapar.config.config import FLAGS
from megapar.config.published_types import wrong_values
from megapar.config.regular_file import read_regular
from megapar.config.shown import shown
from megapar.config.values import BadValue, convert

Json = Mapping[str, Any]
Flags = dict[str, Any]


class Unsupported(ValueError):
    """A published model that megapar cannot be; says which setting."""


def read_config(folder: str | Path) -> dict[str, Any]:
    """config.json of a model folder. Raises Unsupported where it is missing or not JSON."""
    path = Path(folder) / "config.json"
    if not path.exists():
        raise Unsupported(f"{folder} holds no config.json, which every published model has")
    try:
        found = json.loads(read_regular(path))
    except (OSError, ValueError, RecursionError) as error:
        raise Unsupported(f"{path} cannot be read ({error})") from error
    if not isinstance(found, dict):
        raise Unsupported(f"{path} holds no object")
    return found


def flags_of(config: Json) -> tuple[str, Flags]:
    """Model kind (moe or ernie) and flags by field name. Raises Unsupported."""
    name = architecture(config)
    kind, read = ARCHITECTURES[name]
    if config.get("quantization_config"):
        raise Unsupported("quantization_config is set: the weights are rounded; give the folder they were made from")
    whole = {**CLASS_DEFAULTS[name], **config}
    if wrong := wrong_values(name, whole):
        raise Unsupported(f"config.json of this {name}: {'; '.join(wrong)}")
    try:
        found = read(whole)
        return kind, {flag: convert(FLAGS[flag], value) for flag, value in found.items()}
    except Unsupported:
        raise
    except KeyError as error:
        raise Unsupported(f"config.json of this {name} lacks {error}") from error
    except BadValue as error:
        raise Unsupported(f"config.json of this {name}: {error}".rstrip(".")) from error
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise Unsupported(f"config.json of this {name} holds a value of another kind ({error})") from error


def architecture(config: Json) -> str:
    """The class that config.json names. Raises Unsupported for one that is not known here."""
    names = config.get("architectures") or []
    listed = names if isinstance(names, list) else []
    found = next((name for name in listed if isinstance(name, str) and name in ARCHITECTURES), None)
    if found is None:
        raise Unsupported(f"architectures is {shown(names)}; known are {', '.join(ARCHITECTURES)}")
    return str(found)


def remarks(config: Json) -> list[str]:
    """What config.json asks of training that is not done here, in sentences."""
    noise = config.get("router_jitter_noise")
    return [f"router_jitter_noise is {shown(noise)}, and the router's inputs get no noise here"] if noise else []


def _decoder(config: Json) -> Flags:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = rope.get("rope_theta") or config["rope_theta"]
    _must(config, "hidden_act", "silu")
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        raise Unsupported(
            f"rope is of type {shown(rope.get('rope_type', rope.get('type')))}, where only the default is built"
        )
    window = config.get("sliding_window")
    if window is not None and config.get("use_sliding_window", True) and window < config["max_position_embeddings"]:
        raise Unsupported(f"sliding_window is {window}, and attention here sees everything before it")
    heads = config["num_attention_heads"]
    return {
        "num_layers": config["num_hidden_layers"],
        "hidden_size": config["hidden_size"],
        "num_attention_heads": heads,
        "num_query_groups": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or config["hidden_size"] // heads,
        "ffn_hidden_size": config["intermediate_size"],
        "vocab_size": config["vocab_size"],
        "max_position_embeddings": config["max_position_embeddings"],
        "layernorm_epsilon": float(config["rms_norm_eps"]),
        "rope_theta": float(theta),
        "untie_embeddings_and_output_weights": not config["tie_word_embeddings"],
        "attention_dropout": float(config.get("attention_dropout") or 0.0),
        "hidden_dropout": 0.0,
        "add_bias_linear": False,
        "qk_norm": False,
        "normalization": "rmsnorm",
        "position_embedding_type": "rope",
        "activation": "swiglu",
        "num_experts": 0,
        "mtp_depth": 0,
    }


def _experts(config: Json, topk: int, experts: int, width: int, **more: Any) -> Flags:
    if topk < 2:
        raise Unsupported("top-1 routing: published models divide the single weight by itself, here it is kept")
    # moe_ffn_hidden_size follows ffn_hidden_size where they are equal, but is always given.
    sizes = {"num_experts": experts, "moe_router_topk": topk, "moe_ffn_hidden_size": width}
    return {**sizes, "first_k_dense": 0, "moe_shared_experts": 0, **more}


def _ernie45(config: Json) -> Flags:
    return {**_decoder(config), "add_bias_linear": bool(config["use_bias"]), "mtp_depth": _mtp(config)}


def _mtp(config: Json) -> int:
    """Multi-token prediction blocks; transformers leaves them out, the folders of ERNIE 4.5 hold them."""
    depth = int(config.get("num_nextn_predict_layers") or 0)
    if depth > 1:
        raise Unsupported(f"num_nextn_predict_layers is {depth}, where at most one block is built")
    return depth


def _ernie45_moe(config: Json) -> Flags:
    _must(config, "use_bias", False)
    _must(config, "moe_layer_interval", 1)
    _must(config, "moe_norm_min", 1e-12)
    layers = config["num_hidden_layers"]
    last = config.get("moe_layer_end_index", -1)
    if last not in (-1, layers - 1):
        raise Unsupported(f"moe_layer_end_index is {last}, where all layers to the last one must have experts")
    return _decoder(config) | _experts(
        config,
        config["moe_k"],
        config["moe_num_experts"],
        config["moe_intermediate_size"],
        first_k_dense=config["moe_layer_start_index"],
        moe_shared_experts=config["moe_num_shared_experts"] or 0,
        mtp_depth=_mtp(config),
    )


def _mixtral(config: Json) -> Flags:
    experts = config["num_local_experts"]
    return _decoder(config) | _experts(config, config["num_experts_per_tok"], experts, config["intermediate_size"])


def _qwen3_moe(config: Json) -> Flags:
    _must(config, "attention_bias", False)
    _must(config, "norm_topk_prob", True)
    _must(config, "decoder_sparse_step", 1)
    dense = config.get("mlp_only_layers") or []
    if sorted(dense) != list(range(len(dense))):
        raise Unsupported(f"mlp_only_layers is {shown(dense)}, where only leading layers may be dense")
    experts = config["num_experts"] if "num_experts" in config else config["num_local_experts"]
    more = {"first_k_dense": len(dense), "qk_norm": True}
    width = config["moe_intermediate_size"]
    return _decoder(config) | _experts(config, config["num_experts_per_tok"], experts, width, **more)


def _ernie(config: Json) -> Flags:
    _must(config, "hidden_act", "gelu")
    _must(config, "is_decoder", False)
    _must(config, "add_cross_attention", False)
    _must(config, "tie_word_embeddings", True)
    return {
        "num_layers": config["num_hidden_layers"],
        "hidden_size": config["hidden_size"],
        "num_attention_heads": config["num_attention_heads"],
        "ffn_hidden_size": config["intermediate_size"],
        "vocab_size": config["vocab_size"],
        "max_position_embeddings": config["max_position_embeddings"],
        "layernorm_epsilon": float(config["layer_norm_eps"]),
        "type_vocab_size": config["type_vocab_size"],
        "task_type_vocab_size": config["task_type_vocab_size"],
        "hidden_dropout": float(config["hidden_dropout_prob"]),
        "attention_dropout": float(config["attention_probs_dropout_prob"]),
    }


def _must(config: Json, name: str, value: Any) -> None:
    found = config.get(name, value)
    if found != value:
        raise Unsupported(f"{name} is {shown(found)}, where {value!r} is built")


ARCHITECTURES: Mapping[str, tuple[str, Callable[[Json], Flags]]] = {
    "ErnieForPreTraining": ("ernie", _ernie),
    "ErnieForMaskedLM": ("ernie", _ernie),
    "Ernie4_5ForCausalLM": ("moe", _ernie45),
    "Ernie4_5_MoeForCausalLM": ("moe", _ernie45_moe),
    "MixtralForCausalLM": ("moe", _mixtral),
    "Qwen3MoeForCausalLM": ("moe", _qwen3_moe),
}
