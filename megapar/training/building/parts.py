"""The replaceable parts of a trainer: factories for its model, kernels, shards and micro-batches."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.distributed.fsdp import fully_shard

from megapar.arguments import Config
from megapar.core.comm.axis import Axis
from megapar.core.comm.in_flight import CommContext
from megapar.core.comm.world import World
from megapar.core.context_parallel.method import ContextParallel
from megapar.core.device.base import Device
from megapar.core.device.compiled import FunctionRunner
from megapar.core.pipeline.stages import RankLayers
from megapar.core.recompute.checkpointing import Recompute
from megapar.core.tensor_parallel.collective_product import enable
from megapar.core.tensor_parallel.execution import Execution
from megapar.core.tensor_parallel.overlap_price import FUSED, OFF
from megapar.core.tensor_parallel.overlapped_linear import Overlap
from megapar.data.batches import Collate
from megapar.data.corpus import Corpus
from megapar.errors import Complaint, ConfigError
from megapar.model.attention.latent import LATENT
from megapar.model.initialize import fill
from megapar.model.spec import spec_of
from megapar.moe.layer import MoeParts
from megapar.training.building.ampipe_degree import Choose, choose, make_slicing
from megapar.training.building.corpus import make_collate
from megapar.training.building.device_choices import DispatchChoice, dispatch_choice, kind_of_run, tensor_overlap
from megapar.training.building.partition import make_layout
from megapar.training.step.batches import Denominators
from megapar.training.step.dtypes import dtype_name, with_dtype
from megapar.training.step.function_runner import make_runner, try_triton
from megapar.training.step.job import Model


def make_model(
    moe: MoeParts,
    config: Config,
    world: World,
    layers: RankLayers,
    dtype: torch.dtype,
    execution: Execution,
    recompute: Recompute | None,
    *,
    meta: bool,
) -> Model:
    """Return this rank's uninitialized part of the model.

    Args:
        layers: The stages' layers that this rank has.
        meta: Create parameters on the meta device, for stage 3 to allocate.
    """
    common: dict[str, Any] = {
        "mp": world.axis("mp"),
        "sequence_parallel": config.parallel.sequence_parallel,
        "cp": ContextParallel(
            world.axis("cp"),
            config.parallel.context_parallel_algo,
            make_layout(config),
            comm=execution.comm or CommContext(),
            latents=config.parallel.mla_cp_exchange == LATENT,
        ),
        "rank_layers": layers,
        "dtype": dtype,
        "device": torch.device("meta") if meta else world.device.torch_device,
        "execution": execution,
        "recompute": recompute,
    }
    spec = spec_of(config.model)
    if spec.has_experts:
        common |= {"ep": experts_axis(config, world), "emp": world.axis("emp"), "slicing": make_slicing(config)}
        common |= {"moe_parts": moe}
    return spec.load_parts()(config.model, **common)


def experts_axis(config: Config, world: World) -> Axis:
    """Return the axis ep, divided by node if the dispatch of experts is by node. Collective."""
    chosen = experts_dispatch(config, world.device)
    if not chosen.node_ranks:
        return replace(world.axis("ep"), nodes=None)
    if world.axis("ep").nodes is None:
        world.make_nodes(chosen.node_ranks)
    return world.axis("ep")


def experts_dispatch(config: Config, device: Device) -> DispatchChoice:
    """Return the dispatch of experts that this rank chooses. Raises ConfigError if the requested one does not fit."""
    kind = kind_of_run(with_dtype(config, device), device.type, device.name)
    return dispatch_choice(config, kind, dtype_name(config, device))


def make_overlap(config: Config, world: World) -> Overlap:
    """Return how the collectives of column and row parallel layers are overlapped on this device.

    Raises ConfigError if they are to be fused and the ranks of mp do not share a node.
    """
    device, mp = world.device, world.axis("mp")
    kind = kind_of_run(with_dtype(config, device), device.type, device.name)
    form = tensor_overlap(config, kind, dtype_name(config, device)) if mp.size > 1 else OFF
    if form == FUSED:
        per_node = int(os.environ.get("LOCAL_WORLD_SIZE") or world.grid.world_size)
        if len({rank // per_node for rank in mp.ranks}) > 1:
            message = f"--tp-comm-overlap fused, but ranks {mp.ranks} of mp are on nodes of {per_node} ranks."
            fix = "Choose an --mp-degree that fits into a node, or --tp-comm-overlap on."
            raise ConfigError([Complaint("tp-comm-overlap-node", message, fix)])
        enable(mp)
    of = kind.device_class
    return Overlap(of.pieces, of.piece_bytes, of.least_rows, of.batched, blocking=form == OFF, fused=form == FUSED)


def make_tried_runner(config: Config, world: World) -> FunctionRunner:
    """Return the caller of the layers' functions, after trials of kernels. Every rank must call it."""
    try_triton(world)
    return make_runner(config, world)


@dataclass(frozen=True)
class Parts:
    """Factories of a trainer's replaceable parts. ``tools.tracing.pretend`` replaces them to trace without data.

    Attributes:
        model: Returns this rank's uninitialized part of the model.
        moe: Classes that mixture-of-experts layers are made of, the first argument of ``model``.
        overlap: Returns the overlap of tensor parallel layers' collectives.
        runner: Returns the caller of the layers' functions.
        initialize: Fills this rank's shard of a parameter with its initial values.
        fully_shard: Makes one FSDP2 group.
        ampipe_degree: Returns the degree of ``--ampipe-degree auto``, and the reason.
        collate: Returns the function that makes micro-batches from samples.
        denominators: Class that counts the labels of a step.
    """

    model: Callable[..., Model] = make_model
    moe: MoeParts = field(default_factory=MoeParts)
    overlap: Callable[[Config, World], Overlap] = make_overlap
    runner: Callable[[Config, World], FunctionRunner] = make_tried_runner
    initialize: Callable[..., None] = fill
    fully_shard: Callable[..., Any] = fully_shard
    ampipe_degree: Choose = choose
    collate: Callable[[Config, World, Corpus], Collate] = make_collate
    denominators: type[Denominators] = Denominators
