"""The table: a row for every published architecture, with a small configuration of sizes that nothing else has.

An architecture is added by its row. Where two settings of a class exclude each other, it has a row for each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Row:
    """A published class with a configuration.

    Attributes:
        name: Name of the row.
        architecture: Name of the class.
        settings: Arguments of its configuration class.
        refused: Settings that megapar does not support; the refusal names the first key of each.
        initialized: Beginnings of the names of what the class lacks and a run adds: tensors and keys of config.json.
        draws_noise: The class draws noise while it trains, so that it is compared in evaluation.
    """

    name: str
    architecture: str
    settings: Mapping[str, Any]
    refused: tuple[Mapping[str, Any], ...]
    initialized: tuple[str, ...] = ()
    draws_noise: bool = False

    @property
    def encoder(self) -> bool:
        """Whether it sees later tokens, too."""
        return self.architecture.startswith("ErnieFor")

    @property
    def kind(self) -> str:
        """The script that trains it, ``pretrain_KIND.py``."""
        return "ernie" if self.encoder else "moe"


# Weights are large, so that no layer is nearly the identity; multiples of 8, as grouped products in bf16 need them.
ENCODER = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 2,  # these three are those of a run's random tokens, whose export names them
    "eos_token_id": 3,
}
DECODER = {**ENCODER, "num_key_value_heads": 2}
HEAD = {"head_dim": 12}  # so that heads together are wider than the hidden states
EXPERTS = {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
WINDOW = {"sliding_window": 3, "use_sliding_window": True}
ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention"]
LLAMA3 = {
    **{"rope_type": "llama3", "rope_theta": 50.0, "factor": 4.0, "original_max_position_embeddings": 16},
    **{"low_freq_factor": 1.0, "high_freq_factor": 4.0},
}
LINEAR = {"rope_type": "linear", "rope_theta": 50.0, "factor": 4.0}
YARN = {
    **{"rope_type": "yarn", "rope_theta": 50.0, "factor": 4.0, "original_max_position_embeddings": 16},
    **{"beta_fast": 2.0, "beta_slow": 0.5},
}
BY_KIND = {"full_attention": YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 30.0}}
MSCALES = {"mscale": 0.7, "mscale_all_dim": 0.9}
MULTIPLIERS = {
    **{"embedding_multiplier": 3.0, "attention_multiplier": 0.125, "residual_multiplier": 0.75, "logits_scaling": 2.5},
}
LATENT = {"q_lora_rank": 20, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 12}
DEEPSEEK = {
    **{"n_routed_experts": 8, "num_experts_per_tok": 2, "first_k_dense_replace": 1, "moe_intermediate_size": 24},
    "tie_word_embeddings": False,
}
ENCODER_ONLY = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "type_vocab_size": 4}
ROWS = (
    Row(
        "Ernie4_5",
        "Ernie4_5ForCausalLM",
        {**DECODER, **HEAD, "use_bias": True, "rms_norm_eps": 1e-3, "rope_theta": 50.0, "tie_word_embeddings": False},
        refused=({"hidden_act": "gelu"},),
    ),
    Row(
        "Ernie4_5_Moe",
        "Ernie4_5_MoeForCausalLM",
        {
            **DECODER,
            **{"moe_num_experts": 7, "moe_k": 3, "moe_intermediate_size": 24, "moe_num_shared_experts": 2},
            **{"moe_layer_start_index": 1, "use_bias": False, "tie_word_embeddings": True},
        },
        refused=({"moe_norm_min": 0.5}, {"use_bias": True}),
    ),
    Row(
        "Ernie4_5_Moe, every second layer",
        "Ernie4_5_MoeForCausalLM",
        {
            **{**DECODER, "num_hidden_layers": 4, "moe_layer_interval": 2, "moe_layer_start_index": 0},
            **{"moe_num_experts": 7, "moe_k": 3, "moe_intermediate_size": 24, "moe_num_shared_experts": 0},
        },
        refused=({"use_bias": True},),
    ),
    Row(
        "Llama",
        "LlamaForCausalLM",
        {**DECODER, "rms_norm_eps": 1e-3, "tie_word_embeddings": True},
        refused=({"attention_bias": True}, {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1.0}}),
    ),
    Row(
        "Llama, biases",
        "LlamaForCausalLM",
        {**DECODER, **HEAD, "attention_bias": True, "mlp_bias": True},
        refused=({"attention_bias": False},),
    ),
    Row(
        "Mistral",
        "MistralForCausalLM",
        {**DECODER, **HEAD, "sliding_window": None},
        refused=({"sliding_window": 0}, {"layer_types": ["sliding_attention"] * 3}),
    ),
    Row(
        "Mistral, window",
        "MistralForCausalLM",
        {**DECODER, **HEAD, "sliding_window": 2},
        refused=({"layer_types": ["full_attention"] * 3},),
    ),
    Row(
        "Mixtral",
        "MixtralForCausalLM",
        {**DECODER, **HEAD, "num_local_experts": 7, "num_experts_per_tok": 3},
        refused=({"hidden_act": "gelu"},),
    ),
    Row(
        "Mixtral, window",
        "MixtralForCausalLM",
        {**DECODER, **HEAD, "num_local_experts": 7, "num_experts_per_tok": 3, "sliding_window": 3},
        refused=({"sliding_window": 0},),
    ),
    Row("Qwen2", "Qwen2ForCausalLM", {**DECODER, "tie_word_embeddings": True}, refused=({"hidden_act": "gelu"},)),
    Row(
        "Qwen2, window from a layer on",
        "Qwen2ForCausalLM",
        {**DECODER, "use_sliding_window": True, "sliding_window": 2, "max_window_layers": 1},
        refused=({"layer_types": ["chunked_attention"] * 3}, {"use_sliding_window": True, "sliding_window": None}),
    ),
    Row("Qwen3", "Qwen3ForCausalLM", {**DECODER, **HEAD}, refused=({"attention_bias": True},)),
    Row(
        "Qwen3, window in listed layers",
        "Qwen3ForCausalLM",
        {**DECODER, **HEAD, "use_sliding_window": True, "sliding_window": 2, "layer_types": ALTERNATING},
        refused=({"layer_types": ALTERNATING[:2]}, {"layer_types": ALTERNATING, "use_sliding_window": False}),
    ),
    Row(
        "Olmo3",
        "Olmo3ForCausalLM",
        {**DECODER, "sliding_window": 3, "layer_types": ALTERNATING, "rope_parameters": BY_KIND},
        refused=(
            {"rope_parameters": LINEAR},
            {"layer_types": ["chunked_attention"] * 3},
            {"sliding_window": None},
            {"attention_bias": True},
        ),
    ),
    Row(
        "Gemma3",
        "Gemma3ForCausalLM",
        {
            **{**DECODER, **HEAD, "sliding_window": 3, "layer_types": ALTERNATING, "query_pre_attn_scalar": 20},
            "rope_parameters": {"full_attention": LINEAR, "sliding_attention": BY_KIND["sliding_attention"]},
        },
        refused=(
            {"final_logit_softcapping": 30.0},
            {"attn_logit_softcapping": 50.0},
            {"use_bidirectional_attention": True},
            {"hidden_activation": "gelu"},
        ),
    ),
    Row(
        "Gemma3, every second layer full",
        "Gemma3ForCausalLM",
        {**DECODER, **HEAD, "sliding_window_pattern": 2, "sliding_window": 4, "tie_word_embeddings": False},
        refused=({"attention_bias": True},),
    ),
    Row(
        "SmolLM3",
        "SmolLM3ForCausalLM",
        {**DECODER, "no_rope_layers": [1, 0, 1], "rope_parameters": YARN, "tie_word_embeddings": True},
        refused=({"no_rope_layers": [1, 0]}, {"no_rope_layers": [1, 2, 0]}, {"attention_bias": True}),
    ),
    Row(
        "SmolLM3, window without rope",
        "SmolLM3ForCausalLM",
        {**DECODER, "no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 3},
        refused=({"use_sliding_window": False}, {"sliding_window": None}),
    ),
    Row(
        "Qwen3Moe",
        "Qwen3MoeForCausalLM",
        {**DECODER, **HEAD, **EXPERTS, "norm_topk_prob": True, "mlp_only_layers": [0]},
        refused=({"attention_bias": True}, {"num_experts_per_tok": 0}),
    ),
    Row(
        "Llama, llama3 rope",
        "LlamaForCausalLM",
        {**DECODER, **HEAD, "rope_parameters": LLAMA3},
        refused=({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 50.0, "factor": 4.0}},),
    ),
    Row(
        "Mistral, linear rope",
        "MistralForCausalLM",
        {**DECODER, "sliding_window": None, "rope_parameters": LINEAR},
        refused=({"hidden_act": "gelu"},),
    ),
    Row(
        "Qwen3Moe, yarn rope",
        "Qwen3MoeForCausalLM",
        {**DECODER, **HEAD, **EXPERTS, "norm_topk_prob": True, "rope_parameters": YARN},
        refused=({"attention_bias": True},),
    ),
    Row(
        "Granite",
        "GraniteForCausalLM",
        {**DECODER, **MULTIPLIERS, "tie_word_embeddings": True},
        refused=({"hidden_act": "gelu"}, {"attention_bias": True}),
    ),
    Row("Olmo2", "Olmo2ForCausalLM", DECODER, refused=({"attention_bias": True}, {"hidden_act": "gelu"})),
    Row(
        "DeepseekV2",
        "DeepseekV2ForCausalLM",
        {
            **{**DECODER, **LATENT, **DEEPSEEK, "num_key_value_heads": 6, "topk_method": "greedy"},
            **{"n_group": 1, "topk_group": 1, "n_shared_experts": 2, "routed_scaling_factor": 1.5},
        },
        refused=({"attention_bias": True}, {"hidden_act": "gelu"}),
    ),
    Row(
        "DeepseekV2, groups, no query latent",
        "DeepseekV2ForCausalLM",
        {
            **{**DECODER, **LATENT, **DEEPSEEK, "num_key_value_heads": 6, "topk_method": "group_limited_greedy"},
            **{"n_group": 4, "topk_group": 2, "n_shared_experts": 1, "q_lora_rank": None, "norm_topk_prob": False},
        },
        refused=({"attention_bias": True},),
    ),
    Row(
        "DeepseekV3",
        "DeepseekV3ForCausalLM",
        {
            **{**DECODER, **LATENT, **DEEPSEEK, "num_key_value_heads": 6, "n_group": 4, "topk_group": 2},
            **{
                "n_shared_experts": 1,
                "num_mtp_layers": 0,
                "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.9},
            },
        },
        refused=({"attention_bias": True}, {"hidden_act": "gelu"}),
    ),
    Row(
        "DeepseekV3, no groups, no query latent",
        "DeepseekV3ForCausalLM",
        {
            **{**DECODER, **LATENT, **DEEPSEEK, "num_key_value_heads": 6, "n_group": 1, "topk_group": 1},
            **{"n_shared_experts": 2, "num_mtp_layers": 0, "q_lora_rank": None},
        },
        refused=({"rope_interleave": False},),
    ),
    Row(
        "Glm4Moe",
        "Glm4MoeForCausalLM",
        {
            **{**DECODER, **HEAD, "n_routed_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 24},
            **{"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "use_qk_norm": True, "attention_bias": True},
            **{"num_mtp_layers": 0, "routed_scaling_factor": 2.5},
        },
        refused=({"hidden_act": "gelu"},),
    ),
    Row(
        "Olmoe",
        "OlmoeForCausalLM",
        {**DECODER, "num_experts": 7, "num_experts_per_tok": 3, "norm_topk_prob": False},
        refused=({"clip_qkv": 8.0}, {"attention_bias": True}),
    ),
    Row(
        "Olmoe, weights divided",
        "OlmoeForCausalLM",
        {**DECODER, "num_experts": 7, "num_experts_per_tok": 3, "norm_topk_prob": True},
        refused=({"hidden_act": "gelu"},),
    ),
    Row(
        "Qwen2Moe",
        "Qwen2MoeForCausalLM",
        {
            **{**DECODER, **EXPERTS, "shared_expert_intermediate_size": 40, "norm_topk_prob": False},
            **{"decoder_sparse_step": 2, "mlp_only_layers": [0], "num_hidden_layers": 4},
        },
        refused=({"layer_types": ALTERNATING}, {"hidden_act": "gelu"}),
    ),
    Row(
        "Qwen2Moe, window in every second layer",
        "Qwen2MoeForCausalLM",
        {**DECODER, **EXPERTS, **WINDOW, "shared_expert_intermediate_size": 40, "max_window_layers": 2},
        refused=({"use_sliding_window": True, "sliding_window": 0},),
    ),
    Row(
        "Qwen3Moe, window",
        "Qwen3MoeForCausalLM",
        {**DECODER, **HEAD, **EXPERTS, **WINDOW, "norm_topk_prob": True},
        refused=({"layer_types": ["full_attention"] * 3},),
    ),
    Row(
        "GraniteMoe",
        "GraniteMoeForCausalLM",
        {**DECODER, **MULTIPLIERS, "num_local_experts": 7, "num_experts_per_tok": 3, "tie_word_embeddings": True},
        refused=({"hidden_act": "gelu"}, {"attention_bias": True}),
    ),
    Row(
        "GptOss",
        "GptOssForCausalLM",
        {
            **{**DECODER, **HEAD, "num_local_experts": 7, "num_experts_per_tok": 3, "sliding_window": 2},
            "rope_parameters": {**YARN, "truncate": False},
        },
        refused=({"attention_bias": False}, {"swiglu_limit": 6.0}, {"layer_types": ["chunked_attention"] * 3}),
    ),
    Row(
        "GptOss, no window",
        "GptOssForCausalLM",
        {
            **{**DECODER, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 1, "tie_word_embeddings": True},
            **{"layer_types": ["full_attention"] * 3, "rms_norm_eps": 1e-3},
        },
        refused=({"swiglu_alpha": 1.0}, {"sliding_window": None}),
    ),
    Row(
        "Mixtral, one choice",
        "MixtralForCausalLM",
        {**DECODER, **HEAD, "num_local_experts": 7, "num_experts_per_tok": 1, "sliding_window": None},
        refused=({"sliding_window": 0},),
    ),
    Row(
        "Ernie, pretraining",
        "ErnieForPreTraining",
        {**ENCODER, **ENCODER_ONLY, "task_type_vocab_size": 3, "use_task_id": True},
        refused=({"is_decoder": True}, {"hidden_act": "relu"}),
    ),
    Row(
        "Ernie, masked LM",
        "ErnieForMaskedLM",
        {**ENCODER, **ENCODER_ONLY, "use_task_id": True},
        refused=({"add_cross_attention": True},),
        initialized=("architectures", "cls.seq_relationship", "ernie.pooler"),
    ),
)
