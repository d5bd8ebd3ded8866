"""Flags that the fuzzer does not draw, each with the reason; every other flag is a row of the table."""

from __future__ import annotations

from tests.fuzz.table import FIXED

_FILES = "names files; tests/data hold what is read of them to the numbers of mock data's way in"
_SAVING = "checkpoints: tests/training and tests/core/checkpoint"
_RUNS = "set where a run is saved and continued (tests/fuzz/check.py)"
_WATCHING = "watches, logs or ends a run and changes no number; tests/training"
_START = "says where and how a run starts"

UNDRAWN: dict[str, str] = {
    "lr": f"fixed: {FIXED['lr']}",
    **dict.fromkeys(("data_source", "hf_dataset", "on_bad_record", "text_field"), _FILES),
    **dict.fromkeys(("save", "load", "ckpt_step"), _RUNS),
    **dict.fromkeys(("phrase_file", "entity_file", "triples_file"), _FILES),
    **dict.fromkeys(("finetune", "no_load_optim", "no_load_rng"), _SAVING),
    **dict.fromkeys(
        ("save_hf", "load_hf", "save_interval_minutes", "async_save", "keep", "checkpoint_verify"), _SAVING
    ),
    **dict.fromkeys(("on_bad_checkpoint", "on_save_error", "override_opt_param_scheduler", "override_data"), _SAVING),
    **dict.fromkeys(("local_checkpoint_interval", "local_checkpoint_dir"), _SAVING),
    "exit_interval": "the last step that is run",
    **dict.fromkeys(("exit_duration_minutes", "step_timeout_seconds", "straggler_factor"), _WATCHING),
    "section_timeouts": _WATCHING,
    **dict.fromkeys(("distributed_timeout_minutes", "tensorboard_dir", "metrics_jsonl"), _WATCHING),
    "profile": _WATCHING,
    **dict.fromkeys(("wandb_project", "wandb_exp_name", "wandb_entity", "wandb_save_dir"), _WATCHING),
    **dict.fromkeys(("mlflow_experiment", "mlflow_run_name", "mlflow_tracking_uri"), _WATCHING),
    **dict.fromkeys(("swanlab_project", "swanlab_exp_name", "swanlab_save_dir"), _WATCHING),
    "device_tflops": "fixed: what MFU is a share of",
    **dict.fromkeys(
        ("device_memory_gib", "link_gb", "network_gb"),
        "figures of a device, for plans and MFU; tests/training/building/test_device_figures.py",
    ),
    **dict.fromkeys(("validate_only", "rules_only", "world_size", "config", "device"), _START),
    "memory_check": "only refuses what would not fit; tests/tools/test_mistakes.py",
    "strict_seed_rules": "only refuses more; tests/test_compatibility.py",
    "attention_backend": "kernels of NVIDIA GPUs; scripts/trace_cuda.sh traces them, scripts/gpu_day.sh compares them",
    "fp8": "products of NVIDIA GPUs of capability 8.9; tests/core/tensor_parallel/test_fp8.py emulates them",
}
