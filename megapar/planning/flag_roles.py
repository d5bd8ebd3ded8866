"""The role of each flag in a search: tried, left to the user, part of what is trained, or outside a step.

Every flag has exactly one role. A knob changes time, memory or traffic and not what is trained, so a search tries it.
"""

from __future__ import annotations

from collections.abc import Mapping

KNOBS: tuple[str, ...] = (
    *("mp_degree", "pp_degree", "cp_degree", "ep_degree", "expert_mp_degree"),
    *("sharding_degree", "dp_degree", "hybrid_dp", "rank_order"),
    *("sequence_parallel", "tp_comm_overlap", "context_parallel_algo", "mla_cp_exchange"),
    *("sharding_stage", "sharding_segment_strategy", "segment_broadcast_mb", "sharding_prefetch_segments"),
    *("gradient_merge_mode", "overlap_grad_reduce", "overlap_param_gather", "optimizer_offload"),
    *("pp_seg_method", "pp_schedule", "vpp_degree"),
    *("recompute_interval", "recompute_offload", "recompute_partition", "recompute_granularity"),
    *("recompute_method", "recompute_num_layers"),
    *("ampipe_degree", "ampipe_tp_sp_comm_overlap", "ampipe_slicing", "ampipe_cross_layer"),
    *("use_pipe_experts", "pipe_experts_multi_data", "pipe_experts_multi_stream"),
    *("moe_dispatch", "micro_batch_size"),
)
"""Flags that a search tries."""

BY_HAND: Mapping[str, str] = {
    "segment_anchors": "names modules of one model; sizes of segments are tried",
    "use_nanopipe": "is --pp-schedule zero_bubble, which is tried",
    "gradient_merge_acc_step": "follows from the global batch, the micro-batch and the layout",
    "adaptive_recompute_device_size": "decides from measurements of a run; recompute of fixed layers is tried",
    "recompute_in_advance": "is not built",
    "recompute_in_bubble": "is not built",
    "compile": "has no measured gain on any accelerator, so no figures",
    "attention_backend": "has no confirmed kernel but the default's, so no figures",
    "use_flash_attn": "switches to the reference that tests compare with, which no run needs",
}
"""Flags that affect a step and are not tried, each with the reason."""

DROPPED: tuple[str, ...] = (
    *(name for name in KNOBS if name not in ("sharding_segment_strategy", "segment_broadcast_mb")),
    *("use_nanopipe", "gradient_merge_acc_step", "adaptive_recompute_device_size"),
)
"""Flags whose values in files a search drops. Segments stay: any size, even the default, selects a strategy."""

_PROPERTIES: Mapping[str, str] = {
    "describes the model": """
        num_layers hidden_size num_attention_heads num_query_groups head_dim ffn_hidden_size seq_length
        max_position_embeddings vocab_size layernorm_epsilon init_std depth_scaled_init ernie_model normalization
        position_embedding_type activation add_bias_linear add_qkv_bias qk_norm multi_latent_attention q_lora_rank
        kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim attention_latent_norm_epsilon qk_norm_scope
        norm_placement embedding_multiplier residual_multiplier softmax_scale logits_scaling rope_theta
        rope_scaling_type rope_scaling_factor original_max_position_embeddings low_freq_factor high_freq_factor
        beta_fast beta_slow mscale mscale_all_dim rope_attention_factor yarn_correction_range_round_to_int
        rotary_percent untie_embeddings_and_output_weights mtp_depth mtp_block type_vocab_size task_type_vocab_size
        task_num_layers task_hidden_size task_num_attention_heads task_ffn_hidden_size generation_segments
        memory_length first_k_dense moe_layer_freq num_experts moe_ffn_hidden_size moe_layer_ffn_hidden_sizes
        moe_router_topk moe_shared_experts moe_shared_expert_intermediate_size moe_shared_expert_gate
        moe_router_score_function moe_router_pre_softmax moe_router_num_groups moe_router_group_topk
        moe_router_group_score_topk norm_topk_prob moe_router_topk_scaling_factor""",
    "decides which tokens reach their experts": """
        moe_model_type moe_capacity_factor moe_min_capacity moe_drop_policy moe_capacity_scope ampipe_capacity""",
    "is part of the loss or of regularization": """
        attention_dropout hidden_dropout mtp_loss_weight sop_loss_weight moe_aux_loss_coeff moe_seq_aux_loss_coeff
        moe_orthogonal_loss_coeff moe_z_loss_coeff mlm_probability""",
    "decides the precision of the results": "dtype fp8 grad_reduce_dtype deterministic",
    "is part of the optimizer or of its schedule": """
        global_batch_size rampup_batch_size train_iters seed initial_loss_scale min_loss_scale loss_scale_window
        loss_scale_factor hysteresis progressive_iters progressive_batch_multiple progressive_length_multiple lr min_lr
        lr_decay_style lr_warmup_iters lr_decay_iters lr_wsd_decay_iters lr_wsd_decay_style weight_decay clip_grad
        adam_beta1 adam_beta2 adam_eps override_opt_param_scheduler moe_router_lr_ratio moe_router_bias_update_rate
        bad_step_limit spike_sigmas spike_skip""",
    "describes the data": """
        data_path eval_data_path split text_field tokenizer_model data_source hf_dataset reset_position_ids
        reset_attention_mask eod_mask_loss packing on_bad_record ernie_tasks phrase_file entity_file triples_file
        override_data sentence_reorder_pieces skip_samples""",
    "says what the search is for": """
        world_size ranks_per_node device device_tflops device_memory_gib link_gb network_gb config strict_seed_rules
        memory_check""",
}

_WITHOUT_EFFECT: Mapping[str, str] = {
    "is evaluation, between steps": "eval_interval eval_iters",
    "moves experts between some steps; --expert-imbalance gives the load that it leaves": "moe_rebalance_interval",
    "loads or saves, between steps": """
        save load save_interval ckpt_step finetune no_load_optim no_load_rng save_hf load_hf save_interval_minutes
        async_save keep checkpoint_verify on_bad_checkpoint on_save_error exit_interval exit_duration_minutes
        local_checkpoint_interval local_checkpoint_dir""",
    "checks or limits a run; checks take about a percent of its time, which the plan leaves out": """
        distributed_timeout_minutes replica_check_interval recompute_check_interval state_digest_steps
        step_timeout_seconds section_timeouts straggler_factor""",
    "logs or measures a run": """
        log_interval tensorboard_dir metrics_jsonl profile wandb_project wandb_exp_name wandb_entity wandb_save_dir
        mlflow_experiment mlflow_run_name mlflow_tracking_uri swanlab_project swanlab_exp_name swanlab_save_dir""",
    "belongs to the host's garbage collection, which the plan leaves out": "manual_gc manual_gc_interval",
    "checks flags without a run": "validate_only rules_only",
}


def _by_flag(reasons: Mapping[str, str]) -> Mapping[str, str]:
    return {name: reason for reason, names in reasons.items() for name in names.split()}


PROPERTIES: Mapping[str, str] = _by_flag(_PROPERTIES)
"""Flags that decide what is trained, which a search must not change, each with the reason."""

WITHOUT_EFFECT: Mapping[str, str] = _by_flag(_WITHOUT_EFFECT)
"""Flags that change neither time nor memory of a step in the plan, each with the reason."""

STILL: Mapping[str, str] = {}
"""Knobs that move no figure of any plan, each with the reason; every knob moves one."""
