"""Rules on the sizes of decoders and of their mixture-of-experts layers.

Tested in ``tests/test_compatibility.py``.
"""

from __future__ import annotations

from megapar.schema.rule import LIFTED, NO_EFFECT, Facts, Rule, either, near_divisors, near_multiples

SOURCE = "models"
MOE = ("moe",)
_CAPACITY = ("moe_capacity_factor", "moe_min_capacity", "moe_drop_policy", "moe_capacity_scope")


def _spelled(f: Facts, prefixes: tuple[str, ...]) -> list[str]:
    return ["--" + name.replace("_", "-") for name in sorted(f.not_default) if name.startswith(prefixes)]


RULES: tuple[Rule, ...] = (
    Rule(
        id="heads-groups",
        reads=("num_attention_heads", "num_query_groups"),
        requires=lambda f: f.num_attention_heads % f.num_query_groups == 0,
        message="--num-query-groups must divide --num-attention-heads",
        fix=lambda f: f"Choose --num-query-groups {near_divisors(f.num_attention_heads, f.num_query_groups)}.",
        source=SOURCE,
        passing="--num-attention-heads 4 --num-query-groups 2",
        failing="--num-attention-heads 4 --num-query-groups 3",
        models=MOE,
    ),
    Rule(
        id="rope-even",
        reads=("position_embedding_type", "head_dim"),
        when=lambda f: f.position_embedding_type == "rope",
        requires=lambda f: f.head_dim % 2 == 0,
        message="rotary positions rotate pairs of features: the head dim must be even",
        fix=lambda f: f"Choose --head-dim {near_multiples(2, f.head_dim)}.",
        source=SOURCE,
        passing="--head-dim 32",
        failing="--head-dim 33",
        models=MOE,
    ),
    Rule(
        id="qkv-bias-unused",
        reads=("add_qkv_bias", "add_bias_linear"),
        when=lambda f: f.add_qkv_bias,
        requires=lambda f: not f.add_bias_linear,
        message="--add-qkv-bias has no effect with --add-bias-linear, which adds biases to all linear layers",
        fix="Leave out --add-qkv-bias, or --add-bias-linear.",
        source=NO_EFFECT,
        passing="--add-qkv-bias",
        failing="--add-qkv-bias --add-bias-linear",
        models=MOE,
    ),
    Rule(
        id="topk",
        reads=("moe_router_topk", "num_experts"),
        when=lambda f: f.num_experts > 0,
        requires=lambda f: f.moe_router_topk <= f.num_experts,
        message="--moe-router-topk must be at most --num-experts",
        fix=lambda f: f"Choose --moe-router-topk 1 to {f.num_experts}.",
        source=SOURCE,
        passing="--num-experts 4 --moe-router-topk 4",
        failing="--num-experts 4 --moe-router-topk 5",
        models=MOE,
    ),
    Rule(
        id="deepspeed-topk",
        reads=("moe_model_type", "moe_router_topk", "num_experts"),
        when=lambda f: f.moe_model_type == "deepspeed_moe" and f.num_experts > 0,
        requires=lambda f: f.moe_router_topk <= 2,
        message="deepspeed_moe sends a token to 1 or 2 experts",
        fix="Choose --moe-router-topk 1 or 2.",
        source="MindSpeed",
        passing="--moe-model-type deepspeed_moe --moe-router-topk 2",
        failing="--moe-model-type deepspeed_moe --moe-router-topk 4",
        kind=LIFTED,
        reason="the gates here count capacity and drops for any number of choices",
        models=MOE,
    ),
    Rule(
        id="first-k-dense",
        reads=("first_k_dense", "num_layers", "num_experts"),
        when=lambda f: f.num_experts > 0,
        requires=lambda f: f.first_k_dense < f.num_layers,
        message="--first-k-dense must leave at least one layer with experts",
        fix=lambda f: f"Choose 0 to {f.num_layers - 1}, or --num-experts 0 for a dense decoder.",
        source=SOURCE,
        passing="--num-layers 4 --first-k-dense 3",
        failing="--num-layers 4 --first-k-dense 4",
        models=MOE,
    ),
    Rule(
        id="router-groups",
        reads=("moe_router_num_groups", "moe_router_group_topk", "num_experts"),
        when=lambda f: f.num_experts > 0,
        requires=lambda f: (
            f.num_experts % f.moe_router_num_groups == 0 and f.moe_router_group_topk <= f.moe_router_num_groups
        ),
        message="--moe-router-num-groups must divide --num-experts and be at least --moe-router-group-topk",
        fix=lambda f: f"Choose --moe-router-num-groups {near_divisors(f.num_experts, f.moe_router_num_groups)}.",
        source="DeepSeek-V3",
        passing="--num-experts 8 --moe-router-num-groups 4 --moe-router-group-topk 2",
        failing="--num-experts 8 --moe-router-num-groups 3 --moe-router-group-topk 1",
        models=MOE,
    ),
    Rule(
        id="router-group-topk",
        reads=("moe_router_num_groups", "moe_router_group_topk", "num_experts", "moe_router_topk"),
        when=lambda f: f.num_experts > 0 and f.num_experts % f.moe_router_num_groups == 0,
        requires=lambda f: (
            f.moe_router_group_topk == f.moe_router_num_groups == 1
            or (
                f.moe_router_topk % f.moe_router_group_topk == 0
                and f.moe_router_topk <= f.moe_router_group_topk * (f.num_experts // f.moe_router_num_groups)
            )
        ),
        message="the choices come evenly from the groups: --moe-router-group-topk must divide --moe-router-topk, and "
        "each group must have enough experts for its share",
        fix=lambda f: f"Choose --moe-router-group-topk {near_divisors(f.moe_router_topk, f.moe_router_group_topk)}.",
        source="DeepSeek-V3",
        passing="--num-experts 8 --moe-router-topk 4 --moe-router-num-groups 4 --moe-router-group-topk 2",
        failing="--num-experts 8 --moe-router-topk 3 --moe-router-num-groups 4 --moe-router-group-topk 2",
        models=MOE,
    ),
    Rule(
        id="router-groups-unused",
        reads=("moe_router_num_groups", "moe_router_group_topk", "not_default"),
        when=lambda f: bool(f.not_default & {"moe_router_num_groups", "moe_router_group_topk"}),
        requires=lambda f: f.moe_router_group_topk < f.moe_router_num_groups,
        message="--moe-router-num-groups has no effect, because choices may come from all groups",
        fix="Choose --moe-router-group-topk below --moe-router-num-groups, or leave both out.",
        source=NO_EFFECT,
        passing="--num-experts 8 --moe-router-num-groups 4 --moe-router-group-topk 2",
        failing="--num-experts 8 --moe-router-num-groups 2",
        models=MOE,
    ),
    Rule(
        id="layer-ffn-sizes",
        reads=("moe_layer_ffn_hidden_sizes", "num_layers", "first_k_dense", "not_default"),
        when=lambda f: f.moe_layer_ffn_hidden_sizes is not None,
        requires=lambda f: (
            len(f.moe_layer_ffn_hidden_sizes) == f.num_layers - f.first_k_dense
            and "moe_ffn_hidden_size" not in f.not_default
        ),
        message="--moe-layer-ffn-hidden-sizes takes one size for each layer with experts, in place of "
        "--moe-ffn-hidden-size",
        fix=lambda f: f"Pass {f.num_layers - f.first_k_dense} sizes, and no --moe-ffn-hidden-size.",
        source=SOURCE,
        passing="--num-layers 3 --first-k-dense 1 --moe-layer-ffn-hidden-sizes 64 32",
        failing="--num-layers 3 --moe-layer-ffn-hidden-sizes 64 32",
        models=MOE,
    ),
    Rule(
        id="mtp-weight-unused",
        reads=("mtp_depth", "mtp_loss_weight", "not_default"),
        when=lambda f: f.mtp_depth == 0,
        requires=lambda f: "mtp_loss_weight" not in f.not_default,
        message="--mtp-loss-weight has no effect without --mtp-depth 1",
        source=NO_EFFECT,
        passing="--mtp-depth 1 --mtp-loss-weight 0.1",
        failing="--mtp-loss-weight 0.1",
        models=MOE,
    ),
    Rule(
        id="mtp-length",
        reads=("mtp_depth", "seq_length"),
        when=lambda f: f.mtp_depth > 0,
        requires=lambda f: f.seq_length > 1,
        message="the token after the next must be inside the sample: --seq-length must be at least 2",
        source=SOURCE,
        passing="--mtp-depth 1 --seq-length 2",
        failing="--mtp-depth 1 --seq-length 1",
        models=MOE,
    ),
    Rule(
        id="experts-unused",
        reads=("num_experts", "not_default"),
        when=lambda f: f.num_experts == 0,
        requires=lambda f: not any(name.startswith(("moe_", "first_k_dense")) for name in f.not_default),
        message="--moe-... and --first-k-dense have no effect in a dense decoder",
        fix=lambda f: f"Leave out {either(_spelled(f, ('moe_', 'first_k_dense')))}, or set --num-experts.",
        source=NO_EFFECT,
        passing="--num-experts 0",
        failing="--num-experts 0 --moe-shared-experts 1",
        models=MOE,
    ),
    Rule(
        id="capacity-unused",
        reads=("moe_model_type", "num_experts", "not_default"),
        when=lambda f: f.moe_model_type == "megatron_moe" and f.num_experts > 0,
        requires=lambda f: not f.not_default & set(_CAPACITY),
        message="capacity and drop flags have no effect in dropless megatron_moe",
        fix=lambda f: f"Leave out {either(_spelled(f, _CAPACITY))}, or choose --moe-model-type deepspeed_moe.",
        source=NO_EFFECT,
        passing="--moe-model-type deepspeed_moe --moe-capacity-factor 1.5",
        failing="--moe-model-type megatron_moe --moe-capacity-factor 1.5",
        models=MOE,
    ),
    Rule(
        id="rope-theta-unused",
        reads=("position_embedding_type", "not_default"),
        when=lambda f: f.position_embedding_type != "rope",
        requires=lambda f: "rope_theta" not in f.not_default,
        message="--rope-theta has no effect with learned positions",
        source=NO_EFFECT,
        passing="--rope-theta 500000",
        failing="--position-embedding-type learned --rope-theta 500000",
        models=MOE,
    ),
)
