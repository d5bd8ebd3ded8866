"""The split of a model into pipeline stages, from a configuration. Does not import torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from megapar.arguments import Config
from megapar.core.pipeline.schedule import ZERO_BUBBLE, style_of
from megapar.core.pipeline.stages import CutError, PipelineLayers, Stages
from megapar.errors import Complaint, ConfigError
from megapar.model.flops import layer_flops
from megapar.model.parameter import ParameterSpec
from megapar.model.sizes import ModelSizes


def effective_schedule(config: Config) -> str:
    """Return ``--pp-schedule``, or the zero-bubble schedule with ``--use-nanopipe``."""
    return ZERO_BUBBLE if config.pipeline.use_nanopipe else config.pipeline.pp_schedule


def pipeline_layers(sizes: ModelSizes) -> PipelineLayers:
    """Return the model as a list of layers: their class names, including those inside a block, and their FLOPs."""
    return PipelineLayers(sizes.layer_names, tuple(map(float, layer_flops(sizes))))


def placed(table: Iterable[ParameterSpec], stages: Stages) -> tuple[ParameterSpec, ...]:
    """Return the table with the stage of each row filled in."""
    return tuple(replace(spec, stage=stages.rank_of_unit(spec.unit)) for spec in table)


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
