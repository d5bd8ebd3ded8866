"""The options that the fuzzer draws. A new feature adds rows, or legal values to a row that had only ``wild`` ones.

An option's values are those that are legal beside the rows above it; ``wild`` ones may break any rule.
"""

from __future__ import annotations

from pathlib import Path

from megapar.schema.rule import divisors
from tests.fuzz import legal
from tests.fuzz.option import Option, degree, of_layout, some
from tests.fuzz.texts import ASKED, CHATS, LINES, LONG, SHORT

# Set where a row does not say otherwise. A large epsilon: a gradient that is zero in exact arithmetic is rounding
# noise, which Adam would blow up to the size of a step. device_tflops: without it, the peak for MFU is measured.
FIXED: dict[str, object] = {
    "train_iters": 10,
    "data_path": ("mock",),
    "lr": 0.01,
    "adam_eps": 1e-5,
    "eval_interval": 0,
    "dtype": "fp64",
    "replica_check_interval": 5,
    "device_tflops": 1.0,
    "device": "cpu",  # where --fp8 is emulated
}
# Choices that no case has, of flags that are drawn; the default of a flag counts as drawn.
UNDRAWN: dict[tuple[str, str], str] = {
    ("tp_comm_overlap", "fused"): "torch's operators between GPUs; tests/core/tensor_parallel has their plain forms",
    ("grad_reduce_dtype", "fp32"): "what a run in fp32 or bf16 has without the flag",
    ("compile", "off"): "what a run on a CPU has without the flag",
    ("manual_gc", "off"): "what a run on fewer than 64 ranks has without the flag",
}
# Other precisions are compared over steps that change nothing: what two roundings of a step make of the next is chance.
STILL: dict[str, object] = {"lr": 1e-30}

# How often each number of ranks is drawn: small ones are cheap, odd ones leave uneven pieces.
WORLD_SIZES = (2, 1, *(2,) * 5, *(4,) * 7, 3, 3, 5, 6, 6, 7, 8, 8)

ORDERS = (
    ("dp", "pp", "sharding", "cp", "mp"),
    ("sharding", "dp", "pp", "cp", "mp"),
    ("mp", "cp", "sharding", "pp", "dp"),
    ("pp", "mp", "dp", "cp", "sharding"),
)

LAYOUT = (
    # dtypes other than fp64 are compared within rounding, and rarely drawn: 16-bit products are slow on many CPUs.
    Option("dtype", (*(None,) * 17, "fp32", "bf16", "fp16")),
    Option("ernie_model", (None, "ernie3")),
    *of_layout(
        Option(
            "pp_degree",
            lambda d: [None, None, *(n for n in divisors(d.world_size)[1:] if n <= 4)],
            wild=(2, 3),
            group=degree,
        ),
        Option(
            "pp_schedule",
            (None, "gpipe", "interleaved", "zero_bubble"),
            when=legal.pipelined,
            wild=("gpipe", "interleaved"),
        ),
        Option(
            "use_nanopipe",
            lambda d: [None, True] if d.pp_schedule == "1f1b" else [None],
            when=legal.pipelined,
            wild=(True,),
        ),
        Option("vpp_degree", legal.vpps, when=legal.pipelined, wild=(2,)),
        Option(
            "mp_degree",
            lambda d: [None, *divisors(max(1, d.world_size // d.pp_degree))[1:]],
            wild=(2, 3, 4, 16),
            group=degree,
        ),
        Option(
            "cp_degree",
            lambda d: [None, None, *divisors(max(1, d.world_size // (d.pp_degree * d.mp_degree)))[1:]],
            wild=(2, 3),
            group=degree,
            when=lambda d: not legal.branched(d),
        ),
        Option(
            "context_parallel_algo",
            legal.algorithms,
            when=lambda d: legal.cp(d) > 1,
            wild=("ulysses_cp_algo", "allgather_cp_algo"),
        ),
        Option("hybrid_dp", (None, True), when=lambda d: legal.rest(d) > 1, wild=(True,)),
        Option(
            "sharding_degree",
            lambda d: list(divisors(legal.rest(d))[:-1]) if d.hybrid_dp else [None, legal.rest(d), -1],
            wild=(0, 2, 3, 8),
            group=degree,
        ),
        Option("dp_degree", legal.replicas, wild=(0, 2, 3), group=degree),
        Option(
            "sharding_stage",
            lambda d: (None, 1) if legal.split_backward(d) else (None, 2, 1) if legal.pipelined(d) else (None, 2, 3, 1),
            wild=(2, 3),
        ),
        Option("gradient_merge_mode", legal.merge_modes, wild=("step", "micro_batch")),
        Option("sequence_parallel", (None, True, True), when=lambda d: legal.mp(d) > 1, wild=(True,)),
        Option(
            "expert_mp_degree",
            lambda d: [None, legal.mp(d), *([1, 1] if d.sequence_parallel else [])],
            when=lambda d: legal.mp(d) > 1,
            wild=(1, 2, 3),
            group=degree,
        ),
        Option("ep_degree", legal.ep_degrees, wild=(2, 3, 4, 16), group=degree),
        Option("rank_order", (None, *ORDERS), wild=(("dp", "pp", "mp"), (*ORDERS[0][1:], "tp"))),
        Option("tp_comm_overlap", (None, "on", "off"), when=lambda d: legal.mp(d) > 1, wild=("on", "off", "fused")),
        Option("optimizer_offload", (None, None, True), when=lambda d: d.sharding_stage != 3, wild=(True,)),
        Option("overlap_grad_reduce", legal.overlaps, wild=("off",)),
        Option("overlap_param_gather", legal.overlaps, wild=("off",)),
    ),
)

DATA = (
    Option("task", (*(None,) * 11, "sft"), wild=("sft",)),
    *(
        Option(name, values, when=legal.tunes, wild=wild)
        for name, values, wild in (
            ("sft_turns", (None, "last"), ("last",)),
            ("sft_loss", (None, "conversation"), ("conversation",)),
            ("sft_packing", (None, "pad"), ("pad",)),
        )
    ),
    # mock: no tokenizer to train. Else documents of real lengths, alone, in a mixture, and of several files.
    Option(
        "data_path",
        lambda d: (
            ((CHATS,), ("0.7", CHATS, "0.3", ASKED))
            if legal.tunes(d)
            else (*(None,) * 12, (LONG,), ("0.7", LONG, "0.3", SHORT), (LONG, LINES), (SHORT, LONG), *legal.named(d))
            if not legal.branched(d)
            else (None,)
        ),
        group=some,
    ),
    Option("tokenizer_model", legal.tokenizers, when=legal.of_text, group=lambda path: Path(path).name),
)

DECODER = (
    Option("fp8", (*(None,) * 11, True), when=lambda d: legal.exact(d) and not legal.branched(d), wild=(True,)),
    Option(
        "fp8_recipe",
        lambda d: (None, "tensorwise") if legal.mp(d) == legal.cp(d) == 1 else (None,),
        when=legal.casts,
        wild=("tensorwise",),
    ),
    Option("num_layers", legal.layer_counts, wild=(1, 2), size=True),
    Option(
        "pp_seg_method",
        legal.layer_cuts,
        when=legal.pipelined,
        wild=("layer:Mlp", "layer:Conv", "0,1"),
        group=lambda value: "starts" if value[0].isdigit() else value,
        layout=True,
    ),
    Option("position_embedding_type", (None, "learned")),
    Option(
        "multi_latent_attention",
        (None, None, None, True),
        when=legal.one_of("position_embedding_type", "rope"),
        wild=(True,),
    ),
    Option("num_attention_heads", legal.head_counts, wild=(1, 3, 5), size=True),
    Option(
        "num_query_groups",
        lambda d: [None, *(n for n in divisors(d.num_attention_heads) if n % legal.mp(d) == 0)],
        when=legal.has_plain_heads,
        wild=(1, 2, 3),
        size=True,
    ),
    Option("head_dim", legal.head_dims, when=legal.has_plain_heads, wild=(3, 8), size=True),
    *(
        Option(name, values, when=legal.has_latents, wild=wild, size=True)
        for name, values, wild in (
            ("q_lora_rank", (None, 7), (5,)),
            ("kv_lora_rank", (9, 16), (5, 512)),
            ("qk_head_dim", (6, 5), (8,)),
            ("qk_pos_emb_head_dim", (4, 2, 6), (3,)),
            ("v_head_dim", legal.value_dims, (5,)),
        )
    ),
    Option("attention_latent_norm_epsilon", (None, 0.01), when=legal.has_latents, wild=(0.01,)),
    Option("hidden_size", legal.hidden_sizes, wild=(15, 20), size=True),
    Option(
        "ffn_hidden_size",
        legal.ffn_sizes,
        wild=(9, 10, 1),
        size=True,
    ),
    Option("seq_length", legal.lengths, wild=(1, 5, 7), size=True),
    Option("sft_overlong", legal.overlongs, when=legal.tunes, wild=("drop",)),
    Option("data_phases", legal.phases, wild=("0: a=1,b=2", "0: a=1 seq-length=6"), group=some),
    Option(
        "max_position_embeddings",
        lambda d: [None, None, legal.longest(d) + 3],
        when=lambda d: d.kind == "ernie" or d.position_embedding_type == "learned",
        wild=(4,),
        size=True,
    ),
    Option("vocab_size", legal.vocabularies, wild=(9, 10), size=True),
    Option("normalization", (None, "layernorm")),
    Option("activation", legal.activations, wild=("geglu",)),
    Option("add_bias_linear", (None, True), when=legal.has_plain_heads, wild=(True,)),
    Option(
        "add_qkv_bias", (None, True), when=lambda d: not d.add_bias_linear and legal.has_plain_heads(d), wild=(True,)
    ),
    Option("qk_norm", (None, True), when=legal.has_plain_heads, wild=(True,)),
    Option("qk_norm_scope", (None, "width"), when=legal.one_of("qk_norm", True), wild=("width",)),
    Option("norm_placement", (None, None, "output", "both"), wild=("output", "both")),
    Option("apply_layernorm_1p", (None, True)),
    Option("embedding_multiplier", (None, None, 3.0)),
    Option("scale_embedding", (None, True), when=legal.one_of("embedding_multiplier", 1.0, None), wild=(True,)),
    Option("residual_multiplier", (None, None, 0.5)),
    Option("softmax_scale", (None, None, 0.2)),
    Option("logits_scaling", (None, None, 2.0)),
    Option("layernorm_epsilon", (None, 0.01)),
    Option("rope_theta", (None, 100.0), when=legal.one_of("position_embedding_type", "rope"), wild=(100.0,)),
    Option("window_size", legal.windows, wild=("0", "3", "2,0", "2,1"), size=True),
    Option("attention_sinks", (None, None, True)),
    Option("window_attn_skip_freq", legal.windowed, wild=("2", "[1]*5", "[0]"), group=some),
    Option("window_rope", legal.window_ropes, wild=("50", "[50]")),
    Option("no_rope_freq", legal.unrotated, wild=("2", "1", "[1,0]"), group=some),
    Option("rotary_percent", legal.rotated_shares, when=legal.has_plain_heads, wild=(0.5, 0.3), size=True),
    Option(
        "rope_scaling_type",
        (None, "yarn", "llama3", "linear"),
        when=legal.one_of("position_embedding_type", "rope"),
        wild=("yarn", "dynamic"),
    ),
    Option(
        "rope_scaling_factor",
        (None, 2.5, 40.0),
        when=legal.one_of("rope_scaling_type", "yarn", "llama3", "linear"),
        wild=(0.5, 2.5),
        size=True,
    ),
    Option(
        "original_max_position_embeddings",
        (7, None, 21),
        when=legal.one_of("rope_scaling_type", "yarn", "llama3"),
        wild=(7,),
        size=True,
    ),
    *(
        Option(name, (None, value), when=legal.one_of("rope_scaling_type", kind), wild=wild, size=True)
        for name, value, kind, wild in (
            ("low_freq_factor", 0.7, "llama3", (5.0,)),
            ("high_freq_factor", 2.3, "llama3", (0.5,)),
            ("beta_fast", 3.5, "yarn", (0.3,)),
            ("beta_slow", 0.4, "yarn", (40.0,)),
            ("rope_attention_factor", 1.3, "yarn", (0.5,)),
            ("yarn_correction_range_round_to_int", False, "yarn", (False,)),
        )
    ),
    *(
        Option(name, legal.mscales(value, other), when=legal.plain_yarn, wild=(0.5,), size=True)
        for name, value, other in (("mscale", 1.7, ""), ("mscale_all_dim", 0.6, "mscale"))
    ),
    Option("untie_embeddings_and_output_weights", (None, True)),
    # At 0.5 the attention of larger models saturates, and the second step makes 1e-10 of a rounding error of the first.
    Option("init_std", (0.1, 0.02, 0.2)),
    Option("depth_scaled_init", (None, True)),
    Option("use_flash_attn", (None, False)),
    # Masks of split heads and positions are not those of one process (legal.split_dropout).
    Option("attention_dropout", lambda d: legal.dropouts(d, legal.whole_heads(d))),
    Option("hidden_dropout", lambda d: legal.dropouts(d, legal.whole_sequences(d))),
)

EXPERTS = (
    Option(
        "num_experts",
        legal.expert_counts,
        wild=(0, 3, 5),
        size=True,
    ),
    Option("fp8_experts", (None, True), when=legal.casts_rows, wild=(True,)),
    Option("moe_ffn_hidden_size", legal.expert_sizes, when=legal.experts, wild=(5, 6), size=True),
    Option(
        "moe_router_topk", lambda d: [n for n in (1, 2, 3, 4) if n <= d.num_experts], when=legal.experts, wild=(1, 2, 9)
    ),
    Option("first_k_dense", lambda d: [None, *range(1, d.num_layers)], when=legal.experts, wild=(1, 3), group=some),
    Option(
        "moe_layer_freq",
        legal.layer_patterns,
        when=lambda d: legal.experts(d) and not d.first_k_dense,
        wild=("2", "[1]*5", "[0]"),
        group=some,
    ),
    Option("moe_shared_experts", legal.shared_counts, when=legal.experts, wild=(1, 2)),
    Option(
        "moe_shared_expert_intermediate_size",
        legal.shared_sizes,
        when=lambda d: legal.experts(d) and not d.moe_shared_experts,
        wild=(7,),
        group=some,
    ),
    Option(
        "moe_shared_expert_gate",
        (None, True),
        when=lambda d: legal.experts(d) and d.moe_shared_experts + d.moe_shared_expert_intermediate_size > 0,
        wild=(True,),
    ),
    Option("moe_model_type", (None, "deepspeed_moe", "deepspeed_moe"), when=legal.experts),
    Option("moe_capacity_factor", (None, 0.5, 0.75, 1.1, 2.0, 0.01), when=legal.drops, wild=(0.5,)),
    Option("moe_min_capacity", (None, 1, 2, 7), when=legal.drops, wild=(1,)),
    Option("moe_drop_policy", legal.policies, when=legal.drops, wild=("choice",)),
    Option("moe_capacity_scope", (None, "rank"), when=legal.drops, wild=("rank",)),
    Option("moe_aux_loss_coeff", (None, 0.0, 0.05, 1.0), when=legal.experts, wild=(0.5,)),
    Option("moe_z_loss_coeff", (None, 0.01), when=legal.experts, wild=(0.01,)),
    Option("moe_router_score_function", (None, "sigmoid"), when=legal.experts, wild=("sigmoid",)),
    Option("moe_router_num_groups", legal.group_counts, when=legal.experts, wild=(2, 3), group=some),
    Option(
        "moe_router_group_topk",
        legal.group_choices,
        when=lambda d: legal.experts(d) and d.moe_router_num_groups > 1,
        wild=(1, 2),
        group=some,
    ),
    Option(
        "moe_router_group_score_topk",
        legal.group_scores,
        when=lambda d: legal.experts(d) and d.moe_router_num_groups > 1,
        wild=(1, 3),
        group=some,
    ),
    Option("norm_topk_prob", (None, "on", "off"), when=legal.experts, wild=("off",)),
    Option(
        "moe_router_pre_softmax",
        (None, None, True),
        when=lambda d: legal.experts(d) and d.norm_topk_prob != "on" and d.moe_router_score_function == "softmax",
        wild=(True,),
    ),
    Option("moe_router_linear_bias", (None, None, True), when=legal.experts, wild=(True,)),
    Option("moe_router_topk_scaling_factor", (None, None, 2.5), when=legal.experts, wild=(2.5,)),
    Option("moe_router_lr_ratio", (None, None, 0.25), when=legal.experts, wild=(0.25,)),
    Option(
        "moe_layer_ffn_hidden_sizes",
        legal.expert_widths,
        group=some,
        when=lambda d: legal.experts(d) and d.moe_ffn_hidden_size is None,
        wild=((3,), (4, 5)),
    ),
    Option("moe_seq_aux_loss_coeff", (None, None, 0.05), when=legal.experts, wild=(0.05,)),
    Option("moe_orthogonal_loss_coeff", (None, None, 0.1), when=legal.experts, wild=(0.1,)),
    Option(
        "mtp_depth", lambda d: (None, None, 1) if d.seq_length > 1 and legal.plain_block(d) else (None,), wild=(1, 2)
    ),
    Option("mtp_block", (None, "dense", "layer"), when=legal.one_of("mtp_depth", 1), wild=("layer", "experts")),
    Option("mtp_loss_weight", (None, 0.1, 0.0), when=legal.one_of("mtp_depth", 1), wild=(0.1,)),
    Option("moe_router_bias_update_rate", (None, 0.01), when=legal.experts, wild=(0.01,)),
)

SEGMENTS = of_layout(
    Option(
        "sharding_segment_strategy", (None, None, "segment_broadcast_MB", "segment_anchors"), wild=("segment_anchors",)
    ),
    Option(
        "segment_broadcast_mb",
        (0.001, 0.01, None),
        when=legal.one_of("sharding_segment_strategy", "segment_broadcast_MB", None),
        wild=(0.01,),
    ),
    Option(
        "segment_anchors",
        lambda d: (
            *(() if d.sharding_segment_strategy else (None, None)),
            *(("layers.0",), ("layers.*.attention",), ("layers.0.mlp_norm", "layers.0.attention")),
        ),
        when=lambda d: (
            d.sharding_segment_strategy == "segment_anchors"
            or (d.sharding_segment_strategy is None and d.get("segment_broadcast_mb") is None)
        ),
        wild=(("layers.9",), ("layers.*", "layers.0")),
    ),
    Option("sharding_prefetch_segments", (None, 0, 1, 9)),
)

ENCODER = (
    Option("type_vocab_size", (None, 4), wild=(1,)),
    Option("task_type_vocab_size", lambda d: (5, 7) if legal.branched(d) else (None, 1, 5), wild=(2,)),
    Option("sop_loss_weight", (None, 0.5, 0.0), when=lambda d: not legal.branched(d), wild=(0.5,)),
    Option(
        "ernie_tasks",
        (
            "knowledge_mlm:1,document_lm:1,sentence_reorder:1,sentence_distance:1,knowledge_text:1",
            "knowledge_mlm:1,document_lm:2",
            "document_lm:1,sentence_distance:0.5",
        ),
        when=legal.branched,
        wild=("document_lm:1", "poetry:1"),
    ),
    Option("task_num_layers", (2, 1), when=legal.branched, size=True),
    Option("task_num_attention_heads", legal.multiples_of(legal.mp, 1, 2), when=legal.branched, wild=(3,), size=True),
    Option(
        "task_hidden_size",
        lambda d: [d.task_num_attention_heads * 4, d.task_num_attention_heads * 6],
        when=legal.branched,
        wild=(7,),
        size=True,
    ),
    Option("task_ffn_hidden_size", legal.multiples_of(legal.mp, 8, 3), when=legal.branched, wild=(5,), size=True),
    Option("sentence_reorder_pieces", (None, 2), when=legal.branched, wild=(4,)),
    Option(
        "generation_segments",
        lambda d: [None, *(n for n in (2, 3) if d.seq_length % (n * legal.lanes(d)) == 0)],
        when=legal.branched,
        wild=(2, 5),
    ),
    Option(
        "memory_length",
        lambda d: [n for n in (4, 1, 128) if n <= d.seq_length // d.generation_segments],
        when=lambda d: legal.branched(d) and d.generation_segments > 1,
        wild=(3,),
    ),
    Option("mlm_probability", (None, 0.5, 0.01)),
)

TRAINING = (
    # Other cases run 2 of FIXED's 10 steps (case.STEPS). These run to the end, so experts move and biases add up.
    Option("train_iters", (*(None,) * 11, 3, 4, 6, 9, 12), when=legal.exact, group=some),
    Option("seed", (7, 1, 2**40)),
    Option("micro_batch_size", legal.micro_batches),
    Option("gradient_merge_acc_step", lambda d: [None, *legal.step_counts(d)], wild=(1, 3), group=degree, layout=True),
    Option("global_batch_size", legal.global_batches, wild=(7, 10), layout=True, size=True),
    Option("progressive_iters", (None, None, 2, 3), when=legal.may_grow, wild=(2,)),
    Option(
        "progressive_batch_multiple",
        lambda d: [legal.rest(d) * legal.step_counts(d)[0]],
        when=legal.growing,
        wild=(1, 3),
    ),
    Option("progressive_length_multiple", legal.paces, when=legal.growing, wild=(7,)),
    Option(
        "rampup_batch_size",
        legal.rampups,
        when=lambda d: d.gradient_merge_acc_step is None and not legal.growing(d),
        wild=((2, 2, 4), (1, 3, 5)),
        size=True,
    ),
    Option("clip_grad", (None, 0.05, 0.0)),
    Option("qk_clip_threshold", (None, None, 1.0), when=legal.clips_heads, wild=(1.0, 100.0)),
    Option(
        "qk_clip_statistic",
        lambda d: [None] if d.use_flash_attn else [None, "max"],
        when=lambda d: d.qk_clip_threshold > 0,
        wild=("max",),
    ),
    Option("weight_decay_incr_style", (None, None, None, "linear", "cosine"), wild=("linear",)),
    *(
        Option(name, values, when=legal.one_of("weight_decay_incr_style", "linear", "cosine"), wild=(0.3,))
        for name, values in (("start_weight_decay", (0.0, 0.2)), ("end_weight_decay", (0.5, 0.1)))
    ),
    Option("weight_decay", (None, 0.0, 0.5), when=lambda d: d.weight_decay_incr_style == "constant", wild=(0.5,)),
    Option("optimizer", legal.optimizers),
    Option("muon_momentum", (None, 0.5), when=legal.one_of("optimizer", "muon"), wild=(0.5,)),
    Option("muon_use_nesterov", (None, False), when=legal.one_of("optimizer", "muon"), wild=(False,)),
    Option("muon_num_ns_steps", (None, 3), when=legal.one_of("optimizer", "muon"), wild=(2,)),
    Option(
        "muon_coefficient_type",
        (None, "simple", "polar_express"),
        when=legal.one_of("optimizer", "muon"),
        wild=("simple",),
    ),
    Option(
        "muon_scale_mode",
        (None, "unit_rms_norm", "shape_scaling"),
        when=legal.one_of("optimizer", "muon"),
        wild=("shape_scaling",),
    ),
    Option("muon_extra_scale_factor", (0.2, 0.1), when=legal.one_of("optimizer", "muon"), wild=(0.3,)),
    Option(
        "muon_qkv_split",
        (None, "fused", "group", "head"),
        when=legal.one_of("optimizer", "muon"),
        wild=("head",),
    ),
    Option("mup_base_hidden_size", legal.base_widths, wild=(8, 16), group=some),
    Option("sgd_momentum", (None, 0.5, 0.0), when=legal.one_of("optimizer", "sgd"), wild=(0.7,)),
    Option("adam_beta1", (None, 0.5), when=legal.one_of("optimizer", "adamw", "muon"), wild=(0.5,)),
    Option("adam_beta2", (None, 0.6), when=legal.one_of("optimizer", "adamw", "muon"), wild=(0.6,)),
    *(
        Option(name, (None, None, "bf16"), when=legal.rounds_moments, wild=("bf16",))
        for name in ("exp_avg_dtype", "exp_avg_sq_dtype")
    ),
    Option("lr_decay_style", legal.decays, wild=("wsd",)),
    Option("lr_warmup_iters", (None, 1), when=lambda d: not legal.growing(d), wild=(10,)),
    Option("lr_decay_iters", (None, None, 3), wild=(1,)),
    Option("lr_wsd_decay_iters", (None, 2, 1), when=legal.one_of("lr_decay_style", "wsd"), wild=(2, 20)),
    Option(
        "lr_wsd_decay_style",
        (None, "cosine", "exponential", "minus_sqrt"),
        when=legal.one_of("lr_decay_style", "wsd"),
        wild=("cosine",),
    ),
    Option("min_lr", (None, 0.001), when=legal.exact, wild=(1.0,)),
    Option("decoupled_lr", (None, None, 0.02), when=legal.has_one_rate, wild=(0.0005,)),
    Option("decoupled_min_lr", (None, 0.002), when=legal.one_of("decoupled_lr", 0.02), wild=(1.0,)),
    Option("state_digest_steps", (None, 0, 1, 3)),
    Option("skip_samples", (None, None, ("0-1",), ("2-2", "4-9"), ("5-5", "17-40")), wild=(("3-1",),)),
    Option("adam_eps", (None, None, None, 1e-8), when=lambda d: legal.exact(d) and d.optimizer == "adamw"),
    # Spikes are detected from the third step on here (LEAST_BEFORE_A_SPIKE in tests/equivalence/run.py).
    Option("spike_skip", (*(None,) * 4, True), when=lambda d: legal.exact(d) and d.train_iters < 10),
    Option("spike_sigmas", (0.2, 1.0), when=legal.one_of("spike_skip", True)),
    Option("bad_step_limit", lambda d: (None, 1, *([] if d.spike_skip else [0]), 12), when=legal.exact),
)

EVALUATION = (
    Option("eval_interval", lambda d: (*(None,) * (1 if legal.of_text(d) else 6), 1, 2, 3), group=some),
    Option("eval_data_path", legal.held_out, when=lambda d: legal.of_text(d) and legal.evaluated(d), group=some),
    Option(
        "eval_iters",
        lambda d: (1, 2, 3) if d.get("eval_data_path") is None else (1, 2, 50),
        when=legal.evaluated,
        group=some,
    ),
    Option(
        "split",  # the default holds out none of the few conversations
        lambda d: (*(() if legal.tunes(d) else (None,)), "7,3", "8,1,1"),
        when=lambda d: legal.of_text(d) and legal.evaluated(d) and d.get("eval_data_path") is None,
        wild=("1,0",),
    ),
)

# What happens around the steps, mostly at its own interval.
AROUND = of_layout(
    Option("replica_check_interval", (None, 1, 2, 3), group=some),
    Option("save_interval", (*(None,) * 6, 1, 2, 3), group=some),
    Option("log_interval", (*(None,) * 6, 1, 2, 3), group=some),
    Option("manual_gc", (*(None,) * 6, "on")),
    Option("manual_gc_interval", (None, 1, 2), when=legal.one_of("manual_gc", "on"), wild=(2,)),
    Option("deterministic", (*(None,) * 6, True)),
)

FP16 = tuple(
    Option(name, values, when=legal.one_of("dtype", "fp16"), wild=wild)
    for name, values, wild in (
        ("initial_loss_scale", (128.0, 1.0), (2.0,)),
        ("min_loss_scale", (None, 0.5), ()),
        ("loss_scale_window", (None, 1), (1,)),
        ("loss_scale_factor", (None, 4.0), ()),
        ("hysteresis", (None, 1), ()),
    )
)

RECOMPUTE = of_layout(
    Option(
        "recompute_granularity",
        lambda d: (None,) if legal.split_backward(d) else (None, None, None, "selective"),
        wild=("selective",),
    ),
    Option(
        "recompute_interval",
        (None, 1, 2, 3),
        when=lambda d: d.recompute_granularity == "full" and not legal.split_backward(d),
        wild=(0, 1, 5),
    ),
    Option(
        "recompute_method",
        lambda d: [None, "uniform", "block"] if not d.recompute_interval else [None],
        when=lambda d: d.recompute_granularity == "full" and not legal.split_backward(d),
        wild=("block",),
    ),
    Option("recompute_num_layers", (1, 2, 3), when=lambda d: d.recompute_method is not None, wild=(1, 2)),
    Option("recompute_offload", (None, True), when=legal.whole_units, wild=(True,)),
    Option("recompute_partition", (None, True), when=lambda d: legal.whole_units(d) and legal.mp(d) > 1, wild=(True,)),
    Option(
        "adaptive_recompute_device_size",
        (None, None, None, 1048576.0),
        when=lambda d: (
            d.recompute_granularity == "full"
            and not legal.whole_units(d)
            and not legal.pipelined(d)
            and not legal.branched(d)
            and legal.longest(d) == d.seq_length
        ),
        wild=(1048576.0,),
    ),
)

PACKING = (
    Option("packing", (None, None, None, False), when=lambda d: not legal.tunes(d), wild=(False,)),
    *(
        Option(name, (None, True), when=legal.packs_text, wild=(True,))
        for name in ("reset_position_ids", "eod_mask_loss")
    ),
    # Documents that begin alike tie in ``probs``.
    Option(
        "reset_attention_mask",
        (None, True),
        when=lambda d: legal.packs_text(d) and d.moe_drop_policy != "probs",
        wild=(True,),
    ),
)

SLICES = of_layout(
    Option("ampipe_degree", legal.slice_counts, when=legal.can_slice, wild=(2, 3), group=degree),
    # What it is compared with is one process that counts slice by slice (the oracle).
    Option(
        "ampipe_capacity", legal.capacity_scopes, when=lambda d: legal.sliced(d) and legal.drops(d), wild=("slice",)
    ),
    Option("ampipe_slicing", (None, "balanced"), when=legal.sliced, wild=("balanced",)),
    Option("ampipe_cross_layer", (None, True), when=legal.sliced, wild=(True,)),
    Option(
        "ampipe_tp_sp_comm_overlap", (None, True), when=lambda d: legal.sliced(d) and legal.emp(d) > 1, wild=(True,)
    ),
    Option("use_pipe_experts", (None, None, True), when=legal.can_pipe, wild=(True,)),
    Option(
        "pipe_experts_multi_data",
        legal.piece_counts,
        group=degree,
        when=lambda d: bool(d.use_pipe_experts),
        wild=(0, 2, 99),
    ),
    Option(
        "pipe_experts_multi_stream",
        (None, True),
        when=lambda d: bool(d.use_pipe_experts and d.sequence_parallel),
        wild=(True,),
    ),
)

OTHERS = of_layout(
    Option("grad_reduce_dtype", legal.reduce_dtypes, wild=("bf16",)),
    Option("main_grads_dtype", (None, "bf16"), when=legal.has_two_bytes, wild=("bf16",)),
    Option("store_param_remainders", (None, True), when=legal.splits_masters, wild=(True,)),
    # Minutes of a compiler, where everything else is seconds.
    Option(
        "compile",
        lambda d: (
            (*(None,) * 60, "on") if d.world_size <= 2 and not legal.branched(d) and not d.deterministic else (None,)
        ),
        wild=(),
        rare=True,
    ),
    # It makes a run longer and excludes nothing: rarely drawn, and in no pair that must be run.
    Option("recompute_check_interval", lambda d: (*(None,) * 9, 4, 1), rare=True),
    *(Option(name, wild=(True,)) for name in ("recompute_in_advance", "recompute_in_bubble")),
    Option(
        "mla_cp_exchange",
        (None, "latent", "kv"),
        when=lambda d: bool(d.multi_latent_attention) and legal.cp(d) > 1,
        wild=("latent", "kv"),
    ),
    Option("ranks_per_node", lambda d: (None, *legal.nodes(d)), when=lambda d: d.ep_degree > 1, wild=(1, 2, 3, 16)),
    Option(
        "moe_dispatch",
        lambda d: (None, "node", "node") if d.ranks_per_node else (None, "plain"),
        when=lambda d: d.ep_degree > 1,
        wild=("plain", "node"),
    ),
    # All experts move in the first update, and with 1 by load in the next one (tests/support/away.py).
    Option("moe_rebalance_interval", (None, 1, 1, 2), when=legal.can_move_experts, wild=(1,), group=some),
)

OPTIONS: tuple[Option, ...] = (
    *LAYOUT,
    *DATA,
    *DECODER,
    *EXPERTS,
    *SEGMENTS,
    *ENCODER,
    *TRAINING,
    *EVALUATION,
    *AROUND,
    *FP16,
    *RECOMPUTE,
    *PACKING,
    *SLICES,
    *OTHERS,
)
