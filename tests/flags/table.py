"""Every flag with its least other legal value, the flags that it needs, and where its effect has to show."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

MOE, ERNIE = "moe", "ernie"

# The model that every row starts from: what each flag changes must be possible beside it.
SMALL: Mapping[str, Mapping[str, Any]] = {
    MOE: {
        **{"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "ffn_hidden_size": 16, "seq_length": 16},
        **{"vocab_size": 101, "num_experts": 4, "moe_ffn_hidden_size": 8, "init_std": 0.1},
    },
    ERNIE: {
        **{"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "ffn_hidden_size": 16, "seq_length": 32},
        **{"vocab_size": 101, "init_std": 0.1, "hidden_dropout": 0.0, "attention_dropout": 0.0},
    },
}
COMMON: Mapping[str, Any] = {
    **{"data_path": ("mock",), "dtype": "fp64", "micro_batch_size": 1, "train_iters": 2, "lr": 0.01},
    **{"adam_eps": 1e-5, "eval_interval": 0, "log_interval": 1, "replica_check_interval": 0},
}


@dataclass(frozen=True)
class Row:
    """A flag and its value. shows: the part of ``Seen`` that has to differ from the run without it.

    base: flags of both runs; None takes one of the small model away. needs: flags that the value requires, beside it
    only. world: ranks. kind: the trainer. A value of ``{NAME}`` is the path of a file of ``materials``.
    """

    name: str
    value: Any
    shows: str
    base: Mapping[str, Any] = field(default_factory=dict)
    needs: Mapping[str, Any] = field(default_factory=dict)
    world: int = 1
    kind: str = MOE

    def __str__(self) -> str:
        return f"{self.name} {self.value}"


def _two(name: str, value: Any, shows: str, base: Mapping[str, Any] | None = None, **more: Any) -> Row:
    return Row(name, value, shows, base or {}, world=2, **more)


MP = {"mp_degree": 2}
SP = {**MP, "sequence_parallel": True}
PP = {"pp_degree": 2, "gradient_merge_acc_step": 4}
EP = {"ep_degree": 2}
CP = {"cp_degree": 2}
MLA = {"multi_latent_attention": True, "kv_lora_rank": 8, "qk_head_dim": 4, "v_head_dim": 4}
MERGED = {"gradient_merge_acc_step": 2}
LLAMA3 = {"rope_scaling_type": "llama3", "rope_theta": 50.0}
LLAMA3_SHORT = {**LLAMA3, "original_max_position_embeddings": 20}
YARN = {
    **{"rope_scaling_type": "yarn", "rope_theta": 50.0, "original_max_position_embeddings": 200},
    "head_dim": 16,
}
DROPS = {"moe_model_type": "deepspeed_moe", "moe_capacity_factor": 0.5, "moe_min_capacity": 1}
SLICED = {**EP, "ampipe_degree": 2}
PIECES = {**EP, **DROPS, "use_pipe_experts": True}

LAYOUT = (
    Row("sharding_degree", 1, "groups", {"hybrid_dp": True, "sharding_degree": 2}, world=4),
    Row("hybrid_dp", True, "groups", needs={"sharding_degree": 2}, world=4),
    Row("dp_degree", 2, "groups", world=4),
    _two("mp_degree", 2, "groups"),
    _two("pp_degree", 2, "groups", {"gradient_merge_acc_step": 2}),
    _two("cp_degree", 2, "groups"),
    _two("ep_degree", 2, "groups"),
    _two("expert_mp_degree", 1, "groups", SP, needs=EP),
    Row("rank_order", ("mp", "dp", "pp", "sharding", "cp"), "groups", MP, world=4),
    Row("ranks_per_node", 1, "sent", {"ep_degree": 4, "moe_dispatch": "node", "ranks_per_node": 2}, world=4),
    _two("sequence_parallel", True, "sent", MP),
    _two("tp_comm_overlap", "off", "order", SP),
    _two("context_parallel_algo", "ulysses_cp_algo", "sent", CP),
    _two("mla_cp_exchange", "kv", "sent", {**CP, **MLA}),
    _two("sharding_stage", 2, "order", MERGED),
    _two("sharding_segment_strategy", "segment_broadcast_MB", "sent"),
    _two("segment_broadcast_mb", 0.001, "sent"),
    _two("segment_anchors", ("layers.1",), "sent", needs={"sharding_segment_strategy": "segment_anchors"}),
    _two("sharding_prefetch_segments", 0, "order"),
    _two("gradient_merge_acc_step", 2, "steps"),
    _two("gradient_merge_mode", "step", "sent", {**MERGED, "sharding_stage": 2}),
    _two("overlap_grad_reduce", "off", "order"),
    _two("overlap_param_gather", "off", "order"),
    _two("grad_reduce_dtype", "bf16", "sent", {"dtype": "fp32"}),
    _two("optimizer_offload", True, "host"),
    _two("pp_seg_method", "0,2", "held", {**PP, "num_layers": 3}),
    _two("pp_schedule", "gpipe", "order", PP),
    _two("vpp_degree", 2, "held", {**PP, "num_layers": 4}, needs={"pp_schedule": "interleaved"}),
    _two("use_nanopipe", True, "order", PP),
)

RECOMPUTE = (
    Row("recompute_interval", 1, "order"),
    Row("recompute_offload", True, "host", {"recompute_interval": 1}),
    _two("recompute_partition", True, "sent", {**MP, "num_layers": 4, "recompute_interval": 1}),
    Row("recompute_granularity", "selective", "plan"),
    Row("recompute_method", "block", "order", needs={"recompute_num_layers": 1}),
    Row("recompute_num_layers", 2, "order", {"recompute_method": "block", "recompute_num_layers": 1}),
    Row("adaptive_recompute_device_size", 61440.0, "lines", {"train_iters": 8}),
    Row("recompute_in_advance", True, "refused"),
    Row("recompute_in_bubble", True, "refused"),
)

MODEL = (
    Row("num_layers", 3, "table"),
    Row("hidden_size", 32, "table"),
    Row("num_attention_heads", 2, "steps"),
    Row("num_query_groups", 2, "table"),
    Row("head_dim", 8, "table"),
    Row("ffn_hidden_size", 24, "table", {"first_k_dense": 1}),
    Row("seq_length", 8, "steps"),
    Row("max_position_embeddings", 20, "table", {"position_embedding_type": "learned"}),
    Row("vocab_size", 103, "table"),
    Row("normalization", "layernorm", "table"),
    Row("position_embedding_type", "learned", "table"),
    Row("activation", "gelu", "table"),
    Row("add_bias_linear", True, "table"),
    Row("add_qkv_bias", True, "table"),
    Row("qk_norm", True, "table"),
    Row("qk_norm_scope", "width", "table", {"qk_norm": True}),
    Row("norm_placement", "output", "steps"),
    Row("embedding_multiplier", 2.0, "steps"),
    Row("residual_multiplier", 0.5, "steps"),
    Row("softmax_scale", 2.0, "steps"),
    Row("logits_scaling", 2.0, "steps"),
    Row("layernorm_epsilon", 0.01, "steps"),
    Row("rope_theta", 100.0, "steps"),
    Row("rotary_percent", 0.5, "steps"),
    Row("rope_scaling_type", "linear", "steps"),
    Row("rope_scaling_factor", 3.0, "steps", {"rope_scaling_type": "linear"}),
    Row("original_max_position_embeddings", 20, "steps", LLAMA3),
    Row("low_freq_factor", 2.0, "steps", LLAMA3_SHORT),
    Row("high_freq_factor", 8.0, "steps", LLAMA3_SHORT),
    Row("beta_fast", 2.0, "steps", YARN),
    Row("beta_slow", 4.0, "steps", YARN),
    Row("mscale", 2.0, "steps", YARN, needs={"mscale_all_dim": 1.0}),
    Row("mscale_all_dim", 2.0, "steps", YARN, needs={"mscale": 1.0}),
    Row("rope_attention_factor", 2.0, "steps", YARN),
    Row("yarn_correction_range_round_to_int", False, "steps", YARN),
    Row("untie_embeddings_and_output_weights", True, "table"),
    Row("attention_dropout", 0.5, "steps"),
    Row("hidden_dropout", 0.5, "steps"),
    Row("init_std", 0.2, "steps"),
    Row("depth_scaled_init", True, "steps"),
    Row("use_flash_attn", False, "plan", {"dtype": "bf16"}),
    Row("mtp_depth", 1, "table"),
    Row("mtp_block", "layer", "table", {"mtp_depth": 1}),
    Row("mtp_loss_weight", 0.1, "steps", {"mtp_depth": 1}),
    Row("multi_latent_attention", True, "table"),
    Row("q_lora_rank", 6, "table", MLA),
    Row("kv_lora_rank", 6, "table", MLA),
    Row("qk_head_dim", 6, "table", MLA),
    Row("qk_pos_emb_head_dim", 4, "table", MLA),
    Row("v_head_dim", 6, "table", MLA),
    Row("attention_latent_norm_epsilon", 0.01, "steps", MLA),
)

TASKS = "knowledge_mlm:1,document_lm:1,sentence_reorder:1"
BRANCHED = {
    **{"ernie_model": "ernie3", "ernie_tasks": TASKS, "task_type_vocab_size": 5, "task_num_layers": 1},
    **{"task_hidden_size": 8, "task_num_attention_heads": 2, "task_ffn_hidden_size": 8, "global_batch_size": 8},
}
SEGMENTED = {**BRANCHED, "ernie_tasks": "document_lm:1", "generation_segments": 2, "memory_length": 8}
GROWING = {"progressive_iters": 4, "train_iters": 4, "global_batch_size": 4}

ENCODER = (
    Row("ernie_model", "ernie3", "table", needs={k: v for k, v in BRANCHED.items() if k != "ernie_model"}, kind=ERNIE),
    Row("type_vocab_size", 4, "table", kind=ERNIE),
    Row("task_type_vocab_size", 4, "table", kind=ERNIE),
    Row("sop_loss_weight", 0.5, "steps", kind=ERNIE),
    Row("task_num_layers", 2, "table", BRANCHED, kind=ERNIE),
    Row("task_hidden_size", 16, "table", BRANCHED, kind=ERNIE),
    Row("task_num_attention_heads", 1, "steps", BRANCHED, kind=ERNIE),
    Row("task_ffn_hidden_size", 16, "table", BRANCHED, kind=ERNIE),
    Row("generation_segments", 2, "steps", BRANCHED, needs={"memory_length": 8}, kind=ERNIE),
    Row("memory_length", 16, "steps", SEGMENTED, kind=ERNIE),
    Row("mlm_probability", 0.5, "steps", kind=ERNIE),
    Row("ernie_tasks", "knowledge_mlm:1,document_lm:2", "steps", BRANCHED, kind=ERNIE),
    Row(
        *("sentence_reorder_pieces", 2, "steps", {**BRANCHED, "ernie_tasks": "sentence_reorder:1"}),
        kind=ERNIE,
    ),
    Row("progressive_iters", 2, "steps", {"global_batch_size": 4}, kind=ERNIE),
    Row("progressive_batch_multiple", 2, "steps", GROWING, kind=ERNIE),
    Row("progressive_length_multiple", 16, "steps", GROWING, kind=ERNIE),
)

EXPERTS = (
    Row("num_experts", 8, "table"),
    Row("moe_model_type", "deepspeed_moe", "steps", needs={"moe_capacity_factor": 0.5, "moe_min_capacity": 1}),
    Row("moe_ffn_hidden_size", 16, "table"),
    Row("moe_layer_ffn_hidden_sizes", (8, 12), "table", {"moe_ffn_hidden_size": None}),
    Row("moe_router_score_function", "sigmoid", "steps"),
    Row("moe_router_num_groups", 2, "steps", needs={"moe_router_group_topk": 1}),
    Row(
        "moe_router_group_topk",
        2,
        "steps",
        {"num_experts": 8, "moe_router_num_groups": 4, "moe_router_group_topk": 1},
    ),
    Row(
        "moe_router_group_score_topk",
        1,
        "steps",
        {"num_experts": 8, "moe_router_topk": 4, "moe_router_num_groups": 4, "moe_router_group_topk": 2},
    ),
    Row("norm_topk_prob", "off", "steps"),
    Row("moe_router_pre_softmax", True, "steps"),
    Row("moe_router_topk_scaling_factor", 2.5, "steps"),
    Row("moe_dispatch", "node", "sent", {"ep_degree": 4}, needs={"ranks_per_node": 2}, world=4),
    _two("moe_rebalance_interval", 1, "sent", EP),
    Row("moe_router_lr_ratio", 0.5, "weights"),
    Row("moe_router_topk", 1, "steps"),
    Row("first_k_dense", 1, "table"),
    Row("moe_layer_freq", "2", "table"),
    Row("moe_shared_experts", 1, "table"),
    Row("moe_shared_expert_intermediate_size", 12, "table"),
    Row("moe_shared_expert_gate", True, "table", {"moe_shared_experts": 1}),
    Row("moe_capacity_factor", 2.0, "steps", DROPS),
    Row("moe_min_capacity", 16, "steps", DROPS),
    Row("moe_drop_policy", "probs", "steps", DROPS),
    _two("moe_capacity_scope", "rank", "steps", {**SP, **EP, **DROPS, "expert_mp_degree": 1}),
    Row("moe_aux_loss_coeff", 0.1, "steps"),
    Row("moe_seq_aux_loss_coeff", 0.1, "steps"),
    Row("moe_orthogonal_loss_coeff", 0.1, "steps"),
    Row("moe_z_loss_coeff", 0.1, "steps"),
    Row("moe_router_bias_update_rate", 0.1, "weights"),
)

SLICES = (
    _two("ampipe_degree", 2, "sent", EP),
    Row("ampipe_tp_sp_comm_overlap", True, "order", {**SP, **SLICED}, world=4),
    _two("ampipe_capacity", "slice", "steps", {**SLICED, **DROPS}),
    _two("ampipe_slicing", "balanced", "sent", SLICED),
    _two("ampipe_cross_layer", True, "order", SLICED),
    _two("use_pipe_experts", True, "sent", {**EP, **DROPS}, needs={"pipe_experts_multi_data": 2}),
    _two("pipe_experts_multi_data", 2, "sent", PIECES),
    _two(
        *("pipe_experts_multi_stream", True, "order"),
        {**SP, **DROPS, "use_pipe_experts": True, "pipe_experts_multi_data": 2},
    ),
)

HALF = {"dtype": "fp16", "train_iters": 6}
LOST = {**HALF, "initial_loss_scale": 2.0**60}
STEPS = {"train_iters": 6}

TRAINING = (
    Row("micro_batch_size", 2, "order", {"global_batch_size": 4}),
    Row("global_batch_size", 2, "steps"),
    Row("rampup_batch_size", (1, 1, 2), "steps", {"global_batch_size": 2}),
    Row("train_iters", 3, "steps"),
    Row("seed", 7, "steps"),
    Row("dtype", "fp32", "steps"),
    Row("eval_interval", 1, "steps"),
    Row("eval_iters", 2, "steps", {"eval_interval": 1}),
    Row("initial_loss_scale", 1024.0, "steps", HALF),
    Row("min_loss_scale", 2.0**59, "error", {**LOST, "hysteresis": 1}),
    Row("loss_scale_window", 1, "steps", {**HALF, "initial_loss_scale": 16.0}),
    Row("loss_scale_factor", 4.0, "steps", {**HALF, "initial_loss_scale": 16.0, "loss_scale_window": 1}),
    Row("hysteresis", 1, "steps", LOST),
    Row("fp8", True, "refused"),
    Row("attention_backend", "cudnn", "refused"),
    Row("compile", "on", "host"),
    Row("manual_gc", "on", "host", needs={"manual_gc_interval": 1}),
    Row("manual_gc_interval", 1, "host", {"manual_gc": "on"}),
    Row("lr", 0.02, "weights"),
    Row("min_lr", 0.001, "steps"),
    Row("lr_decay_style", "constant", "steps"),
    Row("lr_warmup_iters", 1, "steps", STEPS),
    Row("lr_decay_iters", 4, "steps", STEPS),
    Row("lr_wsd_decay_iters", 3, "steps", {**STEPS, "lr_decay_style": "wsd"}),
    Row("lr_wsd_decay_style", "exponential", "steps", {**STEPS, "lr_decay_style": "wsd", "lr_wsd_decay_iters": 3}),
    Row("weight_decay", 0.5, "weights"),
    Row("clip_grad", 0.01, "weights"),
    Row("adam_beta1", 0.5, "weights"),
    Row("adam_beta2", 0.5, "weights"),
    Row("adam_eps", 1e-3, "weights"),
)

TEXT = {"data_path": ("{text.jsonl}",), "vocab_size": 400}
WORDS = {**BRANCHED, **TEXT, "ernie_tasks": "knowledge_mlm:1"}
TOKENS = {**TEXT, "tokenizer_model": "{tokenizer.model}"}
DAMAGED = {"load": "{damaged}", "train_iters": 6, "seed": 5}

DATA = (
    Row("data_path", ("{text.jsonl}",), "steps", {"vocab_size": 400}),
    Row("text_field", "title", "steps", TEXT),
    Row("eval_data_path", ("{other.jsonl}",), "steps", {**TEXT, "eval_interval": 1}),
    Row("split", "50,50", "steps", TEXT),
    Row("tokenizer_model", "{tokenizer.model}", "steps", TEXT),
    Row("data_source", "hf", "steps", TOKENS, needs={"hf_dataset": "{dataset}", "data_path": None}),
    Row(
        "hf_dataset",
        "{another_dataset}",
        "steps",
        {**TOKENS, "data_path": None, "data_source": "hf", "hf_dataset": "{dataset}"},
    ),
    Row("reset_position_ids", True, "steps", {"position_embedding_type": "learned"}),
    Row("reset_attention_mask", True, "steps"),
    Row("eod_mask_loss", True, "steps"),
    Row("packing", False, "steps"),
    Row("on_bad_record", "skip", "error", {**TEXT, "data_path": ("{broken.jsonl}",)}),
    Row("phrase_file", "{phrases.txt}", "steps", WORDS, kind=ERNIE),
    Row("entity_file", "{phrases.txt}", "steps", WORDS, kind=ERNIE),
    Row(
        "triples_file",
        "{other_triples.tsv}",
        "steps",
        {**WORDS, "ernie_tasks": "knowledge_text:1", "triples_file": "{triples.tsv}"},
        kind=ERNIE,
    ),
)

RESUMED = {"load": "{checkpoints}", "train_iters": 6, "seed": 5}
CHECKPOINT = (
    Row("save", "{new}/checkpoints", "files"),
    Row("load", "{checkpoints}", "steps", {"train_iters": 6, "seed": 5}),
    Row("save_interval", 1, "files", {"save": "{new}/checkpoints"}),
    Row("ckpt_step", 2, "steps", RESUMED),
    Row("finetune", True, "steps", RESUMED),
    Row("no_load_optim", True, "weights", RESUMED),
    Row("no_load_rng", True, "steps", {**RESUMED, "override_data": ("seed",), "seed": 6, "hidden_dropout": 0.5}),
    Row("save_hf", "{new}/model", "files"),
    Row("load_hf", "{published}", "steps"),
    Row("save_interval_minutes", 1e-6, "files", {"save": "{new}/checkpoints", "train_iters": 6}),
    Row("keep", 1, "files", {"save": "{new}/checkpoints", "save_interval": 1}),
    Row("checkpoint_verify", "off", "steps", DAMAGED),
    Row("on_bad_checkpoint", "stop", "error", DAMAGED),
    Row("override_opt_param_scheduler", True, "error", {**RESUMED, "min_lr": 0.001}),
    Row("override_data", ("seed",), "error", {**RESUMED, "seed": 6}),
    Row("exit_interval", 1, "steps"),
    Row("exit_duration_minutes", 1e-6, "steps"),
)

RELIABILITY = (
    Row("bad_step_limit", 1, "error", {"dtype": "fp32", "lr": 1e30, "train_iters": 8, "clip_grad": 0.0}),
    Row("skip_samples", ("0-1",), "steps"),
    _two("state_digest_steps", 1, "lines"),
    _two("replica_check_interval", 1, "host", {"hybrid_dp": True, "sharding_degree": 1}),
    Row("recompute_check_interval", 1, "order"),
)

REPORTS = (
    Row("log_interval", 2, "lines", {"train_iters": 4}),
    Row("tensorboard_dir", "{new}/board", "files"),
    Row("metrics_jsonl", "{new}/metrics.jsonl", "files"),
    Row("profile", "1:2", "files", {"metrics_jsonl": "{new}/metrics.jsonl"}),
    Row("device_tflops", 1.0, "plan"),
    Row("device_memory_gib", 0.001, "plan"),
    _two("link_gb", 1.0, "plan", MP),
    Row("network_gb", 0.1, "plan", {"ep_degree": 4, "moe_dispatch": "node", "ranks_per_node": 2}, world=4),
    Row("strict_seed_rules", True, "refused", {**SLICED, "overlap_grad_reduce": "on"}, world=2),
    Row("config", "{three.yaml}", "table", {"num_layers": None}),
)

ROWS: tuple[Row, ...] = (
    *(*LAYOUT, *RECOMPUTE, *MODEL, *ENCODER, *EXPERTS, *SLICES),
    *(*TRAINING, *DATA, *CHECKPOINT, *RELIABILITY, *REPORTS),
)

_TIME = "a limit of time, which shows where a run hangs"
_FAULT = "acts on a fault, which a sound run has not"

# What cannot show in a short sound run: the reason, and the test that shows it.
EXEMPT: Mapping[str, tuple[str, str]] = {
    "distributed_timeout_minutes": (_TIME, "tests/core/comm/test_world.py"),
    "step_timeout_seconds": (_TIME, "tests/health/hangs/test_watchdog.py"),
    "section_timeouts": (_TIME, "tests/health/hangs/test_watchdog.py"),
    "memory_check": ("refuses what this machine's memory cannot hold", "tests/tools/test_mistakes.py"),
    "straggler_factor": ("compares ranks' seconds", "tests/training/test_pace.py"),
    "on_save_error": (_FAULT, "tests/training/checkpoints/test_checkpoints.py"),
    "spike_sigmas": (_FAULT, "tests/training/step/test_bad_steps.py"),
    "spike_skip": (_FAULT, "tests/training/step/test_bad_steps.py"),
    "deterministic": ("chooses between kernels of an accelerator", "tests/core/device/test_base.py"),
    "async_save": ("writes the same files while training goes on", "tests/training/checkpoints/test_checkpoints.py"),
    "local_checkpoint_interval": (
        "is gone when the run is done; serves restarts",
        "tests/core/checkpoint/test_local.py",
    ),
    "local_checkpoint_dir": ("is gone when the run is done; serves restarts", "tests/core/checkpoint/test_local.py"),
    "device": ("names the device", "tests/test_arguments.py"),
    "rules_only": ("starts no run", "tests/test_validate_only.py"),
    "validate_only": ("starts no run", "tests/test_arguments.py"),
    "world_size": ("says what the launcher says", "tests/test_arguments.py"),
    **dict.fromkeys(
        (
            *("wandb_project", "wandb_exp_name", "wandb_entity", "wandb_save_dir"),
            *("mlflow_experiment", "mlflow_run_name", "mlflow_tracking_uri"),
            *("swanlab_project", "swanlab_exp_name", "swanlab_save_dir"),
        ),
        ("needs a package that is not installed here", "tests/training/reports/test_trackers.py"),
    ),
}
