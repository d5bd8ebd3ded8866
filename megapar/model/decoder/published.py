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
    LLAMA_BIASES,
    MIXTRAL_EXPERTS,
    MTP,
    NO_ATTENTION_BIAS,
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
    "add_qkv_bias": False,
    "qk_norm": False,
    "normalization": "rmsnorm",
    "position_embedding_type": "rope",
    "activation": "swiglu",
    "num_experts": 0,
    "mtp_depth": 0,
}
EXPERT_FLAGS = {**DENSE_FLAGS, "first_k_dense": 0, "moe_shared_experts": 0}
DENSE_LIMITS = (limits.VARIETY, limits.DENSE)
PLAIN_DENSE_LIMITS = (*DENSE_LIMITS, limits.NO_QK_NORM, limits.NO_QKV_BIAS)
EXPERT_LIMITS = (
    *(limits.VARIETY, limits.EXPERTS, limits.NO_EXPERT_BIAS, limits.NO_QKV_BIAS),
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
QK_NORM_NAMES = ((r"^layers\.(\d+)\.attention\.([qk])_norm\.weight$", r"model.layers.\1.self_attn.\2_norm.weight"),)
_BIAS = r"\.e_score_correction_bias$"

ERNIE4_5 = PublishedArchitecture(
    name="Ernie4_5ForCausalLM",
    model_type="ernie4_5",
    settings=(*VOCABULARY, DENSE_WIDTH, *ATTENTION, BIASES, *OUTPUT, MTP),
    defaults={**ERNIE4_5_DEFAULTS, "num_key_value_heads": 2, "head_dim": 128},
    flags=DENSE_FLAGS,
    limits=PLAIN_DENSE_LIMITS,
    tied=TIED,
    remark="the table's own names",
)
LLAMA = PublishedArchitecture(
    name="LlamaForCausalLM",
    model_type="llama",
    settings=(*DECODER, *LLAMA_BIASES),
    defaults={
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
    },
    flags=DENSE_FLAGS,
    limits=(*PLAIN_DENSE_LIMITS, limits.NO_MTP),
    tied=TIED,
    rotary_halves=True,
    remark="Llama 1 to 3 without scaled positions",
)
MISTRAL = PublishedArchitecture(
    name="MistralForCausalLM",
    model_type="mistral",
    settings=(*DECODER, NO_WINDOW),
    defaults={
        "hidden_act": "silu",
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "sliding_window": 4096,
        "attention_dropout": 0.0,
    },
    flags=DENSE_FLAGS,
    limits=(*PLAIN_DENSE_LIMITS, limits.NO_BIAS, limits.NO_MTP),
    tied=TIED,
    rotary_halves=True,
    remark="without a sliding window",
)
QWEN_DEFAULTS = {
    "hidden_act": "silu",
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "sliding_window": None,
    "attention_dropout": 0.0,
}
QWEN2 = PublishedArchitecture(
    name="Qwen2ForCausalLM",
    model_type="qwen2",
    settings=(*DECODER, NO_WINDOW),
    defaults=QWEN_DEFAULTS,
    flags={**DENSE_FLAGS, "add_qkv_bias": True},
    limits=(*DENSE_LIMITS, limits.NO_QK_NORM, limits.QKV_BIAS, limits.NO_BIAS, limits.NO_MTP),
    tied=TIED,
    rotary_halves=True,
    remark="biases on queries, keys and values",
)
QWEN3 = PublishedArchitecture(
    name="Qwen3ForCausalLM",
    model_type="qwen3",
    settings=(*DECODER, NO_ATTENTION_BIAS, NO_WINDOW),
    defaults={**QWEN_DEFAULTS, "head_dim": 128, "attention_bias": False},
    flags={**DENSE_FLAGS, "qk_norm": True},
    limits=(*DENSE_LIMITS, limits.QK_NORM, limits.NO_QKV_BIAS, limits.NO_BIAS, limits.NO_MTP),
    renames=QK_NORM_NAMES,
    tied=TIED,
    rotary_halves=True,
    remark="norms on queries and keys",
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
    settings=(*DECODER, *QWEN_EXPERTS, NO_ATTENTION_BIAS, NO_WINDOW),
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
    renames=QK_NORM_NAMES,
    absent=(_BIAS,),
    tied=TIED,
    rotary_halves=True,
    remark="norms on queries and keys, dense leading layers",
)
ARCHITECTURES = (ERNIE4_5, ERNIE4_5_MOE, LLAMA, MISTRAL, MIXTRAL, QWEN2, QWEN3, QWEN3_MOE)


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
    if any(name not in settings for name in ("num_experts", "qk_norm", "add_qkv_bias")):
        return None
    if settings["num_experts"] > 0:
        return QWEN3_MOE.name if settings["qk_norm"] else ERNIE4_5_MOE.name
    if settings["add_qkv_bias"]:
        return QWEN2.name
    return QWEN3.name if settings["qk_norm"] else ERNIE4_5.name


PUBLISHED = PublishedForms(architectures=ARCHITECTURES, settings=settings_of, own=_own)
