"""Keys of config.json of the DeepSeek family, each with its flag: latent attention and its routing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from megapar.model.decoder.keys import ATTENTION_DROPOUT, MTP, NORM_TOPK_PROB, moe_layers, shared_width
from megapar.model.decoder.rope_keys import rope_settings
from megapar.schema.legal_values import (
    COUNT,
    EPSILON,
    LAYERS,
    OPTIONAL_SIZE,
    POSITIVE,
    SIZE,
    anything,
    text,
    true_or_false,
)
from megapar.schema.published import Json, Setting, Settings


def _own_keys(config: Json) -> str:
    heads = config["num_attention_heads"]
    same = (config.get("num_key_value_heads") or heads) == heads
    return "" if same else f"but each of the {heads} heads has its own keys and values in latent attention"


def _groups(config: Json) -> int:
    """Return the groups of experts; 1 if choices may come from all groups."""
    groups, chosen = config.get("n_group") or 1, config.get("topk_group") or 1
    limited = config.get("topk_method") != "greedy"
    return int(groups) if limited and chosen < groups else 1


def _greedy(config: Json) -> str:
    method = config["topk_method"]
    return "" if method in ("greedy", "group_limited_greedy") else "and only greedy choices are supported"


def _groups_settings(score_topk: int, alone: int | None) -> tuple[Setting, ...]:
    """Return the settings of groups of experts.

    Args:
        score_topk: Best experts of a group that make its score.
        alone: Value of both keys that is written if choices may come from all experts.
    """

    def key(name: str, flag: str, to_flag: Callable[[Json], int]) -> Setting:
        def written(settings: Settings) -> int | None:
            return int(settings[flag]) if settings["moe_router_num_groups"] > 1 else alone

        return Setting(name, OPTIONAL_SIZE, flag, to_flag=to_flag, from_flags=written)

    return (
        key("n_group", "moe_router_num_groups", _groups),
        key("topk_group", "moe_router_group_topk", lambda c: int(c["topk_group"]) if _groups(c) > 1 else 1),
        Setting(
            "topk_group",
            OPTIONAL_SIZE,
            "moe_router_group_score_topk",
            written=False,
            to_flag=lambda config: score_topk if _groups(config) > 1 else 0,
        ),
    )


LATENT_ATTENTION = (
    Setting("num_hidden_layers", LAYERS, "num_layers"),
    Setting("num_attention_heads", SIZE, "num_attention_heads"),
    Setting("num_key_value_heads", OPTIONAL_SIZE, "num_query_groups", to_flag=lambda c: c["num_attention_heads"]),
    Setting("num_key_value_heads", OPTIONAL_SIZE, written=False, refused=_own_keys),
    Setting(
        "q_lora_rank",
        OPTIONAL_SIZE,
        "q_lora_rank",
        to_flag=lambda config: config["q_lora_rank"] or 0,
        from_flags=lambda settings: settings["q_lora_rank"] or None,
    ),
    Setting("kv_lora_rank", SIZE, "kv_lora_rank"),
    Setting("qk_nope_head_dim", SIZE, "qk_head_dim"),
    Setting("qk_rope_head_dim", SIZE, "qk_pos_emb_head_dim"),
    Setting("v_head_dim", SIZE, "v_head_dim"),
    Setting("attention_bias", true_or_false, only=False),
    Setting("hidden_act", text, only="silu"),
    Setting("max_position_embeddings", SIZE, "max_position_embeddings", retrained=True),
    Setting("initializer_range", anything, from_flags=lambda settings: settings["init_std"]),
    Setting("rms_norm_eps", EPSILON, "layernorm_epsilon"),
    *rope_settings(),
    ATTENTION_DROPOUT,
)
INTERLEAVED = Setting("rope_interleave", true_or_false, only=True)
EXPERTS = (
    Setting("n_routed_experts", SIZE, "num_experts"),
    Setting("num_experts_per_tok", SIZE, "moe_router_topk"),
    Setting("moe_intermediate_size", SIZE, "moe_ffn_hidden_size"),
    Setting(
        "n_shared_experts",
        SIZE,
        "moe_shared_experts",
        from_flags=lambda settings: shared_width(settings) // settings["moe_ffn_hidden_size"],
    ),
    Setting("first_k_dense_replace", COUNT, "first_k_dense", from_flags=lambda settings: moe_layers(settings)[0]),
    Setting("moe_layer_freq", anything, only=1, written=False),
    Setting("routed_scaling_factor", POSITIVE, "moe_router_topk_scaling_factor"),
)
SIGMOID_ROUTING = (
    *EXPERTS,
    *_groups_settings(2, alone=1),
    Setting("scoring_func", text, only="sigmoid", written=False),
    Setting("topk_method", text, only="noaux_tc", written=False),
    NORM_TOPK_PROB,
)
SOFTMAX_ROUTING = (
    *EXPERTS,
    *_groups_settings(1, alone=None),
    Setting("scoring_func", text, only="softmax", written=False),
    Setting(
        "topk_method",
        text,
        from_flags=lambda s: "group_limited_greedy" if s["moe_router_num_groups"] > 1 else "greedy",
        refused=_greedy,
    ),
    Setting("norm_topk_prob", true_or_false, only=False),
)
# The class of transformers assumes a block if the key is missing, which a new folder therefore always has.
NEXT_LAYERS = (
    replace(MTP, written=False),
    Setting(MTP.name, MTP.legal, from_flags=lambda settings: settings["mtp_depth"]),
)


def block_copies(config: Json) -> dict[str, str]:
    """Return the copies of embedding and head that a folder stores with its multi-token prediction block.

    The block is the layer after the last one. Returns an empty dictionary for a folder without it.
    """
    layers, blocks = config.get("num_hidden_layers"), config.get("num_nextn_predict_layers")
    if not (isinstance(layers, int) and blocks):
        return {}
    head = "model.embed_tokens.weight" if config.get("tie_word_embeddings") else "lm_head.weight"
    own = f"model.layers.{layers}"
    return {f"{own}.embed_tokens.weight": "model.embed_tokens.weight", f"{own}.shared_head.head.weight": head}
