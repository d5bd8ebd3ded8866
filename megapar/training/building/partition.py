"""The partition of a model, its stages and buckets of parameters, and that of a sequence. Does not import torch.

In buckets parameters are gathered and gradients reduced. The flags call a bucket a segment.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import gcd

from megapar.arguments import Config
from megapar.core.context_parallel.positions import SequenceLayout, choose_layout
from megapar.core.pipeline.schedule import ZERO_BUBBLE, style_of
from megapar.core.pipeline.stages import CutError, PipelineLayers, Stages
from megapar.core.sharding.bucket_plan import PlanError, PlannedBucket, by_anchors, by_bytes, by_unit
from megapar.core.sharding.cut import ParameterInfo, box_at
from megapar.core.units import MEGABYTE
from megapar.errors import Complaint, ConfigError
from megapar.model.flops import layer_flops
from megapar.model.parameter import ParameterSpec
from megapar.model.sizes import ModelSizes
from megapar.model.spec import table_of

ITEM_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp64": 8}


def effective_schedule(config: Config) -> str:
    """Return ``--pp-schedule``, or the zero-bubble schedule with ``--use-nanopipe``."""
    return ZERO_BUBBLE if config.pipeline.use_nanopipe else config.pipeline.pp_schedule


def pipeline_layers(sizes: ModelSizes) -> PipelineLayers:
    """Return the model as a list of layers: their class names, including those inside a block, and their FLOPs."""
    return PipelineLayers(sizes.layer_names, tuple(map(float, layer_flops(sizes))))


def placed(table: Iterable[ParameterSpec], stages: Stages) -> tuple[ParameterSpec, ...]:
    """Return the table with the stage of each row filled in."""
    return tuple(replace(spec, stage=stages.rank_of_unit(spec.unit)) for spec in table)


def make_layout(config: Config) -> SequenceLayout:
    """Return how the ranks of cp share a sequence."""
    parallel, ampipe = config.parallel, config.ampipe
    lengths = {config.model.seq_length, *(span.seq_length for span in config.phases.spans)}
    return choose_layout(
        parallel.context_parallel_algo,
        parallel.cp_degree,
        causal=config.model.causal,
        length=gcd(*lengths),
        slices=max(1, ampipe.ampipe_degree),
        balanced=ampipe.ampipe_slicing == "balanced",
        parts=parallel.mp_degree if parallel.sequence_parallel else 1,
    )


def make_stages(config: Config, sizes: ModelSizes) -> Stages:
    """Return the chunks of ``--pp-seg-method``. Raises ConfigError if the model cannot be split that way."""
    pp, vpp = config.grid.pp, config.pipeline.vpp_degree
    if pp == 1:
        return Stages.single(sizes.num_blocks)
    try:
        starts = pipeline_layers(sizes).starts(pp * vpp, config.pipeline.pp_seg_method)
    except CutError as error:
        raise ConfigError([Complaint("pp-seg-method", f"--pp-seg-method: {error}.")]) from error
    return Stages.of(starts, sizes.num_blocks, pp, style_of(effective_schedule(config), vpp))


def pipeline_outline(config: Config, sizes: ModelSizes) -> str:
    """Describe the pipeline for --validate-only: the layers of every chunk, and its share of the FLOPs."""
    if config.grid.pp == 1:
        return ""
    layers, stages = pipeline_layers(sizes), make_stages(config, sizes)
    whole = sum(layers.costs)
    lines = [f"pipeline: {effective_schedule(config)}, {len(stages.chunks)} chunks on {stages.num_ranks} stages"]
    for chunk in stages.chunks:
        ends = ("embedding, " if chunk.first else "") + f"layers {chunk.layers.start} to {chunk.layers.stop - 1}"
        share = layers.cost(chunk) / whole
        lines.append(f"  stage {chunk.rank}: {ends}{', head' if chunk.last else ''} ({share:.0%} of the FLOPs)")
    return "\n".join(lines) + "\n"


def make_segments(
    config: Config, sizes: ModelSizes, table: Sequence[ParameterSpec] | None = None
) -> list[PlannedBucket]:
    """Plan the buckets of ``--sharding-segment-strategy``. Raises ConfigError for anchors that do not fit the model.

    The size of a bucket is the number of bytes that rank 0 gathers in the compute dtype. If the device chooses the
    dtype, bf16 is assumed. ``table`` is the parameter table; None for that of ``sizes``.
    """
    rows = [spec for spec in table or table_of(sizes) if spec.trainable]
    item = ITEM_BYTES.get(config.training.dtype, 2)
    first = {axis: (config.grid.size(axis), 0) for axis in ("mp", "ep", "emp")}  # rank 0

    def cost(row: ParameterInfo) -> int:
        return box_at(row, first).numel * (max(4, item) if row.fp32 else item)

    sharding = config.sharding
    # At stage 3 the call of a module gathers its parameters. Whole layers are needed where that does not work for parts
    # of a layer: ERNIE 3.0 calls them a different number of times on each rank, depending on its samples, and
    # overlapped gathers of mp use the attention's weights without a call.
    whole = sharding.sharding_stage == 3 and (sizes.mixes_tasks or config.ampipe.ampipe_tp_sp_comm_overlap)
    if sharding.sharding_segment_strategy == "segment_broadcast_MB":
        return by_bytes(rows, cost, sharding.segment_broadcast_mb * MEGABYTE, whole=whole)
    if sharding.sharding_segment_strategy == "segment_anchors":
        try:
            return by_anchors(rows, cost, sharding.segment_anchors, whole=whole)
        except PlanError as error:
            raise ConfigError([Complaint("segment-anchors", str(error))]) from error
    return by_unit(rows, cost)
