"""Rows on batches, schedules, sharding modes, checkpoints and data."""

from __future__ import annotations

from typing import Any

from megapar.files.paths import MOUNT, REMOTE
from megapar.rules.sections import SECTIONS, is_section_limits
from megapar.schema.rule import NO_EFFECT, PADDLE_SHARDING, Facts, Rule, Test, either, near_multiples, spell

SOURCE = "training"
SHARDING = "sharding"


def _unused(id: str, names: tuple[str, ...], when_read: tuple[str, ...], when: Test, what: str, **more: Any) -> Rule:
    """Build a row that refuses flags without an effect; ``what`` names the circumstances."""
    *others, last = map(spell, names)
    subject = f"{', '.join(others)} and {last} have" if others else f"{last} has"
    return Rule(
        id=id,
        reads=(*when_read, "not_default"),
        when=when,
        requires=lambda f: not f.not_default & set(names),
        message=f"{subject} no effect {what}",
        fix=lambda f: f"Leave out {either(spell(n) for n in names if n in f.not_default)}.",
        source=NO_EFFECT,
        **more,
    )


def _fp8(id: str, reads: tuple[str, ...], failing: str, passing: str = "", **more: Any) -> Rule:
    """Build a row on the requirements of --fp8."""
    return Rule(
        id=id,
        reads=("fp8", *reads),
        when=lambda f: f.fp8,
        passing=f"--fp8 {passing}".strip(),
        failing=f"--fp8 {failing}",
        **{"source": "--fp8", **more},
    )


def _step_size(f: Facts) -> int:
    """Return the sequences of one micro-batch over all data ranks."""
    return int(f.micro_batch_size * f.data_ranks)


def _near_batch(f: Facts) -> str:
    return f"Choose --global-batch-size {near_multiples(_step_size(f), f.global_batch_size)}."


def _is_range(text: str) -> bool:
    first, dash, last = text.partition("-")
    return bool(dash) and first.isdecimal() and last.isdecimal() and int(first) <= int(last)


_BATCH = ("global_batch_size", "micro_batch_size", "data_ranks")


def _is_span(text: str) -> bool:
    """Return True for START:END, both counted from 1."""
    first, colon, last = text.partition(":")
    return bool(colon) and first.isdigit() and last.isdigit() and 1 <= int(first) <= int(last)


def _backend(id: str, reads: tuple[str, ...], failing: str, passing: str, **more: Any) -> Rule:
    """Build a row on the requirements of --attention-backend."""
    return Rule(
        id=id,
        reads=("attention_backend", *reads),
        when=lambda f: f.attention_backend != "auto",
        passing=f"--attention-backend {passing}",
        failing=f"--attention-backend {failing}",
        source="devices",
        **more,
    )


_HEADS = "kernels of --attention-backend take heads of at most 256 features; of a multiple of 8, except flash"


def _fits(size: int, backend: str) -> bool:
    """Return True if a kernel takes heads of this size on some GPU."""
    return size <= 256 and (backend == "flash" or size % 8 == 0)


def _in_parts(f: Facts) -> bool:
    """Return True if attention never sees whole samples of one document."""
    keys_travel = f.cp_degree > 1 and f.context_parallel_algo != "ulysses_cp_algo"
    return bool(keys_travel or f.ampipe_degree > 1 or f.reset_attention_mask)


RULES: tuple[Rule, ...] = (
    Rule(
        id="batch-divides",
        reads=_BATCH,
        requires=lambda f: f.global_batch_size % _step_size(f) == 0,
        message="--micro-batch-size x data ranks (dp x sharding) must divide --global-batch-size",
        fix=_near_batch,
        source="definition of the batch",
        passing="--world-size 4 --micro-batch-size 2 --global-batch-size 16",
        failing="--world-size 4 --micro-batch-size 2 --global-batch-size 18",
    ),
    Rule(
        id="batch-agrees",
        reads=(*_BATCH, "requested"),
        when=lambda f: None not in (f.requested.get("gradient_merge_acc_step"), f.requested.get("global_batch_size")),
        requires=lambda f: f.global_batch_size == _step_size(f) * f.requested["gradient_merge_acc_step"],
        message="--global-batch-size must be --micro-batch-size x data ranks x --gradient-merge-acc-step",
        fix=lambda f: (
            f"Leave one out, or choose --global-batch-size {_step_size(f) * f.requested['gradient_merge_acc_step']}."
        ),
        source=SHARDING,
        passing="--micro-batch-size 2 --gradient-merge-acc-step 4 --global-batch-size 8",
        failing="--micro-batch-size 2 --gradient-merge-acc-step 4 --global-batch-size 16",
    ),
    Rule(
        id="rampup-global",
        reads=("rampup_batch_size", "requested"),
        when=lambda f: f.rampup_batch_size is not None,
        requires=lambda f: (
            f.requested.get("global_batch_size") is not None and f.requested.get("gradient_merge_acc_step") is None
        ),
        message="--rampup-batch-size ends at --global-batch-size: set that, and leave out --gradient-merge-acc-step",
        source=SOURCE,
        passing="--rampup-batch-size 4 4 1000 --global-batch-size 16",
        failing="--rampup-batch-size 4 4 1000",
    ),
    Rule(
        id="rampup-steps",
        reads=("rampup_batch_size", *_BATCH),
        when=lambda f: f.rampup_batch_size is not None,
        requires=lambda f: (
            f.rampup_batch_size[0] <= f.global_batch_size
            and (f.global_batch_size - f.rampup_batch_size[0]) % f.rampup_batch_size[1] == 0
            and all(value % _step_size(f) == 0 for value in f.rampup_batch_size[:2])
        ),
        message=(
            "START and INCREMENT of --rampup-batch-size must be multiples of --micro-batch-size x data ranks, and a "
            "whole number of increments must lead from START to --global-batch-size"
        ),
        fix=lambda f: f"Use multiples of {_step_size(f)}.",
        source=SOURCE,
        passing="--rampup-batch-size 4 4 1000 --global-batch-size 16",
        failing="--rampup-batch-size 4 5 1000 --global-batch-size 16",
    ),
    Rule(
        id="merge-mode-stage",
        reads=("sharding_stage", "requested"),
        when=lambda f: f.sharding_stage == 1,
        requires=lambda f: f.requested.get("gradient_merge_mode") != "micro_batch",
        message="--gradient-merge-mode micro_batch at --sharding-stage 1 would be stage 2",
        fix="Choose --sharding-stage 2, or --gradient-merge-mode step.",
        source=SHARDING,
        passing="--sharding-stage 2 --gradient-merge-mode micro_batch",
        failing="--sharding-stage 1 --gradient-merge-mode micro_batch",
    ),
    Rule(
        id="offload-stage",
        reads=("optimizer_offload", "sharding_stage"),
        when=lambda f: f.optimizer_offload,
        requires=lambda f: f.sharding_stage < 3,
        message="--optimizer-offload at --sharding-stage 3 would leave master weights on the device",
        fix="Choose --sharding-stage 1 or 2.",
        source=SHARDING,
        passing="--optimizer-offload --sharding-stage 2",
        failing="--optimizer-offload --sharding-stage 3",
    ),
    Rule(
        id="reduce-dtype-wide",
        reads=("grad_reduce_dtype", "dtype"),
        when=lambda f: f.grad_reduce_dtype == "bf16",
        requires=lambda f: f.dtype not in ("fp64", "fp16"),
        message="--grad-reduce-dtype bf16 would lose the precision of the gradients of an fp16 or fp64 run",
        fix="Leave it out, or choose --dtype bf16 or fp32.",
        source=SHARDING,
        passing="--grad-reduce-dtype bf16 --dtype bf16",
        failing="--grad-reduce-dtype bf16 --dtype fp64",
    ),
    Rule(
        id="reduce-dtype-adds",
        reads=("grad_reduce_dtype", "sharding_stage", "gradient_merge_mode", "gradient_merge_acc_step", "hybrid_dp"),
        when=lambda f: f.grad_reduce_dtype == "bf16" and f.sharding_stage == 3,
        requires=lambda f: (
            f.gradient_merge_acc_step == 1 or (f.gradient_merge_mode == "micro_batch" and not f.hybrid_dp)
        ),
        message=(
            "at --sharding-stage 3 the gradients of several micro-batches are accumulated in --grad-reduce-dtype "
            "before the last reduction (--gradient-merge-mode step, --hybrid-dp), for which bf16 is not precise enough"
        ),
        fix="Leave --grad-reduce-dtype out, choose --sharding-stage 1 or 2, or use one micro-batch per step.",
        source=SHARDING,
        passing="--grad-reduce-dtype bf16 --sharding-stage 3 --world-size 2 --gradient-merge-acc-step 2",
        failing=(
            "--grad-reduce-dtype bf16 --sharding-stage 3 --world-size 2 --gradient-merge-acc-step 2 "
            "--gradient-merge-mode step"
        ),
    ),
    Rule(
        id="segment-anchors",
        reads=("sharding_segment_strategy", "segment_anchors"),
        requires=lambda f: (f.sharding_segment_strategy == "segment_anchors") == bool(f.segment_anchors),
        message="--segment-anchors and --sharding-segment-strategy segment_anchors must be used together",
        fix=(
            "To divide the model at anchors, set only --segment-anchors; to divide it by size, set only "
            "--segment-broadcast-MB."
        ),
        source=PADDLE_SHARDING,
        passing="--sharding-segment-strategy segment_anchors --segment-anchors layers.1 layers.3",
        failing="--sharding-segment-strategy segment_anchors",
    ),
    _unused(
        "segment-size-unused",
        ("segment_broadcast_mb",),
        ("sharding_segment_strategy",),
        lambda f: f.sharding_segment_strategy == "segment_anchors",
        "if segments start at anchors",
        passing="--segment-broadcast-MB 8",
        failing="--sharding-segment-strategy segment_anchors --segment-anchors layers.1 --segment-broadcast-MB 8",
    ),
    Rule(
        id="min-lr",
        reads=("min_lr", "lr"),
        requires=lambda f: f.min_lr <= f.lr,
        message="--min-lr must be at most --lr",
        source=SOURCE,
        passing="--lr 1e-3 --min-lr 1e-4",
        failing="--lr 1e-3 --min-lr 1e-2",
    ),
    Rule(
        id="warmup",
        reads=("lr_warmup_iters", "lr_decay_iters", "lr_decay_style"),
        when=lambda f: f.lr_decay_style != "constant",
        requires=lambda f: f.lr_warmup_iters < f.lr_decay_iters,
        message="--lr-warmup-iters must be below --lr-decay-iters",
        fix=lambda f: f"Choose --lr-warmup-iters 0 to {f.lr_decay_iters - 1}.",
        source=SOURCE,
        passing="--train-iters 100 --lr-warmup-iters 10",
        failing="--train-iters 100 --lr-warmup-iters 100",
    ),
    Rule(
        id="wsd-decay",
        reads=("lr_decay_style", "lr_wsd_decay_iters", "lr_warmup_iters", "lr_decay_iters"),
        when=lambda f: f.lr_decay_style == "wsd",
        requires=lambda f: f.lr_warmup_iters + f.lr_wsd_decay_iters <= f.lr_decay_iters,
        message="--lr-warmup-iters + --lr-wsd-decay-iters must be at most --lr-decay-iters",
        fix=lambda f: f"Choose --lr-wsd-decay-iters 1 to {max(1, f.lr_decay_iters - f.lr_warmup_iters)}.",
        source=SOURCE,
        passing="--lr-decay-style wsd --train-iters 100 --lr-wsd-decay-iters 20",
        failing="--lr-decay-style wsd --train-iters 100 --lr-wsd-decay-iters 120",
    ),
    _unused(
        "wsd-unused",
        ("lr_wsd_decay_iters", "lr_wsd_decay_style"),
        ("lr_decay_style",),
        lambda f: f.lr_decay_style != "wsd",
        "unless --lr-decay-style is wsd",
        passing="--lr-decay-style wsd --lr-wsd-decay-iters 5",
        failing="--lr-decay-style cosine --lr-wsd-decay-iters 5",
    ),
    _unused(
        "adam-unused",
        ("adam_beta1", "adam_beta2", "adam_eps"),
        ("optimizer",),
        lambda f: f.optimizer != "adamw",
        "unless --optimizer is adamw",
        passing="--optimizer adamw --adam-beta1 0.8",
        failing="--optimizer sgd --adam-beta1 0.8",
    ),
    _unused(
        "sgd-unused",
        ("sgd_momentum",),
        ("optimizer",),
        lambda f: f.optimizer != "sgd",
        "unless --optimizer is sgd",
        passing="--optimizer sgd --sgd-momentum 0.5",
        failing="--optimizer adamw --sgd-momentum 0.5",
    ),
    _unused(
        "loss-scale-unused",
        ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "loss_scale_factor", "hysteresis"),
        ("dtype",),
        lambda f: f.dtype != "fp16",
        "unless --dtype is fp16",
        passing="--dtype fp16 --loss-scale-window 500",
        failing="--dtype bf16 --loss-scale-window 500",
    ),
    _unused(
        "load-unused",
        ("ckpt_step", "finetune", "no_load_optim", "no_load_rng", "override_opt_param_scheduler", "override_data"),
        ("load",),
        lambda f: f.load is None,
        "without --load",
        passing="--load runs/a --finetune",
        failing="--finetune",
    ),
    _unused(
        "save-unused",
        ("save_interval", "save_interval_minutes", "keep", "async_save", "on_save_error"),
        ("save",),
        lambda f: f.save is None,
        "without --save",
        passing="--save runs/a --save-interval 50",
        failing="--save-interval 50",
    ),
    _unused(
        "async-save-unused",
        ("async_save", "on_save_error"),
        ("save_interval", "save_interval_minutes"),
        lambda f: not f.save_interval and not f.save_interval_minutes,
        "if only the final checkpoint is saved, after which no training follows",
        passing="--save runs/a --save-interval 5 --on-save-error stop",
        failing="--save runs/a --on-save-error stop",
    ),
    _unused(
        "bad-checkpoint-unused",
        ("checkpoint_verify", "on_bad_checkpoint"),
        ("load", "save"),
        lambda f: f.load is None and f.save is None,
        "if nothing is loaded",
        passing="--load runs/a --checkpoint-verify size",
        failing="--checkpoint-verify size",
    ),
    Rule(
        id="remote-paths",
        reads=("remote_paths",),
        requires=lambda f: not f.remote_paths,
        message=REMOTE,
        fix=MOUNT,
        source="launch",
        passing="--save runs/a",
        failing="--save s3://bucket/a",
    ),
    Rule(
        id="section-timeouts-form",
        reads=("section_timeouts",),
        requires=lambda f: is_section_limits(f.section_timeouts),
        message=f"--section-timeouts takes NAME=SECONDS, each NAME once, of {', '.join(SECTIONS)}",
        source="--section-timeouts",
        passing="--section-timeouts save=600,evaluation=1800",
        failing="--section-timeouts saving=600",
    ),
    Rule(
        id="skip-samples-ranges",
        reads=("skip_samples",),
        requires=lambda f: all(_is_range(text) for text in f.skip_samples),
        message="--skip-samples takes ranges A-B of sample numbers with A <= B",
        source=SOURCE,
        passing="--skip-samples 100-199 500-500",
        failing="--skip-samples 200-100",
    ),
    _unused(
        "local-checkpoint-unused",
        ("local_checkpoint_dir",),
        ("local_checkpoint_interval",),
        lambda f: f.local_checkpoint_interval == 0,
        "without --local-checkpoint-interval",
        passing="--local-checkpoint-interval 10 --local-checkpoint-dir /dev/shm/a",
        failing="--local-checkpoint-dir /dev/shm/a",
    ),
    Rule(
        id="straggler-factor",
        reads=("straggler_factor",),
        requires=lambda f: f.straggler_factor == 0 or f.straggler_factor > 1,
        message="--straggler-factor must be 0 or above 1; the median rank itself has the factor 1",
        source=SOURCE,
        passing="--straggler-factor 1.2",
        failing="--straggler-factor 0.9",
    ),
    Rule(
        id="spike-skip-sigmas",
        reads=("spike_skip", "spike_sigmas"),
        when=lambda f: f.spike_skip,
        requires=lambda f: f.spike_sigmas > 0,
        message="--spike-skip needs --spike-sigmas above 0 to detect spikes",
        source=SOURCE,
        passing="--spike-skip",
        failing="--spike-skip --spike-sigmas 0",
    ),
    Rule(
        id="load-twice",
        reads=("load", "load_hf", "save"),
        when=lambda f: f.load_hf is not None,
        requires=lambda f: f.load is None or f.load == f.save,
        message="--load and --load-hf both set the source of the weights, unless --load is the folder of --save",
        fix="Keep one of them, or set --save to the folder of --load: then the first run starts from --load-hf.",
        source=SOURCE,
        passing="--load-hf models/b --load runs/a --save runs/a",
        failing="--load runs/a --load-hf models/b",
    ),
    Rule(
        id="data-alone",
        reads=("data_path", "eval_data_path"),
        when=lambda f: "mock" in (*f.data_path, *f.eval_data_path),
        requires=lambda f: f.data_path == ("mock",) and f.eval_data_path in ((), ("mock",)),
        message="mock must be the only item of --data-path, and allows nothing else in --eval-data-path",
        source="command line",
        passing="--data-path mock",
        failing="--data-path mock corpus.jsonl",
    ),
    Rule(
        id="profile-steps",
        reads=("profile",),
        when=lambda f: f.profile is not None,
        requires=lambda f: _is_span(f.profile),
        message="--profile takes START:END with START <= END, steps counted from 1",
        fix="Choose for example --profile 3:5.",
        source=SOURCE,
        passing="--profile 3:5 --metrics-jsonl runs/a/metrics.jsonl",
        failing="--profile 5:3 --metrics-jsonl runs/a/metrics.jsonl",
    ),
    Rule(
        id="profile-beyond",
        reads=("profile", "train_iters"),
        when=lambda f: f.profile is not None and _is_span(f.profile),
        requires=lambda f: int(f.profile.partition(":")[0]) <= f.train_iters,
        message="--profile starts after the last step",
        fix=lambda f: f"Choose --profile {f.train_iters}:{f.train_iters}, or earlier steps.",
        source=NO_EFFECT,
        passing="--profile 3:5 --train-iters 5 --metrics-jsonl runs/a/metrics.jsonl",
        failing="--profile 1000001:1000002 --metrics-jsonl runs/a/metrics.jsonl",
    ),
    Rule(
        id="fp64-device",
        reads=("dtype", "device"),
        when=lambda f: f.device == "npu",
        requires=lambda f: f.dtype != "fp64",
        message="NPUs do not support fp64",
        fix="Choose --dtype bf16 or fp32, or --device cpu.",
        source="devices",
        passing="--device npu --dtype bf16",
        failing="--device npu --dtype fp64",
    ),
    Rule(
        id="compile-device",
        reads=("compile", "device"),
        when=lambda f: f.compile == "on",
        requires=lambda f: f.device != "npu",
        message="--compile supports only CPUs and GPUs",
        fix="Leave --compile out; on an NPU, the vendor's fused operators are used.",
        source="devices",
        passing="--compile --device cpu",
        failing="--compile --device npu",
    ),
    Rule(
        id="compile-deterministic",
        reads=("compile", "deterministic"),
        when=lambda f: f.compile == "on",
        requires=lambda f: not f.deterministic,
        message="--compile chooses kernels by timing them, so two runs may round differently",
        fix="Leave one of them out.",
        source="--deterministic",
        passing="--compile",
        failing="--compile --deterministic",
    ),
    Rule(
        id="compile-ernie3",
        reads=("compile", "ernie_model"),
        when=lambda f: f.compile == "on",
        requires=lambda f: f.ernie_model != "ernie3",
        message=(
            "--compile does not support ERNIE 3.0, whose branches attend by segments with sizes that change from step "
            "to step"
        ),
        fix="Leave --compile out.",
        source="--compile",
        passing="--compile",
        failing="--compile --ernie-model ernie3",
        models=("ernie",),
    ),
    Rule(
        id="manual-gc-interval",
        reads=("manual_gc", "manual_gc_interval", "not_default"),
        when=lambda f: "manual_gc_interval" in f.not_default,
        requires=lambda f: f.manual_gc == "on",
        message="--manual-gc-interval is the interval of --manual-gc, and has no effect without it",
        fix="Add --manual-gc, or leave the interval out.",
        source="--manual-gc",
        passing="--manual-gc --manual-gc-interval 50",
        failing="--manual-gc-interval 50",
    ),
    _backend(
        "attention-backend-device",
        ("device",),
        "cudnn --device cpu",
        "cudnn --device cuda",
        requires=lambda f: f.device in ("auto", "cuda"),
        message="--attention-backend names kernels for NVIDIA GPUs",
        fix="Leave --attention-backend out, or choose --device cuda.",
    ),
    _backend(
        "attention-backend-dtype",
        ("dtype",),
        "flash --dtype fp32",
        "flash --bf16",
        requires=lambda f: f.dtype in ("auto", "bf16", "fp16"),
        message="the kernels of --attention-backend take bf16 and fp16",
        fix="Choose --dtype bf16, or leave --attention-backend out.",
    ),
    _backend(
        "attention-backend-fused",
        ("use_flash_attn",),
        "flash --no-use-flash-attn",
        "flash",
        requires=lambda f: f.use_flash_attn,
        message="--no-use-flash-attn computes attention by plain products, which no --attention-backend can run",
        fix="Leave one of the two out.",
    ),
    _backend(
        "attention-backend-repeats",
        ("deterministic",),
        "cudnn --deterministic",
        "flash --deterministic",
        requires=lambda f: not f.deterministic or f.attention_backend == "flash",
        message=(
            "--deterministic needs a kernel whose backward repeats to the last bit: torch refuses cuDNN's, and "
            "FlashAttention-3's has not been measured"
        ),
        fix="Choose --attention-backend flash.",
    ),
    _backend(
        "attention-backend-dropout",
        ("attention_dropout",),
        "cudnn --attention-dropout 0.1",
        "cudnn --attention-dropout 0",
        requires=lambda f: f.attention_dropout == 0 or f.attention_backend == "flash",
        message="FlashAttention-3 drops no attention weights, and neither do some versions of cuDNN",
        fix="Choose --attention-dropout 0 or --attention-backend flash.",
    ),
    _backend(
        "attention-backend-heads",
        ("head_dim",),
        "cudnn --head-dim 20",
        "flash --head-dim 20",
        requires=lambda f: _fits(f.head_dim, f.attention_backend),
        message=_HEADS,
        fix=lambda f: f"Choose --head-dim {near_multiples(8, f.head_dim)}, or leave --attention-backend out.",
        models=("moe",),
    ),
    _backend(
        "attention-backend-heads-ernie",
        ("hidden_size", "num_attention_heads"),
        "flash --hidden-size 2080 --num-attention-heads 8",
        "flash --hidden-size 2048 --num-attention-heads 8",
        requires=lambda f: _fits(f.hidden_size // f.num_attention_heads, f.attention_backend),
        message=_HEADS,
        fix="Choose another --hidden-size or --num-attention-heads, or leave --attention-backend out.",
        models=("ernie",),
    ),
    _backend(
        "attention-backend-form",
        ("cp_degree", "context_parallel_algo", "ampipe_degree", "reset_attention_mask"),
        "cudnn --reset-attention-mask",
        "flash --reset-attention-mask",
        requires=lambda f: f.attention_backend != "cudnn" or not _in_parts(f),
        message=(
            "torch's call of cuDNN takes whole samples only, so no layer would use it with --reset-attention-mask, "
            "slices, or keys from other cp ranks"
        ),
        fix="Choose --attention-backend flash.",
        models=("moe",),
    ),
    _fp8(
        "fp8-device",
        ("device",),
        "--device cpu",
        "--device cuda",
        requires=lambda f: f.device in ("auto", "cuda"),
        message="--fp8 needs an NVIDIA GPU of compute capability 8.9 or higher",
        fix="Leave --fp8 out, or choose --device cuda.",
        source="devices",
    ),
    _fp8(
        "fp8-dtype",
        ("dtype",),
        "--dtype fp32",
        "--bf16",
        requires=lambda f: f.dtype in ("auto", "bf16"),
        message="--fp8 rounds the inputs of bf16 matrix products, and everything else stays in bf16",
        fix="Choose --dtype bf16.",
    ),
    _fp8(
        "fp8-mp",
        ("mp_degree",),
        "--world-size 2 --mp-degree 2",
        requires=lambda f: f.mp_degree == 1,
        message="tensor parallel products are computed in chunks, but fp8 scales whole tensors",
        fix="Choose --mp-degree 1, or leave --fp8 out.",
    ),
    _fp8(
        "fp8-zero-bubble",
        ("use_nanopipe", "pp_schedule"),
        "--world-size 2 --pp-degree 2 --use-nanopipe",
        "--world-size 2 --pp-degree 2",
        requires=lambda f: not f.use_nanopipe and f.pp_schedule != "zero_bubble",
        message=(
            "torchao's backward pass computes the gradients of input and weight together, but zero-bubble needs them "
            "separately"
        ),
        fix="Choose --pp-schedule 1f1b, or leave --fp8 out.",
    ),
)
