"""Input of the plan's formulas: the model, the stages, and one rank of each stage."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, lru_cache, partial
from math import lcm, prod
from typing import Any, TypeVar

from megapar.arguments import Config
from megapar.core.context_parallel.halo import most_keys, rows_exchanged
from megapar.core.context_parallel.positions import RING, ULYSSES
from megapar.core.device.attention.table import LARGEST_GROUP
from megapar.core.device.kinds import DeviceKind
from megapar.core.optimizer.states import states_of
from megapar.core.pipeline.stages import Chunk, Stages
from megapar.core.recompute.choice import FirstLayers, LayerSpan, RecomputeChoice, recompute_choice
from megapar.core.sharding.cut import box_at, shard_dim
from megapar.core.tensor_parallel.overlap_price import OFF
from megapar.errors import Complaint, ConfigError
from megapar.model.attention.latent import LATENT
from megapar.model.cost.model_cost import ModelCost, UnitCost
from megapar.model.cost.rank_view import RankView
from megapar.model.ernie3.sizes import tasks_of
from megapar.model.parameter import ParameterSpec
from megapar.model.sizes import ModelSizes
from megapar.model.spec import ParameterCounts, parameter_counts, spec_of, table_of
from megapar.planning.assume import Assumed
from megapar.training.building.attention_backend import repeats_keys
from megapar.training.building.device_choices import DispatchChoice, assumed_node, dispatch_choice, tensor_overlap
from megapar.training.building.matrices import marked
from megapar.training.building.partition import ITEM_BYTES, effective_schedule, make_layout, make_stages

T = TypeVar("T")


@dataclass
class Shared:
    """A cache of intermediate results, keyed by what they are computed from."""

    parts: dict[Hashable, Any] = field(default_factory=dict)

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return the part of a key, made if it is missing."""
        if key not in self.parts:
            self.parts[key] = make()
        part: T = self.parts[key]
        return part

    def of(self, owner: object, key: Hashable, make: Callable[[], T]) -> T:
        """Return the part of a key that belongs to ``owner``, made if it is missing or belongs to another object."""
        known = self.parts.get(key)
        if known is None or known[0] != owner:
            known = self.parts[key] = owner, make()
        part: T = known[1]
        return part


MOST_COUNTED = 1024  # micro-batches; for usual weights the sequence of tasks repeats long before


# A search plans hundreds of layouts of one model.
_table = lru_cache(maxsize=4)(table_of)


@lru_cache(maxsize=4)
def _marked(sizes: ModelSizes) -> tuple[ParameterSpec, ...]:
    return marked(_table(sizes))


@dataclass(frozen=True)
class PlannedRun:
    """A configuration on a kind of device; ``shared`` is the cache of all runs of a search."""

    config: Config
    kind: DeviceKind
    assumed: Assumed = field(default_factory=Assumed)
    shared: Shared = field(default_factory=Shared, repr=False, compare=False)
    _cuts: dict[Any, tuple[int, ...]] = field(default_factory=dict, repr=False, compare=False)
    _rows: dict[Any, int] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def sizes(self) -> ModelSizes:
        """Sizes of the model."""
        return self.config.model

    def in_fp8(self, flag: str) -> bool:
        """Return True if the run computes products with this ``Product.fp8`` in fp8."""
        return bool(flag) and bool(getattr(self.config.training, flag))

    @cached_property
    def view(self) -> RankView:
        """Description of a rank for the cost formulas."""
        config, grid = self.config, self.config.grid
        item = ITEM_BYTES[self.dtype]
        rows, seen, keys = self._in_windows
        view = RankView(
            seq_length=self.sizes.seq_length,
            samples=config.training.micro_batch_size,
            item_bytes=item,
            stored_item_bytes=item,
            expert_item_bytes=item,
            kernels=self.kind.kernels,
            logits_bytes=self.kind.device_class.logits_bytes,
            mp=grid.mp,
            cp=grid.cp,
            ep=grid.ep,
            node_ep=self.dispatch.node_ranks,
            emp=grid.emp,
            sequence_parallel=config.parallel.sequence_parallel,
            ulysses=config.parallel.context_parallel_algo == ULYSSES,
            ring=config.parallel.context_parallel_algo == RING,
            window_rows=rows,
            window_seen=seen,
            window_keys=keys,
            selective_recompute=config.recompute.recompute_granularity == "selective",
            ampipe_degree=config.ampipe.ampipe_degree,
            slice_capacity=config.ampipe.ampipe_capacity == "slice",
            overlaps_mp=self.hiding != OFF,
            pipe_experts=config.ampipe.use_pipe_experts,
            expert_parts=max(1, config.ampipe.pipe_experts_multi_data // max(1, config.ampipe.ampipe_degree)),
            masked_share=config.data.mlm_probability,
            fused_group=LARGEST_GROUP if self._in_triton else 0,
            fused_router=self._in_triton and self.dtype == "bf16",
            repeats_heads=repeats_keys(config, self.kind, self.dtype),
            sends_latents=config.parallel.mla_cp_exchange == LATENT,
            expert_imbalance=self.assumed.expert_imbalance if grid.ep > 1 else 1.0,
            task_counts=cache(partial(task_counts, config)),
        )
        return self.assumed.rank_view(view)

    @property
    def _in_windows(self) -> tuple[int, int, float]:
        """The rows and the keys of ``RankView`` in a layer with a window; ranks that exchange heads are alike."""
        parallel, sizes = self.config.parallel, self.sizes
        if parallel.cp_degree == 1 or parallel.context_parallel_algo == ULYSSES:
            return 0, 0, 1.0
        layout, window, length = make_layout(self.config), max(sizes.windows, default=0), sizes.seq_length
        return *rows_exchanged(layout, window, length), most_keys(layout, window or length, length)

    @property
    def _in_triton(self) -> bool:
        """True if this package's kernels in Triton run, which have no fp64."""
        return self.kind.kernels == "cuda" and self.dtype != "fp64" and self.assumed.software == "megapar"

    @cached_property
    def dispatch(self) -> DispatchChoice:
        """Dispatch of experts; plain in other software. Raises ConfigError if the nodes do not fit a request."""
        if self.assumed.software != "megapar":
            return DispatchChoice(0, f"of {self.assumed.software}")
        node = assumed_node(self.kind, self.config.grid.world_size)
        return dispatch_choice(self.config, self.kind, self.dtype, node)

    @property
    def node(self) -> int:
        """Ranks of a node: those of ``--ranks-per-node`` or of this job, else those of the kind of device."""
        return self.config.parallel.ranks_per_node or self.kind.node

    @property
    def settled(self) -> Config:
        """The configuration with the planned dispatch of experts, so that a trace on another device has the same."""
        if self.config.grid.ep == 1:
            return self.config
        return replace(
            self.config,
            moe=replace(self.config.moe, moe_dispatch=self.dispatch.name),
            parallel=replace(self.config.parallel, ranks_per_node=self.node if self.dispatch.node_ranks else None),
        )

    @cached_property
    def costs(self) -> ModelCost:
        """Costs of the mean micro-batch on a rank."""
        key = "costs", self.sizes, self.view
        return self.shared.get(key, lambda: spec_of(self.sizes).costs(self.sizes, self.view))

    @cached_property
    def largest_costs(self) -> ModelCost:
        """Costs of the micro-batch that needs the most memory."""
        return self.costs.largest

    @cached_property
    def stages(self) -> Stages:
        """Layers of each stage."""
        return make_stages(self.config, self.sizes)

    @cached_property
    def table(self) -> tuple[ParameterSpec, ...]:
        """Parameter table of the model; with Muon its matrices are marked."""
        return _marked(self.sizes) if self.with_matrices else _table(self.sizes)

    @property
    def with_matrices(self) -> bool:
        """True if the optimizer updates matrices as a whole."""
        return self.config.optimizer.optimizer == "muon"

    @property
    def parameter_counts(self) -> ParameterCounts:
        """Parameter counts of the model, without blocks that only training runs."""
        return parameter_counts(self.sizes, _table(self.sizes.without_training_blocks()))

    @property
    def training_parameters(self) -> int:
        """Number of parameters of blocks that only training runs: multi-token prediction."""
        return sum(row.numel for row in self.table if row.trainable) - self.parameter_counts.total

    @cached_property
    def dtype(self) -> str:
        """Compute dtype; for ``auto``, the device's default."""
        given = self.config.training.dtype
        dtype = self.kind.default_dtype if given == "auto" else given
        if dtype == "fp16" and self.config.sharding.grad_reduce_dtype == "bf16":
            message = (
                "--grad-reduce-dtype bf16 would lose the precision of the gradients of an fp16 run, and the default "
                f"dtype of {self.kind.name} is fp16."
            )
            raise ConfigError([Complaint("reduce-dtype-wide", message, "Leave --grad-reduce-dtype out.")])
        return dtype

    @cached_property
    def hiding(self) -> str:
        """Overlap of the tensor parallel layers' collectives: ``off``, ``on`` or ``fused``."""
        return tensor_overlap(self.config, self.kind, self.dtype, self.sizes)

    @cached_property
    def reduce_bytes(self) -> int:
        """Bytes of an element of gradients in reductions."""
        wide = self.view.wide_bytes
        return wide if wide > 4 else ITEM_BYTES[self.config.sharding.grad_reduce_dtype]

    def main_bytes(self, row: ParameterSpec) -> int:
        """Return the bytes of an element of a parameter's main gradient."""
        narrow = self.config.optimizer.main_grads_dtype == "bf16" and not row.fp32
        return ITEM_BYTES["bf16"] if narrow else self.view.wide_bytes

    def master_bytes(self, row: ParameterSpec) -> int:
        """Return the bytes of an element of a parameter's master weights, or of its remainders."""
        narrow = self.config.optimizer.store_param_remainders and not row.fp32
        return ITEM_BYTES["bf16"] if narrow else self.view.wide_bytes

    def state_bytes(self, row: ParameterSpec) -> int:
        """Return the bytes of optimizer state for each master weight of a parameter."""
        if not row.matrix:
            return self._other_bytes
        narrow = self.config.optimizer.exp_avg_dtype == "bf16"  # a matrix has its momentum
        return ITEM_BYTES["bf16"] if narrow else self.view.wide_bytes

    @cached_property
    def _other_bytes(self) -> int:
        options, wide = self.config.optimizer, self.view.wide_bytes
        dtypes = {"exp_avg": options.exp_avg_dtype, "exp_avg_sq": options.exp_avg_sq_dtype}
        states = states_of("adamw" if self.with_matrices else options.optimizer, options.sgd_momentum)
        return sum(wide if dtypes.get(name, "fp32") == "fp32" else ITEM_BYTES[dtypes[name]] for name in states)

    @property
    def matrix_dtype(self) -> str:
        """Dtype in which Muon sends and orthogonalizes matrices."""
        given, masters = self.config.optimizer.muon_ns_dtype, "fp64" if self.dtype == "fp64" else "fp32"
        if given != "auto":
            return given
        return masters if self.kind.kernels == "cpu" or masters == "fp64" else "bf16"

    @cached_property
    def recompute(self) -> RecomputeChoice | None:
        """Layers that are recomputed. A plan refuses adaptive recompute, which depends on measurements."""
        flags = self.config.recompute
        return recompute_choice(flags.recompute_interval, flags.recompute_method, flags.recompute_num_layers)

    def recompute_spans(self, num_layers: int) -> Sequence[LayerSpan]:
        """Return the spans of a chunk's layers, recomputed or not."""
        return (self.recompute or FirstLayers(0)).spans(num_layers)

    @property
    def cuts_parameters(self) -> bool:
        """Parameters are sharded between steps: stage 3 with more than one shard, as the run builds it."""
        return self.config.sharding.sharding_stage == 3 and self.config.grid.shards > 1

    @property
    def schedule(self) -> str:
        """Schedule of the pipeline."""
        return effective_schedule(self.config)

    @property
    def micro_batches(self) -> int:
        """Micro-batches per optimizer step of one data parallel rank."""
        return self.config.sharding.gradient_merge_acc_step

    def rows(self, stage: int) -> list[ParameterSpec]:
        """Return the rows of the table on a stage; on the last one this includes the copy of a tied embedding."""
        return self._by_stage.get(stage, [])

    def distinct_rows(self, stage: int) -> list[tuple[ParameterSpec, int]]:
        """Return the rows of the table on a stage, each with the number of rows of layers that differ in name only."""
        return self._distinct.get(stage, [])

    @cached_property
    def _distinct(self) -> dict[int, list[tuple[ParameterSpec, int]]]:
        return self.shared.get(("distinct rows", *self._table_key), self._make_distinct)

    def _make_distinct(self) -> dict[int, list[tuple[ParameterSpec, int]]]:
        distinct = {}
        for stage, rows in self._by_stage.items():
            counts: dict[Any, list[Any]] = {}
            for row in rows:
                key = row.shape, row.axes, row.expert, row.fp32, row.trainable, row.mp_partial, row.matrix
                counts.setdefault(key, [row, 0])[1] += 1
            distinct[stage] = [(row, count) for row, count in counts.values()]
        return distinct

    @cached_property
    def _by_stage(self) -> dict[int, list[ParameterSpec]]:
        return self.shared.get(("rows", *self._table_key), self._make_by_stage)

    @property
    def _table_key(self) -> tuple[Hashable, ...]:
        return self.sizes, self.stages, self.costs.tied, self.with_matrices

    def _make_by_stage(self) -> dict[int, list[ParameterSpec]]:
        stage_of = {unit: self.stages.rank_of_unit(unit) for unit in dict.fromkeys(row.unit for row in self.table)}
        by_stage: dict[int, list[ParameterSpec]] = {}
        for row in self.table:
            by_stage.setdefault(stage_of[row.unit], []).append(row)
        last = self.config.grid.pp - 1
        if self.costs.tied and stage_of["embedding"] != last and stage_of["head"] == last:
            by_stage[last] = [row for row in self.table if row.name == "embedding.word.weight"] + by_stage[last]
        return by_stage

    def local_numel(self, row: ParameterSpec) -> int:
        """Return the elements of a parameter on the first rank of its stage."""
        return prod(self._local_shape(row))

    def _local_shape(self, row: ParameterSpec) -> tuple[int, ...]:
        """Return the shape on the first rank of a stage; no other rank has a larger one."""
        key = row.shape, row.axes
        if key not in self._cuts:
            self._cuts[key] = box_at(row, {axis: (self.config.grid.size(axis), 0) for axis, _ in row.axes}).sizes
        return self._cuts[key]

    def row_numel(self, row: ParameterSpec) -> int:
        """Return the elements of one rank's padded shard of a parameter."""
        key = row.shape, row.axes, row.expert
        if key in self._rows:
            return self._rows[key]
        sizes, shards = self._local_shape(row), self.shards(row)
        dim = shard_dim(sizes, shards, full=self.config.sharding.sharding_stage == 3)
        self._rows[key] = prod(sizes) // max(1, sizes[dim]) * -(-sizes[dim] // shards)
        return self._rows[key]

    def shards(self, row: ParameterSpec) -> int:
        """Return the number of ranks over which a parameter's optimizer state is sharded."""
        return self.config.grid.expert_shards if row.expert else self.config.grid.shards

    @cached_property
    def experts_apart(self) -> bool:
        """True if experts are sharded or replicated over other ranks than all other parameters."""
        grid = self.config.grid
        if grid.expert_shards != grid.shards or grid.ep * grid.emp == 1:
            return grid.expert_shards != grid.shards
        groups = (grid.shard_group, grid.replica_group)  # slower: these list all ranks
        return any(group(0, expert=True) != group(0, expert=False) for group in groups)

    def replicas(self, row: ParameterSpec) -> int:
        """Return the number of replicas of each shard of a parameter."""
        grid = self.config.grid
        return grid.edp // grid.expert_shards if row.expert else grid.dp


def units_of(costs: ModelCost, chunk: Chunk) -> list[UnitCost]:
    """Return the units of a chunk, in forward order."""
    units = [costs.embedding] if chunk.first else []
    units += [costs.layer(number) for number in chunk.layers]
    return units + ([costs.head] if chunk.last else [])


def input_of(costs: ModelCost, chunk: Chunk) -> float:
    """Return the bytes of a chunk's input for one micro-batch."""
    return units_of(costs, chunk)[0].input


def task_counts(config: Config) -> Sequence[Mapping[str, float]]:
    """Return the samples of each task in consecutive micro-batches, until they repeat, MOST_COUNTED at most."""
    # Imported here, because plans of models without tasks do not need the packages that read data.
    from megapar.data.sampling.mixture import Shares

    weights = tasks_of(config.data.ernie_tasks)
    shares, size = Shares(list(weights.values())), config.training.micro_batch_size
    whole = sum(weights.values())
    period = min(MOST_COUNTED, int(whole * lcm(*(weight.denominator for weight in weights.values()))))
    batches = []
    for number in range(period):
        starts = number * size, (number + 1) * size
        counts = ((shares.count(place, start) for start in starts) for place in range(len(weights)))
        batches.append({task: float(after - before) for task, (before, after) in zip(weights, counts, strict=True)})
    return batches
