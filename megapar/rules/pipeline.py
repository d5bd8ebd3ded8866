"""Rows on pipeline stages, schedules and activation checkpointing."""

from __future__ import annotations

from functools import partial

from megapar.schema.rule import DOWNGRADE, NO_EFFECT, PADDLE_RECOMPUTE, Facts, Rule, unused

RECOMPUTE = "recompute"
_FLAGS = (
    "recompute_interval", "recompute_offload", "recompute_partition", "recompute_granularity",
    "recompute_method", "recompute_num_layers", "recompute_in_advance", "recompute_in_bubble",
)  # fmt: skip


def zero_bubble(f: Facts) -> bool:
    """Return True if the effective schedule computes weight gradients separately."""
    return bool(f.use_nanopipe or f.pp_schedule == "zero_bubble")


def recomputes(f: Facts) -> bool:
    """Return True if any activations are recomputed."""
    return bool(
        f.recompute_interval
        or f.recompute_method
        or f.recompute_granularity == "selective"
        or f.adaptive_recompute_device_size
    )


def _micro_batches(f: Facts) -> list[int]:
    """Return the micro-batches per step on each data rank: for every batch size of a ramp-up, and before it grows."""
    if f.progressive_iters:  # later batches are multiples of the first
        return [f.progressive_batch_multiple // f.data_ranks, f.gradient_merge_acc_step]
    if f.rampup_batch_size is None:
        return [f.gradient_merge_acc_step]
    start, increment, _ = f.rampup_batch_size
    unit = f.micro_batch_size * f.data_ranks
    sizes = [*range(start, f.global_batch_size, max(1, increment)), f.global_batch_size]
    return [size // unit for size in sizes]


def _small(f: Facts) -> bool:
    return bool(f.adaptive_recompute_device_size < LEAST_MB)


def _size_meant(f: Facts) -> str:
    """Suggest the size in MB for one that was given in GiB or in bytes."""
    size = f.adaptive_recompute_device_size
    if _small(f):
        return f"Write {size * 1024:.0f} for {size:g} GiB; so small a size is only accepted with --device cpu."
    return f"Write {size / 2**20:.0f} for {size:.0f} bytes."


def _enough(f: Facts) -> str:
    """Suggest the minimum number of micro-batches."""
    unit = f.micro_batch_size * f.data_ranks
    if f.progressive_iters:
        return f"Choose --progressive-batch-multiple {f.data_ranks * f.pp_degree} and multiples of it as batches."
    least = unit * f.pp_degree
    if f.rampup_batch_size is not None:
        return f"Choose multiples of {least} as START and INCREMENT of --rampup-batch-size, and as --global-batch-size."
    steps = f"--gradient-merge-acc-step {f.pp_degree} in its place"
    return f"Choose --global-batch-size {least}, or {steps}: {f.pp_degree} micro-batches; of a phase, its own batch."


_BATCH = (
    "gradient_merge_acc_step", "rampup_batch_size", "global_batch_size", "micro_batch_size", "data_ranks",
    "progressive_iters", "progressive_batch_multiple",
)  # fmt: skip
LEAST_MB, MOST_MB = 1024, 4 * 2**20  # device memory: 1 GiB to 4 TiB
RECOMPUTES = ("recompute_interval", "recompute_method", "recompute_granularity", "adaptive_recompute_device_size")

_row = partial(Rule, source="pipeline")
_recompute_row = partial(Rule, source=RECOMPUTE)
_adaptive_row = partial(_recompute_row, when=lambda f: f.adaptive_recompute_device_size > 0)
_no_effect = partial(Rule, source=NO_EFFECT)

RULES: tuple[Rule, ...] = (
    _row(
        id="stages-layers",
        reads=("pp_degree", "vpp_degree", "num_layers"),
        requires=lambda f: f.pp_degree * f.vpp_degree <= f.num_layers,
        message="every stage (and chunk) needs at least one layer: pp x vpp must be at most --num-layers",
        fix=lambda f: (
            f"Choose --pp-degree up to {max(1, f.num_layers // f.vpp_degree)}, or "
            f"--num-layers {f.pp_degree * f.vpp_degree}."
        ),
        passing="--world-size 4 --pp-degree 4 --num-layers 4",
        failing="--world-size 8 --pp-degree 8 --num-layers 4",
    ),
    unused(
        "pipeline-unused",
        ("pp_schedule", "vpp_degree", "use_nanopipe", "pp_seg_method"),
        ("pp_degree",),
        lambda f: f.pp_degree == 1,
        "with --pp-degree 1",
        fix="Leave them out, or choose --pp-degree 2.",
        passing="--world-size 2 --pp-degree 2 --pp-schedule gpipe",
        failing="--pp-schedule gpipe",
    ),
    _no_effect(
        id="schedule-without-chunks",
        reads=("pp_schedule", "vpp_degree", "use_nanopipe"),
        when=lambda f: f.pp_schedule in ("1f1b", "gpipe") and not f.use_nanopipe,
        requires=lambda f: f.vpp_degree == 1,
        message="1f1b and gpipe have one chunk per stage",
        fix="Choose --pp-schedule interleaved, or --vpp-degree 1.",
        passing="--world-size 2 --pp-degree 2 --pp-schedule interleaved --vpp-degree 2",
        failing="--world-size 2 --pp-degree 2 --pp-schedule gpipe --vpp-degree 2",
    ),
    _no_effect(
        id="interleaved-chunks",
        reads=("pp_schedule", "vpp_degree"),
        when=lambda f: f.pp_schedule == "interleaved",
        requires=lambda f: f.vpp_degree > 1,
        message="interleaved needs --vpp-degree > 1",
        fix="Choose --vpp-degree 2, or --pp-schedule 1f1b.",
        passing="--world-size 2 --pp-degree 2 --pp-schedule interleaved --vpp-degree 2",
        failing="--world-size 2 --pp-degree 2 --pp-schedule interleaved",
    ),
    _row(
        id="nanopipe-schedule",
        reads=("use_nanopipe", "pp_schedule"),
        when=lambda f: f.use_nanopipe,
        requires=lambda f: f.pp_schedule in ("1f1b", "zero_bubble"),
        message="--use-nanopipe is the zero-bubble schedule, not gpipe or interleaved",
        fix="Leave --pp-schedule out.",
        passing="--world-size 2 --pp-degree 2 --use-nanopipe",
        failing="--world-size 2 --pp-degree 2 --use-nanopipe --pp-schedule gpipe",
    ),
    _row(
        id="micro-batches-enough",
        reads=("pp_degree", "pp_schedule", "use_nanopipe", *_BATCH),
        when=lambda f: f.pp_degree > 1 and f.pp_schedule == "1f1b" and not f.use_nanopipe,
        requires=lambda f: min(_micro_batches(f)) >= f.pp_degree,
        message=(
            "1f1b needs at least as many micro-batches per step as stages, from the first step of a ramp-up or of "
            "progressive learning on"
        ),
        fix=_enough,
        passing="--world-size 4 --pp-degree 4 --gradient-merge-acc-step 5",
        failing="--world-size 4 --pp-degree 4 --gradient-merge-acc-step 3",
    ),
    _row(
        id="micro-batches-stages",
        reads=("pp_degree", "pp_schedule", "use_nanopipe", *_BATCH),
        when=lambda f: f.pp_degree > 1 and (f.pp_schedule == "interleaved" or zero_bubble(f)),
        requires=lambda f: all(count and count % f.pp_degree == 0 for count in _micro_batches(f)),
        message=(
            "for interleaved and zero-bubble schedules, --pp-degree must divide the number of micro-batches, from the "
            "first step of a ramp-up or of progressive learning on"
        ),
        fix=_enough,
        passing="--world-size 2 --pp-degree 2 --pp-schedule interleaved --vpp-degree 2 --gradient-merge-acc-step 4",
        failing="--world-size 2 --pp-degree 2 --pp-schedule interleaved --vpp-degree 2 --gradient-merge-acc-step 3",
    ),
    _row(
        id="pipeline-stage-3",
        reads=("pp_degree", "sharding_stage"),
        when=lambda f: f.pp_degree > 1,
        requires=lambda f: f.sharding_stage < 3,
        message=(
            "--sharding-stage 3 is not supported with pipelines: each pipeline stage would gather its parameters twice "
            "per micro-batch, where sharding stages 1 and 2 gather them once per step"
        ),
        fix="Choose --sharding-stage 1 or 2.",
        passing="--world-size 2 --pp-degree 2 --sharding-stage 2",
        failing="--world-size 2 --pp-degree 2 --sharding-stage 3",
    ),
    _row(
        id="zero-bubble-stage-2",
        reads=("pp_degree", "sharding_stage", "pp_schedule", "use_nanopipe"),
        when=lambda f: f.pp_degree > 1 and zero_bubble(f),
        requires=lambda f: f.sharding_stage == 1,
        message="zero-bubble keeps gradients until its weight-gradient steps, so --sharding-stage 2 would save nothing",
        fix="Choose --sharding-stage 1.",
        passing="--world-size 2 --pp-degree 2 --use-nanopipe",
        failing="--world-size 2 --pp-degree 2 --use-nanopipe --sharding-stage 2",
    ),
    _row(
        id="zero-bubble-recompute",
        reads=("pp_degree", "pp_schedule", "use_nanopipe", *RECOMPUTES),
        when=lambda f: f.pp_degree > 1 and zero_bubble(f),
        requires=lambda f: not recomputes(f),
        message=(
            "zero-bubble keeps the inputs of weight gradients until their separate step, so recomputing would save "
            "little"
        ),
        fix="Leave one of them out.",
        passing="--world-size 2 --pp-degree 2 --use-nanopipe",
        failing="--world-size 2 --pp-degree 2 --use-nanopipe --recompute-interval 1",
    ),
    Rule(
        id="recompute-interval",
        reads=("recompute_interval",),
        requires=lambda f: f.recompute_interval >= 0,
        message="--recompute-interval must be 0 (off) or a number of layers",
        source=PADDLE_RECOMPUTE,
        passing="--recompute-interval 1",
        failing="--recompute-interval -1",
    ),
    _recompute_row(
        id="recompute-method-layers",
        reads=("recompute_method", "recompute_num_layers"),
        requires=lambda f: (f.recompute_method is None) == (f.recompute_num_layers is None),
        message="--recompute-method and --recompute-num-layers must be used together",
        passing="--recompute-method block --recompute-num-layers 2",
        failing="--recompute-method block",
    ),
    _recompute_row(
        id="recompute-contradiction",
        reads=("recompute_method", "recompute_interval", "recompute_num_layers"),
        when=lambda f: f.recompute_method is not None and f.recompute_interval > 0,
        requires=lambda f: f.recompute_method == "uniform" and f.recompute_interval == f.recompute_num_layers,
        message="--recompute-method uniform with N layers means --recompute-interval N; block has no interval",
        fix="Keep one of the two.",
        passing="--recompute-method uniform --recompute-num-layers 2 --recompute-interval 2",
        failing="--recompute-method uniform --recompute-num-layers 2 --recompute-interval 1",
    ),
    _recompute_row(
        id="recompute-granularity-pair",
        reads=("recompute_granularity", "recompute_interval", "recompute_method"),
        when=lambda f: f.recompute_granularity == "selective",
        requires=lambda f: not f.recompute_interval and f.recompute_method is None,
        message="--recompute-granularity selective recomputes parts of every layer; intervals and methods need full",
        passing="--recompute-granularity selective",
        failing="--recompute-granularity selective --recompute-interval 1",
    ),
    _no_effect(
        id="recompute-keeps-nothing",
        reads=("recompute_offload", "recompute_partition", *RECOMPUTES),
        when=lambda f: f.recompute_offload or f.recompute_partition,
        requires=recomputes,
        message="--recompute-offload and --recompute-partition have no effect without recomputing",
        fix="Add --recompute-interval 1.",
        passing="--recompute-interval 1 --recompute-offload",
        failing="--recompute-offload",
    ),
    _recompute_row(
        id="recompute-keeps-parts",
        reads=("recompute_offload", "recompute_partition", "recompute_granularity"),
        when=lambda f: f.recompute_offload or f.recompute_partition,
        requires=lambda f: f.recompute_granularity == "full",
        message=(
            "--recompute-offload and --recompute-partition apply to the inputs of whole recomputed layers, which are "
            "the same on all mp ranks; with selective granularity they differ"
        ),
        fix="Choose --recompute-granularity full with --recompute-interval 1, or leave the two flags out.",
        passing="--recompute-interval 1 --recompute-offload",
        failing="--recompute-granularity selective --recompute-offload",
    ),
    _no_effect(
        id="recompute-partition-mp",
        reads=("recompute_partition", "mp_degree"),
        when=lambda f: f.recompute_partition,
        requires=lambda f: f.mp_degree > 1,
        message="--recompute-partition splits between mp ranks and has no effect with --mp-degree 1",
        passing="--world-size 2 --mp-degree 2 --recompute-partition --recompute-interval 1",
        failing="--recompute-partition --recompute-interval 1",
    ),
    _recompute_row(
        id="recompute-partition-sequence",
        reads=("recompute_partition", "sequence_parallel", "mp_degree"),
        when=lambda f: f.recompute_partition and f.mp_degree > 1,
        requires=lambda f: not f.sequence_parallel,
        message="with --sequence-parallel, the inputs of recomputed units are already split over mp",
        fix="Leave it out.",
        passing="--world-size 2 --mp-degree 2 --recompute-partition --recompute-interval 1",
        failing="--world-size 2 --mp-degree 2 --recompute-partition --recompute-interval 1 --sequence-parallel",
        kind=DOWNGRADE,
        sets=(("recompute_partition", False),),
    ),
    _no_effect(
        id="recompute-advance-bubble",
        reads=("recompute_in_advance", "recompute_in_bubble"),
        requires=lambda f: not (f.recompute_in_advance and f.recompute_in_bubble),
        message="--recompute-in-advance and --recompute-in-bubble are mutually exclusive",
        passing="--recompute-in-bubble",
        failing="--recompute-in-advance --recompute-in-bubble",
    ),
    _no_effect(
        id="recompute-advance-chunks",
        reads=("recompute_in_advance", "recompute_in_bubble", "vpp_degree"),
        when=lambda f: f.recompute_in_advance or f.recompute_in_bubble,
        requires=lambda f: f.vpp_degree > 1,
        message="--recompute-in-advance and --recompute-in-bubble need --vpp-degree > 1",
        passing="--recompute-in-bubble --world-size 2 --pp-degree 2 --vpp-degree 2 --pp-schedule interleaved",
        failing="--recompute-in-bubble",
    ),
    _adaptive_row(
        id="recompute-adaptive-size",
        reads=("adaptive_recompute_device_size", "device"),
        requires=lambda f: f.adaptive_recompute_device_size <= MOST_MB and (f.device == "cpu" or not _small(f)),
        message="--adaptive-recompute-device-size is in MB, and no accelerator has that little or that much memory",
        fix=_size_meant,
        passing="--adaptive-recompute-device-size 61440",
        failing="--adaptive-recompute-device-size 60",
    ),
    _adaptive_row(
        id="recompute-adaptive-pipeline",
        reads=("adaptive_recompute_device_size", "pp_degree"),
        requires=lambda f: f.pp_degree == 1,
        message=(
            "--adaptive-recompute-device-size measures one micro-batch at a time, but a pipeline stage keeps several"
        ),
        fix="Choose --recompute-interval, or --pp-degree 1.",
        passing="--adaptive-recompute-device-size 32768",
        failing="--world-size 2 --pp-degree 2 --adaptive-recompute-device-size 32768",
    ),
    _adaptive_row(
        id="recompute-adaptive",
        reads=("adaptive_recompute_device_size", "not_default"),
        requires=lambda f: not f.not_default & set(_FLAGS),
        message="--adaptive-recompute-device-size chooses the layers automatically and excludes all other recompute "
        "flags",
        source=NO_EFFECT,
        passing="--adaptive-recompute-device-size 32768",
        failing="--adaptive-recompute-device-size 32768 --recompute-interval 1",
    ),
)
