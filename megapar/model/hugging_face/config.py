"""config.json of a model of ours, and what of it no published class can be."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from megapar.model.decoder.sizes import DecoderSizes
from megapar.model.ernie.sizes import ErnieSizes
from megapar.model.ernie3.sizes import Ernie3Sizes
from megapar.rules.exports import ENCODER, MASKED, class_of, exceeded


def not_exportable(sizes: DecoderSizes | ErnieSizes, name: str | None = None) -> str | None:
    """Why the class called ``name``, by default the model's own one, cannot be this model; None where it can.

    The table is ``rules.exports``, of which the command line's rows are made, too.
    """
    if isinstance(sizes, Ernie3Sizes):
        return "ERNIE 3.0 has no Hugging Face form"
    if isinstance(sizes, ErnieSizes):
        if sizes.sop == (name == MASKED):
            has = "no sentence-order head and this model has one"
            return f"{name or ENCODER} has {has if sizes.sop else 'a sentence-order head and this model has none'}"
        return None
    own = class_of(experts=bool(sizes.moe_layers), qk_norm=sizes.qk_norm)
    name = name or own
    if not (reasons := exceeded(name, _settings(sizes))):
        return None
    other = "No class known here can be it"
    if name != own and not exceeded(own, _settings(sizes)):
        other = f"{own} can be it, which is written where no published folder is kept beside the checkpoint"
    return f"{name} cannot be this model: {'; '.join(reasons)}. {other}; the checkpoint keeps every weight"


def _settings(sizes: DecoderSizes) -> SimpleNamespace:
    """By the names of the flags that make these sizes; --moe-router-bias-update-rate is no size."""
    moe = sizes.moe if sizes.moe_layers else None
    return SimpleNamespace(
        normalization=sizes.normalization,
        position_embedding_type=sizes.position_embedding_type,
        activation=sizes.activation,
        qk_norm=sizes.qk_norm,
        add_bias_linear=sizes.add_bias_linear or (moe is not None and moe.add_bias),
        first_k_dense=sizes.first_k_dense,
        moe_shared_experts=0 if moe is None else moe.shared_experts,
        moe_router_score_function="softmax" if moe is None else moe.score,
        moe_router_num_groups=1 if moe is None else moe.groups,
        moe_router_topk_scaling_factor=1.0 if moe is None else moe.scaling,
        moe_layer_ffn_hidden_sizes=tuple(sizes.moe_widths),
        moe_router_topk=2 if moe is None else moe.topk,
        mtp_depth=sizes.mtp_depth,
        moe_router_bias_update_rate=0.0,
    )


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
