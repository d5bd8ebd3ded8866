"""Variations of a configuration, resolved and checked by the same rules as a command line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megapar.arguments import Config, parse
from megapar.config.config import FLAGS, NOT_BUILT_NOTE
from megapar.config.draft import is_given
from megapar.errors import Complaint, ConfigError

AXES = ("mp_degree", "pp_degree", "cp_degree", "ep_degree", "expert_mp_degree")
LAYOUT = (
    *("sharding_degree", "dp_degree", "hybrid_dp", "mp_degree", "pp_degree", "cp_degree"),
    *("ep_degree", "expert_mp_degree"),
    *("gradient_merge_acc_step", "gradient_merge_mode", "overlap_grad_reduce", "overlap_param_gather"),
)


def flags_of(config: Config, without: tuple[str, ...] = LAYOUT) -> dict[str, Any]:
    """Return the values that the file and the command line set, by field name, except those in ``without``."""
    given, values = {}, config.values()
    for flag in FLAGS.values():
        if is_given(config.origins.get(flag.name)) and flag.name not in without and not flag.meta:
            given[flag.name] = values[flag.name]
    return given


def line_of(values: Mapping[str, Any]) -> list[str]:
    """Return the command line that sets these values."""
    line: list[str] = []
    for name, value in values.items():
        flag = FLAGS[name]
        if value is None:
            continue
        if flag.type == "bool":
            line.append(f"{flag.spelling}={'true' if value else 'false'}")
        elif flag.takes_list and not flag.comma:
            line += [flag.spelling, *map(str, value)]
        elif isinstance(value, tuple):
            line += [flag.spelling, ",".join(map(str, value))]
        else:
            line += [flag.spelling, str(value)]
    return line


def attempt(config: Config, values: Mapping[str, Any], world_size: int | None = None) -> Config | list[Complaint]:
    """Resolve ``values``. Return the configuration, or the complaints if the rules refuse it or it is not built.

    Args:
        config: The configuration to vary.
        values: All values that are not derived, by field name.
        world_size: Number of ranks; None for that of ``config``.
    """
    world = world_size or config.grid.world_size
    line = [*line_of(values), "--rules-only", "--world-size", str(world)]
    try:
        result = parse(config.kind, line, {})
    except ConfigError as error:
        return list(error.complaints)
    # With --rules-only they are notes; --validate-only and a plan refuse them.
    missing = [note for note in result.notes if note.startswith(NOT_BUILT_NOTE)]
    return [Complaint("not-built", note) for note in missing] or result


def changed(config: Config, flags: Mapping[str, Any]) -> Config | None:
    """Return the same layout with other settings; None if the rules refuse it or nothing changes."""
    kept = tuple(name for name in LAYOUT if name not in flags)
    values = {
        **flags_of(config, ()),
        **{name: _value(config, name) for name in kept if _explicit(config, name)},
        **flags,
    }
    if not differing(config, flags):
        return None
    result = attempt(config, values)
    return replace(result, warnings=()) if isinstance(result, Config) else None


def widened(config: Config, flags: Mapping[str, Any], world_size: int) -> Config | None:
    """Return the same model and axes on more ranks, used for sharding, with other settings; None if it is refused."""
    axes = {name: _value(config, name) for name in AXES if _explicit(config, name)}
    result = attempt(config, {**flags_of(config), **axes, **flags}, world_size)
    return result if isinstance(result, Config) else None


def differing(config: Config, flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that differ from those of the configuration."""
    return {name: value for name, value in flags.items() if _value(config, name) != value}


def _explicit(config: Config, name: str) -> bool:
    return is_given(config.origins.get(name))


def _value(config: Config, name: str) -> Any:
    return config.value(name)
