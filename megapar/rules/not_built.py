"""Features of a later version, one row each; implementing a feature removes its row."""

from __future__ import annotations

from functools import partial
from typing import Any

from megapar.model.decoder.windows import window_or_none
from megapar.schema.flag import MOE
from megapar.schema.rule import NOT_BUILT, Rule, Test


def _ahead(name: str, what: str, failing: str) -> Rule:
    """Build the row that refuses recomputing before the backward pass, with the reason."""
    return Rule(
        id=f"not-built-{name.replace('_', '-')}",
        reads=(name, "not_default"),
        when=lambda f: name in f.not_default,
        requires=lambda f: False,
        message=f"--{name.replace('_', '-')} would recompute {what}. The schedules have no action for it",
        fix="Leave it out; a unit is recomputed when its gradient arrives.",
        source="later version",
        passing="",
        failing=failing,
        kind=NOT_BUILT,
    )


_expert_row = partial(Rule, source="later version", passing="", kind=NOT_BUILT, models=MOE)
_row = partial(Rule, source="later version", passing="", kind=NOT_BUILT)


def _moments(other: str, reads: str, when: Test, why: str, failing: str, **more: Any) -> Rule:
    """Build the row that refuses moments in bf16 with another flag, with the reason."""
    return _row(
        id=f"not-built-bf16-moments-{other}",
        reads=(reads, "exp_avg_dtype", "exp_avg_sq_dtype"),
        when=when,
        requires=lambda f: f.exp_avg_dtype == f.exp_avg_sq_dtype == "fp32",
        message=f"--exp-avg-dtype bf16 and --exp-avg-sq-dtype bf16 round moments {why}",
        fix="Keep the moments in fp32, or leave the other flag out.",
        failing=f"{failing} --exp-avg-dtype bf16",
        **more,
    )


def _two_bytes(other: str, reads: str, legal: Test, why: str, failing: str) -> Rule:
    """Build the row that refuses gradients in bf16, and remainders, with another flag, with the reason."""
    return _row(
        id=f"not-built-two-bytes-{other}",
        reads=(reads, "main_grads_dtype", "store_param_remainders"),
        when=lambda f: f.main_grads_dtype == "bf16" or f.store_param_remainders,
        requires=legal,
        message=f"--main-grads-dtype bf16 and --store-param-remainders {why}",
        fix="Leave them out, or the other flag.",
        failing=f"{failing} --dtype bf16 --main-grads-dtype bf16",
    )


def _remainders(other: str, reads: str, legal: Test, why: str, failing: str) -> Rule:
    """Build the row that refuses remainders with another flag of decoders, with the reason."""
    return _expert_row(
        id=f"not-built-remainders-{other}",
        reads=(reads, "store_param_remainders"),
        when=lambda f: f.store_param_remainders,
        requires=legal,
        message=f"--store-param-remainders keeps master weights in two parts, but {why}",
        fix="Leave one of them out.",
        failing=f"{failing} --dtype bf16 --store-param-remainders",
    )


RULES: tuple[Rule, ...] = (
    _two_bytes(
        "optimizer",
        "optimizer",
        lambda f: f.optimizer != "sgd",
        "are read by the updates of AdamW and Muon alone",
        "--optimizer sgd",
    ),
    _two_bytes(
        "offload",
        "optimizer_offload",
        lambda f: not f.optimizer_offload,
        "are read on the device; --optimizer-offload copies master weights and gradients of one dtype",
        "--optimizer-offload",
    ),
    _two_bytes(
        "stage-3",
        "sharding_stage",
        lambda f: f.sharding_stage < 3,
        "are for the buckets of stages 1 and 2; at --sharding-stage 3 torch's FSDP2 keeps parameters and gradients",
        "--sharding-stage 3",
    ),
    _remainders(
        "qk-clip",
        "qk_clip_threshold",
        lambda f: not f.qk_clip_threshold,
        "--qk-clip-threshold scales them whole",
        "--qk-clip-threshold 100",
    ),
    _remainders(
        "rebalance",
        "moe_rebalance_interval",
        lambda f: not f.moe_rebalance_interval,
        "--moe-rebalance-interval moves rows of them whole",
        "--world-size 2 --ep-degree 2 --num-experts 4 --moe-rebalance-interval 100",
    ),
    _moments(
        "offload",
        "optimizer_offload",
        lambda f: f.optimizer_offload,
        "on the device; --optimizer-offload copies states of the master weights' dtype",
        "--optimizer-offload",
    ),
    _moments(
        "rebalance",
        "moe_rebalance_interval",
        lambda f: f.moe_rebalance_interval > 0,
        "by the names of experts' tensors, and with --moe-rebalance-interval experts change their places",
        "--world-size 2 --ep-degree 2 --num-experts 4 --moe-rebalance-interval 100",
        models=MOE,
    ),
    _expert_row(
        id="not-built-cp-pipe-experts",
        reads=("use_pipe_experts", "ampipe_degree", "cp_degree"),
        when=lambda f: f.cp_degree > 1 and f.use_pipe_experts and f.ampipe_degree <= 1,
        requires=lambda f: False,
        message=(
            "--use-pipe-experts without slices drops tokens in order of their positions, and with --cp-degree a rank "
            "has two separate parts of a sequence"
        ),
        fix="Add --ampipe-degree 2, or leave one of them out.",
        failing="--world-size 2 --cp-degree 2 --use-pipe-experts",
    ),
    _row(
        id="not-built-stage-3-overlap-off",
        reads=("sharding_stage", "requested"),
        when=lambda f: f.sharding_stage == 3,
        requires=lambda f: all(
            f.requested.get(name) != "off" for name in ("overlap_grad_reduce", "overlap_param_gather")
        ),
        message=(
            "at --sharding-stage 3 torch's FSDP2 always reduces gradients under the backward and gathers parameters "
            "ahead; --no-overlap-grad-reduce and --no-overlap-param-gather are for stages 1 and 2"
        ),
        fix="Leave the overlap on, or choose --sharding-stage 1 or 2.",
        failing="--sharding-stage 3 --no-overlap-grad-reduce",
    ),
    _expert_row(
        id="not-built-stage-3-rebalance",
        reads=("moe_rebalance_interval", "sharding_stage"),
        when=lambda f: f.moe_rebalance_interval > 0,
        requires=lambda f: f.sharding_stage < 3,
        message=(
            "--moe-rebalance-interval moves rows of the masters of stages 1 and 2; at --sharding-stage 3 they are "
            "parameters of torch's FSDP2"
        ),
        fix="Use --sharding-stage 2, or leave --moe-rebalance-interval out.",
        failing="--world-size 2 --ep-degree 2 --num-experts 4 --sharding-stage 3 --moe-rebalance-interval 100",
    ),
    _expert_row(
        id="not-built-offload-rebalance",
        reads=("optimizer_offload", "moe_rebalance_interval"),
        when=lambda f: f.moe_rebalance_interval > 0,
        requires=lambda f: not f.optimizer_offload,
        message=(
            "--moe-rebalance-interval moves masters and moments on the device, and with --optimizer-offload they are "
            "in the host's memory"
        ),
        fix="Leave one of them out.",
        failing="--world-size 2 --ep-degree 2 --num-experts 4 --optimizer-offload --moe-rebalance-interval 100",
    ),
    _row(
        id="not-built-muon-offload",
        reads=("optimizer", "optimizer_offload"),
        when=lambda f: f.optimizer == "muon",
        requires=lambda f: not f.optimizer_offload,
        message="--optimizer muon puts matrices together on the device, and --optimizer-offload has them on the host",
        fix="Leave --optimizer-offload out, or choose --optimizer adamw.",
        failing="--optimizer muon --optimizer-offload",
    ),
    _expert_row(
        id="not-built-qk-clip-offload",
        reads=("qk_clip_threshold", "optimizer_offload"),
        when=lambda f: f.qk_clip_threshold > 0,
        requires=lambda f: not f.optimizer_offload,
        message="--qk-clip-threshold scales masters on the device, and --optimizer-offload has them on the host",
        fix="Leave one of them out.",
        failing="--qk-clip-threshold 100 --optimizer-offload",
    ),
    _row(
        id="not-built-update-norms-offload",
        reads=("log_update_norms", "optimizer_offload"),
        when=lambda f: f.log_update_norms,
        requires=lambda f: not f.optimizer_offload,
        message="--log-update-norms copies masters on the device, and --optimizer-offload has them on the host",
        fix="Leave one of them out.",
        failing="--log-update-norms --optimizer-offload",
    ),
    _expert_row(
        id="not-built-muon-rebalance",
        reads=("optimizer", "moe_rebalance_interval"),
        when=lambda f: f.optimizer == "muon",
        requires=lambda f: f.moe_rebalance_interval == 0,
        message="--optimizer muon finds experts by their numbers, and --moe-rebalance-interval changes their places",
        fix="Leave --moe-rebalance-interval out, or choose --optimizer adamw.",
        failing="--optimizer muon --world-size 2 --ep-degree 2 --num-experts 4 --moe-rebalance-interval 100",
    ),
    _expert_row(
        id="not-built-window-latent",
        reads=("multi_latent_attention", "window_size"),
        when=lambda f: f.multi_latent_attention,
        requires=lambda f: window_or_none(f.window_size) == 0,
        message="--window-size has no form for --multi-latent-attention, and no published class has both",
        fix="Leave one of them out.",
        failing="--multi-latent-attention --window-size 4",
    ),
    _ahead(
        "recompute_in_advance",
        "before the gradient arrives: at most 3.9% of a step for 4 stages of 2 chunks and 8 micro-batches, 0.7% for 8 "
        "of 4 and 64, and a whole chunk's activations are kept instead of a unit's",
        "--recompute-in-advance",
    ),
    _ahead(
        "recompute_in_bubble",
        "in the pipeline bubble: the first of 4 stages of 2 chunks would keep 8 chunks' activations instead of 11, but "
        "has no bubble while forwards and backwards alternate",
        "--recompute-in-bubble",
    ),
)
