"""How ranks are laid out, what sharding does, and how a pipeline runs."""

from __future__ import annotations

from dataclasses import dataclass

from megapar.schema.flag import SWITCH, Alias, flag


@dataclass(frozen=True, kw_only=True)
class ParallelOptions:
    """Axes and ranks."""

    sharding_degree: int = flag(
        -1,
        "ranks that share optimizer state (stage 2: and gradients, 3: and parameters); -1: every rank the others leave",
        unit="ranks",
        low=-1,
        derived="the ranks that the other degrees leave",
        aliases=(
            "sharding-parallel-degree",
            Alias("sharding-group-size", note="--sharding-group-size is the old name of --sharding-degree"),
        ),
    )
    mp_degree: int = flag(
        1,
        "tensor (Megatron) parallel ranks",
        unit="ranks",
        low=1,
        aliases=("tensor-model-parallel-size", "tensor-parallel-degree"),
    )
    pp_degree: int = flag(
        1,
        "pipeline stages",
        unit="ranks",
        low=1,
        aliases=("pipeline-model-parallel-size", "pipeline-parallel-degree", "num-stages"),
    )
    cp_degree: int = flag(
        1,
        "context parallel ranks that share a sequence",
        unit="ranks",
        low=1,
        aliases=("context-parallel-size", "context-parallel-degree"),
    )
    ep_degree: int = flag(
        1,
        "expert parallel ranks: each holds num-experts / ep-degree experts",
        unit="ranks",
        low=1,
        models=("moe",),
        aliases=("expert-model-parallel-size", "expert-parallel-degree"),
    )
    expert_mp_degree: int = flag(
        None,
        "ranks that split one expert's weights; 1 folds the mp ranks into ep",
        unit="ranks",
        low=1,
        models=("moe",),
        derived="mp-degree",
        aliases=("expert-tensor-parallel-size",),
    )
    dp_degree: int = flag(
        -1,
        "data parallel replicas outside sharding; 2 or more mean --hybrid-dp; -1: what the other degrees leave",
        unit="ranks",
        low=-1,
        derived="what the other degrees leave of the ranks",
        aliases=("data-parallel-degree",),
    )
    hybrid_dp: bool = flag(False, "data parallelism outside sharding: world = N x mp x sharding x pp x cp, N >= 2")
    rank_order: tuple[str, ...] = flag(
        ("dp", "pp", "sharding", "cp", "mp"), "axes from the outermost to the innermost", comma=True, count=5
    )
    sequence_parallel: bool = flag(False, "split activations along the sequence between mp ranks outside the products")
    tp_comm_overlap: str = flag(
        "auto",
        "hide the mp collectives of linear layers: on, in pieces under their products; fused, inside torch's operators",
        type="switch",
        choices=(*SWITCH, "fused"),
        derived="on where the device's class gains by it",
    )
    context_parallel_algo: str = flag(
        "megatron_cp_algo",
        "how a sequence is shared: ring with zig-zag balance, heads by all-to-all, or gathered keys and values",
        choices=("megatron_cp_algo", "ulysses_cp_algo", "allgather_cp_algo"),
    )
    distributed_timeout_minutes: float = flag(
        10.0, "how long a collective may take before the run stops with its name", unit="minutes", above=0
    )


@dataclass(frozen=True, kw_only=True)
class ShardingOptions:
    """What the sharding ranks share, and when they communicate."""

    sharding_stage: int = flag(
        1,
        "1: optimizer state is sharded, 2: and gradients, 3: and parameters",
        choices=(1, 2, 3),
        aliases=(Alias("use-distributed-optimizer", 1),),
    )
    sharding_segment_strategy: str | None = flag(
        None,
        "what cuts the model into the units that are gathered, reduced and overlapped",
        choices=("segment_broadcast_MB", "segment_anchors"),
        derived="that of --segment-broadcast-MB or --segment-anchors, where one of them is given; else one per layer",
    )
    segment_broadcast_mb: float = flag(
        32.0,
        "cut a segment when the bytes to gather reach this; alone it chooses this strategy",
        unit="MB",
        above=0,
        primary="segment-broadcast-MB",
        aliases=(Alias("fuse-broadcast-MB", note="--fuse-broadcast-MB is the old name of --segment-broadcast-MB"),),
    )
    segment_anchors: tuple[str, ...] = flag(
        (), "modules (paths or patterns) at which a new segment starts; alone it chooses this strategy"
    )
    sharding_prefetch_segments: int = flag(2, "segments gathered ahead of use", unit="segments", low=0)
    gradient_merge_acc_step: int = flag(
        None,
        "micro-batches per optimizer step on each data rank",
        unit="micro-batches",
        low=1,
        derived="global-batch-size / (micro-batch-size x data ranks), or 1",
        aliases=("accumulate-steps",),
    )
    gradient_merge_mode: str = flag(
        None,
        "when gradients are reduced: once per optimizer step, or every micro-batch",
        choices=("step", "micro_batch"),
        derived="step at stage 1, micro_batch at stages 2 and 3",
    )
    overlap_grad_reduce: str = flag(
        "auto", "reduce gradients under the backward pass", type="switch", choices=SWITCH, derived="on where allowed"
    )
    overlap_param_gather: str = flag(
        "auto", "gather parameters under the forward pass", type="switch", choices=SWITCH, derived="on where allowed"
    )
    grad_reduce_dtype: str = flag("fp32", "dtype in which gradients are reduced", choices=("fp32", "bf16"))
    optimizer_offload: bool = flag(False, "keep optimizer state and master weights in pinned host memory")


@dataclass(frozen=True, kw_only=True)
class PipelineOptions:
    """Stages and schedules."""

    pp_seg_method: str = flag(
        "uniform",
        "how layers are cut into stages: uniform, balanced, layer:REGEX on class names, or explicit starts",
        aliases=("seg-method",),
    )
    pp_schedule: str = flag("1f1b", "pipeline schedule", choices=("1f1b", "gpipe", "interleaved", "zero_bubble"))
    vpp_degree: int = flag(
        1,
        "model chunks per stage",
        unit="chunks",
        low=1,
        aliases=("virtual-pipeline-model-parallel-size", "virtual-pp-degree", "num-virtual-pipeline-stages"),
    )
    use_nanopipe: bool = flag(False, "split weight gradients off and run them in the bubble (the zero-bubble schedule)")


@dataclass(frozen=True, kw_only=True)
class RecomputeOptions:
    """Activations that are computed again in the backward pass instead of kept."""

    recompute_interval: int = flag(0, "every so many consecutive layers are one recomputed unit; 0: off", unit="layers")
    recompute_offload: bool = flag(False, "what a recomputed unit keeps goes to pinned host memory")
    recompute_partition: bool = flag(False, "each mp rank keeps 1/mp of what a recomputed unit keeps")
    recompute_granularity: str = flag(
        "full",
        "recompute whole layers, or only the attention core and the activation function",
        choices=("full", "selective"),
        aliases=(Alias("recompute-activations", "selective"),),
    )
    recompute_method: str | None = flag(
        None, "uniform: units of N layers; block: the first N layers of each stage", choices=("uniform", "block")
    )
    recompute_num_layers: int | None = flag(None, "N of --recompute-method", unit="layers", low=1)
    recompute_in_advance: bool = flag(False, "recompute before the gradient arrives")
    recompute_in_bubble: bool = flag(False, "recompute in idle slots of the pipeline")
    adaptive_recompute_device_size: float = flag(
        0.0, "choose the fewest recomputed layers that fit into this device memory; 0: off", unit="MB", low=0
    )
