"""Published classes that the decoder implements, one entry each."""

from __future__ import annotations

from functools import partial
from typing import Any

from megapar.model.decoder import limits
from megapar.model.decoder.alternating_keys import GEMMA, alternating_settings
from megapar.model.decoder.deepseek_keys import (
    INTERLEAVED,
    LATENT_ATTENTION,
    NEXT_LAYERS,
    SIGMOID_ROUTING,
    SOFTMAX_ROUTING,
    block_copies,
)
from megapar.model.decoder.keys import (
    ALTERNATING_WINDOWS,
    ATTENTION,
    BIASES,
    CLAMPED,
    DECODER,
    DENSE_WIDTH,
    ERNIE_EXPERTS,
    LLAMA_BIASES,
    MIXTRAL_EXPERTS,
    MTP,
    MULTIPLIERS,
    NO_ATTENTION_BIAS,
    NO_QKV_CLIP,
    OLMO_EXPERTS,
    OUTPUT,
    QWEN2_MOE_WINDOWS,
    QWEN3_MOE_WINDOWS,
    QWEN_EXPERTS,
    QWEN_SHARED,
    QWEN_WINDOWS,
    SAME_WINDOW,
    SKIPPED_ROPE,
    SMOLLM3_WINDOWS,
    VOCABULARY,
    attention_settings,
    with_windows,
)
from megapar.model.decoder.layer_pattern import ALL, to_text
from megapar.model.decoder.layer_ropes import SAME, rope_text
from megapar.model.decoder.sizes import DENSE_BLOCK, LAYER_BLOCK, DecoderSizes
from megapar.model.decoder.windows import NO_FULL, NONE, window_text
from megapar.model.rope_scaling import flags_of_scaling
from megapar.schema.legal_values import true_or_false
from megapar.schema.published import PublishedArchitecture, PublishedForms, Setting, Settings, first_within

# Flags of a class, unless its settings override them

DENSE_FLAGS = {
    "hidden_dropout": 0.0,
    "add_bias_linear": False,
    "add_qkv_bias": False,
    "qk_norm": False,
    "qk_norm_scope": "head",
    "norm_placement": "input",
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "softmax_scale": 0.0,
    "logits_scaling": 1.0,
    "normalization": "rmsnorm",
    "position_embedding_type": "rope",
    "rotary_percent": 1.0,
    "activation": "swiglu",
    "apply_layernorm_1p": False,
    "scale_embedding": False,
    "num_experts": 0,
    "mtp_depth": 0,
    "multi_latent_attention": False,
    "window_size": NONE,
    "window_attn_skip_freq": NO_FULL,
    "attention_sinks": False,
    "window_rope": SAME,
    "no_rope_freq": NO_FULL,
}
EXPERT_FLAGS = {
    **DENSE_FLAGS,
    "first_k_dense": 0,
    "moe_layer_freq": ALL,
    "moe_shared_experts": 0,
    "moe_shared_expert_intermediate_size": 0,
    "moe_shared_expert_gate": False,
    "norm_topk_prob": "on",
    "moe_router_linear_bias": False,
}
PLAIN_BLOCK = (limits.NO_LATENT, limits.HEAD_NORMS, limits.INPUT_NORMS, limits.NO_MULTIPLIERS)
SAME_ROPE = (limits.ONE_ROPE, limits.ROPE_EVERYWHERE)
DENSE_FORM = (limits.VARIETY, *SAME_ROPE, limits.DENSE, limits.WHOLE_HEADS_ROTATED)
DENSE_LIMITS = (*DENSE_FORM, *PLAIN_BLOCK)
MISTRAL_LIMITS = (*DENSE_LIMITS, limits.NO_QK_NORM, limits.NO_QKV_BIAS)
PLAIN_DENSE_LIMITS = (*MISTRAL_LIMITS, limits.NO_WINDOW)
EXPERT_FORM = (
    limits.VARIETY, *SAME_ROPE, limits.EXPERTS, limits.WHOLE_HEADS_ROTATED, limits.NO_EXPERT_BIAS, limits.PLAIN_ROUTING,
    limits.ONE_EXPERT_SIZE,
)  # fmt: skip
NO_SHARED = (limits.NO_SHARED_EXPERTS, limits.NO_SHARED_GATE)
EXPERT_LIMITS = (*EXPERT_FORM, limits.NO_QKV_BIAS, *PLAIN_BLOCK)
TIED = {"lm_head.weight": "model.embed_tokens.weight"}
llama_like = partial(PublishedArchitecture, tied=TIED, rotary_halves=True)
"""Return a class whose head may be tied, and which rotates the two halves of a head."""
DEFAULTS = {"hidden_act": "silu", "rope_theta": 10000.0, "tie_word_embeddings": False, "attention_dropout": 0.0}
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
GATE_BIAS = ((r"\.mlp\.moe_statics\.e_score_correction_bias$", ".mlp.gate.e_score_correction_bias"),)

ERNIE4_5 = PublishedArchitecture(
    name="Ernie4_5ForCausalLM",
    model_type="ernie4_5",
    settings=(*VOCABULARY, DENSE_WIDTH, *ATTENTION, BIASES, *OUTPUT, MTP),
    defaults={**ERNIE4_5_DEFAULTS, "num_key_value_heads": 2, "head_dim": 128},
    flags={**DENSE_FLAGS, "mtp_block": DENSE_BLOCK},
    limits=(*PLAIN_DENSE_LIMITS, limits.DENSE_MTP),
    tied=TIED,
    remark="the table's own names",
)
LLAMA = llama_like(
    name="LlamaForCausalLM",
    model_type="llama",
    settings=(*DECODER, *LLAMA_BIASES),
    defaults={
        **DEFAULTS,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "mlp_bias": False,
    },
    flags=DENSE_FLAGS,
    limits=(*PLAIN_DENSE_LIMITS, limits.NO_MTP),
    remark="Llama 1 to 3.3",
)
MISTRAL = llama_like(
    name="MistralForCausalLM",
    model_type="mistral",
    settings=with_windows(DECODER, SAME_WINDOW),
    defaults={
        **DEFAULTS,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "sliding_window": 4096,
    },
    flags=DENSE_FLAGS,
    limits=(*MISTRAL_LIMITS, limits.NO_BIAS, limits.NO_MTP, limits.SAME_WINDOW),
    specific=(limits.DENSE, limits.WINDOW),
    remark="a window in all layers, or in none",
)
GRANITE_DEFAULTS = {
    **DEFAULTS,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "embedding_multiplier": 1.0,
    "attention_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
}
GRANITE_LIMITS = (
    *DENSE_FORM, limits.NO_LATENT, limits.HEAD_NORMS, limits.INPUT_NORMS, limits.NO_QK_NORM, limits.NO_QKV_BIAS,
    limits.NO_MTP, limits.NO_WINDOW,
)  # fmt: skip
GRANITE = llama_like(
    name="GraniteForCausalLM",
    model_type="granite",
    settings=(*DECODER, *LLAMA_BIASES, *MULTIPLIERS),
    defaults={**GRANITE_DEFAULTS, "mlp_bias": False},
    flags=DENSE_FLAGS,
    limits=GRANITE_LIMITS,
    specific=(limits.MULTIPLIERS,),
    remark="factors on embeddings, attention scores, outputs of layers and logits",
)
OLMO2_LIMITS = (
    *DENSE_FORM, limits.QK_NORM, limits.WIDTH_NORMS, limits.OUTPUT_NORMS, limits.NO_MULTIPLIERS, limits.NO_LATENT,
    limits.NO_QKV_BIAS, limits.NO_BIAS, limits.NO_MTP, limits.NO_WINDOW,
)  # fmt: skip
OLMO2 = llama_like(
    name="Olmo2ForCausalLM",
    model_type="olmo2",
    settings=(*DECODER, NO_ATTENTION_BIAS),
    defaults={**DEFAULTS, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "attention_bias": False},
    flags={**DENSE_FLAGS, "qk_norm": True, "qk_norm_scope": "width", "norm_placement": "output"},
    limits=OLMO2_LIMITS,
    renames=QK_NORM_NAMES,
    specific=(limits.QK_NORM, limits.WIDTH_NORMS, limits.OUTPUT_NORMS),
    remark="norms of queries and keys over all heads; norms after attention and MLP",
)
GEMMA3_LIMITS = (
    limits.GEMMA, limits.QUERY_SCALAR, limits.HEADS_DIVIDE, limits.ROPE_EVERYWHERE, limits.DENSE,
    limits.WHOLE_HEADS_ROTATED, limits.NO_LATENT, limits.NO_QKV_BIAS, limits.NO_BIAS, limits.NO_MTP,
)  # fmt: skip
OLMO3 = llama_like(
    name="Olmo3ForCausalLM",
    model_type="olmo3",
    settings=(*alternating_settings(DECODER, 4, full=500000.0, window=500000.0), NO_ATTENTION_BIAS),
    defaults={**{key: value for key, value in OLMO2.defaults.items() if key != "rope_theta"}, "sliding_window": 4096},
    flags=OLMO2.flags,
    limits=tuple(limit for limit in OLMO2_LIMITS if limit not in (limits.ONE_ROPE, limits.NO_WINDOW)),
    renames=QK_NORM_NAMES,
    specific=(*OLMO2.specific, limits.WINDOW),
    remark="as Olmo2, with a window in some layers, which may have other rotary positions",
)
GEMMA3 = llama_like(
    name="Gemma3ForCausalLM",
    model_type="gemma3_text",
    settings=(
        *alternating_settings(
            tuple(one for one in DECODER if one.name != "hidden_act"),
            6,
            full=1000000.0,
            window=10000.0,
            old_every="sliding_window_pattern",
            old_window="rope_local_base_freq",
        ),
        *GEMMA,
        NO_ATTENTION_BIAS,
    ),
    defaults={
        "hidden_activation": "gelu_pytorch_tanh",
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
    },
    flags={**DENSE_FLAGS, **limits.GEMMA_FLAGS},
    limits=GEMMA3_LIMITS,
    renames=QK_NORM_NAMES,
    specific=(limits.DENSE, limits.GEGLU_GATE),
    remark="text alone: four norms of 1 + weight, geglu, the embedding times sqrt(hidden_size), and rotary positions "
    "by kind of layer; caps of logits and attention to later positions are refused",
)
QWEN_DEFAULTS = {
    **DEFAULTS,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "use_sliding_window": False,
    "sliding_window": None,
}
QWEN_WINDOW_DEFAULTS = {**QWEN_DEFAULTS, "max_window_layers": 28}
QWEN2 = llama_like(
    name="Qwen2ForCausalLM",
    model_type="qwen2",
    settings=with_windows(DECODER, QWEN_WINDOWS),
    defaults=QWEN_WINDOW_DEFAULTS,
    flags={**DENSE_FLAGS, "add_qkv_bias": True},
    limits=(*DENSE_LIMITS, limits.NO_QK_NORM, limits.QKV_BIAS, limits.NO_BIAS, limits.NO_MTP),
    specific=(limits.QKV_BIAS,),
    remark="biases on queries, keys and values; a window in some layers",
)
QWEN3 = llama_like(
    name="Qwen3ForCausalLM",
    model_type="qwen3",
    settings=with_windows((*DECODER, NO_ATTENTION_BIAS), QWEN_WINDOWS),
    defaults={**QWEN_WINDOW_DEFAULTS, "head_dim": 128, "attention_bias": False},
    flags={**DENSE_FLAGS, "qk_norm": True},
    limits=(*DENSE_LIMITS, limits.QK_NORM, limits.NO_QKV_BIAS, limits.NO_BIAS, limits.NO_MTP),
    renames=QK_NORM_NAMES,
    specific=(limits.QK_NORM,),
    remark="norms on queries and keys; a window in some layers",
)
SMOLLM3_LIMITS = (
    limits.VARIETY, limits.ONE_ROPE, limits.DENSE, limits.WHOLE_HEADS_ROTATED, *PLAIN_BLOCK, limits.NO_QK_NORM,
    limits.NO_QKV_BIAS, limits.NO_MTP,
)  # fmt: skip
SMOLLM3 = llama_like(
    name="SmolLM3ForCausalLM",
    model_type="smollm3",
    settings=(*with_windows((*DECODER, *LLAMA_BIASES), SMOLLM3_WINDOWS), *SKIPPED_ROPE),
    defaults={
        **QWEN_DEFAULTS,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-6,
        "rope_theta": 2000000.0,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "no_rope_layer_interval": 4,
    },
    flags=DENSE_FLAGS,
    limits=SMOLLM3_LIMITS,
    specific=(limits.DENSE, limits.SKIPPED_ROPE),
    remark="no rotary positions in some layers; a window in some",
)
ERNIE4_5_MOE_LIMITS = (
    limits.NO_QK_NORM, *EXPERT_LIMITS, limits.DIVIDED_WEIGHTS, limits.WHOLE_SHARED_EXPERTS, limits.NO_SHARED_GATE,
    limits.EVEN_EXPERTS, limits.DENSE_MTP, limits.NO_WINDOW,
)  # fmt: skip
ERNIE4_5_MOE = PublishedArchitecture(
    name="Ernie4_5_MoeForCausalLM",
    model_type="ernie4_5_moe",
    settings=(
        *VOCABULARY,
        DENSE_WIDTH,
        *ATTENTION,
        Setting("use_bias", true_or_false, only=False),
        *OUTPUT,
        MTP,
        *ERNIE_EXPERTS,
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
    flags={**EXPERT_FLAGS, "mtp_block": DENSE_BLOCK},
    limits=ERNIE4_5_MOE_LIMITS,
    fp32=(r"\.gate\.weight$", _BIAS),
    tied=TIED,
    specific=(limits.EXPERTS,),
    remark="correction bias; `mtp` layers that config.json does not count are carried along",
)
MIXTRAL_LIMITS = (
    limits.NO_QK_NORM, *EXPERT_LIMITS, *NO_SHARED, limits.ALL_EXPERTS, limits.DIVIDED_WEIGHTS, limits.NO_MTP,
    limits.NO_CORRECTION_BIAS, limits.SAME_WINDOW,
)  # fmt: skip
MIXTRAL = llama_like(
    name="MixtralForCausalLM",
    model_type="mixtral",
    settings=with_windows((*VOCABULARY, *ATTENTION, *OUTPUT, *MIXTRAL_EXPERTS), SAME_WINDOW),
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
    limits=MIXTRAL_LIMITS,
    renames=(
        (r"\.mlp\.gate\.weight$", ".block_sparse_moe.gate.weight"),
        (r"\.mlp\.experts\.(\d+)\.gate_proj\.", r".block_sparse_moe.experts.\1.w1."),
        (r"\.mlp\.experts\.(\d+)\.up_proj\.", r".block_sparse_moe.experts.\1.w3."),
        (r"\.mlp\.experts\.(\d+)\.down_proj\.", r".block_sparse_moe.experts.\1.w2."),
    ),
    absent=(_BIAS,),
    specific=(*ERNIE4_5_MOE.specific, limits.WINDOW),
    remark="`block_sparse_moe.experts.E.w1/w2/w3`; a window in all layers, or in none",
)
QWEN_MOE_DEFAULTS = {**QWEN_DEFAULTS, "norm_topk_prob": False, "decoder_sparse_step": 1, "mlp_only_layers": []}
QWEN3_MOE_LIMITS = (
    limits.QK_NORM, *EXPERT_LIMITS, *NO_SHARED, limits.NO_MTP, limits.NO_CORRECTION_BIAS, limits.SAME_WINDOW,
)  # fmt: skip
QWEN3_MOE = llama_like(
    name="Qwen3MoeForCausalLM",
    model_type="qwen3_moe",
    settings=with_windows((*DECODER, *QWEN_EXPERTS, NO_ATTENTION_BIAS), QWEN3_MOE_WINDOWS),
    defaults={**QWEN_MOE_DEFAULTS, "num_key_value_heads": 4, "attention_bias": False, "num_experts_per_tok": 8},
    flags={**EXPERT_FLAGS, "qk_norm": True},
    limits=QWEN3_MOE_LIMITS,
    renames=QK_NORM_NAMES,
    absent=(_BIAS,),
    specific=(*ERNIE4_5_MOE.specific, limits.QK_NORM),
    remark="norms on queries and keys, dense layers anywhere, weights divided by their sum or not; a window in all "
    "layers, or in none",
)
GATED = {"moe_shared_expert_gate": True}
QWEN2_MOE_LIMITS = (
    *EXPERT_FORM, *PLAIN_BLOCK, limits.NO_QK_NORM, limits.SHARED_GATE, limits.NO_MTP, limits.NO_CORRECTION_BIAS,
)  # fmt: skip
QWEN2_MOE = llama_like(
    name="Qwen2MoeForCausalLM",
    model_type="qwen2_moe",
    settings=with_windows((*DECODER, *QWEN_EXPERTS, *QWEN_SHARED), QWEN2_MOE_WINDOWS),
    defaults={
        **{**QWEN_MOE_DEFAULTS, "num_key_value_heads": 16, "sliding_window": 0, "num_experts_per_tok": 4},
        "max_window_layers": 28,
        "qkv_bias": True,
    },
    flags={**{name: value for name, value in EXPERT_FLAGS.items() if name != "moe_shared_experts"}, **GATED},
    limits=QWEN2_MOE_LIMITS,
    renames=((r"\.mlp\.shared_experts\.", ".mlp.shared_expert."),),
    absent=(_BIAS,),
    specific=(*ERNIE4_5_MOE.specific, limits.SHARED_GATE, limits.QKV_BIAS),
    remark="shared experts with a gate, dense layers anywhere; a window in some layers",
)
OLMOE_LIMITS = (
    *EXPERT_FORM, limits.NO_QKV_BIAS, limits.QK_NORM, limits.WIDTH_NORMS, limits.HEADS_OF_WIDTH, limits.NO_LATENT,
    limits.INPUT_NORMS, limits.NO_MULTIPLIERS, *NO_SHARED, limits.ALL_EXPERTS, limits.NO_MTP,
    limits.NO_CORRECTION_BIAS, limits.NO_WINDOW,
)  # fmt: skip
OLMOE = llama_like(
    name="OlmoeForCausalLM",
    model_type="olmoe",
    settings=(*VOCABULARY, *ATTENTION, *OUTPUT, *OLMO_EXPERTS, NO_ATTENTION_BIAS, NO_QKV_CLIP),
    defaults={
        **DEFAULTS,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "attention_bias": False,
        "clip_qkv": None,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
    },
    flags={**EXPERT_FLAGS, "qk_norm": True, "qk_norm_scope": "width"},
    limits=OLMOE_LIMITS,
    renames=QK_NORM_NAMES,
    absent=(_BIAS,),
    specific=(*QWEN3_MOE.specific, limits.WIDTH_NORMS),
    remark="norms of queries and keys over all heads, weights divided by their sum or not",
)
GRANITE_MOE_LIMITS = (
    *EXPERT_FORM, limits.NO_QKV_BIAS, limits.NO_QK_NORM, limits.HEAD_NORMS, limits.INPUT_NORMS, limits.NO_LATENT,
    *NO_SHARED, limits.ALL_EXPERTS, limits.DIVIDED_WEIGHTS, limits.NO_MTP, limits.NO_CORRECTION_BIAS,
    limits.NO_WINDOW,
)  # fmt: skip
GRANITE_MOE = llama_like(
    name="GraniteMoeForCausalLM",
    model_type="granitemoe",
    settings=(*VOCABULARY, *ATTENTION, *OUTPUT, *MIXTRAL_EXPERTS, NO_ATTENTION_BIAS, *MULTIPLIERS),
    defaults={**GRANITE_DEFAULTS, "num_experts_per_tok": 2},
    flags=EXPERT_FLAGS,
    limits=GRANITE_MOE_LIMITS,
    renames=((r"\.mlp\.gate\.weight$", ".block_sparse_moe.router.layer.weight"),),
    whole=(
        (r"^layers\.(\d+)\.moe\.experts\.gate_up$", r"model.layers.\1.block_sparse_moe.input_linear.weight"),
        (r"^layers\.(\d+)\.moe\.experts\.down$", r"model.layers.\1.block_sparse_moe.output_linear.weight"),
    ),
    absent=(_BIAS,),
    specific=(*ERNIE4_5_MOE.specific, limits.MULTIPLIERS),
    remark="a layer's experts in two tensors; factors on embeddings, attention scores, outputs of layers and logits",
)
GPT_OSS_LIMITS = (
    limits.SINKS, limits.GPT_OSS_BLOCK, *SAME_ROPE, limits.EXPERTS, limits.WHOLE_HEADS_ROTATED,
    limits.PLAIN_ROUTING, limits.ONE_EXPERT_SIZE, *PLAIN_BLOCK, limits.NO_QK_NORM, limits.NO_QKV_BIAS, *NO_SHARED,
    limits.ALL_EXPERTS, limits.DIVIDED_WEIGHTS, limits.NO_MTP, limits.NO_CORRECTION_BIAS,
)  # fmt: skip
GPT_OSS_YARN = {
    **{"rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "original_max_position_embeddings": 4096},
    **{"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
}
GPT_OSS = llama_like(
    name="GptOssForCausalLM",
    model_type="gpt_oss",
    settings=with_windows((*VOCABULARY, *ATTENTION, *OUTPUT, *MIXTRAL_EXPERTS, *CLAMPED), ALTERNATING_WINDOWS),
    defaults={
        **{**DEFAULTS, "rope_theta": 150000.0},
        "rope_parameters": GPT_OSS_YARN,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "sliding_window": 128,
        "attention_bias": True,
        "num_experts_per_tok": 4,
        "swiglu_limit": 7.0,
        "swiglu_alpha": 1.702,
    },
    flags={
        **EXPERT_FLAGS,
        "activation": "clamped_swiglu",
        "add_bias_linear": True,
        "attention_sinks": True,
        "moe_router_linear_bias": True,
    },
    limits=GPT_OSS_LIMITS,
    renames=((r"\.mlp\.gate\.(weight|bias)$", r".mlp.router.\1"),),
    whole=tuple(
        (rf"^layers\.(\d+)\.moe\.experts\.{part}{kind}$", rf"model.layers.\1.mlp.experts.{part}_proj{kind}")
        for part in ("gate_up", "down")
        for kind in ("", "_bias")
    ),
    inputs_first=True,
    absent=(_BIAS,),
    specific=(*ERNIE4_5_MOE.specific, limits.SINKS),
    remark="sinks, a window in some layers, clamped swiglu, biases everywhere; a layer's experts in one tensor of each "
    "kind, also in MXFP4",
)
LATENT_FLAGS = {**EXPERT_FLAGS, "multi_latent_attention": True, "attention_latent_norm_epsilon": 1e-6}
LEADING_AND_SHARED = (
    limits.SHARED_EXPERTS, limits.WHOLE_SHARED_EXPERTS, limits.NO_SHARED_GATE, limits.LEADING_DENSE,
)  # fmt: skip
LATENT_LIMITS = (
    limits.LATENT, limits.LATENT_EPSILON, limits.VARIETY, *SAME_ROPE, limits.EXPERTS, limits.INPUT_NORMS,
    limits.NO_MULTIPLIERS, limits.ONE_EXPERT_SIZE, *LEADING_AND_SHARED, limits.NO_QK_NORM, limits.HEAD_NORMS,
    limits.NO_QKV_BIAS, limits.NO_EXPERT_BIAS, limits.WHOLE_HEADS_ROTATED, limits.NO_WINDOW,
)  # fmt: skip
DEEPSEEK_DEFAULTS = {
    **DEFAULTS,
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
DEEPSEEK_V2_LIMITS = (
    *LATENT_LIMITS, limits.SOFTMAX_SCORES, limits.WEIGHTS_AS_THEY_ARE, limits.GROUPS_BY_ONE, limits.NO_MTP,
    limits.NO_CORRECTION_BIAS,
)  # fmt: skip
DEEPSEEK_V2 = PublishedArchitecture(
    name="DeepseekV2ForCausalLM",
    model_type="deepseek_v2",
    settings=(*VOCABULARY, DENSE_WIDTH, *LATENT_ATTENTION, *OUTPUT, *SOFTMAX_ROUTING),
    defaults={
        **DEEPSEEK_DEFAULTS,
        "max_position_embeddings": 2048,
        "n_shared_experts": 2,
        "first_k_dense_replace": 0,
        "routed_scaling_factor": 1.0,
        "n_group": None,
        "topk_group": None,
        "topk_method": "greedy",
        "norm_topk_prob": False,
    },
    flags={**LATENT_FLAGS, "moe_router_score_function": "softmax", "norm_topk_prob": "off"},
    limits=DEEPSEEK_V2_LIMITS,
    absent=(_BIAS,),
    tied=TIED,
    specific=(limits.LATENT,),
    remark="latent attention; softmax routing",
)
DEEPSEEK_V3 = PublishedArchitecture(
    name="DeepseekV3ForCausalLM",
    model_type="deepseek_v3",
    settings=(*VOCABULARY, DENSE_WIDTH, *LATENT_ATTENTION, INTERLEAVED, *OUTPUT, *SIGMOID_ROUTING, *NEXT_LAYERS),
    defaults={
        **DEEPSEEK_DEFAULTS,
        "max_position_embeddings": 4096,
        "rope_interleave": True,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 3,
        "routed_scaling_factor": 2.5,
        "n_group": 8,
        "topk_group": 4,
        "norm_topk_prob": True,
    },
    flags={**LATENT_FLAGS, "moe_router_score_function": "sigmoid", "mtp_block": LAYER_BLOCK},
    limits=(*LATENT_LIMITS, limits.SIGMOID_SCORES, limits.GROUPS_BY_TWO, limits.LAYER_MTP),
    copies=block_copies,
    renames=GATE_BIAS,
    vectors=(_BIAS,),
    fp32=(_BIAS,),
    tied=TIED,
    specific=(*DEEPSEEK_V2.specific, limits.SIGMOID_SCORES),
    remark="latent attention, sigmoid routing with a correction bias; also Kimi-K2 and Moonlight; multi-token "
    "prediction as layer `num_hidden_layers`",
)
GLM4_MOE_LIMITS = (
    limits.VARIETY, *SAME_ROPE, limits.EXPERTS, limits.NO_EXPERT_BIAS, limits.SIGMOID_SCORES, limits.ONE_EXPERT_SIZE,
    *PLAIN_BLOCK, limits.GROUPS_BY_TWO, *LEADING_AND_SHARED, limits.LAYER_MTP, limits.NO_WINDOW,
)  # fmt: skip
GLM4_MOE = llama_like(
    name="Glm4MoeForCausalLM",
    model_type="glm4_moe",
    settings=(
        *VOCABULARY,
        DENSE_WIDTH,
        *attention_settings(0.5),
        *OUTPUT,
        Setting("attention_bias", true_or_false, "add_qkv_bias"),
        Setting("use_qk_norm", true_or_false, "qk_norm"),
        *SIGMOID_ROUTING,
        *NEXT_LAYERS,
    ),
    defaults={
        **DEFAULTS,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "attention_bias": False,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "use_qk_norm": False,
    },
    flags={**EXPERT_FLAGS, "moe_router_score_function": "sigmoid", "mtp_block": LAYER_BLOCK},
    copies=block_copies,
    limits=GLM4_MOE_LIMITS,
    renames=(*QK_NORM_NAMES, *GATE_BIAS),
    vectors=(_BIAS,),
    fp32=(_BIAS,),
    specific=(*ERNIE4_5_MOE.specific, limits.SIGMOID_SCORES),
    remark="half of each head rotated, sigmoid routing with a correction bias; multi-token prediction as layer "
    "`num_hidden_layers`",
)
OWN = (
    GPT_OSS, DEEPSEEK_V3, DEEPSEEK_V2, GLM4_MOE, OLMOE, QWEN3_MOE, GRANITE_MOE, QWEN2_MOE, MIXTRAL,
    ERNIE4_5_MOE, GEMMA3, SMOLLM3, OLMO3, OLMO2, QWEN2, QWEN3, GRANITE, MISTRAL, ERNIE4_5,
)  # fmt: skip
"""Classes that a model of megapar's own is saved as: as the first of them whose ``specific`` limits it is within."""
ARCHITECTURES = tuple(sorted((*OWN, LLAMA), key=lambda architecture: architecture.name))


def settings_of(sizes: DecoderSizes) -> Settings:
    """Return a decoder's sizes by the names of the flags. --moe-router-bias-update-rate is not a size, so it is 0."""
    moe = sizes.moe if sizes.moe_layers else None
    settings: dict[str, Any] = {
        **vars(sizes),
        **flags_of_scaling(sizes.rope_scaling),
        "untie_embeddings_and_output_weights": not sizes.tie_embeddings,
        "moe_layer_ffn_hidden_sizes": tuple(sizes.moe_widths),
        "moe_layer_freq": to_text(sizes.moe_pattern),
        "window_size": window_text(sizes.window_size),
        "window_rope": rope_text(sizes.window_rope),
        "moe_router_bias_update_rate": 0.0,
    }
    if moe is None:
        none = {"num_experts": 0, "moe_router_score_function": "softmax", "moe_router_linear_bias": False}
        return settings | none
    return settings | {
        "add_bias_linear": sizes.add_bias_linear or moe.add_bias,
        "num_experts": moe.num_experts,
        "moe_ffn_hidden_size": moe.ffn_hidden_size,
        "moe_shared_experts": 0 if moe.shared_ffn else moe.shared_experts,
        "moe_shared_expert_intermediate_size": moe.shared_ffn,
        "moe_shared_expert_gate": moe.shared_gate,
        "moe_router_score_function": moe.score,
        "moe_router_num_groups": moe.groups,
        "moe_router_topk_scaling_factor": moe.scaling,
        "moe_router_topk": moe.topk,
        "moe_router_group_topk": moe.group_topk,
        "moe_router_group_score_topk": moe.group_score_topk,
        "norm_topk_prob": "on" if moe.renormalizes else "off",
        "moe_router_linear_bias": moe.linear_bias,
    }


PUBLISHED = PublishedForms(architectures=ARCHITECTURES, settings=settings_of, own=partial(first_within, OWN))
