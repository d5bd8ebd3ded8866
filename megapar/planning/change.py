"""Other configurations near a given one, resolved and checked by the same rules, without writing a command line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megapar.arguments import Config, parse
from megapar.config.config import FLAGS
from megapar.config.draft import is_given
from megapar.errors import Complaint, ConfigError

AXES = ("mp_degree", "pp_degree", "cp_degree", "ep_degree", "expert_mp_degree")
LAYOUT = (
    *("sharding_degree", "dp_degree", "hybrid_dp", "mp_degree", "pp_degree", "cp_degree"),
    *("ep_degree", "expert_mp_degree"),
    *("gradient_merge_acc_step", "gradient_merge_mode", "overlap_grad_reduce", "overlap_param_gather"),
)


def flags_of(config: Config, without: tuple[str, ...] = LAYOUT) -> dict[str, Any]:
    """What was asked for, by field name: values from the file and from the line, without those of the layout."""
    found, values = {}, config.values()
    for flag in FLAGS.values():
        if is_given(config.origins.get(flag.name)) and flag.name not in without and not flag.meta:
            found[flag.name] = values[flag.name]
    return found


def line_of(values: Mapping[str, Any]) -> list[str]:
    """A command line that says these values."""
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
    """The configuration with other values, everything that follows from them derived anew; or why it is refused."""
    world = world_size or config.grid.world_size
    line = [*line_of(values), "--rules-only", "--world-size", str(world)]
    try:
        return parse(config.kind, line, {})
    except ConfigError as error:
        return list(error.complaints)


def changed(config: Config, flags: Mapping[str, Any]) -> Config | None:
    """The same layout with other settings, or None where the rules refuse it or nothing changes."""
    kept = tuple(name for name in LAYOUT if name not in flags)
    values = {
        **flags_of(config, ()),
        **{name: _value(config, name) for name in kept if _explicit(config, name)},
        **flags,
    }
    if not differing(config, flags):
        return None
    found = attempt(config, values)
    return replace(found, warnings=()) if isinstance(found, Config) else None


def widened(config: Config, flags: Mapping[str, Any], world_size: int) -> Config | None:
    """The same model and axes on more ranks, which sharding takes, with other settings; None where it is refused."""
    axes = {name: _value(config, name) for name in AXES if _explicit(config, name)}
    found = attempt(config, {**flags_of(config), **axes, **flags}, world_size)
    return found if isinstance(found, Config) else None


def differing(config: Config, flags: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the settings that the configuration does not have already."""
    return {name: value for name, value in flags.items() if _value(config, name) != value}


def _explicit(config: Config, name: str) -> bool:
    return is_given(config.origins.get(name))


def _value(config: Config, name: str) -> Any:
    return config.value(name)
