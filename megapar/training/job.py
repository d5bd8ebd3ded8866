"""What trains: the model of this rank, and what holds its parameters, gradients and optimizer state."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from megapar.arguments import Config
from megapar.core.adaptive import Adaptive
from megapar.core.axis import Axis
from megapar.core.collective_product import enable
from megapar.core.compiled import Compiled, plain
from megapar.core.context_parallel.method import ContextParallel
from megapar.core.device.base import Device
from megapar.core.device.dtypes import wide
from megapar.core.device.kinds import kind_of
from megapar.core.execution import Execution
from megapar.core.fp8 import Fp8Linear, odd_widths, torchao_lacks
from megapar.core.hiding import FUSED, OFF
from megapar.core.kept import Keeper
from megapar.core.meter import WaitMeter
from megapar.core.offload import OffloadedOptimizer
from megapar.core.optimizer import AdamW, Optimizer
from megapar.core.overlap import Overlap
from megapar.core.pipeline.queues import Queues
from megapar.core.pipeline.schedule import ZERO_BUBBLE
from megapar.core.pipeline.stages import Stages
from megapar.core.recompute import Block, Choice, Interval, Recompute
from megapar.core.replicas import Copy, axes_of
from megapar.core.sharding.combined import CombinedSharding
from megapar.core.sharding.fsdp import FullSharding, whole_experts
from megapar.core.sharding.part import Sharding
from megapar.core.sharding.zero import ZeroSharding
from megapar.core.traffic import Traffic
from megapar.core.units import MEGABYTE
from megapar.core.weight_gradients import WeightGradients
from megapar.core.world import World
from megapar.errors import Complaint, ConfigError
from megapar.model.decoder.model import Decoder
from megapar.model.ernie.model import Ernie
from megapar.model.ernie3.model import Ernie3
from megapar.model.initialize import fill, std_of
from megapar.model.sizes import Ernie3Sizes, ErnieSizes
from megapar.model.table import ParameterSpec, placed, table_of
from megapar.training.build import DTYPES, compute_dtype, make_layout, make_objective, make_slicing, reduce_dtype
from megapar.training.hiding import hiding
from megapar.training.pipelined import PipelinedModel
from megapar.training.sizes import Sizes, make_segments, make_sizes
from megapar.training.stages import effective_schedule, make_stages

Model = Decoder | Ernie


@dataclass
class Job:
    """A model with what holds its parameters, gradients and optimizer state.

    traffic: what layers launch; nothing of it may be left at the end of a step. metered: whether ``meter`` sees
    every wait. partial: parameters whose gradients mp ranks must sum. pipeline: runs the model where pp > 1. tied: the
    parameter that the first and the last stage have, whose gradients they sum.
    """

    world: World
    sizes: Sizes
    table: tuple[ParameterSpec, ...]
    model: Model
    sharding: Sharding
    optimizer: Optimizer | OffloadedOptimizer
    meter: WaitMeter
    traffic: Traffic
    metered: bool
    partial: tuple[str, ...]
    pipeline: PipelinedModel | None = None
    tied: str | None = None


def make_job(config: Config, world: World) -> Job:
    """Build and initialise the model as this rank holds it."""
    sizes = make_sizes(config)
    stages = make_stages(config, sizes)
    table = placed(table_of(sizes), stages)
    dtype = compute_dtype(config, world.device)
    world.ledger.meter = meter = WaitMeter(world.device.timed_event())
    chained = frozenset({"ep", "emp"}) if config.ampipe.pipe_experts_multi_stream else frozenset[str]()
    traffic = Traffic(meter, world.device, chained)
    cut_parameters = config.sharding.sharding_stage == 3 and world.grid.shards > 1
    execution = make_execution(config, world, sizes, traffic)
    model_dtype = wide(dtype) if cut_parameters else dtype
    model = _make_model(config, sizes, stages, world, traffic, execution, model_dtype, meta=cut_parameters)
    if config.training.fp8:
        _check_widths(model)
    pipeline: PipelinedModel | None = None
    trainable = [spec for spec in table if spec.trainable]
    if cut_parameters:
        sharding = _full(config, world, sizes, model, trainable, dtype, meter)
    elif world.grid.pp > 1:
        sharding, pipeline = _pipelined(
            config, world, stages, model, trainable, dtype, meter, execution.weight_gradients
        )
    else:
        sharding = _zero(config, world, model, trainable, dtype, meter)
    rows = {spec.name: spec for spec in table}
    for view in sharding.views([part.master for part in sharding.parts]):
        spec = rows[view.spec.name]
        fill(view.tensor, spec, view.box, seed=config.training.seed, init_std=std_of(spec, sizes))
    _zero_buffers(model, table)
    sharding.publish()
    optimizer = _make_optimizer(config, world, sharding)
    partial = _partial_names(table, sequence_parallel=config.parallel.sequence_parallel)
    job = Job(world, sizes, table, model, sharding, optimizer, meter, traffic, not cut_parameters, partial, pipeline)
    holding = stages.holding(world.axis("pp").rank)
    if pipeline is not None and model.embedding is not None and holding.first != holding.last:
        job.tied = "embedding.word.weight" if model.tied_weight is not None else None
    return job


def check_device(config: Config, device: Device) -> None:
    """Raise ConfigError for what is asked of a device that this one, or this machine, does not have."""
    complaints = []
    if config.training.compile and (lacks := device.compiler_lacks()):
        complaints.append(Complaint("compile", f"--compile, but {lacks}.", "Leave it out."))
    if config.parallel.tp_comm_overlap == FUSED and device.type != "cuda":
        message = f"--tp-comm-overlap fused reads the memory of other GPUs, and this is {device.name}."
        complaints.append(Complaint("tp-comm-overlap-fused-device", message, "Choose --tp-comm-overlap on."))
    if config.training.fp8 and (lacks := device.fp8_lacks() or torchao_lacks()):
        complaints.append(Complaint("fp8", f"--fp8, but {lacks}.", "Leave it out."))
    if complaints:
        raise ConfigError(complaints)


def make_execution(config: Config, world: World, sizes: Sizes, traffic: Traffic) -> Execution:
    """The way in which the model's layers run on this device."""
    splits_backward = world.grid.pp > 1 and effective_schedule(config) == ZERO_BUBBLE
    return Execution(
        overlap=make_overlap(config, world, sizes),
        traffic=traffic,
        weight_gradients=WeightGradients() if splits_backward else None,
        fp8=Fp8Linear() if config.training.fp8 else None,
        run=Compiled() if config.training.compile else plain,
        selective=config.recompute.recompute_granularity == "selective",
    )


def _check_widths(model: Model) -> None:
    """Raise ConfigError for linear layers that have no products in fp8."""
    if odd := odd_widths(model):
        message = f"fp8 products take widths that are multiples of 16; not so {', '.join(odd[:4])}."
        raise ConfigError([Complaint("fp8-widths", message, "Choose other sizes, or leave --fp8 out.")])


def _pipelined(
    config: Config,
    world: World,
    stages: Stages,
    model: Model,
    specs: list[ParameterSpec],
    dtype: torch.dtype,
    meter: WaitMeter,
    weight_gradients: WeightGradients | None,
) -> tuple[Sharding, PipelinedModel]:
    """Stages 1 and 2 for each chunk by itself, whose backward is one of many, and what runs the chunks."""
    pp = world.axis("pp")
    mine = stages.on(pp.rank)

    def index_of(spec: ParameterSpec) -> int:
        chunk = stages.chunk_of_unit(spec.unit)
        return chunk.index if chunk.rank == pp.rank else mine[-1].index  # a tied embedding's second copy

    names = dict(model.named_parameters())
    here = [spec for spec in specs if spec.name in names]
    shardings = {
        chunk.index: _zero(config, world, model, [spec for spec in here if index_of(spec) == chunk.index], dtype, meter)
        for chunk in mine
    }
    queues = Queues(pp.rank, world.make_queues(closed=stages.goes_round), world.device)
    pipeline = PipelinedModel(
        model,
        stages,
        queues,
        effective_schedule(config),
        make_objective(config),
        shardings,
        world.device.torch_device,
        reduce_every_micro_batch=config.sharding.gradient_merge_mode == "micro_batch",
        weight_gradients=weight_gradients,
        meter=meter,
    )
    return CombinedSharding(tuple(shardings.values())), pipeline


def _make_optimizer(config: Config, world: World, sharding: Sharding) -> Optimizer | OffloadedOptimizer:
    optimizer = config.optimizer
    betas = optimizer.adam_beta1, optimizer.adam_beta2
    numbers = AdamW(betas, optimizer.adam_eps, optimizer.weight_decay, config.moe.moe_router_lr_ratio)
    if config.sharding.optimizer_offload:
        return OffloadedOptimizer(sharding.parts, world.device, numbers)
    return Optimizer(sharding.parts, numbers)


def _make_model(
    config: Config,
    sizes: Sizes,
    stages: Stages,
    world: World,
    traffic: Traffic,
    execution: Execution,
    dtype: torch.dtype,
    *,
    meta: bool,
) -> Model:
    common: dict[str, Any] = {
        "mp": world.axis("mp"),
        "sequence_parallel": config.parallel.sequence_parallel,
        "cp": ContextParallel(
            world.axis("cp"), config.parallel.context_parallel_algo, make_layout(config), traffic=traffic
        ),
        "holding": stages.holding(world.axis("pp").rank),
        "dtype": dtype,
        "device": torch.device("meta") if meta else world.device.torch_device,
        "execution": execution,
        "recompute": make_recompute(config, world, traffic),
    }
    if isinstance(sizes, Ernie3Sizes):
        return Ernie3(sizes, **common)
    if isinstance(sizes, ErnieSizes):
        return Ernie(sizes, **common)
    return Decoder(sizes, ep=world.axis("ep"), emp=world.axis("emp"), slicing=make_slicing(config), **common)


def make_overlap(config: Config, world: World, sizes: Sizes) -> Overlap:
    """How the collectives of layers cut over mp are hidden on this device.

    Raises ConfigError where they should be fused and the ranks of mp do not share a node.
    """
    device, mp = world.device, world.axis("mp")
    kind, computed = kind_of(device.type, device.name), compute_dtype(config, device)
    dtype = next(name for name, dtype in DTYPES.items() if dtype == computed)
    form = hiding(config, kind, dtype, sizes) if mp.size > 1 else OFF
    if form == FUSED:
        per_node = int(os.environ.get("LOCAL_WORLD_SIZE", world.grid.world_size))
        if len({rank // per_node for rank in mp.ranks}) > 1:
            message = f"--tp-comm-overlap fused, but ranks {mp.ranks} of mp are on nodes of {per_node} ranks."
            fix = "Choose an --mp-degree that fits into a node, or --tp-comm-overlap on."
            raise ConfigError([Complaint("tp-comm-overlap-node", message, fix)])
        enable(mp)
    of = kind.of
    return Overlap(of.pieces, of.piece_bytes, of.least_rows, of.batched, blocking=form == OFF, fused=form == FUSED)


def make_recompute(config: Config, world: World, traffic: Traffic) -> Recompute | None:
    """What is computed again in whole layers; None: nothing."""
    recompute = config.recompute
    choice: Choice
    if recompute.adaptive_recompute_device_size:
        adaptive = Adaptive(round(recompute.adaptive_recompute_device_size * MEGABYTE), config.model.num_layers)
        return Recompute(adaptive, traffic, world.ledger, measure=adaptive)
    if recompute.recompute_method == "block":
        choice = Block(recompute.recompute_num_layers or 0)
    elif recompute.recompute_method == "uniform" or recompute.recompute_interval:
        choice = Interval(recompute.recompute_interval or recompute.recompute_num_layers or 1)
    else:
        return None
    keeper = None
    if recompute.recompute_offload or recompute.recompute_partition:
        mp = world.axis("mp") if recompute.recompute_partition else Axis.single("mp")
        keeper = Keeper(world.device, mp, traffic, offload=recompute.recompute_offload)
    return Recompute(choice, traffic, world.ledger, keeper)


def _partial_names(table: Sequence[ParameterSpec], *, sequence_parallel: bool) -> tuple[str, ...]:
    """Parameters whose gradient is a partial sum on every mp rank."""
    partial = ("always", "sp") if sequence_parallel else ("always",)
    return tuple(spec.name for spec in table if spec.trainable and spec.mp_partial in partial)


def _full(
    config: Config,
    world: World,
    sizes: Sizes,
    model: Model,
    specs: list[ParameterSpec],
    dtype: torch.dtype,
    meter: WaitMeter,
) -> Sharding:
    """Stage 3; experts that are whole on their ranks are kept as stage 2 keeps them."""
    tied = isinstance(sizes, ErnieSizes) or sizes.tie_embeddings or sizes.mtp_depth > 0
    together = ("embedding", "head") if tied else ()
    full = FullSharding(
        world,
        model,
        model.units(),
        specs,
        dtype,
        wide(dtype),
        reduce_dtype(config, dtype),
        together=together,
        plan=make_segments(config, sizes) if config.sharding.sharding_segment_strategy else None,
        prefetch=config.sharding.sharding_prefetch_segments,
        reduce_every_micro_batch=config.sharding.gradient_merge_mode == "micro_batch",
    )
    names = {spec.name for spec in whole_experts(world, specs)}
    if not names:
        return full
    experts = [spec for spec in specs if spec.name in names]
    return CombinedSharding((full, _zero(config, world, model, experts, dtype, meter)))


def _zero(
    config: Config, world: World, model: Model, specs: list[ParameterSpec], dtype: torch.dtype, meter: WaitMeter
) -> ZeroSharding:
    """Stages 1 and 2."""
    named = dict(model.named_parameters())
    return ZeroSharding(
        world,
        model.units(),
        [(spec, named[spec.name]) for spec in specs],
        wide(dtype),
        reduce_dtype(config, dtype),
        make_segments(config, make_sizes(config)),
        reduce_every_micro_batch=config.sharding.gradient_merge_mode == "micro_batch",
        overlap_reduce=config.sharding.overlap_grad_reduce != "off",
        overlap_gather=config.sharding.overlap_param_gather != "off",
        prefetch=config.sharding.sharding_prefetch_segments,
        meter=meter,
        offload=config.sharding.optimizer_offload,
    )


def _zero_buffers(model: nn.Module, table: tuple[ParameterSpec, ...]) -> None:
    """Buffers of the table (the router's correction bias) start at zero; memory may come uninitialised."""
    buffers = dict(model.named_buffers())
    for spec in table:
        if not spec.trainable and spec.name in buffers:
            buffers[spec.name].zero_()


def copies(job: Job) -> Iterator[Copy]:
    """Everything that other ranks hold too: masters, parameters that are whole, buffers of the table."""
    for view in job.sharding.views([part.master for part in job.sharding.parts]):
        for axis in axes_of(view.spec, job.world, sharded=True):
            yield Copy(f"the master of {view.spec.name}", view.tensor, axis)
    rows = {spec.name: spec for spec in job.table}
    for name, parameter in job.model.named_parameters():
        if name in rows and not isinstance(parameter, DTensor):
            for axis in axes_of(rows[name], job.world, sharded=False):
                yield Copy(name, parameter, axis)
    for name, buffer in job.model.named_buffers():
        if name in rows:
            for axis in map(job.world.axis, ("data", "cp", "mp")):
                if axis.group is not None:
                    yield Copy(name, buffer, axis)
