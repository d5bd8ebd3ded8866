"""Rows on batches, schedules, sharding modes, checkpoints and data."""

from __future__ import annotations

import math
from functools import partial

from megapar.files.data_files import split_name
from megapar.files.location import same_place
from megapar.files.paths import MOUNT, REMOTE
from megapar.rules.sections import SECTIONS, is_section_limits
from megapar.schema.flag import MOE
from megapar.schema.rule import NO_EFFECT, PADDLE_SHARDING, Facts, Rule, near_multiples, unused

SOURCE = "training"
SHARDING = "sharding"


def _step_size(f: Facts) -> int:
    """Return the sequences of one micro-batch over all data ranks."""
    return int(f.micro_batch_size * f.data_ranks)


def _decay_is_known(f: Facts) -> bool:
    """Return True if --lr-decay-iters is set, or does not depend on the data."""
    return f.train_epochs == 0 or "lr_decay_iters" in f.given


def _is_interval(text: str, sign: str, low: int = 0) -> bool:
    """Return True for two whole numbers with a sign between them, of which the second is not below the first."""
    first, _, last = text.partition(sign)
    return first.isdecimal() and last.isdecimal() and low <= int(first) <= int(last)


def _mup_divisor(f: Facts) -> float:
    """Return the divisor of the logits that muP needs: the relative width of a tied head, and 1 for any other."""
    return 1.0 if f.untie_embeddings_and_output_weights else float(f.hidden_size / f.mup_base_hidden_size)


_BATCH = ("global_batch_size", "micro_batch_size", "data_ranks")
_row = partial(Rule, source=SOURCE)
_sharding_row = partial(Rule, source=SHARDING)

RULES: tuple[Rule, ...] = (
    Rule(
        id="batch-divides",
        reads=_BATCH,
        requires=lambda f: f.global_batch_size % _step_size(f) == 0,
        message="--micro-batch-size x data ranks (dp x sharding) must divide --global-batch-size",
        fix=lambda f: f"Choose --global-batch-size {near_multiples(_step_size(f), f.global_batch_size)}.",
        source="definition of the batch",
        passing="--world-size 4 --micro-batch-size 2 --global-batch-size 16",
        failing="--world-size 4 --micro-batch-size 2 --global-batch-size 18",
    ),
    _sharding_row(
        id="batch-agrees",
        reads=(*_BATCH, "requested"),
        when=lambda f: None not in (f.requested.get("gradient_merge_acc_step"), f.requested.get("global_batch_size")),
        requires=lambda f: f.global_batch_size == _step_size(f) * f.requested["gradient_merge_acc_step"],
        message="--global-batch-size must be --micro-batch-size x data ranks x --gradient-merge-acc-step",
        fix=lambda f: (
            f"Leave one out, or choose --global-batch-size {_step_size(f) * f.requested['gradient_merge_acc_step']}."
        ),
        passing="--micro-batch-size 2 --gradient-merge-acc-step 4 --global-batch-size 8",
        failing="--micro-batch-size 2 --gradient-merge-acc-step 4 --global-batch-size 16",
    ),
    _row(
        id="rampup-global",
        reads=("rampup_batch_size", "requested"),
        when=lambda f: f.rampup_batch_size is not None,
        requires=lambda f: (
            f.requested.get("global_batch_size") is not None and f.requested.get("gradient_merge_acc_step") is None
        ),
        message="--rampup-batch-size ends at --global-batch-size: set that, and leave out --gradient-merge-acc-step",
        passing="--rampup-batch-size 4 4 1000 --global-batch-size 16",
        failing="--rampup-batch-size 4 4 1000",
    ),
    _row(
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
        passing="--rampup-batch-size 4 4 1000 --global-batch-size 16",
        failing="--rampup-batch-size 4 5 1000 --global-batch-size 16",
    ),
    _sharding_row(
        id="merge-mode-stage",
        reads=("sharding_stage", "requested"),
        when=lambda f: f.sharding_stage == 1,
        requires=lambda f: f.requested.get("gradient_merge_mode") != "micro_batch",
        message="--gradient-merge-mode micro_batch at --sharding-stage 1 would be stage 2",
        fix="Choose --sharding-stage 2, or --gradient-merge-mode step.",
        passing="--sharding-stage 2 --gradient-merge-mode micro_batch",
        failing="--sharding-stage 1 --gradient-merge-mode micro_batch",
    ),
    _sharding_row(
        id="offload-stage",
        reads=("optimizer_offload", "sharding_stage"),
        when=lambda f: f.optimizer_offload,
        requires=lambda f: f.sharding_stage < 3,
        message="--optimizer-offload at --sharding-stage 3 would leave master weights on the device",
        fix="Choose --sharding-stage 1 or 2.",
        passing="--optimizer-offload --sharding-stage 2",
        failing="--optimizer-offload --sharding-stage 3",
    ),
    _sharding_row(
        id="reduce-dtype-wide",
        reads=("grad_reduce_dtype", "dtype"),
        when=lambda f: f.grad_reduce_dtype == "bf16",
        requires=lambda f: f.dtype not in ("fp64", "fp16"),
        message="--grad-reduce-dtype bf16 would lose the precision of the gradients of an fp16 or fp64 run",
        fix="Leave it out, or choose --dtype bf16 or fp32.",
        passing="--grad-reduce-dtype bf16 --dtype bf16",
        failing="--grad-reduce-dtype bf16 --dtype fp64",
    ),
    _sharding_row(
        id="two-byte-dtype",
        reads=("main_grads_dtype", "store_param_remainders", "dtype"),
        when=lambda f: f.main_grads_dtype == "bf16" or f.store_param_remainders,
        requires=lambda f: f.dtype == "bf16",
        message=(
            "--main-grads-dtype bf16 and --store-param-remainders are for weights in bf16, whose gradients are bf16, "
            "and which are the upper half of their master weights"
        ),
        fix="Add --dtype bf16, or leave them out.",
        passing="--store-param-remainders --main-grads-dtype bf16 --dtype bf16",
        failing="--store-param-remainders --dtype fp32",
    ),
    _sharding_row(
        id="main-grads-reduce",
        reads=("main_grads_dtype", "grad_reduce_dtype"),
        when=lambda f: f.main_grads_dtype == "bf16",
        requires=lambda f: f.grad_reduce_dtype == "bf16",
        message="--grad-reduce-dtype fp32 would send gradients of --main-grads-dtype bf16 in twice the bytes",
        fix="Leave --grad-reduce-dtype out, or keep the gradients in fp32.",
        passing="--main-grads-dtype bf16 --grad-reduce-dtype bf16 --dtype bf16",
        failing="--main-grads-dtype bf16 --grad-reduce-dtype fp32 --dtype bf16",
    ),
    _sharding_row(
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
    unused(
        "segment-size-unused",
        ("segment_broadcast_mb",),
        ("sharding_segment_strategy",),
        lambda f: f.sharding_segment_strategy == "segment_anchors",
        "if segments start at anchors",
        passing="--segment-broadcast-MB 8",
        failing="--sharding-segment-strategy segment_anchors --segment-anchors layers.1 --segment-broadcast-MB 8",
    ),
    _row(
        id="min-lr",
        reads=("min_lr", "lr"),
        requires=lambda f: f.min_lr <= f.lr,
        message="--min-lr must be at most --lr",
        passing="--lr 1e-3 --min-lr 1e-4",
        failing="--lr 1e-3 --min-lr 1e-2",
    ),
    _row(
        id="mup-logits",
        reads=("mup_base_hidden_size", "hidden_size", "logits_scaling", "untie_embeddings_and_output_weights"),
        when=lambda f: f.mup_base_hidden_size > 0,
        requires=lambda f: math.isclose(f.logits_scaling, _mup_divisor(f)),
        message=(
            "with --mup-base-hidden-size a head that is the word embedding needs its logits divided by the relative "
            "width, and a separate head starts smaller instead"
        ),
        fix=lambda f: f"Set --logits-scaling {_mup_divisor(f):g}, or change --untie-embeddings-and-output-weights.",
        passing="--mup-base-hidden-size 64 --hidden-size 256 --logits-scaling 4",
        failing="--mup-base-hidden-size 64 --hidden-size 256",
        models=MOE,
    ),
    _row(
        id="mup-muon-heads",
        reads=("mup_base_hidden_size", "optimizer", "muon_qkv_split", "muon_scale_mode"),
        when=lambda f: f.mup_base_hidden_size > 0 and f.optimizer == "muon" and f.muon_qkv_split in ("group", "head"),
        requires=lambda f: f.muon_scale_mode == "unit_rms_norm",
        message=(
            "with --mup-base-hidden-size, matrices of single heads or groups, which do not grow with the width, need "
            "--muon-scale-mode unit_rms_norm"
        ),
        fix="Choose --muon-scale-mode unit_rms_norm, or --muon-qkv-split tensor or fused.",
        passing=(
            "--mup-base-hidden-size 256 --hidden-size 256 --optimizer muon --muon-qkv-split head "
            "--muon-scale-mode unit_rms_norm"
        ),
        failing="--mup-base-hidden-size 256 --hidden-size 256 --optimizer muon --muon-qkv-split head",
        models=MOE,
    ),
    _row(
        id="decoupled-min-lr",
        reads=("decoupled_min_lr", "decoupled_lr", "min_lr"),
        when=lambda f: f.decoupled_lr is not None,
        requires=lambda f: (f.min_lr if f.decoupled_min_lr is None else f.decoupled_min_lr) <= f.decoupled_lr,
        message="--decoupled-min-lr, by default --min-lr, must be at most --decoupled-lr",
        passing="--decoupled-lr 1e-3 --decoupled-min-lr 1e-4",
        failing="--decoupled-lr 1e-3 --decoupled-min-lr 1e-2",
    ),
    unused(
        "decoupled-unused",
        ("decoupled_min_lr",),
        ("decoupled_lr",),
        lambda f: f.decoupled_lr is None,
        "without --decoupled-lr",
        passing="--decoupled-lr 1e-3 --decoupled-min-lr 1e-4",
        failing="--decoupled-min-lr 1e-4",
    ),
    _row(
        id="weight-decay-ends",
        reads=("weight_decay_incr_style", "start_weight_decay", "end_weight_decay"),
        when=lambda f: f.weight_decay_incr_style != "constant",
        requires=lambda f: None not in (f.start_weight_decay, f.end_weight_decay),
        message="--weight-decay-incr-style linear and cosine need --start-weight-decay and --end-weight-decay",
        passing="--weight-decay-incr-style linear --start-weight-decay 0.01 --end-weight-decay 0.1",
        failing="--weight-decay-incr-style linear --end-weight-decay 0.1",
    ),
    unused(
        "weight-decay-ends-unused",
        ("start_weight_decay", "end_weight_decay"),
        ("weight_decay_incr_style",),
        lambda f: f.weight_decay_incr_style == "constant",
        "unless --weight-decay-incr-style is linear or cosine",
        passing="--weight-decay-incr-style linear --start-weight-decay 0.01 --end-weight-decay 0.1",
        failing="--end-weight-decay 0.2",
    ),
    unused(
        "weight-decay-unused",
        ("weight_decay",),
        ("weight_decay_incr_style",),
        lambda f: f.weight_decay_incr_style != "constant",
        "with --weight-decay-incr-style linear or cosine, which take a start and an end",
        passing="--weight-decay 0.2",
        failing=(
            "--weight-decay 0.2 --weight-decay-incr-style linear --start-weight-decay 0.01 --end-weight-decay 0.1"
        ),
    ),
    _row(
        id="warmup",
        reads=("lr_warmup_iters", "lr_decay_iters", "lr_decay_style", "train_epochs", "given"),
        when=lambda f: _decay_is_known(f) and f.lr_decay_style != "constant",
        requires=lambda f: f.lr_warmup_iters < f.lr_decay_iters,
        message="--lr-warmup-iters must be below --lr-decay-iters",
        fix=lambda f: f"Choose --lr-warmup-iters 0 to {f.lr_decay_iters - 1}.",
        passing="--train-iters 100 --lr-warmup-iters 10",
        failing="--train-iters 100 --lr-warmup-iters 100",
    ),
    _row(
        id="wsd-decay",
        reads=("lr_decay_style", "lr_wsd_decay_iters", "lr_warmup_iters", "lr_decay_iters", "train_epochs", "given"),
        when=lambda f: _decay_is_known(f) and f.lr_decay_style == "wsd",
        requires=lambda f: f.lr_warmup_iters + f.lr_wsd_decay_iters <= f.lr_decay_iters,
        message="--lr-warmup-iters + --lr-wsd-decay-iters must be at most --lr-decay-iters",
        fix=lambda f: f"Choose --lr-wsd-decay-iters 1 to {max(1, f.lr_decay_iters - f.lr_warmup_iters)}.",
        passing="--lr-decay-style wsd --train-iters 100 --lr-wsd-decay-iters 20",
        failing="--lr-decay-style wsd --train-iters 100 --lr-wsd-decay-iters 120",
    ),
    unused(
        "wsd-unused",
        ("lr_wsd_decay_iters", "lr_wsd_decay_style"),
        ("lr_decay_style",),
        lambda f: f.lr_decay_style != "wsd",
        "unless --lr-decay-style is wsd",
        passing="--lr-decay-style wsd --lr-wsd-decay-iters 5",
        failing="--lr-decay-style cosine --lr-wsd-decay-iters 5",
    ),
    unused(
        "adam-unused",
        ("adam_beta1", "adam_beta2", "adam_eps", "exp_avg_dtype", "exp_avg_sq_dtype"),
        ("optimizer",),
        lambda f: f.optimizer == "sgd",
        "with --optimizer sgd",
        passing="--optimizer adamw --adam-beta1 0.8",
        failing="--optimizer sgd --adam-beta1 0.8",
    ),
    unused(
        "muon-unused",
        (
            *("muon_momentum", "muon_use_nesterov", "muon_num_ns_steps", "muon_coefficient_type", "muon_scale_mode"),
            *("muon_extra_scale_factor", "muon_qkv_split", "muon_ns_dtype"),
        ),
        ("optimizer",),
        lambda f: f.optimizer != "muon",
        "unless --optimizer is muon",
        passing="--optimizer muon --muon-momentum 0.9",
        failing="--optimizer adamw --muon-momentum 0.9",
    ),
    unused(
        "qk-clip-unused",
        ("qk_clip_statistic",),
        ("qk_clip_threshold",),
        lambda f: f.qk_clip_threshold == 0,
        "without --qk-clip-threshold",
        passing="--qk-clip-threshold 100 --qk-clip-statistic max --no-use-flash-attn",
        failing="--qk-clip-statistic max --no-use-flash-attn",
        models=MOE,
    ),
    _row(
        id="qk-clip-statistic",
        reads=("qk_clip_threshold", "qk_clip_statistic", "use_flash_attn"),
        when=lambda f: f.qk_clip_threshold > 0 and f.qk_clip_statistic == "max",
        requires=lambda f: not f.use_flash_attn,
        message="--qk-clip-statistic max needs scores, of which fused kernels give the log-sum-exp of each row only",
        fix="Choose --qk-clip-statistic lse, which is at most ln(keys) above the maximum, or add --no-use-flash-attn.",
        passing="--qk-clip-threshold 100 --qk-clip-statistic max --no-use-flash-attn",
        failing="--qk-clip-threshold 100 --qk-clip-statistic max",
        models=MOE,
    ),
    unused(
        "sgd-unused",
        ("sgd_momentum",),
        ("optimizer",),
        lambda f: f.optimizer != "sgd",
        "unless --optimizer is sgd",
        passing="--optimizer sgd --sgd-momentum 0.5",
        failing="--optimizer adamw --sgd-momentum 0.5",
    ),
    unused(
        "loss-scale-unused",
        ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "loss_scale_factor", "hysteresis"),
        ("dtype",),
        lambda f: f.dtype != "fp16",
        "unless --dtype is fp16",
        passing="--dtype fp16 --loss-scale-window 500",
        failing="--dtype bf16 --loss-scale-window 500",
    ),
    unused(
        "load-unused",
        ("ckpt_step", "finetune", "no_load_optim", "no_load_rng", "override_opt_param_scheduler", "override_data"),
        ("load",),
        lambda f: f.load is None,
        "without --load",
        passing="--load runs/a --finetune",
        failing="--finetune",
    ),
    unused(
        "save-unused",
        ("save_interval", "save_interval_minutes", "keep", "async_save", "on_save_error"),
        ("save",),
        lambda f: f.save is None,
        "without --save",
        passing="--save runs/a --save-interval 50",
        failing="--save-interval 50",
    ),
    unused(
        "async-save-unused",
        ("async_save", "on_save_error"),
        ("save_interval", "save_interval_minutes"),
        lambda f: not f.save_interval and not f.save_interval_minutes,
        "if only the final checkpoint is saved, after which no training follows",
        passing="--save runs/a --save-interval 5 --on-save-error stop",
        failing="--save runs/a --on-save-error stop",
    ),
    unused(
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
        passing="--tensorboard-dir runs/a",
        failing="--tensorboard-dir s3://bucket/a",
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
    _row(
        id="skip-samples-ranges",
        reads=("skip_samples",),
        requires=lambda f: all(_is_interval(text, "-") for text in f.skip_samples),
        message="--skip-samples takes ranges A-B of sample numbers with A <= B",
        passing="--skip-samples 100-199 500-500",
        failing="--skip-samples 200-100",
    ),
    unused(
        "local-checkpoint-unused",
        ("local_checkpoint_dir",),
        ("local_checkpoint_interval",),
        lambda f: f.local_checkpoint_interval == 0,
        "without --local-checkpoint-interval",
        passing="--local-checkpoint-interval 10 --local-checkpoint-dir /dev/shm/a",
        failing="--local-checkpoint-dir /dev/shm/a",
    ),
    _row(
        id="straggler-factor",
        reads=("straggler_factor",),
        requires=lambda f: f.straggler_factor == 0 or f.straggler_factor > 1,
        message="--straggler-factor must be 0 or above 1; the median rank itself has the factor 1",
        passing="--straggler-factor 1.2",
        failing="--straggler-factor 0.9",
    ),
    _row(
        id="spike-skip-sigmas",
        reads=("spike_skip", "spike_sigmas", "bad_step_limit"),
        when=lambda f: f.spike_skip,
        requires=lambda f: f.spike_sigmas > 0 and f.bad_step_limit > 0,
        message="--spike-skip needs --spike-sigmas above 0 to detect spikes, and --bad-step-limit above 0 to skip one",
        passing="--spike-skip",
        failing="--spike-skip --spike-sigmas 0",
    ),
    _row(
        id="load-twice",
        reads=("load", "load_hf", "save"),
        when=lambda f: f.load_hf is not None,
        requires=lambda f: f.load is None or same_place(f.load, f.save),
        message="--load and --load-hf both set the source of the weights, unless --load is the folder of --save",
        fix="Keep one of them, or set --save to the folder of --load: then the first run starts from --load-hf.",
        passing="--load-hf models/b --load runs/a --save runs/a",
        failing="--load runs/a --load-hf models/b",
    ),
    Rule(
        id="data-alone",
        reads=("data_path", "eval_data_path"),
        when=lambda f: "mock" in {split_name(word)[1] for word in (*f.data_path, *f.eval_data_path)},
        requires=lambda f: f.data_path == ("mock",) and f.eval_data_path in ((), ("mock",)),
        message="mock must be the only item of --data-path, and allows nothing else in --eval-data-path",
        source="command line",
        passing="--data-path mock",
        failing="--data-path mock corpus.jsonl",
    ),
    _row(
        id="profile-steps",
        reads=("profile",),
        when=lambda f: f.profile is not None,
        requires=lambda f: _is_interval(f.profile, ":", 1),
        message="--profile takes START:END with START <= END, steps counted from 1",
        fix="Choose for example --profile 3:5.",
        passing="--profile 3:5 --metrics-jsonl runs/a/metrics.jsonl",
        failing="--profile 5:3 --metrics-jsonl runs/a/metrics.jsonl",
    ),
    Rule(
        id="profile-beyond",
        reads=("profile", "train_iters", "train_epochs"),
        when=lambda f: f.train_epochs == 0 and f.profile is not None and _is_interval(f.profile, ":", 1),
        requires=lambda f: int(f.profile.partition(":")[0]) <= f.train_iters,
        message="--profile starts after the last step",
        fix=lambda f: f"Choose --profile {f.train_iters}:{f.train_iters}, or earlier steps.",
        source=NO_EFFECT,
        passing="--profile 3:5 --train-iters 5 --metrics-jsonl runs/a/metrics.jsonl",
        failing="--profile 1000001:1000002 --metrics-jsonl runs/a/metrics.jsonl",
    ),
)
