"""The configuration of a run: frozen groups, complete and resolved, with the origin of each value.

The numbers of a model are declared, each with its flag, by the dataclass that its layers take
(``model/<name>/sizes.py``); ``Config.model`` is that dataclass. All other flags are declared in this folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from types import MappingProxyType
from typing import Any

from megapar.config.model import AmpipeOptions, ModelOptions, MoeOptions
from megapar.config.parallel import ParallelOptions, PipelineOptions, RecomputeOptions, ShardingOptions
from megapar.config.reliability import ReliabilityOptions
from megapar.config.run import (
    CheckpointOptions,
    DataOptions,
    LoggingOptions,
    OptimizerOptions,
    RuntimeOptions,
    TrainingOptions,
)
from megapar.core.grid import Grid
from megapar.model.decoder.sizes import MoeSizes
from megapar.model.sizes import ModelSizes
from megapar.model.spec import MODELS, model_of
from megapar.schema.flag import KINDS, Flag, from_flags, to_flag, to_flags


@dataclass(frozen=True)
class FlagGroup:
    """Flags that are listed together in --help and docs/flags.md.

    Attributes:
        title: The line above them.
        classes: The dataclasses that declare them, each with the trainers that know its flags.
    """

    title: str
    classes: tuple[tuple[type[Any], tuple[str, ...]], ...]


def _options(cls: type[Any]) -> FlagGroup:
    return FlagGroup((cls.__doc__ or "").splitlines()[0], ((cls, KINDS),))


_MODEL = "The transformer. pretrain_ernie.py builds an encoder; its norm, positions and activation are fixed."
_SIZES = ((ModelSizes, KINDS), *((spec.sizes, (spec.kind,)) for spec in MODELS.values()))

GROUPS: Mapping[str, FlagGroup] = MappingProxyType(
    {
        "parallel": _options(ParallelOptions),
        "sharding": _options(ShardingOptions),
        "pipeline": _options(PipelineOptions),
        "recompute": _options(RecomputeOptions),
        "model": FlagGroup(_MODEL, (*_SIZES, (ModelOptions, KINDS))),
        "moe": FlagGroup("The mixture of experts of pretrain_moe.py.", ((MoeSizes, ("moe",)), (MoeOptions, KINDS))),
        "ampipe": _options(AmpipeOptions),
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
    found: dict[str, Flag] = {}
    for group, listed in GROUPS.items():
        for cls, models in listed.classes:
            for item in fields(cls):
                described = to_flag(item, group, models)
                if described is not None:
                    found.setdefault(described.name, described)
    ordered = (_ordered([flag for flag in found.values() if flag.group == group]) for group in GROUPS)
    return {flag.name: flag for flags in ordered for flag in flags}


def _ordered(flags: list[Flag]) -> list[Flag]:
    """The flags of a group as they are declared, except those that follow another one."""
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
    """Everything a run is: no value is left to be derived, except ``device`` and ``dtype`` where they say ``auto``.

    Attributes:
        kind: ``moe`` or ``ernie``.
        model: The numbers that layers take.
        model_options: The weights of the model's losses.
        moe: The training of routers.
        unused: Values of the flags whose numbers this model does not have, by the flags' names.
        origins: Per flag ``default``, ``file`` (``file NAME`` of several), ``flag``, ``derived`` or ``switched off by``
            a row.
        warnings: What was switched off or read under an old name, and advice.
        notes: What --rules-only tolerates.
        reminders: What the run does because nothing was said.
        grid: The ranks.
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
        """The value of a flag, by the name of the flag."""
        group = FLAGS[name].group
        return self.values()[name] if group in ("model", "moe") else getattr(getattr(self, group), name)

    def values(self) -> dict[str, Any]:
        """The values of all flags, by the names of the flags."""
        held = [getattr(self, item.name) for item in fields(self)]
        held += [part for part in vars(self.model).values() if is_dataclass(part)]
        found = dict(self.unused)
        for group in held:
            found |= to_flags(group) if is_dataclass(group) else {}
        return found

    def to_dict(self) -> dict[str, Any]:
        """Group -> flag -> plain value (lists for tuples), ready for JSON, after the kind."""
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
    """The frozen Config of complete flat values (every flag and fact by name)."""
    config = Config(
        kind=kind,
        parallel=from_flags(ParallelOptions, values),
        sharding=from_flags(ShardingOptions, values),
        pipeline=from_flags(PipelineOptions, values),
        recompute=from_flags(RecomputeOptions, values),
        model=from_flags(model_of(kind, values).sizes, values),
        model_options=from_flags(ModelOptions, values),
        moe=from_flags(MoeOptions, values),
        ampipe=from_flags(AmpipeOptions, values),
        training=from_flags(TrainingOptions, values),
        optimizer=from_flags(OptimizerOptions, values),
        data=from_flags(DataOptions, values),
        checkpoint=from_flags(CheckpointOptions, values),
        reliability=from_flags(ReliabilityOptions, values),
        logging=from_flags(LoggingOptions, values),
        runtime=from_flags(RuntimeOptions, values),
        unused=MappingProxyType({}),
        origins=MappingProxyType(dict(origins)),
        warnings=warnings,
        notes=notes,
        reminders=reminders,
        grid=grid,
    )
    unused = {name: values[name] for name in FLAGS.keys() - config.values().keys()}
    return replace(config, unused=MappingProxyType(unused))
