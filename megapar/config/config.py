"""The configuration of a run: frozen groups, complete and resolved, with the origin of each value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from types import MappingProxyType
from typing import Any

from megapar.config.model import Ampipe, Model, Moe
from megapar.config.parallel import Parallel, Pipeline, Recompute, Sharding
from megapar.config.reliability import Reliability
from megapar.config.run import Checkpoint, Data, Logging, Optimizer, Runtime, Training
from megapar.core.grid import Grid
from megapar.schema.flag import Flag, to_flag

GROUPS: Mapping[str, type[Any]] = MappingProxyType(
    {
        "parallel": Parallel,
        "sharding": Sharding,
        "pipeline": Pipeline,
        "recompute": Recompute,
        "model": Model,
        "moe": Moe,
        "ampipe": Ampipe,
        "training": Training,
        "optimizer": Optimizer,
        "data": Data,
        "checkpoint": Checkpoint,
        "reliability": Reliability,
        "logging": Logging,
        "runtime": Runtime,
    }
)


def _flags() -> dict[str, Flag]:
    found = {}
    for group, kind in GROUPS.items():
        for item in fields(kind):
            described = to_flag(item, group)
            if described is not None:
                found[described.name] = described
    return found


FLAGS: Mapping[str, Flag] = MappingProxyType(_flags())


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything a run is: no value is left to be derived, except ``device`` and ``dtype`` where they say ``auto``.

    kind: ``moe`` or ``ernie``. origins: per field ``default``, ``file`` (``file NAME`` of several), ``flag``,
    ``derived`` or ``switched off by`` a row. warnings: what was switched off or read under an old name, and advice.
    notes: what --rules-only tolerates. reminders: what the run does because nothing was said. grid: the ranks.
    """

    kind: str
    parallel: Parallel
    sharding: Sharding
    pipeline: Pipeline
    recompute: Recompute
    model: Model
    moe: Moe
    ampipe: Ampipe
    training: Training
    optimizer: Optimizer
    data: Data
    checkpoint: Checkpoint
    reliability: Reliability
    logging: Logging
    runtime: Runtime
    origins: Mapping[str, str]
    warnings: tuple[str, ...]
    notes: tuple[str, ...]
    reminders: tuple[str, ...]
    grid: Grid

    def to_dict(self) -> dict[str, Any]:
        """Group -> field -> plain value (lists for tuples), ready for JSON; the kind beside them."""
        groups = {name: asdict(getattr(self, name)) for name in GROUPS}
        plain = {
            name: {key: list(value) if isinstance(value, tuple) else value for key, value in group.items()}
            for name, group in groups.items()
        }
        return {"kind": self.kind, **plain}


def build(
    kind: str,
    values: Mapping[str, Any],
    origins: Mapping[str, str],
    warnings: tuple[str, ...],
    notes: tuple[str, ...],
    reminders: tuple[str, ...],
    grid: Grid,
) -> Config:
    """The frozen Config of complete flat values (every field of every group by name)."""
    groups = {name: cls(**{item.name: values[item.name] for item in fields(cls)}) for name, cls in GROUPS.items()}
    frozen = MappingProxyType(dict(origins))
    return Config(kind=kind, origins=frozen, warnings=warnings, notes=notes, reminders=reminders, grid=grid, **groups)
