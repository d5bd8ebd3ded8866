"""What published classes take for a setting that their config.json leaves out; the values of transformers' classes.

Sizes (layers, widths, heads, vocabulary, experts) are not here: a folder that leaves one out is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_ENCODER: Mapping[str, Any] = {
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "task_type_vocab_size": 3,
    "use_task_id": False,
    "layer_norm_eps": 1e-12,
    "is_decoder": False,
    "add_cross_attention": False,
    "tie_word_embeddings": True,
}
_ERNIE4_5: Mapping[str, Any] = {
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "use_bias": False,
}
CLASS_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "ErnieForPreTraining": _ENCODER,
    "ErnieForMaskedLM": _ENCODER,
    "Ernie4_5ForCausalLM": {**_ERNIE4_5, "num_key_value_heads": 2, "head_dim": 128},
    "Ernie4_5_MoeForCausalLM": {
        **_ERNIE4_5,
        "num_key_value_heads": 4,
        "moe_k": 6,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
        "moe_layer_interval": 1,
        "moe_norm_min": 1e-12,
    },
    "MixtralForCausalLM": {
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
    "Qwen3MoeForCausalLM": {
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
}
