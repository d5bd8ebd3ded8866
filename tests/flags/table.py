"""Every flag with its least other legal value, the flags that it needs, and where its effect has to show.

The value stands in the flag's field, or follows from its type. A flag has an entry here if its effect does not show in
the steps of the small model, beside no other flag.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megapar.arguments import FLAGS
from megapar.schema.flag import Flag

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


@dataclass(frozen=True)
class Shown:
    """Where a flag's effect shows; ``value``: in place of the flag's own, if it names files or suits ``base`` alone."""

    shows: str = "steps"
    base: Mapping[str, Any] = field(default_factory=dict)
    needs: Mapping[str, Any] = field(default_factory=dict)
    world: int = 1
    value: Any = None


def other(flag: Flag, kind: str) -> Any:
    """The least other legal value of a flag: the one of its field, or the one that its type gives."""
    default = flag.defaults[kind]
    if flag.other is not None:
        return flag.other
    if flag.type == "bool":
        return not default
    if flag.choices:
        return "off" if flag.type == "switch" else next(choice for choice in flag.choices if choice != default)
    if flag.type == "int":
        least = max(1, int(flag.low or 1))
        return least + 1 if default in (None, least) else least
    assert flag.type == "float", f"{flag.name} needs flag(.., other=VALUE)"
    return 0.5 if flag.high is not None and flag.high <= 1 else 2 * (default or 0.05)


MP = {"mp_degree": 2}
SP = {**MP, "sequence_parallel": True}
PP = {"pp_degree": 2, "gradient_merge_acc_step": 4}
EP = {"ep_degree": 2}
CP = {"cp_degree": 2}
MLA = {"multi_latent_attention": True, "kv_lora_rank": 8, "qk_head_dim": 4, "v_head_dim": 4}
MERGED = {"gradient_merge_acc_step": 2}
LLAMA3 = {"rope_scaling_type": "llama3", "rope_theta": 50.0}
LLAMA3_SHORT = {**LLAMA3, "original_max_position_embeddings": 20}
YARN = {**{"rope_scaling_type": "yarn", "rope_theta": 50.0, "original_max_position_embeddings": 200}, "head_dim": 16}
DROPS = {"moe_model_type": "deepspeed_moe", "moe_capacity_factor": 0.5, "moe_min_capacity": 1}
WIDE = {"device": "cpu", "hidden_size": 128, "ffn_hidden_size": 128, "num_attention_heads": 4}
SLICED = {**EP, "ampipe_degree": 2}
PIECES = {**EP, **DROPS, "use_pipe_experts": True}
TASKS = "knowledge_mlm:1,document_lm:1,sentence_reorder:1"
BRANCHED = {
    **{"ernie_model": "ernie3", "ernie_tasks": TASKS, "task_type_vocab_size": 5, "task_num_layers": 1},
    **{"task_hidden_size": 8, "task_num_attention_heads": 2, "task_ffn_hidden_size": 8, "global_batch_size": 8},
}
SEGMENTED = {**BRANCHED, "ernie_tasks": "document_lm:1", "generation_segments": 2, "memory_length": 8}
GROWING = {"progressive_iters": 4, "train_iters": 4, "global_batch_size": 4}
HALF = {"dtype": "fp16", "train_iters": 6}
LOST = {**HALF, "initial_loss_scale": 2.0**60}
STEPS = {"train_iters": 6}
TEXT = {"data_path": ("{text.jsonl}",), "vocab_size": 400}
WORDS = {**BRANCHED, **TEXT, "ernie_tasks": "knowledge_mlm:1"}
TOKENS = {**TEXT, "tokenizer_model": "{tokenizer.model}"}
TALK = {
    **{"task": "sft", "data_path": ("{chat.jsonl}",), "tokenizer_model": "{chat_tokenizer}", "vocab_size": 400},
    **{"seq_length": 160, "chat_date": "2026-07-26"},
}
DAMAGED = {"load": "{damaged}", "train_iters": 6, "seed": 5}
RESUMED = {"load": "{checkpoints}", "train_iters": 6, "seed": 5}

TOGETHER: Mapping[str, Shown] = {
    # layout
    "sharding_degree": Shown("groups", {"hybrid_dp": True, "sharding_degree": 2}, world=4),
    "hybrid_dp": Shown("groups", needs={"sharding_degree": 2}, world=4),
    "dp_degree": Shown("groups", world=4),
    "mp_degree cp_degree ep_degree": Shown("groups", world=2),
    "pp_degree": Shown("groups", {"gradient_merge_acc_step": 2}, world=2),
    "expert_mp_degree": Shown("groups", SP, needs=EP, world=2),
    "rank_order": Shown("groups", MP, world=4),
    "ranks_per_node": Shown("sent", {"ep_degree": 4, "moe_dispatch": "node", "ranks_per_node": 2}, world=4),
    "sequence_parallel": Shown("sent", MP, world=2),
    "tp_comm_overlap": Shown("order", SP, world=2),
    "context_parallel_algo": Shown("sent", CP, world=2),
    "mla_cp_exchange": Shown("sent", {**CP, **MLA}, world=2),
    "sharding_stage": Shown("order", MERGED, world=2),
    "sharding_segment_strategy segment_broadcast_mb": Shown("sent", world=2),
    "segment_anchors": Shown("sent", needs={"sharding_segment_strategy": "segment_anchors"}, world=2),
    "sharding_prefetch_segments overlap_grad_reduce overlap_param_gather": Shown("order", world=2),
    "gradient_merge_acc_step": Shown(world=2),
    "gradient_merge_mode": Shown("sent", {**MERGED, "sharding_stage": 2}, world=2),
    "grad_reduce_dtype": Shown("sent", {"dtype": "fp32"}, world=2),
    "optimizer_offload": Shown("host", world=2),
    "pp_seg_method": Shown("held", {**PP, "num_layers": 3}, world=2, value="0,2"),
    "pp_schedule use_nanopipe": Shown("order", PP, world=2),
    "vpp_degree": Shown("held", {**PP, "num_layers": 4}, needs={"pp_schedule": "interleaved"}, world=2),
    # recompute
    "recompute_interval": Shown("order"),
    "recompute_offload": Shown("host", {"recompute_interval": 1}),
    "recompute_partition": Shown("sent", {**MP, "num_layers": 4, "recompute_interval": 1}, world=2),
    "recompute_granularity": Shown("plan"),
    "recompute_method": Shown("order", needs={"recompute_num_layers": 1}),
    "recompute_num_layers": Shown("order", {"recompute_method": "block", "recompute_num_layers": 1}),
    "adaptive_recompute_device_size": Shown("lines", {"train_iters": 8}),
    "recompute_in_advance recompute_in_bubble": Shown("refused"),
    # model
    "num_layers hidden_size num_query_groups head_dim vocab_size normalization": Shown("table"),
    "position_embedding_type activation add_bias_linear add_qkv_bias qk_norm": Shown("table"),
    "untie_embeddings_and_output_weights mtp_depth multi_latent_attention": Shown("table"),
    "ffn_hidden_size": Shown("table", {"first_k_dense": 1}),
    "max_position_embeddings": Shown("table", {"position_embedding_type": "learned"}),
    "qk_norm_scope": Shown("table", {"qk_norm": True}),
    "window_attn_skip_freq window_rope": Shown(base={"window_size": "4"}),
    "apply_layernorm_1p": Shown("weights"),
    "rope_scaling_factor": Shown(base={"rope_scaling_type": "linear"}),
    "original_max_position_embeddings": Shown(base=LLAMA3),
    "low_freq_factor high_freq_factor": Shown(base=LLAMA3_SHORT),
    "beta_fast beta_slow rope_attention_factor yarn_correction_range_round_to_int": Shown(base=YARN),
    "mscale": Shown(base=YARN, needs={"mscale_all_dim": 1.0}),
    "mscale_all_dim": Shown(base=YARN, needs={"mscale": 1.0}),
    "use_flash_attn": Shown("plan", {"dtype": "bf16"}),
    "mtp_block": Shown("table", {"mtp_depth": 1}),
    "mtp_loss_weight": Shown(base={"mtp_depth": 1}),
    "q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim": Shown("table", MLA),
    "attention_latent_norm_epsilon": Shown(base=MLA),
    # encoder
    "ernie_model": Shown("table", needs={k: v for k, v in BRANCHED.items() if k != "ernie_model"}),
    "type_vocab_size task_type_vocab_size": Shown("table"),
    "task_num_layers task_hidden_size task_ffn_hidden_size": Shown("table", BRANCHED),
    "task_num_attention_heads ernie_tasks": Shown(base=BRANCHED),
    "generation_segments": Shown(base=BRANCHED, needs={"memory_length": 8}),
    "memory_length": Shown(base=SEGMENTED),
    "sentence_reorder_pieces": Shown(base={**BRANCHED, "ernie_tasks": "sentence_reorder:1"}),
    "progressive_iters": Shown(base={"global_batch_size": 4}),
    "progressive_batch_multiple progressive_length_multiple": Shown(base=GROWING),
    # experts
    "num_experts moe_ffn_hidden_size first_k_dense moe_layer_freq moe_shared_experts": Shown("table"),
    "moe_shared_expert_intermediate_size": Shown("table"),
    "moe_model_type": Shown(needs={"moe_capacity_factor": 0.5, "moe_min_capacity": 1}),
    "moe_layer_ffn_hidden_sizes": Shown("table", {"moe_ffn_hidden_size": None}),
    "moe_router_num_groups": Shown(needs={"moe_router_group_topk": 1}),
    "moe_router_group_topk": Shown(base={"num_experts": 8, "moe_router_num_groups": 4, "moe_router_group_topk": 1}),
    "moe_router_group_score_topk": Shown(
        base={"num_experts": 8, "moe_router_topk": 4, "moe_router_num_groups": 4, "moe_router_group_topk": 2}
    ),
    "moe_dispatch": Shown("sent", {"ep_degree": 4}, needs={"ranks_per_node": 2}, world=4),
    "moe_rebalance_interval": Shown("sent", EP, world=2),
    "moe_router_lr_ratio moe_router_bias_update_rate": Shown("weights"),
    "moe_shared_expert_gate": Shown("table", {"moe_shared_experts": 1}),
    "moe_capacity_factor moe_min_capacity moe_drop_policy": Shown(base=DROPS),
    "moe_capacity_scope": Shown(base={**SP, **EP, **DROPS, "expert_mp_degree": 1}, world=2),
    # slices
    "ampipe_degree": Shown("sent", EP, world=2),
    "ampipe_tp_sp_comm_overlap": Shown("order", {**SP, **SLICED}, world=4),
    "ampipe_capacity": Shown(base={**SLICED, **DROPS}, world=2),
    "ampipe_slicing": Shown("sent", SLICED, world=2),
    "ampipe_cross_layer": Shown("order", SLICED, world=2),
    "use_pipe_experts": Shown("sent", {**EP, **DROPS}, needs={"pipe_experts_multi_data": 2}, world=2),
    "pipe_experts_multi_data": Shown("sent", PIECES, world=2),
    "pipe_experts_multi_stream": Shown(
        "order", {**SP, **DROPS, "use_pipe_experts": True, "pipe_experts_multi_data": 2}, world=2
    ),
    # training
    "micro_batch_size": Shown("order", {"global_batch_size": 4}),
    "rampup_batch_size": Shown(base={"global_batch_size": 2}),
    "eval_iters": Shown(base={"eval_interval": 1}),
    "initial_loss_scale": Shown(base=HALF),
    "min_loss_scale": Shown("error", {**LOST, "hysteresis": 1}, value=2.0**59),
    "loss_scale_window": Shown(base={**HALF, "initial_loss_scale": 16.0}),
    "loss_scale_factor": Shown(base={**HALF, "initial_loss_scale": 16.0, "loss_scale_window": 1}),
    "hysteresis": Shown(base=LOST),
    "fp8": Shown(base=WIDE),
    "fp8_recipe": Shown(base={**WIDE, "fp8": True}),
    "fp8_experts": Shown(base={**WIDE, "fp8": True, "moe_ffn_hidden_size": 16, "moe_shared_experts": 0}),
    "attention_backend apex": Shown("refused"),
    "compile": Shown("host"),
    "manual_gc": Shown("host", needs={"manual_gc_interval": 1}),
    "manual_gc_interval": Shown("host", {"manual_gc": "on"}),
    "mup_base_hidden_size": Shown(base={"untie_embeddings_and_output_weights": True}),
    "decoupled_min_lr": Shown(base={**STEPS, "decoupled_lr": 0.05}),
    "weight_decay_incr_style": Shown(needs={"start_weight_decay": 0.0, "end_weight_decay": 0.5}),
    "start_weight_decay end_weight_decay": Shown(
        "weights", {"weight_decay_incr_style": "linear", "start_weight_decay": 0.1, "end_weight_decay": 0.2}
    ),
    "lr weight_decay clip_grad adam_beta1 adam_beta2 adam_eps": Shown("weights"),
    "exp_avg_dtype exp_avg_sq_dtype": Shown(base=STEPS),
    "main_grads_dtype": Shown("sent", {"dtype": "bf16"}, world=2),
    "store_param_remainders": Shown("weights", {"dtype": "bf16"}),
    "optimizer": Shown("weights", {"adam_eps": None}),
    "qk_clip_threshold": Shown("weights"),
    "qk_clip_statistic": Shown("weights", {"qk_clip_threshold": 0.1, "use_flash_attn": False}),
    "sgd_momentum": Shown(base={**STEPS, "optimizer": "sgd", "adam_eps": None}),
    "muon_momentum muon_use_nesterov": Shown(base={**STEPS, "optimizer": "muon"}),
    "muon_num_ns_steps muon_coefficient_type muon_scale_mode muon_extra_scale_factor muon_qkv_split muon_ns_dtype": (
        Shown("weights", {"optimizer": "muon"})
    ),
    "lr_warmup_iters lr_decay_iters": Shown(base=STEPS),
    "lr_wsd_decay_iters": Shown(base={**STEPS, "lr_decay_style": "wsd"}),
    "lr_wsd_decay_style": Shown(base={**STEPS, "lr_decay_style": "wsd", "lr_wsd_decay_iters": 3}),
    # data
    "data_path": Shown(base={"vocab_size": 400}, value=("{text.jsonl}",)),
    "text_field": Shown(base=TEXT, value="title"),
    "document_per": Shown(base={**TEXT, "data_path": ("{texts}",)}, value="paragraph"),
    "eval_data_path": Shown(base={**TEXT, "eval_interval": 1}, value=("{other.jsonl}",)),
    "eval_tasks": Shown(
        base={**TEXT, "eval_interval": 1, "tokenizer_model": "{tokenizer.model}"}, value=("{quiz.jsonl}",)
    ),
    "data_phases": Shown(
        base={**TEXT, "data_path": ("a={text.jsonl}",)}, value="0: a=1; 1 iterations: a=1 seq-length=8"
    ),
    "on_source_end": Shown(base={**TEXT, "micro_batch_size": 32, "global_batch_size": 32, "train_iters": 30}),
    "split": Shown(base=TEXT),
    "tokenizer_model": Shown(base=TEXT, value="{tokenizer.model}"),
    "data_source": Shown(base=TOKENS, needs={"hf_dataset": "{dataset}", "data_path": None}),
    "task": Shown(base={**TALK, "task": None, "chat_date": None}, value="sft"),
    "sft_turns sft_loss sft_packing": Shown(base=TALK),
    "sft_overlong": Shown("error", {**TALK, "seq_length": 40}),
    "chat_template": Shown(base=TALK, value="{dated.jinja}"),
    "chat_date": Shown(base={**TALK, "chat_template": "{dated.jinja}"}),
    "train_epochs": Shown(base=TALK, needs={"train_iters": None}),
    "hf_dataset": Shown(
        base={**TOKENS, "data_path": None, "data_source": "hf", "hf_dataset": "{dataset}"}, value="{another_dataset}"
    ),
    "reset_position_ids": Shown(base={"position_embedding_type": "learned"}),
    "on_bad_record": Shown("error", {**TEXT, "data_path": ("{broken.jsonl}",)}),
    "phrase_file entity_file": Shown(base=WORDS, value="{phrases.txt}"),
    "triples_file": Shown(
        base={**WORDS, "ernie_tasks": "knowledge_text:1", "triples_file": "{triples.tsv}"}, value="{other_triples.tsv}"
    ),
    # checkpoint
    "save": Shown("files", value="{new}/checkpoints"),
    "load": Shown(base={"train_iters": 6, "seed": 5}, value="{checkpoints}"),
    "save_interval": Shown("files", {"save": "{new}/checkpoints"}),
    "ckpt_step finetune": Shown(base=RESUMED),
    "no_load_optim": Shown("weights", RESUMED),
    "no_load_rng": Shown(base={**RESUMED, "override_data": ("seed",), "seed": 6, "hidden_dropout": 0.5}),
    "save_hf": Shown("files", value="{new}/model"),
    "load_hf": Shown(value="{published}"),
    "save_interval_minutes": Shown("files", {"save": "{new}/checkpoints", "train_iters": 6}),
    "keep": Shown("files", {"save": "{new}/checkpoints", "save_interval": 1}),
    "checkpoint_verify": Shown(base=DAMAGED),
    "on_bad_checkpoint": Shown("error", DAMAGED),
    "override_opt_param_scheduler": Shown("error", {**RESUMED, "min_lr": 0.001}),
    "override_data": Shown("error", {**RESUMED, "seed": 6}),
    # reliability
    "bad_step_limit": Shown("error", {"dtype": "fp32", "lr": 1e30, "train_iters": 8, "clip_grad": 0.0}),
    "state_digest_steps": Shown("lines", {"log_start": "full"}, world=2),
    "replica_check_interval": Shown("host", {"hybrid_dp": True, "sharding_degree": 1}, world=2),
    "recompute_check_interval": Shown("order"),
    # reports
    "log_interval": Shown("lines", {"train_iters": 4}),
    "log_start": Shown("lines"),
    "tensorboard_dir": Shown("files", value="{new}/board"),
    "metrics_jsonl": Shown("files", value="{new}/metrics.jsonl"),
    "profile": Shown("files", {"metrics_jsonl": "{new}/metrics.jsonl"}),
    "device_tflops device_memory_gib": Shown("plan"),
    "link_gb": Shown("plan", MP, world=2),
    "network_gb": Shown("plan", {"ep_degree": 4, "moe_dispatch": "node", "ranks_per_node": 2}, world=4),
    "strict_seed_rules": Shown("refused", {**SLICED, "overlap_grad_reduce": "on"}, world=2),
    "config": Shown("table", {"num_layers": None}, value="{three.yaml}"),
}
SHOWN: Mapping[str, Shown] = {name: shown for names, shown in TOGETHER.items() for name in names.split()}

_TIME = "a limit of time, which shows where a run hangs"
_FAULT = "acts on a fault, which a sound run has not"

# What cannot show in a short sound run: the reason, and the test that shows it.
EXEMPT: Mapping[str, tuple[str, str]] = {
    "distributed_timeout_minutes": (_TIME, "tests/core/comm/test_world.py"),
    "step_timeout_seconds": (_TIME, "tests/health/hangs/test_watchdog.py"),
    "section_timeouts": (_TIME, "tests/health/hangs/test_watchdog.py"),
    "memory_check": ("refuses what this machine's memory cannot hold", "tests/tools/test_mistakes.py"),
    "straggler_factor": ("compares ranks' seconds", "tests/training/test_pace.py"),
    "on_save_error": (_FAULT, "tests/checkpoints/save_load/test_checkpoints.py"),
    "spike_sigmas": (_FAULT, "tests/training/step/test_bad_steps.py"),
    "spike_skip": (_FAULT, "tests/training/step/test_bad_steps.py"),
    "deterministic": ("chooses between kernels of an accelerator", "tests/core/device/test_base.py"),
    "async_save": ("writes the same files while training goes on", "tests/checkpoints/save_load/test_checkpoints.py"),
    "local_checkpoint_interval": (
        "is gone when the run is done; serves restarts",
        "tests/checkpoints/save_load/test_local.py",
    ),
    "local_checkpoint_dir": (
        "is gone when the run is done; serves restarts",
        "tests/checkpoints/save_load/test_local.py",
    ),
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


def _row(flag: Flag) -> Row:
    shown, kind = SHOWN.get(flag.name, Shown()), MOE if MOE in flag.models else ERNIE
    value = other(flag, kind) if shown.value is None else shown.value
    return Row(flag.name, value, shown.shows, shown.base, shown.needs, shown.world, kind)


ROWS = tuple(_row(flag) for flag in FLAGS.values() if flag.name not in EXEMPT)
