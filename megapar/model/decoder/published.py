"""Published classes that the decoder implements, one entry in ``ARCHITECTURES`` each. Standard library only.

Tested in ``tests/model/test_architectures.py``.
"""

from __future__ import annotations

from typing import Any

from megapar.model.decoder import limits
from megapar.model.decoder.keys import (
    ATTENTION,
    BIASES,
    DECODER,
    DENSE_WIDTH,
    ERNIE_EXPERTS,
    MIXTRAL_EXPERTS,
    MTP,
    NO_WINDOW,
    OUTPUT,
    QWEN_EXPERTS,
    VOCABULARY,
)
from megapar.model.decoder.sizes import DecoderSizes
from megapar.schema.legal_values import true_or_false
from megapar.schema.published import PublishedArchitecture, PublishedForms, Setting, Settings

# Flags of a class, unless its settings override them

DENSE_FLAGS = {
    "hidden_dropout": 0.0,
    "add_bias_linear": False,
    "qk_norm": False,
    "normalization": "rmsnorm",
    "position_embedding_type": "rope",
    "activation": "swiglu",
    "num_experts": 0,
    "mtp_depth": 0,
}
EXPERT_FLAGS = {**DENSE_FLAGS, "first_k_dense": 0, "moe_shared_experts": 0}
DENSE_LIMITS = (limits.VARIETY, limits.NO_QK_NORM, limits.DENSE)
EXPERT_LIMITS = (
    *(limits.VARIETY, limits.EXPERTS, limits.NO_EXPERT_BIAS),
    *(limits.PLAIN_ROUTING, limits.ONE_EXPERT_SIZE, limits.DIVIDED_WEIGHTS),
)
TIED = {"lm_head.weight": "model.embed_tokens.weight"}
ERNIE4_5_DEFAULTS = {
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "use_bias": False,
}
_BIAS = r"\.e_score_correction_bias$"

ERNIE4_5 = PublishedArchitecture(
    name="Ernie4_5ForCausalLM",
    model_type="ernie4_5",
    settings=(*VOCABULARY, DENSE_WIDTH, *ATTENTION, BIASES, *OUTPUT, MTP),
    defaults={**ERNIE4_5_DEFAULTS, "num_key_value_heads": 2, "head_dim": 128},
    flags=DENSE_FLAGS,
    limits=DENSE_LIMITS,
    tied=TIED,
    remark="the table's own names",
)
ERNIE4_5_MOE = PublishedArchitecture(
    name="Ernie4_5_MoeForCausalLM",
    model_type="ernie4_5_moe",
    settings=(
        *(*VOCABULARY, DENSE_WIDTH, *ATTENTION),
        Setting("use_bias", true_or_false, only=False),
        *(*OUTPUT, MTP, *ERNIE_EXPERTS),
    ),
    defaults={
        **ERNIE4_5_DEFAULTS,
        "num_key_value_heads": 4,
        "moe_k": 6,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
        "moe_layer_interval": 1,
        "moe_norm_min": 1e-12,
    },
    flags=EXPERT_FLAGS,
    limits=(limits.NO_QK_NORM, *EXPERT_LIMITS),
    tied=TIED,
    remark="correction bias; `mtp` layers that config.json does not count are carried along",
)
MIXTRAL = PublishedArchitecture(
    name="MixtralForCausalLM",
    model_type="mixtral",
    settings=(*VOCABULARY, *ATTENTION, *OUTPUT, *MIXTRAL_EXPERTS, NO_WINDOW),
    defaults={
        "hidden_act": "silu",
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": False,
        "sliding_window": None,
        "attention_dropout": 0.0,
        "num_experts_per_tok": 2,
        "router_jitter_noise": 0.0,
    },
    flags=EXPERT_FLAGS,
    limits=(
        *(limits.NO_QK_NORM, *EXPERT_LIMITS, limits.NO_SHARED_EXPERTS, limits.NO_DENSE_LEAD),
        *(limits.NO_MTP, limits.NO_CORRECTION_BIAS),
    ),
    renames=(
        (r"\.mlp\.gate\.weight$", ".block_sparse_moe.gate.weight"),
        (r"\.mlp\.experts\.(\d+)\.gate_proj\.", r".block_sparse_moe.experts.\1.w1."),
        (r"\.mlp\.experts\.(\d+)\.up_proj\.", r".block_sparse_moe.experts.\1.w3."),
        (r"\.mlp\.experts\.(\d+)\.down_proj\.", r".block_sparse_moe.experts.\1.w2."),
    ),
    absent=(_BIAS,),
    tied=TIED,
    rotary_halves=True,
    remark="`block_sparse_moe.experts.E.w1/w2/w3`",
)
QWEN3_MOE = PublishedArchitecture(
    name="Qwen3MoeForCausalLM",
    model_type="qwen3_moe",
    settings=(*DECODER, *QWEN_EXPERTS, NO_WINDOW),
    defaults={
        "hidden_act": "silu",
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "sliding_window": None,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    flags={**EXPERT_FLAGS, "qk_norm": True},
    limits=(
        *(limits.QK_NORM, *EXPERT_LIMITS, limits.NO_SHARED_EXPERTS),
        *(limits.NO_MTP, limits.NO_CORRECTION_BIAS),
    ),
    renames=((r"^layers\.(\d+)\.attention\.([qk])_norm\.weight$", r"model.layers.\1.self_attn.\2_norm.weight"),),
    absent=(_BIAS,),
    tied=TIED,
    rotary_halves=True,
    remark="norms on queries and keys, dense leading layers",
)
ARCHITECTURES = (ERNIE4_5, ERNIE4_5_MOE, MIXTRAL, QWEN3_MOE)


def settings_of(sizes: DecoderSizes) -> Settings:
    """Return a decoder's sizes by the names of the flags. --moe-router-bias-update-rate is not a size, so it is 0."""
    moe = sizes.moe if sizes.moe_layers else None
    settings: dict[str, Any] = {
        **vars(sizes),
        "untie_embeddings_and_output_weights": not sizes.tie_embeddings,
        "moe_layer_ffn_hidden_sizes": tuple(sizes.moe_widths),
        "moe_router_bias_update_rate": 0.0,
    }
    if moe is None:
        return settings | {"num_experts": 0}
    return settings | {
        "add_bias_linear": sizes.add_bias_linear or moe.add_bias,
        "num_experts": moe.num_experts,
        "moe_ffn_hidden_size": moe.ffn_hidden_size,
        "moe_shared_experts": moe.shared_experts,
        "moe_router_score_function": moe.score,
        "moe_router_num_groups": moe.groups,
        "moe_router_topk_scaling_factor": moe.scaling,
        "moe_router_topk": moe.topk,
    }


def _own(settings: Settings) -> str | None:
    if "num_experts" not in settings or "qk_norm" not in settings:
        return None
    if settings["num_experts"] > 0:
        return QWEN3_MOE.name if settings["qk_norm"] else ERNIE4_5_MOE.name
    return ERNIE4_5.name


PUBLISHED = PublishedForms(architectures=ARCHITECTURES, settings=settings_of, own=_own)
