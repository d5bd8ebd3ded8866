"""Complete configuration of a run: frozen groups with every value resolved, and the origin of each value.

The numbers of a model are declared, each with its flag, by the dataclass that its layers take
(``model/<name>/sizes.py``); ``Config.model`` is that dataclass. All other flags are declared in this folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

from megapar.config.model import AmpipeOptions, ModelOptions, MoeOptions, OptimizerOptions, TrainingOptions
from megapar.config.parallel import ParallelOptions, PipelineOptions, RecomputeOptions, ShardingOptions
from megapar.config.run import CheckpointOptions, DataOptions, LoggingOptions, ReliabilityOptions, RuntimeOptions
from megapar.core.grid import Grid
from megapar.model.rope_scaling import RopeScaling
from megapar.model.sizes import ModelSizes
from megapar.model.spec import MODELS, selected_model
from megapar.moe.sizes import MoeSizes
from megapar.schema.batch_size import BatchSize
from megapar.schema.flag import KINDS, MOE, Flag, from_flags, to_flag, to_flags
from megapar.schema.phase_plan import PhasePlan, PhaseSpan, parse_phases, plan_phases

NOT_BUILT_NOTE = "NOT BUILT, a start is refused: "  # how notes about features of a later version begin


@dataclass(frozen=True)
class FlagGroup:
    """Flags that are listed together in --help and docs/flags.md: dataclasses, each with the trainers that have it."""

    title: str
    classes: tuple[tuple[type[Any], tuple[str, ...]], ...]


def _options(cls: type[Any], models: tuple[str, ...] = KINDS) -> FlagGroup:
    return FlagGroup((cls.__doc__ or "").splitlines()[0], ((cls, models),))


_MODEL = "The transformer. pretrain_ernie.py builds an encoder; its norm, positions and activation are fixed."
_SIZES: tuple[tuple[type[Any], tuple[str, ...]], ...] = (
    (ModelSizes, KINDS),
    *((spec.sizes, (spec.kind,)) for spec in MODELS.values()),
)

GROUPS: Mapping[str, FlagGroup] = MappingProxyType(
    {
        "parallel": _options(ParallelOptions),
        "sharding": _options(ShardingOptions),
        "pipeline": _options(PipelineOptions),
        "recompute": _options(RecomputeOptions),
        "model": FlagGroup(_MODEL, (*_SIZES, (RopeScaling, MOE), (ModelOptions, KINDS))),
        "moe": FlagGroup("The mixture of experts of pretrain_moe.py.", ((MoeSizes, MOE), (MoeOptions, MOE))),
        "ampipe": _options(AmpipeOptions, MOE),
        "training": _options(TrainingOptions),
        "optimizer": _options(OptimizerOptions),
        "data": _options(DataOptions),
        "checkpoint": _options(CheckpointOptions),
        "reliability": _options(ReliabilityOptions),
        "logging": _options(LoggingOptions),
        "runtime": _options(RuntimeOptions),
    }
)


def _flags() -> dict[str, Flag]:
    declared: dict[str, Flag] = {}
    for group, listed in GROUPS.items():
        for cls, models in listed.classes:
            for item in fields(cls):
                described = to_flag(item, group, models, cls.role)
                if described is not None:
                    declared.setdefault(described.name, described)
    ordered = (_ordered([flag for flag in declared.values() if flag.group == group]) for group in GROUPS)
    return {flag.name: flag for flags in ordered for flag in flags}


def _ordered(flags: list[Flag]) -> list[Flag]:
    """Return the flags of a group in declaration order, except those placed by ``Flag.after``."""
    done = [flag for flag in flags if not flag.after]
    waiting = [flag for flag in flags if flag.after]
    assert {flag.after for flag in waiting} <= {flag.name for flag in flags}
    while waiting:
        flag = waiting.pop(0)
        place = next((i for i, other in enumerate(done) if other.name == flag.after), None)
        if place is None:
            waiting.append(flag)
        else:
            done.insert(place + 1, flag)
    return done


FLAGS: Mapping[str, Flag] = MappingProxyType(_flags())


@dataclass(frozen=True, kw_only=True)
class Config:
    """Complete configuration of a run. Only ``device`` and ``dtype`` may still be ``auto``; the run resolves them.

    Attributes:
        kind: ``moe`` or ``ernie``.
        model: Numbers that the layers take.
        unused: Values of the flags that this model does not use, by flag name.
        origins: Origin of each value, by flag name: ``default``, ``file`` (``file NAME`` if there are several),
            ``flag``, ``derived`` or ``switched off by ROW``.
        warnings: Values that were switched off, deprecated spellings, and advice.
        notes: Problems that --rules-only tolerates.
        reminders: Consequences of defaults that may be unintended.
    """

    kind: str
    parallel: ParallelOptions
    sharding: ShardingOptions
    pipeline: PipelineOptions
    recompute: RecomputeOptions
    model: ModelSizes
    model_options: ModelOptions
    moe: MoeOptions
    ampipe: AmpipeOptions
    training: TrainingOptions
    optimizer: OptimizerOptions
    data: DataOptions
    checkpoint: CheckpointOptions
    reliability: ReliabilityOptions
    logging: LoggingOptions
    runtime: RuntimeOptions
    unused: Mapping[str, Any]
    origins: Mapping[str, str]
    warnings: tuple[str, ...]
    notes: tuple[str, ...]
    reminders: tuple[str, ...]
    grid: Grid

    def value(self, name: str) -> Any:
        """Return the value of a flag by its name."""
        group = FLAGS[name].group
        return self.values()[name] if group in ("model", "moe") else getattr(getattr(self, group), name)

    @cached_property
    def phases(self) -> PhasePlan:
        """The phases of the data; a run without ``--data-phases`` is one."""
        training, written = self.training, self.data.data_phases
        batch = BatchSize(training.global_batch_size, *(training.rampup_batch_size or ()))
        return plan_phases(parse_phases(written) if written else (), self.model.seq_length, batch)

    @cached_property
    def longest(self) -> Config:
        """The configuration of the phase of the data with the longest samples, among those that the run reaches."""
        reached = [span for span, _ in self.phases.until(self.training.train_iters)]
        return self.of_phase(max(reached, key=lambda span: span.seq_length)) if self.data.data_phases else self

    def of_phase(self, span: PhaseSpan) -> Config:
        """Return the configuration of a run that is one phase of this one, after a ramp of the batch."""
        batch, share = span.batch.final, self.training.micro_batch_size * self.runtime.data_ranks
        training = replace(self.training, global_batch_size=batch, rampup_batch_size=None)
        return replace(
            self,
            model=replace(self.model, seq_length=span.seq_length),
            sharding=replace(self.sharding, gradient_merge_acc_step=batch // share),
            training=training,
            data=replace(self.data, data_phases=None),
        )

    def values(self) -> dict[str, Any]:
        """Return the values of all flags by name."""
        groups = [getattr(self, item.name) for item in fields(self)]
        groups += [part for part in vars(self.model).values() if is_dataclass(part)]
        values = dict(self.unused)
        for group in groups:
            values |= to_flags(group) if is_dataclass(group) else {}
        return values

    def to_dict(self) -> dict[str, Any]:
        """Return the kind and, for each group, flag -> plain value (lists for tuples), ready for JSON."""
        groups: dict[str, dict[str, Any]] = {group: {} for group in GROUPS}
        for name, value in self.values().items():
            groups[FLAGS[name].group][name] = list(value) if isinstance(value, tuple) else value
        groups["runtime"]["data_ranks"] = self.runtime.data_ranks
        return {"kind": self.kind, **groups}


def build(
    kind: str,
    values: Mapping[str, Any],
    origins: Mapping[str, str],
    warnings: tuple[str, ...],
    notes: tuple[str, ...],
    reminders: tuple[str, ...],
    grid: Grid,
) -> Config:
    """Build the frozen Config from complete flat values: every flag and fact by name."""
    numbers = ("model", "moe")  # those that layers take are in the model's sizes
    options = {name: from_flags(group.classes[0][0], values) for name, group in GROUPS.items() if name not in numbers}
    config = Config(
        kind=kind,
        model=from_flags(selected_model(kind, values).sizes, values),
        model_options=from_flags(ModelOptions, values),
        moe=from_flags(MoeOptions, values),
        **options,
        unused=MappingProxyType({}),
        origins=MappingProxyType(dict(origins)),
        warnings=warnings,
        notes=notes,
        reminders=reminders,
        grid=grid,
    )
    unused = {name: values[name] for name in FLAGS.keys() - config.values().keys()}
    return replace(config, unused=MappingProxyType(unused))
