"""The job: this rank's part of the model with its sharded parameters, gradients and optimizer state."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import torch
from torch import nn

from megapar.arguments import Config
from megapar.core.comm.in_flight import CommContext
from megapar.core.comm.world import World
from megapar.core.device.base import Device
from megapar.core.device.dtypes import at_least_fp32
from megapar.core.optimizer.offload import OffloadedOptimizer
from megapar.core.optimizer.optimizer import Optimizer
from megapar.core.optimizer.update_rule import AdamW, Sgd, UpdateRule
from megapar.core.pipeline.queues import Queues
from megapar.core.pipeline.stages import Stages
from megapar.core.sharding.fsdp import FullSharding, whole_experts
from megapar.core.sharding.sharding import CombinedSharding, Sharding
from megapar.core.sharding.zero import ZeroSharding
from megapar.core.tensor_parallel.fp8 import torchao_lacks
from megapar.core.tensor_parallel.overlap_price import FUSED
from megapar.core.tensor_parallel.weight_gradients import WeightGradients
from megapar.errors import Complaint, ConfigError
from megapar.model.decoder.model import Decoder
from megapar.model.initialize import std_of
from megapar.model.parameter import ParameterSpec, led_names
from megapar.model.sizes import ModelSizes
from megapar.model.spec import table_of
from megapar.training.building.attention_backend import backend_lacks, needs_flash3
from megapar.training.building.build import make_objective
from megapar.training.building.builder import Builder, check_widths, make_execution, make_recompute
from megapar.training.building.pipeline_split import effective_schedule, make_stages, placed
from megapar.training.building.segments import make_segments
from megapar.training.step.dtypes import compute_dtype, reduce_dtype
from megapar.training.step.job import Job, Model
from megapar.training.step.observer import StepObserver
from megapar.training.step.pipelined import PipelinedModel


def make_job(config: Config, world: World, builder: Builder | None = None, observer: StepObserver | None = None) -> Job:
    """Build and initialize this rank's part of the model.

    Args:
        builder: Builds the replaceable parts. None uses the default parts.
        observer: Hooks into every step. None observes nothing.
    """
    builder = builder or Builder()
    sizes = config.model
    stages = make_stages(config, sizes)
    table = placed(table_of(sizes), stages)
    dtype = compute_dtype(config, world.device)
    chained = frozenset({"ep", "emp"}) if config.ampipe.pipe_experts_multi_stream else frozenset[str]()
    comm = CommContext(world.meter, world.device, chained, None if observer is None else observer.host_waited)
    recompute = make_recompute(config, world, comm, nullcontext if observer is None else observer.recomputation)
    cut_parameters = config.sharding.sharding_stage == 3 and world.grid.shards > 1
    overlap, run = builder.overlap(config, world, sizes), builder.runner(config, world)
    execution = make_execution(config, world, overlap, comm, run)
    rank_layers = stages.rank_layers(world.axis("pp").rank)
    model_dtype = at_least_fp32(dtype) if cut_parameters else dtype
    model = builder.model(config, world, sizes, rank_layers, model_dtype, execution, recompute, meta=cut_parameters)
    if config.training.fp8:
        check_widths(model)
    pipeline: PipelinedModel | None = None
    trainable = [spec for spec in table if spec.trainable]
    if cut_parameters:
        sharding = _full(config, world, sizes, model, trainable, dtype, builder)
    elif world.grid.pp > 1:
        sharding, pipeline = _pipelined(config, world, stages, model, trainable, dtype, execution.weight_gradients)
    else:
        sharding = _zero(config, world, model, trainable, dtype)
    _initialize(config, builder, model, table, sharding)
    summed = ("always", "sp") if config.parallel.sequence_parallel else ("always",)
    job = Job(
        world=world,
        sizes=sizes,
        table=table,
        model=model,
        sharding=sharding,
        optimizer=_make_optimizer(config, world, sharding),
        comm=comm,
        partial=tuple(spec.name for spec in trainable if spec.mp_partial in summed),
        led=led_names(table, world.grid.mp, summed) if cut_parameters else frozenset(),
        pipeline=pipeline,
        moves_experts=config.moe.moe_rebalance_interval > 0,
        runner=execution.run,
        observer=observer or StepObserver(),
    )
    if pipeline is not None and model.embedding is not None and rank_layers.first != rank_layers.last:
        job.tied = "embedding.word.weight" if model.tied_weight is not None else None
    if observer is not None:
        _observe_routing(model, observer)
        observer.model_built(model)
    return job


def _observe_routing(model: Model, observer: StepObserver) -> None:
    """Pass every router's choice through the observer, with torch's forward hooks."""
    if isinstance(model, Decoder):
        for number, moe in model.expert_layers().items():
            seen = partial(observer.experts_chosen, number)
            moe.router.top.register_forward_hook(lambda _, inputs, experts_Tk, seen=seen: seen(experts_Tk))


def check_device(config: Config, device: Device) -> None:
    """Raise ConfigError if the flags need something that this device or machine does not support.

    Otherwise prepare the process for the kernels of attention.
    """
    complaints = []
    if config.parallel.tp_comm_overlap == FUSED and (lacks := device.fused_lacks()):
        message = f"--tp-comm-overlap fused reads the memory of other GPUs, but {lacks}."
        complaints.append(Complaint("tp-comm-overlap-fused-device", message, "Use --tp-comm-overlap on."))
    if config.training.fp8 and (lacks := device.fp8_lacks() or torchao_lacks()):
        complaints.append(Complaint("fp8", f"--fp8, but {lacks}.", "Remove --fp8."))
    backend, dtype = config.training.attention_backend, str(compute_dtype(config, device)).removeprefix("torch.")
    if lacks := backend_lacks(config, device, dtype):
        fix = "Remove --attention-backend."
        complaints.append(Complaint("attention-backend", f"--attention-backend {backend}, but {lacks}.", fix))
    if complaints:
        raise ConfigError(complaints)
    if needs_flash3(config, device, dtype):
        device.activate_flash3()


def _pipelined(
    config: Config,
    world: World,
    stages: Stages,
    model: Model,
    specs: list[ParameterSpec],
    dtype: torch.dtype,
    weight_gradients: WeightGradients | None,
) -> tuple[Sharding, PipelinedModel]:
    """Return sharding stage 1 or 2 with a separate part for each chunk, and the model that runs the chunks.

    The parts are separate because each chunk has its own backward.
    """
    pp = world.axis("pp")
    mine = stages.on(pp.rank)

    def index_of(spec: ParameterSpec) -> int:
        chunk = stages.chunk_of_unit(spec.unit)
        return chunk.index if chunk.rank == pp.rank else mine[-1].index  # a tied embedding's second copy

    names = dict(model.named_parameters())
    here = [spec for spec in specs if spec.name in names]
    shardings = {
        chunk.index: _zero(config, world, model, [spec for spec in here if index_of(spec) == chunk.index], dtype)
        for chunk in mine
    }
    queues = Queues(pp.rank, world.make_queues(closed=stages.last_sends_to_first), world.device)
    pipeline = PipelinedModel(
        model=model,
        stages=stages,
        queues=queues,
        schedule=effective_schedule(config),
        objective=make_objective(config),
        shardings=shardings,
        device=world.device.torch_device,
        reduce_every_micro_batch=config.sharding.gradient_merge_mode == "micro_batch",
        weight_gradients=weight_gradients,
        meter=world.meter,
    )
    return CombinedSharding(tuple(shardings.values())), pipeline


def _make_optimizer(config: Config, world: World, sharding: Sharding) -> Optimizer | OffloadedOptimizer:
    rule = _update_rule(config)
    if config.sharding.optimizer_offload:
        return OffloadedOptimizer(sharding.master_shards, world.device, rule)
    return Optimizer(sharding.master_shards, rule)


def _update_rule(config: Config) -> UpdateRule:
    optimizer, ratio = config.optimizer, config.moe.moe_router_lr_ratio
    if optimizer.optimizer == "sgd":
        return Sgd(optimizer.sgd_momentum, optimizer.weight_decay, ratio)
    return AdamW((optimizer.adam_beta1, optimizer.adam_beta2), optimizer.adam_eps, optimizer.weight_decay, ratio)


def _full(
    config: Config,
    world: World,
    sizes: ModelSizes,
    model: Model,
    specs: list[ParameterSpec],
    dtype: torch.dtype,
    builder: Builder,
) -> Sharding:
    """Return sharding stage 3 (FSDP). Experts that are not sharded are handled as in stage 2."""
    together = ("embedding", "head") if sizes.shares_embedding else ()
    full = FullSharding(
        world,
        model,
        model.units(),
        specs,
        dtype,
        at_least_fp32(dtype),
        reduce_dtype(config, dtype),
        together=together,
        plan=make_segments(config, sizes) if config.sharding.sharding_segment_strategy else None,
        prefetch=config.sharding.sharding_prefetch_segments,
        reduce_every_micro_batch=config.sharding.gradient_merge_mode == "micro_batch",
        shard=builder.fully_shard,
    )
    names = {spec.name for spec in whole_experts(world, specs)}
    if not names:
        return full
    experts = [spec for spec in specs if spec.name in names]
    return CombinedSharding((full, _zero(config, world, model, experts, dtype)))


def _zero(config: Config, world: World, model: Model, specs: list[ParameterSpec], dtype: torch.dtype) -> ZeroSharding:
    """Return sharding stage 1 or 2."""
    named = dict(model.named_parameters())
    return ZeroSharding(
        world,
        model.units(),
        [(spec, named[spec.name]) for spec in specs],
        at_least_fp32(dtype),
        reduce_dtype(config, dtype),
        make_segments(config, config.model),
        reduce_every_micro_batch=config.sharding.gradient_merge_mode == "micro_batch",
        overlap_reduce=config.sharding.overlap_grad_reduce != "off",
        overlap_gather=config.sharding.overlap_param_gather != "off",
        prefetch=config.sharding.sharding_prefetch_segments,
        offload=config.sharding.optimizer_offload,
    )


def _initialize(
    config: Config, builder: Builder, model: Model, table: tuple[ParameterSpec, ...], sharding: Sharding
) -> None:
    """Fill the master weights with their initial values, zero the buffers, and gather the weights for the model."""
    rows = {spec.name: spec for spec in table}
    for view in sharding.views([shard.master for shard in sharding.master_shards]):
        spec = rows[view.spec.name]
        std = std_of(spec, config.model)
        builder.initialize(view.tensor, spec, view.box, seed=config.training.seed, init_std=std)
    _zero_buffers(model, table)
    sharding.start_param_gather()


def _zero_buffers(model: nn.Module, table: tuple[ParameterSpec, ...]) -> None:
    """Zero the buffers of the table (the router's correction bias), whose memory may be uninitialized."""
    buffers = dict(model.named_buffers())
    for spec in table:
        if not spec.trainable and spec.name in buffers:
            buffers[spec.name].zero_()
