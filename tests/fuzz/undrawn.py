"""Flags that the fuzzer does not draw, each with the reason; every other flag is a row of the table."""

from __future__ import annotations

from tests.fuzz.table import FIXED

_FILES = "names files; tests/data hold what is read of them to the numbers of mock data's way in"
_SAVING = "checkpoints: tests/training and tests/core/checkpoint save and load them across layouts"
_WATCHING = "watches, logs or ends a run and changes no number; tests/training"
_START = "says where and how a run starts"
_ORDINARY = "acts on steps out of the ordinary, which two steps of random data are not; tests/training"
_EVALUATION = "evaluation changes no state; tests/test_trainer.py"
_COLLECTOR = "when Python's garbage collector runs"

UNDRAWN: dict[str, str] = {
    **{name: f"fixed: {value}" for name, value in FIXED.items() if name != "dtype"},
    **dict.fromkeys(
        ("eval_data_path", "split", "tokenizer_model", "data_source", "hf_dataset", "on_bad_record", "text_field"),
        _FILES,
    ),
    **dict.fromkeys(("phrase_file", "entity_file", "triples_file"), _FILES),
    **dict.fromkeys(
        ("save", "load", "save_interval", "ckpt_step", "finetune", "no_load_optim", "no_load_rng"), _SAVING
    ),
    **dict.fromkeys(
        ("save_hf", "load_hf", "save_interval_minutes", "async_save", "keep", "checkpoint_verify"), _SAVING
    ),
    **dict.fromkeys(("on_bad_checkpoint", "on_save_error", "override_opt_param_scheduler", "override_data"), _SAVING),
    **dict.fromkeys(("local_checkpoint_interval", "local_checkpoint_dir"), _SAVING),
    **dict.fromkeys(("exit_interval", "exit_duration_minutes", "step_timeout_seconds", "straggler_factor"), _WATCHING),
    "section_timeouts": _WATCHING,
    **dict.fromkeys(("distributed_timeout_minutes", "log_interval", "tensorboard_dir", "metrics_jsonl"), _WATCHING),
    "profile": _WATCHING,
    **dict.fromkeys(("wandb_project", "wandb_exp_name", "wandb_entity", "wandb_save_dir"), _WATCHING),
    **dict.fromkeys(("mlflow_experiment", "mlflow_run_name", "mlflow_tracking_uri"), _WATCHING),
    **dict.fromkeys(("swanlab_project", "swanlab_exp_name", "swanlab_save_dir"), _WATCHING),
    **dict.fromkeys(("bad_step_limit", "spike_sigmas", "spike_skip"), _ORDINARY),
    "eval_iters": _EVALUATION,
    **dict.fromkeys(("manual_gc", "manual_gc_interval"), _COLLECTOR),
    **dict.fromkeys(
        ("device_tflops", "device_memory_gib", "link_gb", "network_gb"),
        "figures of a device, for plans and MFU; tests/training/building/test_device_figures.py",
    ),
    **dict.fromkeys(("validate_only", "rules_only", "world_size", "config", "device"), _START),
    "strict_seed_rules": "only refuses more; tests/test_compatibility.py",
    "deterministic": "chooses kernels, of which a CPU has one that repeats its results; tests/training",
    "attention_backend": "kernels of NVIDIA GPUs; scripts/trace_cuda.sh traces them, scripts/gpu_day.sh compares them",
    "fp8": "products of NVIDIA GPUs of capability 8.9; tests/core/tensor_parallel/test_fp8.py emulates them",
}
