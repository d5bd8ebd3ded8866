"""A configuration as the formulas read it: the numbers that belong to one rank of one pipeline stage."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from math import prod
from typing import Any, cast

from megapar.arguments import Config
from megapar.core.device.kinds import DeviceKind
from megapar.core.pipeline.stages import Stages
from megapar.core.sharding.cut import box_at, shard_dim
from megapar.errors import Complaint, ConfigError
from megapar.model.decoder.sizes import DecoderSizes
from megapar.model.ernie.sizes import ErnieSizes
from megapar.model.parameter import ParameterSpec
from megapar.planning.assume import Assumed
from megapar.training.hiding import hiding
from megapar.training.segments import ITEM_BYTES
from megapar.training.stages import effective_schedule, make_stages

Sizes = DecoderSizes | ErnieSizes


@lru_cache(maxsize=4)
def _table(assumed: Assumed, sizes: Sizes) -> tuple[ParameterSpec, ...]:
    """A search plans hundreds of layouts of one model."""
    return assumed.table(sizes)


@dataclass(frozen=True)
class Layout:
    """config: the run. kind: where it runs. assumed: techniques that only the plan knows.
    of, through: a part of the model, and how many samples of a micro-batch run through it."""

    config: Config
    kind: DeviceKind
    assumed: Assumed = field(default_factory=Assumed)
    of: Sizes | None = None
    through: float | None = None
    _cuts: dict[Any, tuple[int, ...]] = field(default_factory=dict, repr=False, compare=False)
    _rows: dict[Any, int] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def sizes(self) -> Sizes:
        """The model's numbers, or those of a part of it."""
        return self.of or cast(Sizes, self.config.model)

    @cached_property
    def stages(self) -> Stages:
        """Which layers live where."""
        return make_stages(self.config, self.sizes)

    @cached_property
    def table(self) -> tuple[ParameterSpec, ...]:
        """All parameters."""
        return _table(self.assumed, self.sizes)

    @property
    def dtype(self) -> str:
        """The compute dtype; ``auto`` as this device would choose it."""
        asked = self.config.training.dtype
        dtype = self.kind.default_dtype if asked == "auto" else asked
        if dtype == "fp16" and self.config.sharding.grad_reduce_dtype == "bf16":
            message = (
                f"--grad-reduce-dtype bf16 rounds the gradients of an fp16 run away; {self.kind.name} has no bf16."
            )
            raise ConfigError([Complaint("reduce-dtype-wide", message, "Leave it out.")])
        return dtype

    @cached_property
    def hiding(self) -> str:
        """Which way the collectives of layers cut over mp take: off, on or fused."""
        return hiding(self.config, self.kind, self.dtype, self.sizes)

    @property
    def item(self) -> int:
        """Bytes of an element in the compute dtype."""
        return ITEM_BYTES[self.dtype]

    @property
    def wide(self) -> int:
        """Bytes of an element in max(fp32, dtype)."""
        return max(4, self.item)

    @property
    def schedule(self) -> str:
        """Of the pipeline."""
        return effective_schedule(self.config)

    @property
    def micro_batches(self) -> int:
        """Of one data rank and optimizer step."""
        return self.config.sharding.gradient_merge_acc_step

    @property
    def samples(self) -> float:
        """Sequences of a micro-batch; a mean where only some run through this part of the model."""
        return self.config.training.micro_batch_size if self.through is None else self.through

    @property
    def tokens(self) -> int:
        """Positions of a micro-batch that this rank's products see: those of its context-parallel part."""
        return round(self.samples * self.sizes.seq_length) // self.config.grid.cp

    @property
    def own(self) -> int:
        """Positions that lie on this rank outside the products: cut over mp under sequence parallelism."""
        grid = self.config.grid
        return self.tokens // grid.mp if self.config.parallel.sequence_parallel else self.tokens

    @property
    def cut(self) -> bool:
        """Positions are cut over mp."""
        return self.config.parallel.sequence_parallel and self.config.grid.mp > 1

    def stored(self, elements: float) -> float:
        """Bytes of an input that a product keeps."""
        return elements * (1 if self.assumed.fp8_activations else self.item)

    @property
    def recomputes(self) -> bool:
        """Some layers keep only their input."""
        recompute = self.config.recompute
        return recompute.recompute_interval > 0 or recompute.recompute_method is not None

    @property
    def vocabulary(self) -> int:
        """Rows of the vocabulary on the fullest mp rank."""
        return -(-self.sizes.vocab_size // self.config.grid.mp)

    @property
    def tied(self) -> bool:
        """The head computes with the word embedding."""
        return not isinstance(self.sizes, DecoderSizes) or self.sizes.tie_embeddings

    def held(self, stage: int) -> list[ParameterSpec]:
        """Rows that a stage holds: its own and, on the last stage, the second copy of a tied embedding."""
        return self._held.get(stage, [])

    @cached_property
    def _held(self) -> dict[int, list[ParameterSpec]]:
        stage_of = {row.unit: 0 for row in self.table}
        stage_of = {unit: self.stages.rank_of_unit(unit) for unit in stage_of}
        held: dict[int, list[ParameterSpec]] = {}
        for row in self.table:
            held.setdefault(stage_of[row.unit], []).append(row)
        last = self.config.grid.pp - 1
        if self.tied and stage_of["embedding"] != last and stage_of["head"] == last:
            held[last] = [row for row in self.table if row.name == "embedding.word.weight"] + held[last]
        return held

    def local_numel(self, row: ParameterSpec) -> int:
        """Elements of a parameter on the first rank of its stage."""
        return prod(self._sizes(row))

    def _sizes(self, row: ParameterSpec) -> tuple[int, ...]:
        """Of the piece on the first rank of a stage, where no piece is shorter."""
        key = row.shape, row.axes
        if key not in self._cuts:
            self._cuts[key] = box_at(row, {axis: (self.config.grid.size(axis), 0) for axis, _ in row.axes}).sizes
        return self._cuts[key]

    def row_numel(self, row: ParameterSpec) -> int:
        """Elements of one rank's padded piece of a parameter, as sharding cuts it."""
        key = row.shape, row.axes, row.expert
        if key in self._rows:
            return self._rows[key]
        sizes, parts = self._sizes(row), self.shards(row)
        dim = shard_dim(sizes, parts, full=self.config.sharding.sharding_stage == 3)
        self._rows[key] = prod(sizes) // max(1, sizes[dim]) * -(-sizes[dim] // parts)
        return self._rows[key]

    def shards(self, row: ParameterSpec) -> int:
        """Ranks that share a parameter's optimizer state."""
        return self.config.grid.expert_shards if row.expert else self.config.grid.shards

    def replicas(self, row: ParameterSpec) -> int:
        """Ranks that repeat it."""
        grid = self.config.grid
        return grid.edp // grid.expert_shards if row.expert else grid.dp
