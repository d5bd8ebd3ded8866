"""The builder of a rank's model. It first decides how layers run, and passes that to their constructors."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import fully_shard

from megapar.arguments import Config
from megapar.core.box import Box
from megapar.core.comm.axis import Axis
from megapar.core.comm.in_flight import CommContext
from megapar.core.comm.world import World
from megapar.core.context_parallel.method import ContextParallel
from megapar.core.device.compiled import FunctionRunner
from megapar.core.pipeline.schedule import ZERO_BUBBLE
from megapar.core.pipeline.stages import RankLayers
from megapar.core.recompute.adaptive import Adaptive
from megapar.core.recompute.checkpointing import Recompute
from megapar.core.recompute.choice import recompute_choice
from megapar.core.recompute.saved_inputs import SavedInputs
from megapar.core.tensor_parallel.collective_product import enable
from megapar.core.tensor_parallel.execution import Execution
from megapar.core.tensor_parallel.fp8 import Fp8Linear, odd_widths
from megapar.core.tensor_parallel.overlap_price import FUSED, OFF
from megapar.core.tensor_parallel.overlapped_linear import Overlap
from megapar.core.tensor_parallel.weight_gradients import WeightGradients
from megapar.core.units import MEGABYTE
from megapar.data.batches import Collate
from megapar.data.corpus import Corpus
from megapar.errors import Complaint, ConfigError
from megapar.model.attention.latent_exchange import LATENT
from megapar.model.initialize import fill
from megapar.model.parameter import ParameterSpec
from megapar.model.sizes import ModelSizes
from megapar.model.spec import spec_of
from megapar.moe.layer import MoeParts
from megapar.training.building.ampipe_degree import choose
from megapar.training.building.attention_backend import attention_operator
from megapar.training.building.build import experts_axis, make_collate, make_layout, make_slicing
from megapar.training.building.device_figures import kind_of_run
from megapar.training.building.pipeline_split import effective_schedule
from megapar.training.building.tensor_overlap import hiding
from megapar.training.step.denominators import Denominators
from megapar.training.step.dtypes import DTYPES, compute_dtype
from megapar.training.step.function_runner import make_runner, try_triton
from megapar.training.step.job import Model


class Builder:
    """Factory for the replaceable parts of a trainer. ``tools.tracing.pretend`` overrides them to trace without data.

    Attributes:
        moe_parts: The classes that mixture-of-experts layers are made of.
        denominators: Class that counts the labels of a step.
    """

    moe_parts: MoeParts = MoeParts()
    denominators: type[Denominators] = Denominators

    def model(
        self,
        config: Config,
        world: World,
        sizes: ModelSizes,
        rank_layers: RankLayers,
        dtype: torch.dtype,
        execution: Execution,
        recompute: Recompute | None,
        *,
        meta: bool,
    ) -> Model:
        """Return this rank's uninitialized part of the model.

        Args:
            rank_layers: The stages' layers that this rank has.
            execution: How layers run.
            recompute: Activation checkpointing of whole layers. None without it.
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
            "rank_layers": rank_layers,
            "dtype": dtype,
            "device": torch.device("meta") if meta else world.device.torch_device,
            "execution": execution,
            "recompute": recompute,
        }
        spec = spec_of(sizes)
        if spec.has_experts:
            common |= {"ep": experts_axis(config, world), "emp": world.axis("emp"), "slicing": make_slicing(config)}
            common |= {"moe_parts": self.moe_parts}
        model: Model = spec.load_parts()(sizes, **common)
        return model

    def overlap(self, config: Config, world: World, sizes: ModelSizes) -> Overlap:
        """Return the overlap of tensor parallel layers' collectives. See ``make_overlap``."""
        return make_overlap(config, world, sizes)

    def runner(self, config: Config, world: World) -> FunctionRunner:
        """Return the caller of the layers' functions, after trials of kernels. See ``make_runner``, ``try_triton``."""
        try_triton(world)
        return make_runner(config, world)

    def ampipe_degree(self, seconds: Mapping[int, float]) -> tuple[int, str]:
        """Return the degree of ``--ampipe-degree auto`` and the reason. See ``ampipe_degree.choose``."""
        return choose(seconds)

    def initialize(self, tensor: Tensor, spec: ParameterSpec, box: Box, *, seed: int, init_std: float) -> None:
        """Fill this rank's shard of a parameter with its initial values."""
        fill(tensor, spec, box, seed=seed, init_std=init_std)

    def fully_shard(self, *modules: Any, **options: Any) -> Any:
        """Make one FSDP2 group, as ``torch.distributed.fsdp.fully_shard``."""
        return fully_shard(*modules, **options)

    def collate(self, config: Config, world: World, corpus: Corpus) -> Collate:
        """Return the function that makes micro-batches from samples. See ``make_collate``."""
        return make_collate(config, world, corpus)


def make_execution(config: Config, world: World, overlap: Overlap, comm: CommContext, run: FunctionRunner) -> Execution:
    """Return how the model's layers run on this device. ``run`` calls their functions."""
    dtype = str(compute_dtype(config, world.device)).removeprefix("torch.")
    splits_backward = world.grid.pp > 1 and effective_schedule(config) == ZERO_BUBBLE
    return Execution(
        overlap=overlap,
        comm=comm,
        weight_gradients=WeightGradients() if splits_backward else None,
        fp8=Fp8Linear() if config.training.fp8 else None,
        run=run,
        attention=attention_operator(config, world.device, dtype),
        selective=config.recompute.recompute_granularity == "selective",
    )


def check_widths(model: Model) -> None:
    """Raise ConfigError if linear layers have widths that fp8 products do not support."""
    if odd := odd_widths(model):
        message = f"fp8 products need widths that are multiples of 16, unlike those of {', '.join(odd[:4])}."
        raise ConfigError([Complaint("fp8-widths", message, "Choose other sizes, or remove --fp8.")])


def make_overlap(config: Config, world: World, sizes: ModelSizes) -> Overlap:
    """Return how the collectives of column and row parallel layers are overlapped on this device.

    Raises ConfigError if they are to be fused and the ranks of mp do not share a node.
    """
    device, mp = world.device, world.axis("mp")
    kind, computed = kind_of_run(config, device.type, device.name), compute_dtype(config, device)
    dtype = next(name for name, dtype in DTYPES.items() if dtype == computed)
    form = hiding(config, kind, dtype, sizes) if mp.size > 1 else OFF
    if form == FUSED:
        per_node = int(os.environ.get("LOCAL_WORLD_SIZE", world.grid.world_size))
        if len({rank // per_node for rank in mp.ranks}) > 1:
            message = f"--tp-comm-overlap fused, but ranks {mp.ranks} of mp are on nodes of {per_node} ranks."
            fix = "Choose an --mp-degree that fits into a node, or --tp-comm-overlap on."
            raise ConfigError([Complaint("tp-comm-overlap-node", message, fix)])
        enable(mp)
    of = kind.device_class
    return Overlap(of.pieces, of.piece_bytes, of.least_rows, of.batched, blocking=form == OFF, fused=form == FUSED)


def make_recompute(
    config: Config,
    world: World,
    comm: CommContext,
    around: Callable[[], AbstractContextManager[object]] = nullcontext,
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
