"""Flags of the device mesh, of sharding, of the pipeline and of activation checkpointing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from megapar.model.attention.latent import AUTO, EXCHANGES
from megapar.schema import role as roles
from megapar.schema.flag import SWITCH, Alias, flag


@dataclass(frozen=True, kw_only=True)
class ParallelOptions:
    """The device mesh: the axes and their sizes."""

    role: ClassVar[roles.Role] = roles.KNOB
    sharding_degree: int = flag(
        -1,
        "ranks that shard optimizer state (stage 2: and gradients, stage 3: and parameters); -1: all ranks left by the "
        "other degrees",
        unit="ranks",
        low=-1,
        derived="the ranks left by the other degrees",
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
        "context parallel ranks, which split the sequence",
        unit="ranks",
        low=1,
        aliases=("context-parallel-size", "context-parallel-degree"),
    )
    ep_degree: int = flag(
        1,
        "expert parallel ranks; each rank has num-experts / ep-degree experts",
        unit="ranks",
        low=1,
        models=("moe",),
        aliases=("expert-model-parallel-size", "expert-parallel-degree"),
    )
    expert_mp_degree: int = flag(
        None,
        "ranks that split the weights of each expert; 1: experts are whole, and the mp ranks are used for ep",
        unit="ranks",
        low=1,
        models=("moe",),
        derived="mp-degree",
        aliases=("expert-tensor-parallel-size",),
        other=1,
    )
    dp_degree: int = flag(
        -1,
        "data parallel replicas outside sharding (hybrid sharding); 2 or more imply --hybrid-dp; -1: the quotient left "
        "by the other degrees",
        unit="ranks",
        low=-1,
        derived="the quotient left by the other degrees",
        aliases=("data-parallel-degree",),
        other=2,
    )
    hybrid_dp: bool = flag(
        False, "hybrid sharding: data parallel replicas outside sharding; ranks = N x mp x sharding x pp x cp, N >= 2"
    )
    rank_order: tuple[str, ...] = flag(
        ("dp", "pp", "sharding", "cp", "mp"),
        "axes of the device mesh, from outermost to innermost",
        comma=True,
        count=5,
        other=("mp", "dp", "pp", "sharding", "cp"),
    )
    sequence_parallel: bool = flag(
        False, "split activations along the sequence between mp ranks outside the column and row parallel layers"
    )
    tp_comm_overlap: str = flag(
        "auto",
        "overlap the mp collectives of linear layers with their matrix products; on: in chunks; fused: with torch's "
        "fused operators",
        type="switch",
        choices=(*SWITCH, "fused"),
        derived="on or off, whichever is faster by estimate",
    )
    context_parallel_algo: str = flag(
        "megatron_cp_algo",
        "context parallel algorithm: ring attention with zig-zag balance (megatron), all-to-all of heads (ulysses), or "
        "all-gather of keys and values (allgather)",
        choices=("megatron_cp_algo", "ulysses_cp_algo", "allgather_cp_algo"),
    )
    mla_cp_exchange: str = flag(
        AUTO,
        "what context parallel ranks send for multi-latent attention: latents and rotary keys, from which every rank "
        "makes the keys and values it attends to, or the keys and values",
        choices=EXCHANGES,
        models=("moe",),
        derived="latent or kv, whichever sends fewer bytes, with --multi-latent-attention and --cp-degree > 1",
        other="kv",
    )
    ranks_per_node: int | None = flag(
        None,
        "ranks of a node, by which --moe-dispatch divides the ranks of ep; consecutive ranks are on one node",
        unit="ranks",
        low=1,
        models=("moe",),
        per_node=True,
        derived="LOCAL_WORLD_SIZE of the environment; without it all ranks are on one node",
        role=roles.CLUSTER,
        other=1,
    )
    distributed_timeout_minutes: float = flag(
        10.0,
        "time limit of a collective; the run then stops and names the collective",
        unit="minutes",
        above=0,
        role=roles.WATCHES,
    )


@dataclass(frozen=True, kw_only=True)
class ShardingOptions:
    """Sharding of the optimizer, gradients and parameters (ZeRO, FSDP), and its communication."""

    role: ClassVar[roles.Role] = roles.KNOB
    sharding_stage: int = flag(
        1,
        "1: shard optimizer state (distributed optimizer), 2: and gradients, 3: and parameters (FSDP)",
        choices=(1, 2, 3),
        aliases=(Alias("use-distributed-optimizer", 1),),
    )
    sharding_segment_strategy: str | None = flag(
        None,
        "how the model is divided into segments, the buckets that are gathered and reduced together: by size or at "
        "anchors",
        choices=("segment_broadcast_MB", "segment_anchors"),
        derived="--segment-broadcast-MB or --segment-anchors if one of them is given; without either, one segment per "
        "layer",
    )
    segment_broadcast_mb: float = flag(
        32.0,
        "size to gather at which a segment ends; setting it selects the strategy segment_broadcast_MB",
        unit="MB",
        above=0,
        primary="segment-broadcast-MB",
        aliases=(Alias("fuse-broadcast-MB", note="--fuse-broadcast-MB is the old name of --segment-broadcast-MB"),),
        other=0.001,
    )
    segment_anchors: tuple[str, ...] = flag(
        (),
        "modules (paths or patterns) at which a new segment starts; setting it selects the strategy segment_anchors",
        role=roles.by_hand("names modules of one model; sizes of segments are tried"),
        other=("layers.1",),
    )
    sharding_prefetch_segments: int = flag(
        2, "segments (buckets) that are gathered ahead of their use", unit="segments", low=0, other=0
    )
    gradient_merge_acc_step: int = flag(
        None,
        "gradient accumulation: micro-batches per optimizer step on each data rank",
        unit="micro-batches",
        low=1,
        derived="global-batch-size / (micro-batch-size x data ranks), or 1",
        aliases=("accumulate-steps",),
        role=roles.by_hand("follows from the global batch, the micro-batch and the layout"),
    )
    gradient_merge_mode: str = flag(
        None,
        "when gradients are reduced: once per optimizer step, or every micro-batch",
        choices=("step", "micro_batch"),
        derived="step at stage 1, micro_batch at stages 2 and 3",
    )
    overlap_grad_reduce: str = flag(
        "auto", "overlap the reduction of gradients with the backward pass", type="switch", derived="on if allowed"
    )
    overlap_param_gather: str = flag(
        "auto", "overlap the gathering of parameters with the forward pass", type="switch", derived="on if allowed"
    )
    grad_reduce_dtype: str = flag(
        None,
        "dtype of the gradient reduction; fp32: that of the master weights",
        choices=("fp32", "bf16"),
        derived="that of --main-grads-dtype",
        role=roles.PRECISION,
        other="bf16",
    )
    optimizer_offload: bool = flag(False, "keep optimizer state and master weights in pinned host memory")


@dataclass(frozen=True, kw_only=True)
class PipelineOptions:
    """Pipeline stages and schedules."""

    role: ClassVar[roles.Role] = roles.KNOB
    pp_seg_method: str = flag(
        "uniform",
        "how layers are divided into stages: uniform, balanced, layer:REGEX on class names, or the first layer of each",
        aliases=("seg-method",),
    )
    pp_schedule: str = flag("1f1b", "pipeline schedule", choices=("1f1b", "gpipe", "interleaved", "zero_bubble"))
    vpp_degree: int = flag(
        1,
        "model chunks per stage (interleaved schedule)",
        unit="chunks",
        low=1,
        aliases=("virtual-pipeline-model-parallel-size", "virtual-pp-degree", "num-virtual-pipeline-stages"),
    )
    use_nanopipe: bool = flag(
        False,
        "compute weight gradients separately, in the pipeline bubble (the zero-bubble schedule)",
        role=roles.by_hand("is --pp-schedule zero_bubble, which is tried"),
    )


@dataclass(frozen=True, kw_only=True)
class RecomputeOptions:
    """Activation checkpointing: recompute activations in the backward pass instead of storing them."""

    role: ClassVar[roles.Role] = roles.KNOB
    recompute_interval: int = flag(
        0, "number of consecutive layers that are recomputed as one unit; 0: off", unit="layers"
    )
    recompute_offload: bool = flag(False, "store the inputs of recomputed units in pinned host memory")
    recompute_partition: bool = flag(False, "store only 1/mp of the inputs of recomputed units on each mp rank")
    recompute_granularity: str = flag(
        "full",
        "full: recompute whole layers; selective: only the attention core and the activation function",
        choices=("full", "selective"),
        aliases=(Alias("recompute-activations", "selective"),),
    )
    recompute_method: str | None = flag(
        None,
        "uniform: units of N layers; block: the first N layers of each stage",
        choices=("uniform", "block"),
        other="block",
    )
    recompute_num_layers: int | None = flag(None, "N of --recompute-method", unit="layers", low=1)
    recompute_in_advance: bool = flag(False, "recompute a unit before its gradient arrives", role=roles.NOT_BUILT)
    recompute_in_bubble: bool = flag(False, "recompute in the pipeline bubble", role=roles.NOT_BUILT)
    adaptive_recompute_device_size: float = flag(
        0.0,
        "recompute as few layers as possible within this much device memory; 0: off",
        unit="MB",
        low=0,
        role=roles.by_hand("decides from measurements of a run; recompute of fixed layers is tried"),
        other=61440.0,
    )
