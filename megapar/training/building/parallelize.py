"""The parallelization of a model: all that is done to it on this rank, in order.

[1] stages       the pipeline ranks divide the layers, and with them the parameters
[2] execution    overlap of collectives, recomputation, compiled functions, kernels of attention, fp8
[3] modules      of this rank's layers, split over mp, cp, ep and emp (``Parts.model``)
[4] sharding     parameters and gradients in buckets: at stage 3 by FSDP, else by ZeRO, one for each chunk of layers
[5] weights      initialized in the masters, which the optimizer updates, and gathered for the model
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import nn

from megapar.arguments import Config
from megapar.core.comm.axis import Axis
from megapar.core.comm.in_flight import CommContext
from megapar.core.comm.world import World
from megapar.core.device.apex import add_product_apex
from megapar.core.device.base import Device
from megapar.core.device.compiled import FunctionRunner
from megapar.core.device.dtypes import at_least_fp32
from megapar.core.device.kinds import TENSORWISE
from megapar.core.optimizer.muon import MuonOptimizer
from megapar.core.optimizer.offload import OffloadedOptimizer
from megapar.core.optimizer.optimizer import Optimizer
from megapar.core.optimizer.tensor_pieces import TensorRegion, pieces_of, tensor_key
from megapar.core.optimizer.update_rule import AdamW, ApexAdamW, RoundedAdamW, Sgd, UpdateRule
from megapar.core.pipeline.runner import Queues
from megapar.core.pipeline.schedule import ZERO_BUBBLE
from megapar.core.pipeline.stages import Stages
from megapar.core.recompute.adaptive import Adaptive
from megapar.core.recompute.checkpointing import Recompute
from megapar.core.recompute.choice import recompute_choice
from megapar.core.recompute.saved_inputs import SavedInputs
from megapar.core.sharding.bucket import BucketDtypes
from megapar.core.sharding.cut import ParameterInfo
from megapar.core.sharding.fsdp import FullSharding, whole_experts
from megapar.core.sharding.sharding import CombinedSharding, Sharding, changed_masters
from megapar.core.sharding.zero import ZeroSharding
from megapar.core.tensor_parallel.execution import Execution
from megapar.core.tensor_parallel.fp8 import Fp8Casts
from megapar.core.tensor_parallel.overlap_price import FUSED
from megapar.core.tensor_parallel.overlapped_linear import Overlap
from megapar.core.tensor_parallel.weight_gradients import WeightGradients
from megapar.core.units import MEGABYTE
from megapar.errors import Complaint, ConfigError
from megapar.model.decoder.model import Decoder
from megapar.model.initialize import piece_box, std_of
from megapar.model.layers.norm import ApexNorms
from megapar.model.parameter import ParameterSpec, names_from_first_rank
from megapar.model.spec import table_of
from megapar.training.building.attention_backend import attention_operator, backend_lacks, needs_flash3
from megapar.training.building.muon import make_muon
from megapar.training.building.partition import effective_schedule, make_segments, make_stages, placed
from megapar.training.building.parts import Parts
from megapar.training.building.rates import with_rates
from megapar.training.step.dtypes import DTYPES, compute_dtype, reduce_dtype
from megapar.training.step.job import Job, Model
from megapar.training.step.objective import make_objective
from megapar.training.step.observer import StepObserver
from megapar.training.step.pipelined import PipelinedModel
from megapar.training.step.qk_clip import QkClip


def parallelize(config: Config, world: World, parts: Parts | None = None, observer: StepObserver | None = None) -> Job:
    """Build and initialize this rank's part of the model."""
    parts = parts or Parts()
    sizes = config.model
    # [1] The layers and parameters of each stage of the pipeline
    stages = make_stages(config, sizes)
    layers = stages.rank_layers(world.axis("pp").rank)
    table = with_rates(config, placed(table_of(sizes), stages))
    trainable = [spec for spec in table if spec.trainable]
    # [2] How layers run
    chained = frozenset({"ep", "emp"}) if config.ampipe.pipe_experts_multi_stream else frozenset[str]()
    comm = CommContext(world.meter, world.device, chained, None if observer is None else observer.host_waited)
    recompute = make_recompute(config, world, comm, nullcontext if observer is None else observer.recomputation)
    overlap, run = parts.overlap(config, world), parts.runner(config, world)
    cut_parameters = config.sharding.sharding_stage == 3 and world.grid.shards > 1
    training = config.training
    fp8 = Fp8Casts(kept=not cut_parameters, recipe=training.fp8_recipe) if training.fp8 else None
    execution = make_execution(config, world, overlap, comm, run, fp8)
    # [3] The modules, split over mp, cp, ep and emp
    dtype = compute_dtype(config, world.device)
    model_dtype = at_least_fp32(dtype) if cut_parameters else dtype
    model = parts.model(parts.moe, config, world, layers, model_dtype, execution, recompute, meta=cut_parameters)
    # [4] The shards of parameters and gradients
    pipeline: PipelinedModel | None = None
    if cut_parameters:
        sharding = _full(config, world, model, trainable, dtype, parts)
    elif world.grid.pp > 1:
        sharding, pipeline = _pipelined(config, world, stages, model, trainable, dtype, execution)
    else:
        sharding = _zero(config, world, model, trainable, dtype, fp8)
    # [5] Initial weights in the masters, gathered for the model, and the optimizer of the masters
    _initialize(config, parts, model, table, sharding)
    optimizer = _make_optimizer(config, world, sharding, trainable)
    summed = ("always", "sp") if config.parallel.sequence_parallel else ("always",)
    job = Job(
        world=world,
        sizes=sizes,
        table=table,
        model=model,
        sharding=sharding,
        optimizer=optimizer,
        comm=comm,
        partial=tuple(spec.name for spec in trainable if spec.mp_partial in summed),
        from_first_rank=names_from_first_rank(table, world.grid.mp, summed) if cut_parameters else frozenset(),
        pipeline=pipeline,
        moves_experts=config.moe.moe_rebalance_interval > 0,
        qk_clip=_qk_clip(config, world, model, sharding),
        runner=run,
        observer=observer or StepObserver(),
    )
    if pipeline is not None and model.embedding is not None and layers.first != layers.last:
        job.tied = "embedding.word.weight" if model.tied_weight is not None else None
    if observer is not None:
        _observe_routing(model, observer)
        observer.model_built(model)
    return job


def make_execution(
    config: Config, world: World, overlap: Overlap, comm: CommContext, run: FunctionRunner, fp8: Fp8Casts | None
) -> Execution:
    """Return how the model's layers run on this device. ``run`` calls their functions."""
    splits_backward = world.grid.pp > 1 and effective_schedule(config) == ZERO_BUBBLE
    return Execution(
        overlap=overlap,
        comm=comm,
        weight_gradients=WeightGradients() if splits_backward else None,
        fp8=fp8,
        fp8_experts=fp8 if config.training.fp8_experts else None,
        run=ApexNorms(run) if config.training.apex else run,
        attention=attention_operator(config, world.device, _torch_name(config, world.device)),
        selective=config.recompute.recompute_granularity == "selective",
    )


def make_recompute(
    config: Config, world: World, comm: CommContext, around: Callable[[], AbstractContextManager[object]] = nullcontext
) -> Recompute | None:
    """Return the activation checkpointing of whole layers, or None without it. For ``around``, see ``Recompute``."""
    recompute = config.recompute
    if recompute.adaptive_recompute_device_size:
        adaptive = Adaptive(round(recompute.adaptive_recompute_device_size * MEGABYTE), config.model.num_layers)
        return Recompute(adaptive, comm, world.sent_bytes, around=around)
    choice = recompute_choice(recompute.recompute_interval, recompute.recompute_method, recompute.recompute_num_layers)
    if choice is None:
        return None
    saved_inputs = None
    if recompute.recompute_offload or recompute.recompute_partition:
        mp = world.axis("mp") if recompute.recompute_partition else Axis.single("mp")
        saved_inputs = SavedInputs(world.device, mp, comm, offload=recompute.recompute_offload)
    return Recompute(choice, comm, world.sent_bytes, saved_inputs, around=around)


def _observe_routing(model: Model, observer: StepObserver) -> None:
    """Pass every router's choice through the observer, with torch's forward hooks."""
    observes = type(observer).experts_chosen is not StepObserver.experts_chosen
    if isinstance(model, Decoder) and observes:  # otherwise a kernel may choose
        for number, moe in model.expert_layers().items():
            choose = partial(observer.experts_chosen, number)
            moe.router.top.register_forward_hook(lambda _, inputs, experts_Tk, choose=choose: choose(experts_Tk))


def check_device(config: Config, device: Device) -> None:
    """Raise ConfigError if the device or machine lacks what flags need; else prepare for the kernels of attention."""
    complaints = []
    if config.parallel.tp_comm_overlap == FUSED and (lacks := device.fused_lacks()):
        message = f"--tp-comm-overlap fused reads the memory of other GPUs, but {lacks}."
        complaints.append(Complaint("tp-comm-overlap-fused-device", message, "Use --tp-comm-overlap on."))
    if config.training.apex and (lacks := device.apex_lacks()):
        complaints.append(Complaint("apex", f"--apex, but {lacks}.", "Remove --apex, or install it (docs/devices.md)."))
    if config.training.fp8 and (lacks := device.fp8_lacks(config.training.fp8_recipe)):
        other = "" if device.fp8_lacks(TENSORWISE) else "Choose --fp8-recipe tensorwise, or "
        complaints.append(Complaint("fp8", f"--fp8, but {lacks}.", f"{other}remove --fp8.".capitalize()))
    backend, dtype = config.training.attention_backend, _torch_name(config, device)
    if lacks := backend_lacks(config, device, dtype):
        fix = "Remove --attention-backend."
        complaints.append(Complaint("attention-backend", f"--attention-backend {backend}, but {lacks}.", fix))
    if complaints:
        raise ConfigError(complaints)
    if needs_flash3(config, device, dtype):
        device.activate_flash3()


def _torch_name(config: Config, device: Device) -> str:
    """Return the compute dtype as torch writes it, such as "bfloat16"."""
    return str(compute_dtype(config, device)).removeprefix("torch.")


def _pipelined(
    config: Config,
    world: World,
    stages: Stages,
    model: Model,
    specs: list[ParameterSpec],
    dtype: torch.dtype,
    execution: Execution,
) -> tuple[Sharding, PipelinedModel]:
    """Return sharding stage 1 or 2 with a separate part for each chunk, and the model that runs the chunks.

    The parts are separate because each chunk has its own backward.
    """
    pp = world.axis("pp")
    chunks = stages.on(pp.rank)

    def index_of(spec: ParameterSpec) -> int:
        chunk = stages.chunk_of_unit(spec.unit)
        return chunk.index if chunk.rank == pp.rank else chunks[-1].index  # a tied embedding's second copy

    names = dict(model.named_parameters())
    local = [spec for spec in specs if spec.name in names]
    shardings = {
        chunk.index: _zero(
            config, world, model, [spec for spec in local if index_of(spec) == chunk.index], dtype, execution.fp8
        )
        for chunk in chunks
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
        weight_gradients=execution.weight_gradients,
        meter=world.meter,
    )
    return CombinedSharding(tuple(shardings.values())), pipeline


def _make_optimizer(
    config: Config, world: World, sharding: Sharding, table: Sequence[ParameterSpec]
) -> Optimizer | OffloadedOptimizer | MuonOptimizer:
    rule, pieces = _update_rule(config), None
    if isinstance(rule, RoundedAdamW):
        rows, seed = {spec.name: spec for spec in table}, config.training.seed

        def regions(spec: ParameterInfo) -> list[TensorRegion]:
            row = rows[spec.name]
            return [TensorRegion(piece_box(row, piece), tensor_key(seed, piece.hf_name)) for piece in row.pieces]

        pieces = pieces_of(sharding, regions)
    if config.optimizer.optimizer == "muon":
        assert isinstance(rule, AdamW)
        return make_muon(config, world, sharding, table, rule, pieces)
    if config.sharding.optimizer_offload:
        return OffloadedOptimizer(sharding.master_shards, world.device, rule)
    return Optimizer(sharding.master_shards, rule, pieces)


def _qk_clip(config: Config, world: World, model: Model, sharding: Sharding) -> QkClip | None:
    """Return what clips heads of attention after an update, or None without --qk-clip-threshold."""
    options = config.optimizer
    if not options.qk_clip_threshold:
        return None
    assert isinstance(model, Decoder)  # the rules refuse other models
    return QkClip(options.qk_clip_threshold, options.qk_clip_statistic, model.attentions(), sharding, world)


def _update_rule(config: Config) -> UpdateRule:
    optimizer, ratio = config.optimizer, config.moe.moe_router_lr_ratio
    if optimizer.optimizer == "sgd":
        return Sgd(optimizer.sgd_momentum, optimizer.weight_decay, ratio)
    numbers = (optimizer.adam_beta1, optimizer.adam_beta2), optimizer.adam_eps, optimizer.weight_decay, ratio
    rounds = optimizer.exp_avg_dtype == "bf16", optimizer.exp_avg_sq_dtype == "bf16"
    if any(rounds) or optimizer.main_grads_dtype == "bf16" or optimizer.store_param_remainders:
        return RoundedAdamW(*numbers, rounds=rounds)
    return ApexAdamW(*numbers) if config.training.apex else AdamW(*numbers)


def _full(
    config: Config, world: World, model: Model, specs: list[ParameterSpec], dtype: torch.dtype, parts: Parts
) -> Sharding:
    """Return sharding stage 3 (FSDP). Experts that are not sharded are handled as in stage 2."""
    together = ("embedding", "head") if config.model.shares_embedding else ()
    full = FullSharding(
        world,
        model,
        model.units(),
        specs,
        dtype,
        at_least_fp32(dtype),
        reduce_dtype(config, dtype),
        together=together,
        plan=make_segments(config, config.model) if config.sharding.sharding_segment_strategy else None,
        prefetch=config.sharding.sharding_prefetch_segments,
        reduce_every_micro_batch=config.sharding.gradient_merge_mode == "micro_batch",
        shard=parts.fully_shard,
    )
    names = {spec.name for spec in whole_experts(world, specs)}
    if not names:
        return full
    experts = [spec for spec in specs if spec.name in names]
    return CombinedSharding((full, _zero(config, world, model, experts, dtype)))


def _zero(
    config: Config,
    world: World,
    model: Model,
    specs: list[ParameterSpec],
    dtype: torch.dtype,
    fp8: Fp8Casts | None = None,
) -> ZeroSharding:
    """Return sharding stage 1 or 2. fp8: Casts of the weights, which are made again when these have changed."""
    named = dict(model.named_parameters())
    return ZeroSharding(
        world,
        model.units(),
        [(spec, named[spec.name]) for spec in specs],
        BucketDtypes(
            at_least_fp32(dtype),
            reduce_dtype(config, dtype),
            DTYPES["bf16"] if config.optimizer.main_grads_dtype == "bf16" else None,
            splits=config.optimizer.store_param_remainders,
        ),
        make_segments(config, config.model),
        reduce_every_micro_batch=config.sharding.gradient_merge_mode == "micro_batch",
        overlap_reduce=config.sharding.overlap_grad_reduce != "off",
        overlap_gather=config.sharding.overlap_param_gather != "off",
        prefetch=config.sharding.sharding_prefetch_segments,
        offload=config.sharding.optimizer_offload,
        add_product=add_product_apex if config.training.apex else None,
        changed=None if fp8 is None else fp8.forget,
    )


def _initialize(
    config: Config, parts: Parts, model: Model, table: tuple[ParameterSpec, ...], sharding: Sharding
) -> None:
    """Fill the master weights with their initial values, zero the buffers, and gather the weights for the model."""
    rows = {spec.name: spec for spec in table}
    with changed_masters(sharding) as masters:
        for view in sharding.views(masters):
            spec = rows[view.spec.name]
            std = std_of(spec, config.model)
            parts.initialize(view.tensor, spec, view.box, seed=config.training.seed, init_std=std)
    _zero_buffers(model, table)
    sharding.start_param_gather()


def _zero_buffers(model: nn.Module, table: tuple[ParameterSpec, ...]) -> None:
    """Zero the buffers of the table (the router's correction bias), whose memory may be uninitialized."""
    buffers = dict(model.named_buffers())
    for spec in table:
        if not spec.trainable and spec.name in buffers:
            buffers[spec.name].zero_()
