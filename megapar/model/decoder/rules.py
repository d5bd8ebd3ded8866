"""Rules on the sizes of decoders and of their mixture-of-experts layers."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from megapar.model.decoder.layer_pattern import layers_of, listed, to_pattern
from megapar.model.decoder.layer_ropes import SAME, roped_layers, to_rope
from megapar.model.decoder.windows import NO_FULL, to_window, window_or_none, windowed_layers
from megapar.model.rope_scaling import FLAGS_OF, YARN, flags_of_scaling
from megapar.moe.sizes import ACTIVATIONS
from megapar.schema.flag import MOE
from megapar.schema.rule import LIFTED, NO_EFFECT, Facts, Rule, divisors, either, near_divisors, near_multiples

_SCALING = frozenset(FLAGS_OF["llama3"]) | frozenset(FLAGS_OF["yarn"])
_UNSCALED = flags_of_scaling(None)
_LATENT = frozenset(
    ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim", "attention_latent_norm_epsilon")
)
_GROUPED = "--num-experts 8 --moe-router-num-groups 4 --moe-router-group-topk 2 --moe-router-topk 4"
_MSCALE = ("mscale", "mscale_all_dim")
_GROUPS = ("moe_router_num_groups", "moe_router_group_topk", "moe_router_group_score_topk")
_EXPERTS = ("moe_", "first_k_dense", "norm_topk_prob")
_CAPACITY = ("moe_capacity_factor", "moe_min_capacity", "moe_drop_policy", "moe_capacity_scope")

_MULTIPLIERS = ("embedding_multiplier", "residual_multiplier", "softmax_scale", "logits_scaling")


def _spelled(f: Facts, prefixes: tuple[str, ...]) -> list[str]:
    return ["--" + name.replace("_", "-") for name in sorted(f.not_default) if name.startswith(prefixes)]


def _idle_scaling(f: Facts) -> list[str]:
    """Return the given flags of another scaling, unless they say what holds without them."""
    idle = f.given & f.not_default & _SCALING - set(FLAGS_OF[f.rope_scaling_type])
    if f.original_max_position_embeddings == _UNSCALED["original_max_position_embeddings"]:
        idle -= {"original_max_position_embeddings"}
    return sorted(idle)


def _other_scaling(f: Facts) -> str:
    return (
        f"Leave out {either('--' + n.replace('_', '-') for n in _idle_scaling(f))}, or choose its --rope-scaling-type."
    )


def _wrong_pattern(f: Facts) -> str:
    """Return the reason why --moe-layer-freq is not legal, or ""."""
    try:
        pattern = listed(f.moe_layer_freq)
    except ValueError as error:
        return str(error)
    if pattern is not None and len(pattern) != f.num_layers:
        return f"it lists {len(pattern)} layers"
    with_experts = layers_of(to_pattern(f.moe_layer_freq), f.num_layers, min(f.first_k_dense, f.num_layers - 1))
    return "" if with_experts else "no layer has experts"


def _pattern_example(f: Facts) -> str:
    dense = min(max(1, f.first_k_dense), f.num_layers - 1)
    runs = ((kind, number) for kind, number in ((0, dense), (1, f.num_layers - dense)) if number)
    return "+".join(f"[{kind}]*{number}" for kind, number in runs) + " and --first-k-dense 0" * (f.first_k_dense > 0)


def _from_groups(f: Facts, groups: int, chosen: int) -> bool:
    """Return True if the choices can come from ``chosen`` of this number of groups, all of them only if it is one."""
    even = f.moe_router_group_score_topk > 0 or f.moe_router_topk % chosen == 0
    fewer = chosen < groups and even and f.moe_router_topk <= chosen * (f.num_experts // groups)
    whole = chosen == groups == 1 and f.moe_router_group_score_topk == 0
    return whole or (fewer and f.moe_router_group_score_topk * groups <= f.num_experts)


def _choose_groups(flag: str, values: Iterable[int]) -> str:
    legal = list(values)
    return f"Choose {flag} {either(legal)}, or leave the flags of groups out." if legal else "Leave the groups out."


def _wrong_window(f: Facts) -> str:
    """Return the reason why --window-size is not legal, or ""."""
    try:
        to_window(f.window_size)
    except ValueError as error:
        return str(error)
    return ""


def _wrong_windowed(f: Facts) -> str:
    """Return the reason why --window-attn-skip-freq is not legal, or ""."""
    try:
        windowed = windowed_layers(f.window_attn_skip_freq, f.num_layers)[: f.num_layers]
        numbers = None if f.window_attn_skip_freq == NO_FULL else listed(f.window_attn_skip_freq)
    except ValueError as error:
        return str(error)
    if numbers is not None and len(numbers) not in (f.num_layers, f.num_layers + f.mtp_depth):
        return f"it lists {len(numbers)} layers"
    if numbers is None and f.window_attn_skip_freq != NO_FULL and all(windowed):
        return f"there is no layer {f.window_attn_skip_freq}"
    return "" if any(windowed) else "no layer has the window"


def _wrong_rope(f: Facts) -> str:
    """Return the reason why --window-rope is not legal, or ""."""
    try:
        to_rope(f.window_rope)
    except ValueError as error:
        return str(error)
    return ""


def _wrong_roped(f: Facts) -> str:
    """Return the reason why --no-rope-freq is not legal, or ""."""
    try:
        roped = roped_layers(f.no_rope_freq, f.num_layers)[: f.num_layers]
        numbers = None if f.no_rope_freq == NO_FULL else listed(f.no_rope_freq)
    except ValueError as error:
        return str(error)
    if numbers is not None and len(numbers) not in (f.num_layers, f.num_layers + f.mtp_depth):
        return f"it lists {len(numbers)} layers"
    return "" if any(roped) and not all(roped) else f"{'every' if all(roped) else 'no'} layer has rotary positions"


def _moe_layers(f: Facts) -> int:
    return len(layers_of(to_pattern(f.moe_layer_freq), f.num_layers, f.first_k_dense))


_rule = partial(Rule, models=MOE)
_of_sizes = partial(_rule, source="models")
_without_effect = partial(_rule, source=NO_EFFECT)
_of_latent = partial(_rule, source="DeepSeek-V2 (arXiv 2405.04434)", when=lambda f: f.multi_latent_attention)

RULES: tuple[Rule, ...] = (
    _of_sizes(
        id="heads-groups",
        reads=("num_attention_heads", "num_query_groups"),
        requires=lambda f: f.num_attention_heads % f.num_query_groups == 0,
        message="--num-query-groups must divide --num-attention-heads",
        fix=lambda f: f"Choose --num-query-groups {near_divisors(f.num_attention_heads, f.num_query_groups)}.",
        passing="--num-attention-heads 4 --num-query-groups 2",
        failing="--num-attention-heads 4 --num-query-groups 3",
    ),
    _of_sizes(
        id="rope-even",
        reads=("position_embedding_type", "head_dim", "multi_latent_attention"),
        when=lambda f: f.position_embedding_type == "rope" and not f.multi_latent_attention,
        requires=lambda f: f.head_dim % 2 == 0,
        message="rotary positions rotate pairs of features: the head dim must be even",
        fix=lambda f: f"Choose --head-dim {near_multiples(2, f.head_dim)}.",
        passing="--head-dim 32",
        failing="--head-dim 33",
    ),
    _of_sizes(
        id="rotary-percent-even",
        reads=("position_embedding_type", "head_dim", "rotary_percent"),
        when=lambda f: f.position_embedding_type == "rope" and f.rotary_percent < 1 and f.head_dim % 2 == 0,
        requires=lambda f: (rotated := int(f.head_dim * f.rotary_percent)) > 0 and rotated % 2 == 0,
        message="rotary positions rotate pairs of features: the rotated part of a head must be even",
        fix=lambda f: (
            "Choose a --rotary-percent of which --head-dim rounds down to "
            f"{near_multiples(2, max(2, int(f.head_dim * f.rotary_percent)))}."
        ),
        passing="--head-dim 32 --rotary-percent 0.25",
        failing="--head-dim 6 --rotary-percent 0.5",
    ),
    _of_latent(
        id="latent-positions",
        reads=("multi_latent_attention", "position_embedding_type"),
        requires=lambda f: f.position_embedding_type == "rope",
        message="--multi-latent-attention has a rotary key that all heads share: it needs rotary positions",
        fix="Choose --position-embedding-type rope.",
        passing="--multi-latent-attention",
        failing="--multi-latent-attention --position-embedding-type learned",
    ),
    _of_sizes(
        id="latent-rotary-even",
        reads=("multi_latent_attention", "qk_pos_emb_head_dim"),
        when=lambda f: f.multi_latent_attention,
        requires=lambda f: f.qk_pos_emb_head_dim % 2 == 0,
        message="rotary positions rotate pairs of features: --qk-pos-emb-head-dim must be even",
        fix=lambda f: f"Choose --qk-pos-emb-head-dim {near_multiples(2, f.qk_pos_emb_head_dim)}.",
        passing="--multi-latent-attention --qk-pos-emb-head-dim 16",
        failing="--multi-latent-attention --qk-pos-emb-head-dim 15",
    ),
    _of_latent(
        id="latent-heads",
        reads=("multi_latent_attention", "num_query_groups", "num_attention_heads"),
        requires=lambda f: f.num_query_groups == f.num_attention_heads,
        message="every head of --multi-latent-attention has its own keys and values",
        fix="Leave out --num-query-groups.",
        passing="--multi-latent-attention",
        failing="--multi-latent-attention --num-query-groups 2",
    ),
    _of_latent(
        id="latent-head-dim",
        reads=("multi_latent_attention", "head_dim", "qk_head_dim", "qk_pos_emb_head_dim"),
        requires=lambda f: f.head_dim == f.qk_head_dim + f.qk_pos_emb_head_dim,
        message="heads of --multi-latent-attention have --qk-head-dim + --qk-pos-emb-head-dim features, and those of "
        "values --v-head-dim",
        fix="Leave out --head-dim.",
        passing="--multi-latent-attention --qk-head-dim 32 --qk-pos-emb-head-dim 16",
        failing="--multi-latent-attention --head-dim 32",
    ),
    _of_latent(
        id="latent-rotary-percent",
        reads=("multi_latent_attention", "rotary_percent"),
        requires=lambda f: f.rotary_percent == 1,
        message="--multi-latent-attention rotates --qk-pos-emb-head-dim features of a head",
        fix="Choose --qk-pos-emb-head-dim in place of --rotary-percent.",
        passing="--multi-latent-attention --qk-pos-emb-head-dim 16",
        failing="--multi-latent-attention --rotary-percent 0.5",
    ),
    _of_latent(
        id="latent-extras",
        reads=("multi_latent_attention", "qk_norm", "add_qkv_bias", "add_bias_linear"),
        requires=lambda f: not (f.qk_norm or f.add_qkv_bias or f.add_bias_linear),
        message="--multi-latent-attention normalizes its latents, not queries and keys, and its projections have no "
        "biases",
        fix="Leave out --qk-norm, --add-qkv-bias and --add-bias-linear.",
        passing="--multi-latent-attention",
        failing="--multi-latent-attention --qk-norm",
    ),
    _without_effect(
        id="latent-sizes-unused",
        reads=("multi_latent_attention", "not_default"),
        when=lambda f: not f.multi_latent_attention,
        requires=lambda f: not f.not_default & _LATENT,
        message="the sizes of latents and of their heads have no effect without --multi-latent-attention",
        fix=lambda f: (
            f"Set it, or leave out {either('--' + name.replace('_', '-') for name in sorted(f.not_default & _LATENT))}."
        ),
        passing="--multi-latent-attention --kv-lora-rank 256",
        failing="--kv-lora-rank 256",
    ),
    _without_effect(
        id="rope-scaling-unused",
        reads=("rope_scaling_type", "original_max_position_embeddings", "given", "not_default"),
        requires=lambda f: not _idle_scaling(f),
        message="a flag of another --rope-scaling-type has no effect",
        fix=_other_scaling,
        passing="--rope-scaling-type yarn --beta-fast 16",
        failing="--rope-scaling-type llama3 --beta-fast 16",
    ),
    _without_effect(
        id="mscale-unused",
        reads=(*_MSCALE, "rope_scaling_type", "rope_attention_factor", "given", "multi_latent_attention"),
        when=lambda f: f.rope_scaling_type == YARN and bool(f.given & set(_MSCALE)),
        requires=lambda f: (
            (f.mscale > 0 and f.mscale_all_dim > 0 and f.rope_attention_factor == 0)
            or (f.multi_latent_attention and f.mscale_all_dim > 0 and f.mscale == 0)
        ),
        message="--mscale has no effect without --mscale-all-dim, nor the other way round except in multi-latent "
        "attention, and neither with --rope-attention-factor",
        fix="Set both to more than 0 and leave out --rope-attention-factor, or leave out both.",
        passing="--rope-scaling-type yarn --mscale 1 --mscale-all-dim 0.5",
        failing="--rope-scaling-type yarn --mscale 1.5",
    ),
    _rule(
        id="llama3-frequencies",
        reads=("rope_scaling_type", "low_freq_factor", "high_freq_factor"),
        when=lambda f: f.rope_scaling_type == "llama3",
        requires=lambda f: f.low_freq_factor < f.high_freq_factor,
        message="frequencies between the two are scaled in part: --low-freq-factor must be below --high-freq-factor",
        source="Llama 3.1",
        passing="--rope-scaling-type llama3 --low-freq-factor 2 --high-freq-factor 8",
        failing="--rope-scaling-type llama3 --low-freq-factor 4",
    ),
    _rule(
        id="yarn-frequencies",
        reads=("rope_scaling_type", "beta_fast", "beta_slow", "rope_theta"),
        when=lambda f: f.rope_scaling_type == YARN,
        requires=lambda f: f.beta_slow <= f.beta_fast and f.rope_theta > 1,
        message="frequencies between the two are scaled in part: --beta-slow must be at most --beta-fast, and "
        "--rope-theta above 1",
        source="YaRN (arXiv 2309.00071)",
        passing="--rope-scaling-type yarn --beta-fast 16 --beta-slow 2",
        failing="--rope-scaling-type yarn --beta-fast 0.5",
    ),
    _without_effect(
        id="qkv-bias-unused",
        reads=("add_qkv_bias", "add_bias_linear"),
        when=lambda f: f.add_qkv_bias,
        requires=lambda f: not f.add_bias_linear,
        message="--add-qkv-bias has no effect with --add-bias-linear, which adds biases to all linear layers",
        fix="Leave out --add-qkv-bias, or --add-bias-linear.",
        passing="--add-qkv-bias",
        failing="--add-qkv-bias --add-bias-linear",
    ),
    _without_effect(
        id="qk-norm-scope-unused",
        reads=("qk_norm", "qk_norm_scope"),
        when=lambda f: f.qk_norm_scope == "width",
        requires=lambda f: f.qk_norm,
        message="--qk-norm-scope has no effect without --qk-norm",
        fix="Add --qk-norm, or leave out --qk-norm-scope.",
        passing="--qk-norm --qk-norm-scope width",
        failing="--qk-norm-scope width",
    ),
    _of_sizes(
        id="window-size",
        reads=("window_size",),
        requires=lambda f: not _wrong_window(f),
        message="--window-size is one number of keys for all layers, at least 1 because a position attends to itself, "
        "or Megatron-LM's L,0: L keys before a position and none after it",
        fix=lambda f: f"{_wrong_window(f)[:1].upper()}{_wrong_window(f)[1:]}; write for example 4096, or none.",
        passing="--window-size 4095,0",
        failing="--window-size 4095,1",
    ),
    _of_sizes(
        id="window-layers",
        reads=("window_size", "window_attn_skip_freq", "num_layers", "mtp_depth"),
        when=lambda f: window_or_none(f.window_size) > 0,
        requires=lambda f: not _wrong_windowed(f),
        message="--window-attn-skip-freq is 0, a number N for full attention in layers N, 2 N, .., or lists of 1 "
        "(window) and 0 (full) with a number for each of --num-layers, and leaves at least one layer with the window",
        fix=lambda f: f"{_wrong_windowed(f).capitalize()}; write 0 for the window in all layers, or for example 2.",
        passing="--num-layers 4 --window-size 4 --window-attn-skip-freq [1,0]*2",
        failing="--num-layers 4 --window-size 4 --window-attn-skip-freq [1,0]*3",
    ),
    _without_effect(
        id="window-layers-unused",
        reads=("window_size", "window_attn_skip_freq"),
        when=lambda f: f.window_attn_skip_freq != NO_FULL,
        requires=lambda f: window_or_none(f.window_size) > 0,
        message="--window-attn-skip-freq has no effect without --window-size",
        fix="Set it, or leave out --window-attn-skip-freq.",
        passing="--num-layers 4 --window-size 4 --window-attn-skip-freq 2",
        failing="--num-layers 4 --window-attn-skip-freq 2",
    ),
    _of_sizes(
        id="window-rope",
        reads=("window_rope",),
        requires=lambda f: not _wrong_rope(f),
        message="--window-rope is a base of angles, or an object as in rope_parameters of config.json that says all "
        "of the rope",
        fix=lambda f: f"{_wrong_rope(f)[:1].upper()}{_wrong_rope(f)[1:]}; write for example 10000, or same.",
        passing="--window-size 4 --window-rope 10000",
        failing="--window-size 4 --window-rope [10000]",
    ),
    _without_effect(
        id="window-rope-unused",
        reads=("window_size", "window_rope", "position_embedding_type"),
        when=lambda f: f.window_rope != SAME,
        requires=lambda f: window_or_none(f.window_size) > 0 and f.position_embedding_type == "rope",
        message="--window-rope has no effect without --window-size, and without rotary positions",
        fix="Set --window-size and --position-embedding-type rope, or leave out --window-rope.",
        passing="--window-size 4 --window-rope 10000",
        failing="--window-rope 10000",
    ),
    _of_sizes(
        id="no-rope-layers",
        reads=("no_rope_freq", "num_layers", "mtp_depth"),
        when=lambda f: f.no_rope_freq != NO_FULL,
        requires=lambda f: not _wrong_roped(f),
        message="--no-rope-freq is 0, a number N for no rotary positions in layers N, 2 N, .., or lists of 1 (none) "
        "and 0 with a number for each of --num-layers, and leaves out some layers and not all",
        fix=lambda f: f"{_wrong_roped(f).capitalize()}; write 0 for rotary positions everywhere, or for example 2.",
        passing="--num-layers 4 --no-rope-freq [0,1]*2",
        failing="--num-layers 4 --no-rope-freq [0,1]*3",
    ),
    _of_sizes(
        id="no-rope-positions",
        reads=("no_rope_freq", "position_embedding_type", "multi_latent_attention"),
        when=lambda f: f.no_rope_freq != NO_FULL,
        requires=lambda f: f.position_embedding_type == "rope" and not f.multi_latent_attention,
        message="--no-rope-freq leaves rotary positions out of some layers: learned ones are in none, and those of "
        "--multi-latent-attention are a part of every head",
        fix="Leave it out, or choose --position-embedding-type rope without --multi-latent-attention.",
        passing="--num-layers 4 --no-rope-freq 2",
        failing="--num-layers 4 --no-rope-freq 2 --multi-latent-attention",
    ),
    _of_sizes(
        id="qk-clip-norm",
        reads=("qk_norm", "qk_clip_threshold"),
        when=lambda f: f.qk_clip_threshold > 0,
        requires=lambda f: not f.qk_norm,
        message="--qk-clip-threshold scales weights of queries and keys, and --qk-norm takes their scale away again",
        fix="Leave one of them out: norms bound the scores themselves.",
        passing="--qk-clip-threshold 100",
        failing="--qk-clip-threshold 100 --qk-norm",
    ),
    _of_sizes(
        id="output-norm-ampipe",
        reads=("norm_placement", "ampipe_degree"),
        when=lambda f: f.norm_placement != "input",
        requires=lambda f: f.ampipe_degree <= 1,
        message="--norm-placement output and both normalize the summed outputs of the experts, which --ampipe-degree "
        "leaves in flight until the next layer",
        fix="Set --ampipe-degree 1, or choose --norm-placement input.",
        passing="--norm-placement output",
        failing="--norm-placement output --world-size 2 --ep-degree 2 --moe-model-type deepspeed_moe --ampipe-degree 2",
    ),
    _of_sizes(
        id="mtp-block",
        reads=("mtp_depth", "norm_placement", "scale_embedding", *_MULTIPLIERS),
        when=lambda f: f.mtp_depth > 0,
        requires=lambda f: (
            not f.scale_embedding
            and (f.norm_placement, f.embedding_multiplier, f.residual_multiplier, f.softmax_scale, f.logits_scaling)
            == ("input", 1.0, 1.0, 0.0, 1.0)
        ),
        message="the block of --mtp-depth is defined for models with norms on inputs and without multipliers",
        fix="Leave out --mtp-depth, or --norm-placement, --softmax-scale, --logits-scaling, --scale-embedding and the "
        "multipliers.",
        passing="--mtp-depth 1",
        failing="--mtp-depth 1 --residual-multiplier 0.5",
    ),
    _of_sizes(
        id="embedding-scale",
        reads=("scale_embedding", "embedding_multiplier"),
        when=lambda f: f.scale_embedding,
        requires=lambda f: f.embedding_multiplier == 1.0,
        message="--scale-embedding and --embedding-multiplier are two factors on the word embedding",
        fix="Leave one of them out.",
        passing="--scale-embedding",
        failing="--scale-embedding --embedding-multiplier 2",
    ),
    _of_sizes(
        id="geglu-experts",
        reads=("activation", "num_experts"),
        when=lambda f: f.activation not in ACTIVATIONS,
        requires=lambda f: f.num_experts == 0,
        message="experts have swiglu, clamped_swiglu or gelu, and --activation geglu is for dense models only",
        fix="Set --num-experts 0, or choose --activation swiglu.",
        passing="--activation geglu --num-experts 0",
        failing="--activation geglu --num-experts 4",
    ),
    _of_sizes(
        id="topk",
        reads=("moe_router_topk", "num_experts"),
        when=lambda f: f.num_experts > 0,
        requires=lambda f: f.moe_router_topk <= f.num_experts,
        message="--moe-router-topk must be at most --num-experts",
        fix=lambda f: f"Choose --moe-router-topk 1 to {f.num_experts}.",
        passing="--num-experts 4 --moe-router-topk 4",
        failing="--num-experts 4 --moe-router-topk 5",
    ),
    _rule(
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
    ),
    _of_sizes(
        id="first-k-dense",
        reads=("first_k_dense", "num_layers", "num_experts"),
        when=lambda f: f.num_experts > 0,
        requires=lambda f: f.first_k_dense < f.num_layers,
        message="--first-k-dense must leave at least one layer with experts",
        fix=lambda f: f"Choose 0 to {f.num_layers - 1}, or --num-experts 0 for a dense decoder.",
        passing="--num-layers 4 --first-k-dense 3",
        failing="--num-layers 4 --first-k-dense 4",
    ),
    _rule(
        id="layer-freq",
        reads=("moe_layer_freq", "num_layers", "first_k_dense"),
        requires=lambda f: not _wrong_pattern(f),
        message="--moe-layer-freq is a number of at least 1, or lists of 0 (dense) and 1 (experts) with a number for "
        "each of --num-layers, and leaves at least one layer with experts",
        fix=lambda f: f"{_wrong_pattern(f).capitalize()}; write for example {_pattern_example(f)}.",
        source="Megatron-LM",
        passing="--num-layers 4 --moe-layer-freq [0,1]*2",
        failing="--num-layers 4 --moe-layer-freq [0,1]*3",
    ),
    _of_sizes(
        id="layer-freq-lead",
        reads=("moe_layer_freq", "first_k_dense", "num_layers"),
        when=lambda f: f.first_k_dense > 0 and not _wrong_pattern(f),
        requires=lambda f: listed(f.moe_layer_freq) is None,
        message="a list of --moe-layer-freq says of every layer whether it is dense, and so does --first-k-dense",
        fix="Set --first-k-dense 0: [0]*K at the beginning of the list is the same.",
        passing="--num-layers 4 --moe-layer-freq 2 --first-k-dense 1",
        failing="--num-layers 4 --moe-layer-freq [0,1,0,1] --first-k-dense 1",
    ),
    _of_sizes(
        id="shared-width",
        reads=("moe_shared_experts", "moe_shared_expert_intermediate_size"),
        when=lambda f: f.moe_shared_expert_intermediate_size > 0,
        requires=lambda f: f.moe_shared_experts == 0,
        message="--moe-shared-expert-intermediate-size and --moe-shared-experts both give the width of the shared "
        "experts",
        fix="Leave out one of them.",
        passing="--moe-shared-expert-intermediate-size 96",
        failing="--moe-shared-expert-intermediate-size 96 --moe-shared-experts 1",
    ),
    _rule(
        id="shared-gate",
        reads=("moe_shared_expert_gate", "moe_shared_experts", "moe_shared_expert_intermediate_size"),
        when=lambda f: f.moe_shared_expert_gate,
        requires=lambda f: f.moe_shared_experts + f.moe_shared_expert_intermediate_size > 0,
        message="--moe-shared-expert-gate is a gate of shared experts, which this model does not have",
        fix="Set --moe-shared-expert-intermediate-size or --moe-shared-experts.",
        source="Megatron-LM",
        passing="--moe-shared-expert-gate --moe-shared-experts 1",
        failing="--moe-shared-expert-gate",
    ),
    _rule(
        id="router-groups",
        reads=(*_GROUPS, "num_experts", "moe_router_topk"),
        when=lambda f: f.num_experts > 0,
        requires=lambda f: (
            f.num_experts % f.moe_router_num_groups == 0 and f.moe_router_group_topk <= f.moe_router_num_groups
        ),
        message="--moe-router-num-groups must divide --num-experts and be at least --moe-router-group-topk",
        fix=lambda f: _choose_groups(
            "--moe-router-num-groups",
            (n for n in divisors(f.num_experts) if _from_groups(f, n, f.moe_router_group_topk)),
        ),
        source="DeepSeek-V3",
        passing="--num-experts 8 --moe-router-num-groups 4 --moe-router-group-topk 2",
        failing="--num-experts 8 --moe-router-num-groups 3 --moe-router-group-topk 1",
    ),
    _rule(
        id="router-group-topk",
        reads=(*_GROUPS, "num_experts", "moe_router_topk"),
        when=lambda f: f.num_experts > 0 and f.num_experts % f.moe_router_num_groups == 0,
        requires=lambda f: (
            f.moe_router_group_topk == f.moe_router_num_groups == 1
            or (
                (f.moe_router_group_score_topk > 0 or f.moe_router_topk % f.moe_router_group_topk == 0)
                and f.moe_router_topk <= f.moe_router_group_topk * (f.num_experts // f.moe_router_num_groups)
            )
        ),
        message="the choices come evenly from the groups: --moe-router-group-topk must divide --moe-router-topk unless "
        "--moe-router-group-score-topk says how a group is scored, and the groups must have enough experts",
        fix=lambda f: _choose_groups(
            "--moe-router-group-topk",
            (n for n in range(1, f.moe_router_num_groups) if _from_groups(f, f.moe_router_num_groups, n)),
        ),
        source="DeepSeek-V3",
        passing="--num-experts 8 --moe-router-topk 4 --moe-router-num-groups 4 --moe-router-group-topk 2",
        failing="--num-experts 8 --moe-router-topk 3 --moe-router-num-groups 4 --moe-router-group-topk 2",
    ),
    _of_sizes(
        id="router-group-score",
        reads=("moe_router_num_groups", "moe_router_group_score_topk", "num_experts"),
        when=lambda f: f.num_experts > 0,
        requires=lambda f: f.moe_router_group_score_topk * f.moe_router_num_groups <= f.num_experts,
        message="a group has fewer experts than --moe-router-group-score-topk sums for its score",
        fix=lambda f: f"Choose --moe-router-group-score-topk up to {f.num_experts // f.moe_router_num_groups}.",
        passing=f"{_GROUPED} --moe-router-group-score-topk 2",
        failing=f"{_GROUPED} --moe-router-group-score-topk 3",
    ),
    _rule(
        id="pre-softmax",
        reads=("moe_router_pre_softmax", "moe_router_score_function", "norm_topk_prob"),
        when=lambda f: f.moe_router_pre_softmax,
        requires=lambda f: f.moe_router_score_function == "softmax" and f.norm_topk_prob == "off",
        message="--moe-router-pre-softmax keeps the probabilities of a softmax as they are, which is not what other "
        "scores or --norm-topk-prob do; probabilities that are divided by their sum are the softmax after the choice",
        fix="Leave out --moe-router-pre-softmax; --no-norm-topk-prob keeps the scores of any function as they are.",
        source="Megatron-LM",
        passing="--moe-router-pre-softmax",
        failing="--moe-router-pre-softmax --norm-topk-prob",
    ),
    _without_effect(
        id="router-groups-unused",
        reads=_GROUPS,
        when=lambda f: (f.moe_router_num_groups, f.moe_router_group_topk, f.moe_router_group_score_topk) != (1, 1, 0),
        requires=lambda f: f.moe_router_group_topk < f.moe_router_num_groups,
        message="--moe-router-num-groups has no effect, because choices may come from all groups",
        fix="Choose --moe-router-group-topk below --moe-router-num-groups, or leave the flags of groups out.",
        passing="--num-experts 8 --moe-router-num-groups 4 --moe-router-group-topk 2",
        failing="--num-experts 8 --moe-router-num-groups 2",
    ),
    _of_sizes(
        id="layer-ffn-sizes",
        reads=("moe_layer_ffn_hidden_sizes", "num_layers", "first_k_dense", "moe_layer_freq", "not_default"),
        when=lambda f: f.moe_layer_ffn_hidden_sizes is not None and not _wrong_pattern(f),
        requires=lambda f: (
            len(f.moe_layer_ffn_hidden_sizes) == _moe_layers(f) and "moe_ffn_hidden_size" not in f.not_default
        ),
        message="--moe-layer-ffn-hidden-sizes takes one size for each layer with experts, in place of "
        "--moe-ffn-hidden-size",
        fix=lambda f: f"Pass {_moe_layers(f)} sizes, and no --moe-ffn-hidden-size.",
        passing="--num-layers 3 --first-k-dense 1 --moe-layer-ffn-hidden-sizes 64 32",
        failing="--num-layers 3 --moe-layer-ffn-hidden-sizes 64 32",
    ),
    _without_effect(
        id="mtp-weight-unused",
        reads=("mtp_depth", "mtp_loss_weight", "not_default"),
        when=lambda f: f.mtp_depth == 0,
        requires=lambda f: "mtp_loss_weight" not in f.not_default,
        message="--mtp-loss-weight has no effect without --mtp-depth 1",
        passing="--mtp-depth 1 --mtp-loss-weight 0.1",
        failing="--mtp-loss-weight 0.1",
    ),
    _without_effect(
        id="mtp-block-unused",
        reads=("mtp_depth", "mtp_block", "given"),
        when=lambda f: f.mtp_depth == 0,
        requires=lambda f: "mtp_block" not in f.given,
        message="--mtp-block has no effect without --mtp-depth 1",
        passing="--mtp-depth 1 --mtp-block layer",
        failing="--mtp-block layer",
    ),
    _of_sizes(
        id="mtp-length",
        reads=("mtp_depth", "seq_length"),
        when=lambda f: f.mtp_depth > 0,
        requires=lambda f: f.seq_length > 1,
        message="the token after the next must be inside the sample: --seq-length must be at least 2",
        passing="--mtp-depth 1 --seq-length 2",
        failing="--mtp-depth 1 --seq-length 1",
    ),
    _without_effect(
        id="experts-unused",
        reads=("num_experts", "not_default"),
        when=lambda f: f.num_experts == 0,
        requires=lambda f: not any(name.startswith(_EXPERTS) for name in f.not_default),
        message="--moe-..., --first-k-dense and --norm-topk-prob have no effect in a dense decoder",
        fix=lambda f: f"Leave out {either(_spelled(f, _EXPERTS))}, or set --num-experts.",
        passing="--num-experts 0",
        failing="--num-experts 0 --moe-shared-experts 1",
    ),
    _without_effect(
        id="capacity-unused",
        reads=("moe_model_type", "num_experts", "not_default"),
        when=lambda f: f.moe_model_type == "megatron_moe" and f.num_experts > 0,
        requires=lambda f: not f.not_default & set(_CAPACITY),
        message="capacity and drop flags have no effect in dropless megatron_moe",
        fix=lambda f: f"Leave out {either(_spelled(f, _CAPACITY))}, or choose --moe-model-type deepspeed_moe.",
        passing="--moe-model-type deepspeed_moe --moe-capacity-factor 1.5",
        failing="--moe-model-type megatron_moe --moe-capacity-factor 1.5",
    ),
    _without_effect(
        id="rope-theta-unused",
        reads=("position_embedding_type", "not_default"),
        when=lambda f: f.position_embedding_type != "rope",
        requires=lambda f: not f.not_default & {"rope_theta", "rope_scaling_type", "rotary_percent"},
        message="--rope-theta, --rope-scaling-type and --rotary-percent have no effect with learned positions",
        passing="--rope-theta 500000 --rope-scaling-type linear --rotary-percent 0.5",
        failing="--position-embedding-type learned --rope-theta 500000",
    ),
)
