"""Settings of a decoder that some published classes do not support. Standard library only.

The rules that refuse ``--save-hf`` are made from these limits. The export and ``megapar convert`` check them again
against the sizes of the model.

Tested in ``tests/model/hugging_face/test_save.py``.
"""

from __future__ import annotations

from megapar.schema.published import Limit

VARIETY = Limit(
    id="hf-decoder-variety",
    reads=("normalization", "position_embedding_type", "activation"),
    within=lambda f: (f.normalization, f.position_embedding_type, f.activation) == ("rmsnorm", "rope", "swiglu"),
    message="a decoder's Hugging Face form has rmsnorm, rotary positions and swiglu",
    instead="Or train with these three.",
    failing="--normalization layernorm",
)
NO_QK_NORM = Limit(
    id="hf-qk-norm",
    reads=("qk_norm",),
    within=lambda f: not f.qk_norm,
    message="this class has no norms of queries and keys; Qwen3 and Qwen3Moe have them",
    instead="Or train without --qk-norm, or without --add-qkv-bias: Qwen3 has no biases.",
    passing="--qk-norm",
    failing="--qk-norm --add-qkv-bias --num-experts 0",
)
QK_NORM = Limit(
    id="hf-qk-norm-always",
    reads=("qk_norm",),
    within=lambda f: f.qk_norm,
    message="this class has norms of queries and keys",
)
NO_QKV_BIAS = Limit(
    id="hf-qkv-bias",
    reads=("add_qkv_bias",),
    within=lambda f: not f.add_qkv_bias,
    message="this class has no biases of queries, keys and values alone; Qwen2 has them, and has no experts",
    instead="Or train without --add-qkv-bias.",
    passing="--add-qkv-bias --num-experts 0",
    failing="--add-qkv-bias",
)
QKV_BIAS = Limit(
    id="hf-qkv-bias-always",
    reads=("add_qkv_bias",),
    within=lambda f: f.add_qkv_bias,
    message="this class has biases of queries, keys and values",
)
NO_BIAS = Limit(
    id="hf-bias",
    reads=("add_bias_linear",),
    within=lambda f: not f.add_bias_linear,
    message="this class has no biases in all linear layers",
    instead="Or train without --add-bias-linear, or without --qk-norm: Ernie4_5 has biases.",
    passing="--add-bias-linear --num-experts 0",
    failing="--add-bias-linear --qk-norm --num-experts 0",
)
DENSE = Limit(
    id="hf-dense",
    reads=("num_experts",),
    within=lambda f: f.num_experts == 0,
    message="this class has no experts",
)
EXPERTS = Limit(
    id="hf-experts",
    reads=("num_experts",),
    within=lambda f: f.num_experts > 0,
    message="this class has experts",
)
NO_EXPERT_BIAS = Limit(
    id="hf-moe-bias",
    reads=("add_bias_linear",),
    within=lambda f: not f.add_bias_linear,
    message="the experts of this class have no biases",
    instead="Or train without --add-bias-linear.",
    passing="--add-bias-linear --num-experts 0",
    failing="--add-bias-linear",
)
NO_SHARED_EXPERTS = Limit(
    id="hf-shared-experts",
    reads=("moe_shared_experts",),
    within=lambda f: f.moe_shared_experts == 0,
    message="this class has no shared experts",
    instead="Or train without --moe-shared-experts, or without --qk-norm: Ernie4_5_Moe has shared experts.",
    passing="--moe-shared-experts 1",
    failing="--qk-norm --moe-shared-experts 1",
)
NO_DENSE_LEAD = Limit(
    id="hf-dense-lead",
    reads=("first_k_dense",),
    within=lambda f: f.first_k_dense == 0,
    message="every layer of this class has experts",
    instead="Or train with --first-k-dense 0.",
)
PLAIN_ROUTING = Limit(
    id="hf-moe-routing",
    reads=("moe_router_score_function", "moe_router_num_groups", "moe_router_topk_scaling_factor"),
    within=lambda f: (
        (f.moe_router_score_function, f.moe_router_num_groups, f.moe_router_topk_scaling_factor) == ("softmax", 1, 1.0)
    ),
    message="the routing of this class is a plain softmax: no sigmoid, no groups, no factor on the weights",
    instead="Or train with these.",
    passing="--mtp-depth 1",
    failing="--moe-router-score-function sigmoid",
)
ONE_EXPERT_SIZE = Limit(
    id="hf-moe-widths",
    reads=("moe_layer_ffn_hidden_sizes",),
    within=lambda f: not f.moe_layer_ffn_hidden_sizes,
    message="the experts of this class have the same size in all layers",
    instead="Or train with --moe-ffn-hidden-size in place of --moe-layer-ffn-hidden-sizes.",
    failing="--num-layers 2 --moe-layer-ffn-hidden-sizes 128 64",
)
DIVIDED_WEIGHTS = Limit(
    id="hf-moe-topk",
    reads=("moe_router_topk",),
    within=lambda f: f.moe_router_topk > 1,
    message="this class divides the weight of a single choice by itself, but here it is the raw probability",
    instead="Or train with --moe-router-topk 2.",
    passing="--moe-router-topk 2",
    failing="--moe-router-topk 1",
)
NO_MTP = Limit(
    id="hf-mtp",
    reads=("mtp_depth",),
    within=lambda f: f.mtp_depth == 0,
    message="this class has no multi-token prediction block",
    way="Export it without its block: --load RUN --finetune --mtp-depth 0 --train-iters 0 --save-hf OUT.",
    passing="--mtp-depth 1",
    failing="--qk-norm --mtp-depth 1",
)
NO_CORRECTION_BIAS = Limit(
    id="hf-router-bias",
    reads=("moe_router_bias_update_rate",),
    within=lambda f: f.moe_router_bias_update_rate == 0,
    message="this class has no place for the correction bias that --moe-router-bias-update-rate updates",
    way=(
        "Without --qk-norm, megapar convert megapar-to-hf writes them as Ernie4_5_Moe, which has the bias; no "
        "known class has both."
    ),
    passing="--moe-router-bias-update-rate 0.001",
    failing="--qk-norm --moe-router-bias-update-rate 0.001",
)
