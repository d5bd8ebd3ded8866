"""The options that the fuzzer draws. A new feature adds its rows, or gives values to a row that was only wild before.

An option's values are those that are legal beside the rows above it; ``wild`` ones may break any rule.
"""

from __future__ import annotations

from pathlib import Path

from megapar.schema.rule import divisors
from tests.fuzz import legal
from tests.fuzz.option import Option, degree, some
from tests.fuzz.texts import LINES, LONG, SHORT

# Set where a row does not say otherwise. A large epsilon: a gradient that is zero in exact arithmetic is rounding
# noise, which Adam would blow up to the size of a step. device_tflops: what MFU is a share of would be measured.
FIXED: dict[str, object] = {
    "train_iters": 10,
    "data_path": ("mock",),
    "lr": 0.01,
    "adam_eps": 1e-5,
    "eval_interval": 0,
    "dtype": "fp64",
    "replica_check_interval": 5,
    "device_tflops": 1.0,
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
    # Others than fp64 are compared by what they round away, and rarely drawn: 16-bit products are slow on many CPUs.
    Option(name="dtype", values=(*(None,) * 17, "fp32", "bf16", "fp16"), layout=False),
    Option(name="ernie_model", values=(None, "ernie3")),
    Option(
        name="pp_degree",
        values=lambda d: [None, None, *(n for n in divisors(d.world_size)[1:] if n <= 4)],
        wild=(2, 3),
        group=degree,
        layout=True,
    ),
    Option(
        name="pp_schedule",
        values=(None, "gpipe", "interleaved", "zero_bubble"),
        when=legal.pipelined,
        wild=("gpipe", "interleaved"),
        layout=True,
    ),
    Option(
        name="use_nanopipe",
        values=lambda d: [None, True] if d.pp_schedule == "1f1b" else [None],
        when=legal.pipelined,
        wild=(True,),
        layout=True,
    ),
    Option(name="vpp_degree", values=legal.vpps, when=legal.pipelined, wild=(2,), layout=True),
    Option(
        name="mp_degree",
        values=lambda d: [None, *divisors(max(1, d.world_size // d.pp_degree))[1:]],
        wild=(2, 3, 4, 16),
        group=degree,
        layout=True,
    ),
    Option(
        name="cp_degree",
        values=lambda d: [None, None, *divisors(max(1, d.world_size // (d.pp_degree * d.mp_degree)))[1:]],
        wild=(2, 3),
        group=degree,
        layout=True,
        when=lambda d: not legal.branched(d),
    ),
    Option(
        name="context_parallel_algo",
        values=legal.algorithms,
        when=lambda d: legal.cp(d) > 1,
        wild=("ulysses_cp_algo", "allgather_cp_algo"),
        layout=True,
    ),
    Option(name="hybrid_dp", values=(None, True), when=lambda d: legal.rest(d) > 1, wild=(True,), layout=True),
    Option(
        name="sharding_degree",
        values=lambda d: list(divisors(legal.rest(d))[:-1]) if d.hybrid_dp else [None, legal.rest(d), -1],
        wild=(0, 2, 3, 8),
        group=degree,
        layout=True,
    ),
    Option(name="dp_degree", values=legal.replicas, wild=(0, 2, 3), group=degree, layout=True),
    Option(
        name="sharding_stage",
        values=lambda d: (
            (None, 1) if legal.split_backward(d) else (None, 2, 1) if legal.pipelined(d) else (None, 2, 3, 1)
        ),
        wild=(2, 3),
        layout=True,
    ),
    Option(name="gradient_merge_mode", values=legal.merge_modes, wild=("step", "micro_batch"), layout=True),
    Option(
        name="sequence_parallel", values=(None, True, True), when=lambda d: legal.mp(d) > 1, wild=(True,), layout=True
    ),
    Option(
        name="expert_mp_degree",
        values=lambda d: [None, legal.mp(d), *([1, 1] if d.sequence_parallel else [])],
        when=lambda d: legal.mp(d) > 1,
        wild=(1, 2, 3),
        group=degree,
        layout=True,
    ),
    Option(name="ep_degree", values=legal.ep_degrees, wild=(2, 3, 4, 16), group=degree, layout=True),
    Option(name="rank_order", values=(None, *ORDERS), wild=(("dp", "pp", "mp"), (*ORDERS[0][1:], "tp")), layout=True),
    Option(
        name="tp_comm_overlap",
        values=(None, "on", "off"),
        when=lambda d: legal.mp(d) > 1,
        wild=("on", "off", "fused"),
        layout=True,
    ),
    Option(
        name="optimizer_offload",
        values=(None, None, True),
        when=lambda d: d.sharding_stage != 3,
        wild=(True,),
        layout=True,
    ),
    Option(name="overlap_grad_reduce", values=legal.overlaps, wild=("off",), layout=True),
    Option(name="overlap_param_gather", values=legal.overlaps, wild=("off",), layout=True),
)

DATA = (
    # mock: no tokenizer to train. Else documents of real lengths, alone, in a mixture, and of several files.
    Option(
        name="data_path",
        values=lambda d: (
            (*(None,) * 12, (LONG,), ("0.7", LONG, "0.3", SHORT), (LONG, LINES), (SHORT, LONG))
            if not legal.branched(d)
            else (None,)
        ),
        group=some,
    ),
    Option(name="tokenizer_model", values=legal.tokenizers, when=legal.of_text, group=lambda path: Path(path).name),
)

DECODER = (
    Option(name="num_layers", values=legal.layer_counts, wild=(1, 2), size=True),
    Option(
        name="pp_seg_method",
        values=legal.layer_cuts,
        when=legal.pipelined,
        wild=("layer:Mlp", "layer:Conv", "0,1"),
        group=lambda value: "starts" if value[0].isdigit() else value,
        layout=True,
    ),
    Option(name="position_embedding_type", values=(None, "learned")),
    Option(
        name="multi_latent_attention",
        values=(None, None, None, True),
        when=legal.one_of("position_embedding_type", "rope"),
        wild=(True,),
    ),
    Option(name="num_attention_heads", values=legal.head_counts, wild=(1, 3, 5), size=True),
    Option(
        name="num_query_groups",
        values=lambda d: [None, *(n for n in divisors(d.num_attention_heads) if n % legal.mp(d) == 0)],
        when=legal.has_plain_heads,
        wild=(1, 2, 3),
        size=True,
    ),
    Option(name="head_dim", values=legal.head_dims, when=legal.has_plain_heads, wild=(3, 8), size=True),
    *(
        Option(name=name, values=values, when=legal.has_latents, wild=wild, size=True)
        for name, values, wild in (
            ("q_lora_rank", (None, 7), (5,)),
            ("kv_lora_rank", (9, 16), (5, 512)),
            ("qk_head_dim", (6, 5), (8,)),
            ("qk_pos_emb_head_dim", (4, 2, 6), (3,)),
            ("v_head_dim", (4, 8, 3), (5,)),
        )
    ),
    Option(name="attention_latent_norm_epsilon", values=(None, 0.01), when=legal.has_latents, wild=(0.01,)),
    Option(name="hidden_size", values=legal.hidden_sizes, wild=(15, 20), size=True),
    Option(
        name="ffn_hidden_size",
        values=lambda d: [legal.mp(d) * n for n in (8, 5, 3)] + ([None] if 4 % legal.mp(d) == 0 else []),
        wild=(9, 10, 1),
        size=True,
    ),
    Option(name="seq_length", values=legal.lengths, wild=(1, 5, 7), size=True),
    Option(
        name="max_position_embeddings",
        values=lambda d: [None, None, d.seq_length + 3],
        when=lambda d: d.kind == "ernie" or d.position_embedding_type == "learned",
        wild=(4,),
        size=True,
    ),
    Option(name="vocab_size", values=legal.vocabularies, wild=(9, 10), size=True),
    Option(name="normalization", values=(None, "layernorm")),
    Option(name="activation", values=(None, "gelu")),
    Option(name="add_bias_linear", values=(None, True), when=legal.has_plain_heads, wild=(True,)),
    Option(
        name="add_qkv_bias",
        values=(None, True),
        when=lambda d: not d.add_bias_linear and legal.has_plain_heads(d),
        wild=(True,),
    ),
    Option(name="qk_norm", values=(None, True), when=legal.has_plain_heads, wild=(True,)),
    Option(name="qk_norm_scope", values=(None, "width"), when=legal.one_of("qk_norm", True), wild=("width",)),
    Option(name="norm_placement", values=(None, None, "output"), wild=("output",)),
    Option(name="embedding_multiplier", values=(None, None, 3.0)),
    Option(name="residual_multiplier", values=(None, None, 0.5)),
    Option(name="softmax_scale", values=(None, None, 0.2)),
    Option(name="logits_scaling", values=(None, None, 2.0)),
    Option(name="layernorm_epsilon", values=(None, 0.01)),
    Option(
        name="rope_theta", values=(None, 100.0), when=legal.one_of("position_embedding_type", "rope"), wild=(100.0,)
    ),
    Option(name="rotary_percent", values=legal.rotated_shares, when=legal.has_plain_heads, wild=(0.5, 0.3), size=True),
    Option(
        name="rope_scaling_type",
        values=(None, "yarn", "llama3", "linear"),
        when=legal.one_of("position_embedding_type", "rope"),
        wild=("yarn", "dynamic"),
    ),
    Option(
        name="rope_scaling_factor",
        values=(None, 2.5, 40.0),
        when=legal.one_of("rope_scaling_type", "yarn", "llama3", "linear"),
        wild=(0.0, 2.5),
        size=True,
    ),
    Option(
        name="original_max_position_embeddings",
        values=(7, None, 21),
        when=legal.one_of("rope_scaling_type", "yarn", "llama3"),
        wild=(7,),
        size=True,
    ),
    *(
        Option(name=name, values=(None, value), when=legal.one_of("rope_scaling_type", kind), wild=wild, size=True)
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
        Option(name=name, values=legal.mscales(value, other), when=legal.plain_yarn, wild=(0.5,), size=True)
        for name, value, other in (("mscale", 1.7, ""), ("mscale_all_dim", 0.6, "mscale"))
    ),
    Option(name="untie_embeddings_and_output_weights", values=(None, True)),
    # At 0.5 the attention of larger models saturates, and the second step makes 1e-10 of a rounding error of the first.
    Option(name="init_std", values=(0.1, 0.02, 0.2)),
    Option(name="depth_scaled_init", values=(None, True)),
    Option(name="use_flash_attn", values=(None, False)),
    # Masks of split heads and positions are not those of one process (legal.split_dropout).
    Option(name="attention_dropout", values=lambda d: legal.dropouts(d, legal.whole_heads(d))),
    Option(name="hidden_dropout", values=lambda d: legal.dropouts(d, legal.whole_sequences(d))),
)

EXPERTS = (
    Option(
        name="num_experts",
        values=lambda d: [d.ep_degree * n for n in (2, 1, 3, 4)] + ([0] if d.ep_degree == 1 else []),
        wild=(0, 3, 5),
        size=True,
    ),
    Option(
        name="moe_ffn_hidden_size",
        values=lambda d: [legal.emp(d) * n for n in (4, 7, 3)] + [None],
        when=legal.experts,
        wild=(5, 6),
        size=True,
    ),
    Option(
        name="moe_router_topk",
        values=lambda d: [n for n in (1, 2, 3, 4) if n <= d.num_experts],
        when=legal.experts,
        wild=(1, 2, 9),
    ),
    Option(
        name="first_k_dense",
        values=lambda d: [None, *range(1, d.num_layers)],
        when=legal.experts,
        wild=(1, 3),
        group=some,
    ),
    Option(
        name="moe_layer_freq",
        values=legal.layer_patterns,
        when=lambda d: legal.experts(d) and not d.first_k_dense,
        wild=("2", "[1]*5", "[0]"),
        group=some,
    ),
    Option(name="moe_shared_experts", values=legal.shared_counts, when=legal.experts, wild=(1, 2)),
    Option(
        name="moe_shared_expert_intermediate_size",
        values=lambda d: [None, None, legal.mp(d) * 5],
        when=lambda d: legal.experts(d) and not d.moe_shared_experts,
        wild=(7,),
        group=some,
    ),
    Option(
        name="moe_shared_expert_gate",
        values=(None, True),
        when=lambda d: legal.experts(d) and d.moe_shared_experts + d.moe_shared_expert_intermediate_size > 0,
        wild=(True,),
    ),
    Option(name="moe_model_type", values=(None, "deepspeed_moe", "deepspeed_moe"), when=legal.experts),
    Option(name="moe_capacity_factor", values=(None, 0.5, 0.75, 1.1, 2.0, 0.01), when=legal.drops, wild=(0.5,)),
    Option(name="moe_min_capacity", values=(None, 1, 2, 7), when=legal.drops, wild=(1,)),
    Option(name="moe_drop_policy", values=legal.policies, when=legal.drops, wild=("choice",)),
    Option(name="moe_capacity_scope", values=(None, "rank"), when=legal.drops, wild=("rank",)),
    Option(name="moe_aux_loss_coeff", values=(None, 0.0, 0.05, 1.0), when=legal.experts, wild=(0.5,)),
    Option(name="moe_z_loss_coeff", values=(None, 0.01), when=legal.experts, wild=(0.01,)),
    Option(name="moe_router_score_function", values=(None, "sigmoid"), when=legal.experts, wild=("sigmoid",)),
    Option(name="moe_router_num_groups", values=legal.group_counts, when=legal.experts, wild=(2, 3), group=some),
    Option(
        name="moe_router_group_topk",
        values=legal.group_choices,
        when=lambda d: legal.experts(d) and d.moe_router_num_groups > 1,
        wild=(1, 2),
        group=some,
    ),
    Option(
        name="moe_router_group_score_topk",
        values=legal.group_scores,
        when=lambda d: legal.experts(d) and d.moe_router_num_groups > 1,
        wild=(1, 3),
        group=some,
    ),
    Option(name="norm_topk_prob", values=(None, "on", "off"), when=legal.experts, wild=("off",)),
    Option(
        name="moe_router_pre_softmax",
        values=(None, None, True),
        when=lambda d: legal.experts(d) and d.norm_topk_prob != "on" and d.moe_router_score_function == "softmax",
        wild=(True,),
    ),
    Option(name="moe_router_topk_scaling_factor", values=(None, None, 2.5), when=legal.experts, wild=(2.5,)),
    Option(name="moe_router_lr_ratio", values=(None, None, 0.25), when=legal.experts, wild=(0.25,)),
    Option(
        name="moe_layer_ffn_hidden_sizes",
        group=some,
        values=legal.expert_widths,
        when=lambda d: legal.experts(d) and d.moe_ffn_hidden_size is None,
        wild=((3,), (4, 5)),
    ),
    Option(name="moe_seq_aux_loss_coeff", values=(None, None, 0.05), when=legal.experts, wild=(0.05,)),
    Option(name="moe_orthogonal_loss_coeff", values=(None, None, 0.1), when=legal.experts, wild=(0.1,)),
    Option(
        name="mtp_depth",
        values=lambda d: (None, None, 1) if d.seq_length > 1 and legal.plain_block(d) else (None,),
        wild=(1, 2),
    ),
    Option(
        name="mtp_block", values=(None, "dense", "layer"), when=legal.one_of("mtp_depth", 1), wild=("layer", "experts")
    ),
    Option(name="mtp_loss_weight", values=(None, 0.1, 0.0), when=legal.one_of("mtp_depth", 1), wild=(0.1,)),
    Option(name="moe_router_bias_update_rate", values=(None, 0.01), when=legal.experts, wild=(0.01,)),
)

SEGMENTS = (
    Option(
        name="sharding_segment_strategy",
        values=(None, None, "segment_broadcast_MB", "segment_anchors"),
        wild=("segment_anchors",),
        layout=True,
    ),
    Option(
        name="segment_broadcast_mb",
        values=(0.001, 0.01, None),
        when=legal.one_of("sharding_segment_strategy", "segment_broadcast_MB", None),
        wild=(0.01,),
        layout=True,
    ),
    Option(
        name="segment_anchors",
        values=lambda d: (
            *(() if d.sharding_segment_strategy else (None, None)),
            *(("layers.0",), ("layers.*.attention",), ("layers.0.mlp_norm", "layers.0.attention")),
        ),
        when=lambda d: (
            d.sharding_segment_strategy == "segment_anchors"
            or (d.sharding_segment_strategy is None and d.get("segment_broadcast_mb") is None)
        ),
        wild=(("layers.9",), ("layers.*", "layers.0")),
        layout=True,
    ),
    Option(name="sharding_prefetch_segments", values=(None, 0, 1, 9), layout=True),
)

ENCODER = (
    Option(name="type_vocab_size", values=(None, 4), wild=(1,)),
    Option(name="task_type_vocab_size", values=lambda d: (5, 7) if legal.branched(d) else (None, 1, 5), wild=(2,)),
    Option(name="sop_loss_weight", values=(None, 0.5, 0.0), when=lambda d: not legal.branched(d), wild=(0.5,)),
    Option(
        name="ernie_tasks",
        values=(
            "knowledge_mlm:1,document_lm:1,sentence_reorder:1,sentence_distance:1,knowledge_text:1",
            "knowledge_mlm:1,document_lm:2",
            "document_lm:1,sentence_distance:0.5",
        ),
        when=legal.branched,
        wild=("document_lm:1", "poetry:1"),
    ),
    Option(name="task_num_layers", values=(2, 1), when=legal.branched, size=True),
    Option(
        name="task_num_attention_heads",
        values=legal.multiples_of(legal.mp, 1, 2),
        when=legal.branched,
        wild=(3,),
        size=True,
    ),
    Option(
        name="task_hidden_size",
        values=lambda d: [d.task_num_attention_heads * 4, d.task_num_attention_heads * 6],
        when=legal.branched,
        wild=(7,),
        size=True,
    ),
    Option(
        name="task_ffn_hidden_size",
        values=legal.multiples_of(legal.mp, 8, 3),
        when=legal.branched,
        wild=(5,),
        size=True,
    ),
    Option(name="sentence_reorder_pieces", values=(None, 2), when=legal.branched, wild=(4,)),
    Option(
        name="generation_segments",
        values=lambda d: [None, *(n for n in (2, 3) if d.seq_length % (n * legal.lanes(d)) == 0)],
        when=legal.branched,
        wild=(2, 5),
    ),
    Option(
        name="memory_length",
        values=lambda d: [n for n in (4, 1, 128) if n <= d.seq_length // d.generation_segments],
        when=lambda d: legal.branched(d) and d.generation_segments > 1,
        wild=(3,),
    ),
    Option(name="mlm_probability", values=(None, 0.5, 0.01)),
)

TRAINING = (
    # More steps than the two of the other cases, up to the end of the run; experts' load moves them, a bias adds up.
    Option(name="train_iters", values=(*(None,) * 11, 3, 4, 6, 9, 12), when=legal.exact, group=some),
    Option(name="seed", values=(7, 1, 2**40)),
    Option(name="micro_batch_size", values=legal.micro_batches),
    Option(
        name="gradient_merge_acc_step",
        values=lambda d: [None, *legal.step_counts(d)],
        wild=(1, 3),
        group=degree,
        layout=True,
    ),
    Option(name="global_batch_size", values=legal.global_batches, wild=(7, 10), layout=True, size=True),
    Option(name="progressive_iters", values=(None, None, 2, 3), when=legal.may_grow, wild=(2,)),
    Option(
        name="progressive_batch_multiple",
        values=lambda d: [legal.rest(d) * legal.step_counts(d)[0]],
        when=legal.growing,
        wild=(1, 3),
    ),
    Option(name="progressive_length_multiple", values=legal.paces, when=legal.growing, wild=(7,)),
    Option(
        name="rampup_batch_size",
        values=legal.rampups,
        when=lambda d: d.gradient_merge_acc_step is None and not legal.growing(d),
        wild=((2, 2, 4), (1, 3, 5)),
        size=True,
    ),
    Option(name="clip_grad", values=(None, 0.05, 0.0)),
    Option(name="weight_decay", values=(None, 0.0, 0.5)),
    Option(name="optimizer", values=(None, None, None, "sgd")),
    Option(name="sgd_momentum", values=(None, 0.5, 0.0), when=legal.one_of("optimizer", "sgd"), wild=(0.7,)),
    Option(name="adam_beta1", values=(None, 0.5), when=legal.one_of("optimizer", None), wild=(0.5,)),
    Option(name="adam_beta2", values=(None, 0.6), when=legal.one_of("optimizer", None), wild=(0.6,)),
    Option(name="lr_decay_style", values=(None, "constant", "linear", "wsd", "inverse-square-root")),
    Option(name="lr_warmup_iters", values=(None, 1), when=lambda d: not legal.growing(d), wild=(10,)),
    Option(name="lr_decay_iters", values=(None, None, 3), wild=(1,)),
    Option(name="lr_wsd_decay_iters", values=(None, 2, 1), when=legal.one_of("lr_decay_style", "wsd"), wild=(2, 20)),
    Option(
        name="lr_wsd_decay_style",
        values=(None, "cosine", "exponential", "minus_sqrt"),
        when=legal.one_of("lr_decay_style", "wsd"),
        wild=("cosine",),
    ),
    Option(name="min_lr", values=(None, 0.001), when=legal.exact, wild=(1.0,)),
    Option(name="state_digest_steps", values=(None, 0, 1, 3)),
    Option(name="skip_samples", values=(None, None, ("0-1",), ("2-2", "4-9"), ("5-5", "17-40")), wild=(("3-1",),)),
    Option(name="adam_eps", values=(None, None, None, 1e-8), when=lambda d: legal.exact(d) and d.optimizer is None),
    # A spike is one after two steps here (tests/equivalence/run.py).
    Option(name="spike_skip", values=(*(None,) * 4, True), when=lambda d: legal.exact(d) and d.train_iters < 10),
    Option(name="spike_sigmas", values=(0.2, 1.0), when=legal.one_of("spike_skip", True)),
    Option(name="bad_step_limit", values=(None, 1, 0, 12), when=legal.exact),
)

EVALUATION = (
    Option(name="eval_interval", values=lambda d: (*(None,) * (1 if legal.of_text(d) else 6), 1, 2, 3), group=some),
    Option(
        name="eval_data_path", values=legal.held_out, when=lambda d: legal.of_text(d) and legal.evaluated(d), group=some
    ),
    Option(
        name="eval_iters",
        values=lambda d: (1, 2, 3) if d.get("eval_data_path") is None else (1, 2, 50),
        when=legal.evaluated,
        group=some,
    ),
    Option(
        name="split",
        values=(None, "7,3", "8,1,1"),
        when=lambda d: legal.of_text(d) and legal.evaluated(d) and d.get("eval_data_path") is None,
        wild=("1,0",),
    ),
)

# At intervals of their own.
AROUND = (
    Option(name="replica_check_interval", values=(None, 1, 2, 3), group=some, layout=True),
    Option(name="save_interval", values=(*(None,) * 6, 1, 2, 3), group=some, layout=True),
    Option(name="log_interval", values=(*(None,) * 6, 1, 2, 3), group=some, layout=True),
    Option(name="manual_gc", values=(*(None,) * 6, "on"), layout=True),
    Option(
        name="manual_gc_interval", values=(None, 1, 2), when=legal.one_of("manual_gc", "on"), wild=(2,), layout=True
    ),
    Option(name="deterministic", values=(*(None,) * 6, True), layout=True),
)

FP16 = tuple(
    Option(name=name, values=values, when=legal.one_of("dtype", "fp16"), wild=wild)
    for name, values, wild in (
        ("initial_loss_scale", (128.0, 1.0), (2.0,)),
        ("min_loss_scale", (None, 0.5), ()),
        ("loss_scale_window", (None, 1), (1,)),
        ("loss_scale_factor", (None, 4.0), ()),
        ("hysteresis", (None, 1), ()),
    )
)

RECOMPUTE = (
    Option(
        name="recompute_granularity",
        values=lambda d: (None,) if legal.split_backward(d) else (None, None, None, "selective"),
        wild=("selective",),
        layout=True,
    ),
    Option(
        name="recompute_interval",
        values=(None, 1, 2, 3),
        when=lambda d: d.recompute_granularity == "full" and not legal.split_backward(d),
        wild=(0, 1, 5),
        layout=True,
    ),
    Option(
        name="recompute_method",
        values=lambda d: [None, "uniform", "block"] if not d.recompute_interval else [None],
        when=lambda d: d.recompute_granularity == "full" and not legal.split_backward(d),
        wild=("block",),
        layout=True,
    ),
    Option(
        name="recompute_num_layers",
        values=(1, 2, 3),
        when=lambda d: d.recompute_method is not None,
        wild=(1, 2),
        layout=True,
    ),
    Option(name="recompute_offload", values=(None, True), when=legal.whole_units, wild=(True,), layout=True),
    Option(
        name="recompute_partition",
        values=(None, True),
        when=lambda d: legal.whole_units(d) and legal.mp(d) > 1,
        wild=(True,),
        layout=True,
    ),
    Option(
        name="adaptive_recompute_device_size",
        values=(None, None, None, 1048576.0),
        when=lambda d: (
            d.recompute_granularity == "full"
            and not legal.whole_units(d)
            and not legal.pipelined(d)
            and not legal.branched(d)
        ),
        wild=(1048576.0,),
        layout=True,
    ),
)

PACKING = (
    Option(name="packing", values=(None, None, None, False), wild=(False,)),
    *(
        Option(name=name, values=(None, True), when=lambda d: d.packing is not False, wild=(True,))
        for name in ("reset_position_ids", "eod_mask_loss")
    ),
    Option(
        name="reset_attention_mask",
        values=(None, True),
        when=lambda d: d.packing is not False and d.moe_drop_policy != "probs",  # documents that begin alike tie
        wild=(True,),
    ),
)

SLICES = (
    Option(
        name="ampipe_degree", values=legal.slice_counts, when=legal.can_slice, wild=(2, 3), group=degree, layout=True
    ),
    # What it is compared with is one process that counts slice by slice (the oracle).
    Option(
        name="ampipe_capacity",
        values=legal.capacity_scopes,
        when=lambda d: legal.sliced(d) and legal.drops(d),
        wild=("slice",),
        layout=True,
    ),
    Option(name="ampipe_slicing", values=(None, "balanced"), when=legal.sliced, wild=("balanced",), layout=True),
    Option(name="ampipe_cross_layer", values=(None, True), when=legal.sliced, wild=(True,), layout=True),
    Option(
        name="ampipe_tp_sp_comm_overlap",
        values=(None, True),
        when=lambda d: legal.sliced(d) and legal.emp(d) > 1,
        wild=(True,),
        layout=True,
    ),
    Option(name="use_pipe_experts", values=(None, None, True), when=legal.can_pipe, wild=(True,), layout=True),
    Option(
        name="pipe_experts_multi_data",
        group=degree,
        values=legal.piece_counts,
        when=lambda d: bool(d.use_pipe_experts),
        wild=(0, 2, 99),
        layout=True,
    ),
    Option(
        name="pipe_experts_multi_stream",
        values=(None, True),
        when=lambda d: bool(d.use_pipe_experts and d.sequence_parallel),
        wild=(True,),
        layout=True,
    ),
)

OTHERS = (
    Option(name="grad_reduce_dtype", values=legal.reduce_dtypes, wild=("bf16",), layout=True),
    # Minutes of a compiler, where everything else is seconds.
    Option(
        name="compile",
        values=lambda d: (*(None,) * 60, "on") if d.world_size <= 2 and not legal.branched(d) else (None,),
        wild=(),
        layout=True,
        rare=True,
    ),
    # It makes a run longer and excludes nothing: rarely drawn, and in no pair that must be run.
    Option(name="recompute_check_interval", values=lambda d: (*(None,) * 9, 4, 1), layout=True, rare=True),
    *(Option(name=name, wild=(True,), layout=True) for name in ("recompute_in_advance", "recompute_in_bubble")),
    Option(
        name="mla_cp_exchange",
        values=(None, "latent", "kv"),
        when=lambda d: bool(d.multi_latent_attention) and legal.cp(d) > 1,
        wild=("latent", "kv"),
        layout=True,
    ),
    Option(
        name="ranks_per_node",
        values=lambda d: (None, *legal.nodes(d)),
        when=lambda d: d.ep_degree > 1,
        wild=(1, 2, 3, 16),
        layout=True,
    ),
    Option(
        name="moe_dispatch",
        values=lambda d: (None, "node", "node") if d.ranks_per_node else (None, "plain"),
        when=lambda d: d.ep_degree > 1,
        wild=("plain", "node"),
        layout=True,
    ),
    # All experts move in the first update, and with 1 by load in the next one (tests/support/away.py).
    Option(
        name="moe_rebalance_interval",
        values=(None, 1, 1, 2),
        when=legal.can_move_experts,
        wild=(1,),
        group=some,
        layout=True,
    ),
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
