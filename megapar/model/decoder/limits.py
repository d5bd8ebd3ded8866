"""Settings of a decoder that some published classes do not support.

The rules that refuse ``--save-hf`` are made from these limits. The export and ``megapar convert`` check them again
against the sizes of the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megapar.model.decoder.layer_pattern import ALL, ernie_interval, flags_of, layers_of, pattern_or_all
from megapar.model.decoder.layer_ropes import SAME, rope_or_same, roped_or_all
from megapar.model.decoder.windows import window_or_none, windowed_or_all
from megapar.model.sizes import GEGLU
from megapar.schema.published import Limit

_GLM = "--moe-router-score-function sigmoid --moe-shared-experts 1"
_V2 = "--multi-latent-attention --attention-latent-norm-epsilon 1e-6 --moe-shared-experts 1 --no-norm-topk-prob"
_GEMMA = "--num-experts 0 --activation geglu --norm-placement both --apply-layernorm-1p --qk-norm --scale-embedding"
_LIMITED = "--num-experts 16 --moe-router-topk 3 --moe-router-num-groups 4 --moe-router-group-topk 1"
_WITHOUT_BLOCK = "Export it without its block: --load RUN --finetune --mtp-depth 0 --train-iters 0 --save-hf OUT."
_GROUPS = (
    "moe_router_num_groups", "moe_router_group_topk", "moe_router_group_score_topk", "moe_router_topk",
)  # fmt: skip


def _scored(f: Any) -> int:
    """Return how many experts of a group its score sums; 0 if choices may come from all groups."""
    if f.moe_router_group_topk == f.moe_router_num_groups:
        return 0
    return int(f.moe_router_group_score_topk or f.moe_router_topk // f.moe_router_group_topk)


def _fixed(sizes: Mapping[str, object], **more: Any) -> Limit:
    """Return the limit of classes that need these values of some sizes."""

    def within(f: Any) -> bool:
        return all(getattr(f, name) == value for name, value in sizes.items())

    return Limit(reads=tuple(sizes), within=within, **more)


def _opposite(limit: Limit, name: str, message: str) -> Limit:
    """Return the limit of classes that need what the given one excludes."""
    return Limit(id=name, reads=limit.reads, within=lambda f: not limit.within(f), message=message)


_POSITIONS_AND_NORM = {"normalization": "rmsnorm", "position_embedding_type": "rope"}
_OWN_WEIGHTS = {"apply_layernorm_1p": False, "scale_embedding": False}
_PLAIN_PARTS = {**_OWN_WEIGHTS, "activation": "swiglu", "attention_sinks": False, "moe_router_linear_bias": False}
GEMMA_FLAGS = {
    **{"activation": GEGLU, "apply_layernorm_1p": True, "scale_embedding": True, "norm_placement": "both"},
    "qk_norm": True,
}
"""Flags of Gemma 3 that differ from those of other classes."""
GEGLU_GATE = _fixed(
    id="hf-geglu", sizes={"activation": GEGLU}, message="this class has a gate of gelu, approximated by tanh"
)
GEMMA = _fixed(
    id="hf-gemma",
    sizes={
        **{**_POSITIONS_AND_NORM, **GEMMA_FLAGS, "qk_norm_scope": "head", "attention_sinks": False},
        **{"embedding_multiplier": 1.0, "residual_multiplier": 1.0, "logits_scaling": 1.0},
    },
    message="this class has geglu, norms of 1 + weight on inputs and outputs and on queries and keys, the embedding "
    "times sqrt(hidden-size), and no other factors",
    instead="Or train with --norm-placement both, --apply-layernorm-1p, --qk-norm and --scale-embedding.",
    passing=_GEMMA,
    failing="--num-experts 0 --activation geglu --qk-norm",
)
QUERY_SCALAR = Limit(
    id="hf-query-scalar",
    reads=("softmax_scale",),
    within=lambda f: (
        not f.softmax_scale or (1e-9 < f.softmax_scale <= 1 and round(f.softmax_scale**-2) ** -0.5 == f.softmax_scale)
    ),
    message="the factor on the scores of this class is 1 / sqrt(a whole number)",
    instead="Or train with --softmax-scale 0.0625, which is 1 / sqrt(256).",
    passing=f"{_GEMMA} --softmax-scale 0.0625",
    failing=f"{_GEMMA} --softmax-scale 0.06",
)
HEADS_DIVIDE = Limit(
    id="hf-heads-divide",
    reads=("hidden_size", "num_attention_heads"),
    within=lambda f: f.hidden_size % f.num_attention_heads == 0,
    message="--num-attention-heads of this class divides --hidden-size",
    instead="Or train with heads that do.",
    passing=f"{_GEMMA} --hidden-size 96 --num-attention-heads 6 --head-dim 8",
    failing=f"{_GEMMA} --hidden-size 100 --num-attention-heads 6 --head-dim 8",
)
VARIETY = _fixed(
    id="hf-decoder-variety",
    sizes={**_POSITIONS_AND_NORM, **_PLAIN_PARTS},
    message="a decoder's Hugging Face form has rmsnorm, rotary positions and swiglu; only GptOss has sinks, a bias on "
    "the router's logits and clamped_swiglu, all of them, and only Gemma3 geglu, 1 + weight and --scale-embedding",
    instead="Or train with these, and without those.",
    failing="--normalization layernorm",
)
SINKS = _fixed(
    id="hf-sinks", sizes={"attention_sinks": True}, message="every query head of this class has a sink in its softmax"
)
GPT_OSS_BLOCK = _fixed(
    id="hf-gpt-oss",
    sizes={
        **{**_POSITIONS_AND_NORM, **_OWN_WEIGHTS, "activation": "clamped_swiglu"},
        **{"add_bias_linear": True, "moe_router_linear_bias": True},
    },
    message="a class with sinks (GptOss) has rmsnorm, rotary positions, clamped_swiglu, and biases in all linear "
    "layers and on the router's logits",
    instead="Or train with these.",
    passing="--attention-sinks --activation clamped_swiglu --add-bias-linear --moe-router-linear-bias",
    failing="--attention-sinks",
)
WHOLE_HEADS_ROTATED = _fixed(
    id="hf-rotary-percent",
    sizes={"rotary_percent": 1},
    message="this class rotates all features of a head",
    instead="Or train with --rotary-percent 1.",
    passing="--rope-scaling-type yarn",
    failing="--rotary-percent 0.5",
)
NO_QK_NORM = _fixed(
    id="hf-qk-norm",
    sizes={"qk_norm": False},
    message="this class has no norms of queries and keys; Qwen3 and Qwen3Moe have them",
    instead="Or train without --qk-norm, or without --add-qkv-bias: Qwen3 has no biases.",
    passing="--qk-norm",
    failing="--qk-norm --add-qkv-bias --num-experts 0",
)
QK_NORM = _opposite(NO_QK_NORM, "hf-qk-norm-always", "this class has norms of queries and keys")
HEAD_NORMS = _fixed(
    id="hf-qk-norm-scope",
    sizes={"qk_norm_scope": "head"},
    message="this class has no norms of queries or keys over all heads; Olmo2 has them, with norms of outputs",
    instead="Or train with --qk-norm-scope head.",
    passing="--num-experts 0 --qk-norm --qk-norm-scope width --norm-placement output",
    failing="--num-experts 0 --qk-norm --qk-norm-scope width",
)
WIDTH_NORMS = _opposite(HEAD_NORMS, "hf-qk-norm-width", "the norms of queries and keys of this class see all heads")
INPUT_NORMS = _fixed(
    id="hf-norm-placement",
    sizes={"norm_placement": "input"},
    message="this class has its norms before attention and MLP; Olmo2 has them after, with norms of queries and keys",
    instead="Or train with --norm-placement input.",
    passing="--num-experts 0 --qk-norm --qk-norm-scope width --norm-placement output",
    failing="--num-experts 0 --norm-placement output",
)
OUTPUT_NORMS = _fixed(
    id="hf-norm-placement-output",
    sizes={"norm_placement": "output"},
    message="this class has its norms after attention and MLP",
)
NO_MULTIPLIERS = _fixed(
    id="hf-multipliers",
    sizes={"embedding_multiplier": 1.0, "residual_multiplier": 1.0, "softmax_scale": 0.0, "logits_scaling": 1.0},
    message="this class has no factors on embeddings, outputs of layers, attention scores and logits; Granite has them",
    instead="Or train without them, or without --qk-norm.",
    passing="--num-experts 0 --logits-scaling 8",
    failing="--num-experts 0 --qk-norm --logits-scaling 8",
)
MULTIPLIERS = _opposite(
    NO_MULTIPLIERS,
    "hf-multipliers-always",
    "this class has factors on embeddings, outputs of layers, attention scores or logits",
)
NO_QKV_BIAS = _fixed(
    id="hf-qkv-bias",
    sizes={"add_qkv_bias": False},
    message="this class has no biases of queries, keys and values alone; Qwen2 has them, and Qwen2Moe",
    instead="Or train without --add-qkv-bias.",
    passing="--add-qkv-bias --num-experts 0",
    failing="--add-qkv-bias",
)
QKV_BIAS = _opposite(NO_QKV_BIAS, "hf-qkv-bias-always", "this class has biases of queries, keys and values")
NO_BIAS = _fixed(
    id="hf-bias",
    sizes={"add_bias_linear": False},
    message="this class has no biases in all linear layers",
    instead="Or train without --add-bias-linear, or without --qk-norm: Ernie4_5 has biases.",
    passing="--add-bias-linear --num-experts 0",
    failing="--add-bias-linear --qk-norm --num-experts 0",
)
NO_WINDOW = Limit(
    id="hf-window",
    reads=("window_size", "window_attn_skip_freq"),
    within=lambda f: window_or_none(f.window_size) == 0,
    message="no layer of this class has a window; those of GptOss, Mistral, Mixtral, Qwen2 and Qwen3 have",
    instead="Or train without --window-size.",
    passing="--num-experts 0 --window-size 4",
    failing=f"{_GLM} --window-size 4",
)
WINDOW = _opposite(NO_WINDOW, "hf-window-always", "layers of this class have a window")
SAME_WINDOW = Limit(
    id="hf-window-layers",
    reads=("window_size", "window_attn_skip_freq", "num_layers"),
    within=lambda f: (
        window_or_none(f.window_size) == 0 or all(windowed_or_all(f.window_attn_skip_freq, f.num_layers)[:-1])
    ),
    message="all layers of this class have the window, or none",
    instead="Or train without --window-attn-skip-freq, or with --num-experts 0 --qk-norm: Qwen3 has both kinds.",
    passing="--num-experts 0 --qk-norm --num-layers 4 --window-size 4 --window-attn-skip-freq 2",
    failing="--num-experts 0 --num-layers 4 --window-size 4 --window-attn-skip-freq 2",
)
ONE_ROPE = Limit(
    id="hf-window-rope",
    reads=("window_rope",),
    within=lambda f: rope_or_same(f.window_rope) is None,
    message="all layers of this class have the same rotary positions",
    instead=f"Or train with --window-rope {SAME}.",
    passing="--window-size 4",
    failing="--window-size 4 --window-rope 100",
)
ROPE_EVERYWHERE = Limit(
    id="hf-no-rope",
    reads=("no_rope_freq", "num_layers"),
    within=lambda f: all(roped_or_all(f.no_rope_freq, f.num_layers)),
    message="all layers of this class have rotary positions; some of SmolLM3 have none",
    instead="Or train without --no-rope-freq.",
    passing="--num-experts 0 --num-layers 4 --no-rope-freq 4",
    failing="--num-layers 4 --no-rope-freq 4",
)
SKIPPED_ROPE = _opposite(ROPE_EVERYWHERE, "hf-no-rope-always", "some layers of this class have no rotary positions")
DENSE = Limit(
    id="hf-dense", reads=("num_experts",), within=lambda f: f.num_experts == 0, message="this class has no experts"
)
EXPERTS = _opposite(DENSE, "hf-experts", "this class has experts")
NO_EXPERT_BIAS = _fixed(
    id="hf-moe-bias",
    sizes={"add_bias_linear": False},
    message="the experts of this class have no biases",
    instead="Or train without --add-bias-linear.",
    passing="--add-bias-linear --num-experts 0",
    failing="--add-bias-linear",
)
NO_SHARED_EXPERTS = Limit(
    id="hf-shared-experts",
    reads=("moe_shared_experts", "moe_shared_expert_intermediate_size"),
    within=lambda f: f.moe_shared_experts + f.moe_shared_expert_intermediate_size == 0,
    message="this class has no shared experts",
    instead="Or train without shared experts, or without --qk-norm: Ernie4_5_Moe has shared experts.",
    passing="--moe-shared-experts 1",
    failing="--qk-norm --moe-shared-experts 1",
)
HEADS_OF_WIDTH = Limit(
    id="hf-head-dim",
    reads=("head_dim", "num_attention_heads", "hidden_size"),
    within=lambda f: f.head_dim * f.num_attention_heads == f.hidden_size,
    message="the heads of this class are as wide together as a token",
    instead="Or train without --head-dim.",
    passing="--qk-norm --qk-norm-scope width",
    failing="--qk-norm --qk-norm-scope width --head-dim 12",
)
WHOLE_SHARED_EXPERTS = Limit(
    id="hf-shared-width",
    reads=("moe_shared_expert_intermediate_size", "moe_ffn_hidden_size"),
    within=lambda f: f.moe_shared_expert_intermediate_size % f.moe_ffn_hidden_size == 0,
    message="the width of this class's shared experts is a multiple of a routed one's",
    instead="Or train with --moe-shared-experts.",
    passing="--moe-ffn-hidden-size 16 --moe-shared-expert-intermediate-size 32",
    failing="--moe-ffn-hidden-size 16 --moe-shared-expert-intermediate-size 24",
)
NO_SHARED_GATE = _fixed(
    id="hf-shared-gate",
    sizes={"moe_shared_expert_gate": False},
    message="this class has no gate of shared experts; Qwen2Moe has it, with biases of queries, keys and values",
    instead="Or train without --moe-shared-expert-gate, or with --add-qkv-bias.",
    passing="--moe-shared-experts 1 --moe-shared-expert-gate --add-qkv-bias",
    failing="--moe-shared-experts 1 --moe-shared-expert-gate",
)
SHARED_GATE = _opposite(NO_SHARED_GATE, "hf-shared-gate-always", "the shared experts of this class have a gate")
ALL_EXPERTS = Limit(
    id="hf-dense-lead",
    reads=("first_k_dense", "moe_layer_freq"),
    within=lambda f: f.first_k_dense == 0 and not pattern_or_all(f.moe_layer_freq),
    message="every layer of this class has experts",
    instead="Or train with --first-k-dense 0 and without --moe-layer-freq.",
    passing="--num-experts 4",
    failing="--qk-norm --qk-norm-scope width --first-k-dense 1",
)
LEADING_DENSE = Limit(
    id="hf-dense-leading",
    reads=("moe_layer_freq", "num_layers", "first_k_dense"),
    within=lambda f: (
        flags_of(layers_of(pattern_or_all(f.moe_layer_freq), f.num_layers, f.first_k_dense), f.num_layers)[1] == ALL
    ),
    message="only leading layers of this class are dense",
    instead="Or train with --first-k-dense.",
    passing=f"{_GLM} --num-layers 4 --moe-layer-freq [0,1,1,1]",
    failing=f"{_GLM} --num-layers 4 --moe-layer-freq 2",
)
EVEN_EXPERTS = Limit(
    id="hf-ernie-layers",
    reads=("moe_layer_freq", "num_layers", "first_k_dense"),
    within=lambda f: ernie_interval(layers_of(pattern_or_all(f.moe_layer_freq), f.num_layers, f.first_k_dense)) > 0,
    message="the layers with experts of this class are every N-th one, N - 1 the first possible",
    instead="Or train with --first-k-dense, or with --qk-norm: Qwen3Moe has dense layers anywhere.",
    passing="--num-layers 4 --moe-layer-freq [0,1,0,1]",
    failing="--num-layers 4 --moe-layer-freq [1,0,1,0]",
)
NO_LATENT = _fixed(
    id="hf-latent-attention",
    sizes={"multi_latent_attention": False},
    message="this class has no multi-latent attention",
)
LATENT = _opposite(NO_LATENT, "hf-latent-attention-always", "this class has multi-latent attention")
LATENT_EPSILON = _fixed(
    id="hf-latent-epsilon",
    sizes={"attention_latent_norm_epsilon": 1e-6},
    message="the norms of latents of this class add 1e-6 to the variance",
    instead="Or train with --attention-latent-norm-epsilon 1e-6.",
    passing="--mtp-depth 1",
    failing="--multi-latent-attention --moe-shared-experts 1 --no-norm-topk-prob",
)
SHARED_EXPERTS = Limit(
    id="hf-shared-experts-always",
    reads=("moe_shared_experts", "moe_shared_expert_intermediate_size"),
    within=lambda f: f.moe_shared_experts + f.moe_shared_expert_intermediate_size > 0,
    message="this class has shared experts",
    instead="Or train with --moe-shared-experts 1.",
    passing="--mtp-depth 1",
    failing="--moe-router-score-function sigmoid",
)
SIGMOID_SCORES = _fixed(
    id="hf-sigmoid-scores",
    sizes={"moe_router_score_function": "sigmoid"},
    message="the scores of this class's router are sigmoids",
)
SOFTMAX_SCORES = _fixed(
    id="hf-softmax-scores",
    sizes={"moe_router_score_function": "softmax"},
    message="the scores of this class's router are a softmax",
)
WEIGHTS_AS_THEY_ARE = Limit(
    id="hf-moe-weights",
    reads=("moe_router_topk", "norm_topk_prob"),
    within=lambda f: f.norm_topk_prob == "off" or (f.norm_topk_prob == "auto" and f.moe_router_topk == 1),
    message="this class does not divide the weights of a token's experts by their sum",
    instead="Or train with --no-norm-topk-prob, or with --moe-router-score-function sigmoid: DeepseekV3 divides them.",
    passing="--mtp-depth 1",
    failing="--multi-latent-attention --attention-latent-norm-epsilon 1e-6 --moe-shared-experts 1",
)
GROUPS_BY_TWO = Limit(
    id="hf-group-score",
    reads=_GROUPS,
    within=lambda f: _scored(f) in (0, 2),
    message="the score of a group of experts in this class is the sum of its two best",
    instead="Or train with --moe-router-group-score-topk 2.",
    passing=f"{_GLM} {_LIMITED} --moe-router-group-score-topk 2",
    failing=f"{_GLM} {_LIMITED}",
)
GROUPS_BY_ONE = Limit(
    id="hf-group-best",
    reads=_GROUPS,
    within=lambda f: _scored(f) in (0, 1),
    message="the score of a group of experts in this class is that of its best one",
    instead="Or train with --moe-router-group-score-topk 1.",
    passing=f"{_V2} {_LIMITED} --moe-router-group-score-topk 1",
    failing=f"{_V2} {_LIMITED}",
)
PLAIN_ROUTING = _fixed(
    id="hf-moe-routing",
    sizes={"moe_router_score_function": "softmax", "moe_router_num_groups": 1, "moe_router_topk_scaling_factor": 1.0},
    message="the routing of this class is a plain softmax: no other scores, no groups, no factor on the weights",
    instead="Or train with these.",
    passing="--mtp-depth 1",
    failing="--moe-router-topk-scaling-factor 2",
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
    reads=("moe_router_topk", "norm_topk_prob"),
    within=lambda f: f.norm_topk_prob == "on" or (f.norm_topk_prob == "auto" and f.moe_router_topk > 1),
    message="this class divides the weights of a token's experts by their sum, also that of a single one",
    instead="Or train with --norm-topk-prob; Qwen3Moe also has weights as they are.",
    passing="--moe-router-topk 1 --norm-topk-prob",
    failing="--moe-router-topk 1",
)
NO_MTP = _fixed(
    id="hf-mtp",
    sizes={"mtp_depth": 0},
    message="this class has no multi-token prediction block",
    way=_WITHOUT_BLOCK,
    passing="--mtp-depth 1",
    failing="--qk-norm --mtp-depth 1",
)
DENSE_MTP = Limit(
    id="hf-mtp-dense",
    reads=("mtp_depth", "mtp_block"),
    within=lambda f: f.mtp_depth == 0 or f.mtp_block == "dense",
    message="the multi-token prediction block of this class is dense",
    instead="Or train with --mtp-block dense.",
    way=_WITHOUT_BLOCK,
    passing="--mtp-depth 1 --mtp-block dense",
    failing="--mtp-depth 1 --mtp-block layer",
)
LAYER_MTP = Limit(
    id="hf-mtp-layer",
    reads=("mtp_depth", "mtp_block"),
    within=lambda f: f.mtp_depth == 0 or f.mtp_block == "layer",
    message="the multi-token prediction block of this class is like its last layer",
    instead="Or train with --mtp-block layer.",
    way=_WITHOUT_BLOCK,
    passing="--moe-router-score-function sigmoid --moe-shared-experts 1 --mtp-depth 1",
    failing="--moe-router-score-function sigmoid --moe-shared-experts 1 --mtp-depth 1 --mtp-block dense",
)
NO_CORRECTION_BIAS = _fixed(
    id="hf-router-bias",
    sizes={"moe_router_bias_update_rate": 0},
    message="this class has no place for the correction bias that --moe-router-bias-update-rate updates",
    way=(
        "Without --qk-norm, megapar convert megapar-to-hf writes them as Ernie4_5_Moe, which has the bias; no "
        "known class has both."
    ),
    passing="--moe-router-bias-update-rate 0.001",
    failing="--qk-norm --moe-router-bias-update-rate 0.001",
)
