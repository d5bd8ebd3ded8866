"""A configuration as the formulas read it: its model, its stages, and one rank of each stage in numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, lru_cache, partial
from math import prod
from typing import Any

from megapar.arguments import Config
from megapar.core.context_parallel.positions import RING, ULYSSES
from megapar.core.device.kinds import DeviceKind
from megapar.core.pipeline.stages import Chunk, Stages
from megapar.core.recompute.choice import FirstLayers, LayerSpan, RecomputeChoice, recompute_choice
from megapar.core.sharding.cut import box_at, shard_dim
from megapar.errors import Complaint, ConfigError
from megapar.model.cost.model_cost import ModelCost, UnitCost
from megapar.model.cost.rank_view import LatentAttention, RankView
from megapar.model.ernie3.tasks import tasks_of
from megapar.model.parameter import ParameterSpec
from megapar.model.sizes import ModelSizes
from megapar.model.spec import ParameterCounts, parameter_counts, spec_of, table_of
from megapar.planning.assume import Assumed, with_latent_attention
from megapar.training.building.segments import ITEM_BYTES
from megapar.training.building.stages import effective_schedule, make_stages
from megapar.training.building.tensor_overlap import hiding

MOST_COUNTED = 1024  # micro-batches; tasks come round again long before


@lru_cache(maxsize=4)
def _table(sizes: ModelSizes, latent: LatentAttention | None) -> tuple[ParameterSpec, ...]:
    """A search plans hundreds of layouts of one model."""
    table = table_of(sizes)
    return table if latent is None else with_latent_attention(table, sizes, latent)


@dataclass(frozen=True)
class PlannedRun:
    """A configuration on a kind of device.

    Attributes:
        config: The run.
        kind: The devices that it runs on.
        assumed: Techniques that only the plan knows.
    """

    config: Config
    kind: DeviceKind
    assumed: Assumed = field(default_factory=Assumed)
    _cuts: dict[Any, tuple[int, ...]] = field(default_factory=dict, repr=False, compare=False)
    _rows: dict[Any, int] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def sizes(self) -> ModelSizes:
        """The numbers of the model."""
        return self.config.model

    @cached_property
    def view(self) -> RankView:
        """A rank in the numbers that the costs of a model depend on."""
        config, grid = self.config, self.config.grid
        item = ITEM_BYTES[self.dtype]
        return RankView(
            seq_length=self.sizes.seq_length,
            samples=config.training.micro_batch_size,
            item_bytes=item,
            stored_item_bytes=1 if self.assumed.fp8_activations else item,
            kernels=self.kind.kernels,
            logits_bytes=self.kind.device_class.logits_bytes,
            mp=grid.mp,
            cp=grid.cp,
            ep=grid.ep,
            emp=grid.emp,
            sequence_parallel=config.parallel.sequence_parallel,
            ulysses=config.parallel.context_parallel_algo == ULYSSES,
            ring=config.parallel.context_parallel_algo == RING,
            selective_recompute=config.recompute.recompute_granularity == "selective",
            ampipe_degree=config.ampipe.ampipe_degree,
            pipe_experts=config.ampipe.use_pipe_experts,
            masked_share=config.data.mlm_probability,
            latent=self._latent,
            recomputed_operators=self.assumed.operators,
            task_counts=cache(partial(task_counts, config)),
        )

    @cached_property
    def costs(self) -> ModelCost:
        """The costs of a micro-batch on a rank, in the mean."""
        return spec_of(self.sizes).costs(self.sizes, self.view)

    @cached_property
    def largest_costs(self) -> ModelCost:
        """The costs of the micro-batch that needs the most memory."""
        return self.costs.largest

    @cached_property
    def stages(self) -> Stages:
        """The layers of each stage."""
        return make_stages(self.config, self.sizes)

    @cached_property
    def table(self) -> tuple[ParameterSpec, ...]:
        """All parameters."""
        return _table(self.sizes, self._latent)

    @property
    def parameter_counts(self) -> ParameterCounts:
        """Parameters of the model, without blocks that only training runs."""
        return parameter_counts(self.sizes, _table(self.sizes.without_training_blocks(), self._latent))

    @property
    def _latent(self) -> LatentAttention | None:
        """Latent attention, where it is assumed and the model may have it."""
        return self.assumed.latent if spec_of(self.sizes).costs.latent_attention else None

    @cached_property
    def dtype(self) -> str:
        """The compute dtype; ``auto`` as this device would choose it."""
        given = self.config.training.dtype
        dtype = self.kind.default_dtype if given == "auto" else given
        if dtype == "fp16" and self.config.sharding.grad_reduce_dtype == "bf16":
            message = (
                f"--grad-reduce-dtype bf16 rounds the gradients of an fp16 run away; {self.kind.name} has no bf16."
            )
            raise ConfigError([Complaint("reduce-dtype-wide", message, "Leave it out.")])
        return dtype

    @cached_property
    def hiding(self) -> str:
        """The way that the collectives of layers split over mp take: off, on or fused."""
        return hiding(self.config, self.kind, self.dtype, self.sizes)

    @cached_property
    def reduce_bytes(self) -> int:
        """Bytes of an element of the gradients that travel."""
        wide = self.view.wide_bytes
        return wide if wide > 4 else ITEM_BYTES[self.config.sharding.grad_reduce_dtype]

    @cached_property
    def recompute(self) -> RecomputeChoice | None:
        """The layers that are computed again; adaptive recompute, which measures, is planned as without it."""
        flags = self.config.recompute
        return recompute_choice(flags.recompute_interval, flags.recompute_method, flags.recompute_num_layers)

    def recompute_spans(self, num_layers: int) -> Sequence[LayerSpan]:
        """Layers of a chunk that run together, and whether they are computed again."""
        return (self.recompute or FirstLayers(0)).spans(num_layers)

    @property
    def schedule(self) -> str:
        """The schedule of the pipeline."""
        return effective_schedule(self.config)

    @property
    def micro_batches(self) -> int:
        """Micro-batches of one data rank in an optimizer step."""
        return self.config.sharding.gradient_merge_acc_step

    def held(self, stage: int) -> list[ParameterSpec]:
        """Rows of the table that a stage holds: its own and, on the last stage, the second copy of a tied embedding."""
        return self._held.get(stage, [])

    @cached_property
    def _held(self) -> dict[int, list[ParameterSpec]]:
        stage_of = {row.unit: 0 for row in self.table}
        stage_of = {unit: self.stages.rank_of_unit(unit) for unit in stage_of}
        held: dict[int, list[ParameterSpec]] = {}
        for row in self.table:
            held.setdefault(stage_of[row.unit], []).append(row)
        last = self.config.grid.pp - 1
        if self.costs.tied and stage_of["embedding"] != last and stage_of["head"] == last:
            held[last] = [row for row in self.table if row.name == "embedding.word.weight"] + held[last]
        return held

    def local_numel(self, row: ParameterSpec) -> int:
        """Elements of a parameter on the first rank of its stage."""
        return prod(self._local_shape(row))

    def _local_shape(self, row: ParameterSpec) -> tuple[int, ...]:
        """The shape on the first rank of a stage, where none is smaller."""
        key = row.shape, row.axes
        if key not in self._cuts:
            self._cuts[key] = box_at(row, {axis: (self.config.grid.size(axis), 0) for axis, _ in row.axes}).sizes
        return self._cuts[key]

    def row_numel(self, row: ParameterSpec) -> int:
        """Elements of one rank's padded shard of a parameter."""
        key = row.shape, row.axes, row.expert
        if key in self._rows:
            return self._rows[key]
        sizes, shards = self._local_shape(row), self.shards(row)
        dim = shard_dim(sizes, shards, full=self.config.sharding.sharding_stage == 3)
        self._rows[key] = prod(sizes) // max(1, sizes[dim]) * -(-sizes[dim] // shards)
        return self._rows[key]

    def shards(self, row: ParameterSpec) -> int:
        """Ranks that share a parameter's optimizer state."""
        return self.config.grid.expert_shards if row.expert else self.config.grid.shards

    def replicas(self, row: ParameterSpec) -> int:
        """Ranks that repeat it."""
        grid = self.config.grid
        return grid.edp // grid.expert_shards if row.expert else grid.dp


def units_of(costs: ModelCost, chunk: Chunk) -> list[UnitCost]:
    """The units that a chunk runs, in forward order."""
    units = [costs.embedding] if chunk.first else []
    units += [costs.layer(number) for number in chunk.layers]
    return units + ([costs.head] if chunk.last else [])


def input_of(costs: ModelCost, chunk: Chunk) -> float:
    """Bytes of what a chunk takes from the one before it, in one micro-batch."""
    return units_of(costs, chunk)[0].input


def task_counts(config: Config) -> Sequence[Mapping[str, float]]:
    """Samples of each task in consecutive micro-batches, until they repeat."""
    # Plans of models without tasks do without the packages that read data.
    from megapar.data.sampling.mixture import Shares

    weights = tasks_of(config.data.ernie_tasks)
    shares, size = Shares(list(weights.values())), config.training.micro_batch_size
    whole = sum(weights.values())
    period = min(MOST_COUNTED, int(whole * max(weight.denominator for weight in weights.values())) * 2)
    found = []
    for number in range(period):
        starts = number * size, (number + 1) * size
        counts = ((shares.count(place, start) for start in starts) for place in range(len(weights)))
        found.append({task: float(after - before) for task, (before, after) in zip(weights, counts, strict=True)})
    return found
