"""Keys of config.json that decoders share, each with its flag. Standard library only.

Tested in ``tests/training/checkpoints/test_convert.py``.
"""

from __future__ import annotations

from megapar.schema.legal_values import (
    COUNT,
    EPSILON,
    OPTIONAL_COUNT,
    OPTIONAL_PROBABILITY,
    OPTIONAL_SIZE,
    SIZE,
    THETA,
    anything,
    layer_numbers,
    rope,
    text,
    true_or_false,
    whole,
)
from megapar.schema.published import Json, Setting


def _head_dim(config: Json) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _theta(config: Json) -> float:
    settings = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return float(settings.get("rope_theta") or config["rope_theta"])


def _rope_type(config: Json, key: str) -> str:
    settings = config.get(key) or {}
    default = settings.get("rope_type", settings.get("type", "default")) == "default"
    return "" if default else "but only the default type of rope is supported"


def _old_rope_type(config: Json) -> str:
    return "" if config.get("rope_parameters") else _rope_type(config, "rope_scaling")


def _window(config: Json) -> str:
    window = config.get("sliding_window")
    if window is None or not config.get("use_sliding_window", True) or window >= config["max_position_embeddings"]:
        return ""
    return "but attention here always sees all earlier positions"


def _layer_types(config: Json) -> str:
    kinds = config.get("layer_types") or []
    plain = all(kind == "full_attention" for kind in kinds) or (
        set(kinds) <= {"full_attention", "sliding_attention"} and not _window(config)
    )
    return "" if plain else "but attention here always sees all earlier positions"


def _biases(config: Json) -> str:
    same = config["attention_bias"] == config["mlp_bias"]
    return (
        "" if same else "but biases here are in all linear layers or in none, apart from those of queries, keys, values"
    )


VOCABULARY = (Setting("vocab_size", SIZE, "vocab_size"), Setting("hidden_size", SIZE, "hidden_size"))
DENSE_WIDTH = Setting("intermediate_size", SIZE, "ffn_hidden_size")
ATTENTION = (
    Setting("num_hidden_layers", SIZE, "num_layers"),
    Setting("num_attention_heads", SIZE, "num_attention_heads"),
    Setting(
        "num_key_value_heads",
        OPTIONAL_SIZE,
        "num_query_groups",
        to_flag=lambda config: config.get("num_key_value_heads") or config["num_attention_heads"],
    ),
    Setting("head_dim", OPTIONAL_SIZE, "head_dim", to_flag=_head_dim),
    Setting("hidden_act", text, only="silu"),
    Setting("max_position_embeddings", SIZE, "max_position_embeddings", retrained=True),
    Setting("initializer_range", anything, from_flags=lambda settings: settings["init_std"]),
    Setting("rms_norm_eps", EPSILON, "layernorm_epsilon"),
    Setting(
        "rope_parameters",
        rope,
        "rope_theta",
        to_flag=_theta,
        from_flags=lambda settings: {"rope_type": "default", "rope_theta": settings["rope_theta"]},
        refused=lambda config: _rope_type(config, "rope_parameters"),
    ),
    Setting("rope_theta", THETA, written=False),  # this key and the next one are from transformers before version 5
    Setting("rope_scaling", rope, written=False, refused=_old_rope_type),
    Setting("sliding_window", OPTIONAL_COUNT, written=False, refused=_window),
    Setting("use_sliding_window", true_or_false, written=False),
    Setting("layer_types", anything, written=False, refused=_layer_types),
    Setting(
        "attention_dropout",
        OPTIONAL_PROBABILITY,
        "attention_dropout",
        written=False,
        to_flag=lambda config: config.get("attention_dropout") or 0.0,
    ),
    Setting(
        "router_jitter_noise", OPTIONAL_PROBABILITY, written=False, ignored="the router's inputs have no noise here"
    ),
)
OUTPUT = (
    Setting(
        "tie_word_embeddings",
        true_or_false,
        "untie_embeddings_and_output_weights",
        to_flag=lambda config: not config["tie_word_embeddings"],
        from_flags=lambda settings: not settings["untie_embeddings_and_output_weights"],
    ),
    Setting("dtype", anything, from_flags=lambda settings: settings["dtype"]),
)
DECODER = (*VOCABULARY, DENSE_WIDTH, *ATTENTION, *OUTPUT)
NO_WINDOW = Setting("sliding_window", OPTIONAL_COUNT, from_flags=lambda settings: None)
BIASES = Setting("use_bias", true_or_false, "add_bias_linear", to_flag=lambda config: bool(config["use_bias"]))
LLAMA_BIASES = (
    Setting("attention_bias", true_or_false, "add_bias_linear", refused=_biases),
    Setting("mlp_bias", true_or_false, from_flags=lambda settings: settings["add_bias_linear"]),
)
NO_ATTENTION_BIAS = Setting("attention_bias", true_or_false, only=False)
MTP = Setting(
    "num_nextn_predict_layers",
    OPTIONAL_COUNT,
    "mtp_depth",
    implied=0,
    retrained=True,
    to_flag=lambda config: config.get("num_nextn_predict_layers") or 0,
    refused=lambda config: (
        "but at most one block is supported" if (config.get("num_nextn_predict_layers") or 0) > 1 else ""
    ),
)


def topk(key: str) -> Setting:
    """Return the setting for the number of experts per token."""
    reason = "but top-1 routing of published models divides the single weight by itself, and here it is kept"
    return Setting(key, SIZE, "moe_router_topk", refused=lambda config: reason if config[key] < 2 else "")


def _last_moe_layer(config: Json) -> str:
    last = config.get("moe_layer_end_index", -1)
    supported = last in (-1, config["num_hidden_layers"] - 1)
    return "" if supported else "but all layers up to the last one must have experts"


def _leading(config: Json) -> str:
    dense = config.get("mlp_only_layers") or []
    return "" if sorted(dense) == list(range(len(dense))) else "but only leading layers may be dense"


ERNIE_EXPERTS = (
    Setting("moe_num_experts", SIZE, "num_experts"),
    topk("moe_k"),
    Setting("moe_intermediate_size", SIZE, "moe_ffn_hidden_size"),
    Setting(
        "moe_num_shared_experts",
        OPTIONAL_COUNT,
        "moe_shared_experts",
        to_flag=lambda config: config["moe_num_shared_experts"] or 0,
    ),
    Setting("moe_layer_start_index", COUNT, "first_k_dense"),
    Setting(
        "moe_layer_end_index",
        whole(-1),
        from_flags=lambda settings: settings["num_layers"] - 1,
        refused=_last_moe_layer,
    ),
    Setting("moe_layer_interval", SIZE, only=1),
    Setting("moe_norm_min", EPSILON, only=1e-12, written=False),
)
MIXTRAL_EXPERTS = (
    Setting("intermediate_size", SIZE, "moe_ffn_hidden_size"),
    Setting("intermediate_size", SIZE, "ffn_hidden_size", written=False),
    topk("num_experts_per_tok"),
    Setting("num_local_experts", SIZE, "num_experts"),
)
QWEN_EXPERTS = (
    topk("num_experts_per_tok"),
    Setting(
        "num_experts",
        SIZE,
        "num_experts",
        to_flag=lambda config: config["num_experts"] if "num_experts" in config else config["num_local_experts"],
    ),
    Setting("num_local_experts", OPTIONAL_SIZE, written=False),
    Setting("moe_intermediate_size", SIZE, "moe_ffn_hidden_size"),
    Setting("norm_topk_prob", true_or_false, only=True),
    Setting("decoder_sparse_step", SIZE, only=1),
    Setting(
        "mlp_only_layers",
        layer_numbers,
        "first_k_dense",
        to_flag=lambda config: len(config.get("mlp_only_layers") or []),
        from_flags=lambda settings: list(range(settings["first_k_dense"])),
        refused=_leading,
    ),
)
