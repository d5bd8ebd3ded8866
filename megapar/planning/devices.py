"""Devices of plans: the parser of ``--device-kind``, and a run's memory by its plan against that of its device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches
from types import MappingProxyType

from megapar.arguments import FLAGS, Config
from megapar.core.device.kinds import DeviceKind, kind_called, kind_of, kinds
from megapar.core.units import GIBIBYTE
from megapar.errors import Complaint, ConfigError
from megapar.machine import memory_bytes, no_device
from megapar.planning.memory import StageMemory
from megapar.planning.plan import Plan
from megapar.training.building.device_choices import FIGURES

ROOM = 1.25  # a plan of a CPU is at most 1.15 times what runs need
LONG_MINUTES = 5
ALIASES: Mapping[str, str] = MappingProxyType(
    {
        **{"h800": "h800-80g", "h100": "h100-80g", "h200": "h200-141g", "a100": "a100-80g", "v100": "v100-32g"},
        **{"b200": "b200-180g", "b300": "b300-288g", "gb200": "gb200-186g", "gb300": "gb300-288g"},
        **{"a10": "a10-24g", "l4": "l4-24g", "l40s": "l40s-48g", "a6000": "rtx-a6000-48g", "mi300x": "mi300x-192g"},
        **{"rtx-4090": "rtx-4090-24g", "rtx-5090": "rtx-5090-32g", "4090": "rtx-4090-24g", "5090": "rtx-5090-32g"},
    }
)


def device_kind(name: str) -> DeviceKind:
    """Return the kind called ``name``. Raises ConfigError with the nearest names if there is none."""
    rows = kinds()
    key = name.lower().replace("_", "-")
    key = ALIASES.get(key, key)
    if key not in rows:
        near = get_close_matches(key, list(rows), 3, 0.4)
        hint = f"Did you mean {' or '.join(near)}? " if near else ""
        message = f"--device-kind {name} is not in the table."
        raise ConfigError([Complaint("device-kind", message, f"{hint}Choose one of {', '.join(rows)}.")])
    row = rows[key]
    return replace(row, memory_bytes=memory_bytes()) if row.kernels == "cpu" else row


def check_named(config: Config, kind: str) -> None:
    """Raise ConfigError if flags give figures of a device, and no ``--device-kind`` says whose other figures hold.

    ``kind`` is the row that the command line or a file names, "" for the default.
    """
    given = [FLAGS[name].spelling for name in FIGURES if getattr(config.runtime, name) is not None]
    if not given or kind:
        return
    message = (
        f"{', '.join(given)} {'replaces a figure' if len(given) == 1 else 'replace figures'} of a row of the device "
        "table, and no row is named. A plan also needs the bandwidth of the memory, the multiprocessors, the links and "
        "the size of a node, and does not guess them."
    )
    fix = f"Name the row that is nearest to the device with --device-kind: {', '.join(kinds())}."
    raise ConfigError([Complaint("device-figures", message, fix)])


def check_host(config: Config, environ: Mapping[str, str]) -> str:
    """Return a remark about a step of many minutes on this machine's CPU; "" if there is none, or on another device.

    Raises ConfigError if the ranks of this machine need more memory than it has.
    """
    runtime = config.runtime
    on_cpu = runtime.device == "cpu" or (runtime.device == "auto" and all(map(no_device, ("cuda", "npu"))))
    if not on_cpu or runtime.validate_only or runtime.rules_only:
        return ""
    try:
        plan = Plan(config, device_kind("cpu"))
        peaks, seconds = [stage.peak for stage in plan.memory], plan.speed.step_seconds
    except (ConfigError, NotImplementedError):  # nothing is planned for it
        return ""
    first = int(environ.get("RANK") or 0) - int(environ.get("LOCAL_RANK") or 0)
    ranks = range(first, first + int(environ.get("LOCAL_WORLD_SIZE") or 1))
    needed, available = sum(peaks[config.grid.coordinates(rank)["pp"]] for rank in ranks), memory_bytes()
    if runtime.memory_check and needed > ROOM * available:
        share = Plan(config, replace(device_kind("cpu"), memory_bytes=available // len(ranks)))
        raise _refusal(share, needed, f"{len(ranks)} ranks here", available, "this machine")
    remark = f"megapar: a step takes about {seconds / 60:,.0f} minutes on this CPU, by megapar plan\n"
    return remark if seconds / 60 > LONG_MINUTES and first == 0 == int(environ.get("LOCAL_RANK") or 0) else ""


def check_memory(config: Config, environ: Mapping[str, str], device_type: str, device: str) -> None:
    """Compare the plan with the memory of this machine's CPU or of the device; one without figures is not compared.

    Raises ConfigError, on every rank, if the fullest stage needs more than the device has.
    """
    if device_type == "cpu":
        check_host(config, environ)
        return
    planned = _plan(config, device_type, device)
    if isinstance(planned, str) or not config.runtime.memory_check:
        return
    plan, stage = planned
    if stage.peak > ROOM * plan.kind.memory_bytes:
        ranks, where = f"a rank of stage {stage.stage}", f"a device ({device})"
        raise _refusal(plan, stage.peak, ranks, plan.kind.memory_bytes, where)


def planned_memory(config: Config, device_type: str, device: str) -> str:
    """Describe the plan's figures for the fullest stage, and settings that need less memory."""
    planned = _plan(config, device_type, device)
    if isinstance(planned, str):
        return f"megapar plan has no figures{planned}"
    plan, stage = planned
    advice = plan.advice()
    return f"megapar plan ({plan.kind.title}): {_parts(stage)}" + (f"; {advice}" if advice else "")


def _plan(config: Config, device_type: str, device: str) -> tuple[Plan, StageMemory] | str:
    """Return the plan on a device and its fullest stage, or the reason why there is none."""
    kind = kind_called(device)
    if kind is None and config.runtime.device_memory_gib is None:
        return f" for the device {device!r}; --device-memory-gib gives its memory"
    try:
        plan = Plan(config, kind or kind_of(device_type, device))
        return plan, plan.fullest
    except (ConfigError, NotImplementedError) as error:
        return f": {error}"


def _refusal(plan: Plan, needed: float, ranks: str, available: float, where: str) -> ConfigError:
    message = (
        f"the run needs {needed / GIBIBYTE:,.0f} GiB for {ranks}, by megapar plan, and {where} has "
        f"{available / GIBIBYTE:,.0f} GiB."
    )
    advice = f"{found}. " if (found := plan.advice()) else ""
    return ConfigError([Complaint("memory", message, f"{advice}--no-memory-check starts it all the same.")])


def _parts(stage: StageMemory) -> str:
    names = ("parameters", "gradients", "optimizer", "activations", "buffers")
    listed = ", ".join(f"{name} {getattr(stage, name) / GIBIBYTE:.2f}" for name in names)
    return f"stage {stage.stage} peaks at {stage.peak / GIBIBYTE:.2f} GiB ({listed}), {stage.moment}"
