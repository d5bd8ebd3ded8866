"""Memory figures of the plan: for the start of a run, and for the report of a run that is out of memory."""

from __future__ import annotations

from collections.abc import Mapping

from megapar.arguments import Config
from megapar.core.device.kinds import kind_called, kind_of
from megapar.core.units import GIBIBYTE
from megapar.errors import Complaint, ConfigError
from megapar.machine import memory_bytes, no_device
from megapar.planning.devices import device_kind
from megapar.planning.memory import StageMemory
from megapar.planning.plan import Plan

ROOM = 1.25  # no plan was more than an eighth above the traced or measured peak
LONG_MINUTES = 5


def check_host(config: Config, environ: Mapping[str, str]) -> str:
    """Return a remark about a step of many minutes on this machine's CPU; "" if there is none, or on another device.

    Raises ConfigError if the ranks of this machine need more memory than it has.
    """
    runtime = config.runtime
    here = runtime.device == "cpu" or (runtime.device == "auto" and all(map(no_device, ("cuda", "npu"))))
    if not here or runtime.validate_only or runtime.rules_only:
        return ""
    try:
        plan = Plan(config, device_kind("cpu"))
        peaks, seconds = [stage.peak for stage in plan.memory], plan.speed.step_seconds
    except (ConfigError, NotImplementedError):  # nothing is planned for it
        return ""
    first = int(environ.get("RANK") or 0) - int(environ.get("LOCAL_RANK") or 0)
    ranks = range(first, first + int(environ.get("LOCAL_WORLD_SIZE") or 1))
    needed, ours = sum(peaks[config.grid.coordinates(rank)["pp"]] for rank in ranks), memory_bytes()
    if runtime.memory_check and needed > ROOM * ours:
        raise _refusal(plan, needed, f"{len(ranks)} ranks here", ours, "this machine")
    said = f"megapar: a step takes about {seconds / 60:,.0f} minutes on this CPU, by megapar plan\n"
    return said if seconds / 60 > LONG_MINUTES and first == 0 == int(environ.get("LOCAL_RANK") or 0) else ""


def check_memory(config: Config, environ: Mapping[str, str], device_type: str, device: str) -> None:
    """Compare the plan with the memory of this machine's CPU or of the device; one without figures is not compared.

    Args:
        environ: Environment of the rank.
        device_type: torch's device type.
        device: Name of the device, as the driver reports it.

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
        whose, where = f"a rank of stage {stage.stage}", f"a device ({device})"
        raise _refusal(plan, stage.peak, whose, plan.kind.memory_bytes, where)


def planned_memory(config: Config, device_type: str, device: str) -> str:
    """Describe the plan's figures for the fullest stage, and settings that need less memory.

    Args:
        device_type: torch's device type.
        device: Name of the device, as the driver reports it.
    """
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


def _refusal(plan: Plan, needed: float, whose: str, ours: float, where: str) -> ConfigError:
    message = (
        f"the run needs {needed / GIBIBYTE:,.0f} GiB for {whose}, by megapar plan, and {where} has "
        f"{ours / GIBIBYTE:,.0f} GiB."
    )
    return ConfigError([Complaint("memory", message, f"{plan.advice()}. --no-memory-check starts it all the same.")])


def _parts(stage: StageMemory) -> str:
    parts = (
        ("parameters", stage.parameters),
        ("gradients", stage.gradients),
        ("optimizer", stage.optimizer),
        ("activations", stage.activations),
        ("buffers", stage.buffers),
    )
    listed = ", ".join(f"{name} {size / GIBIBYTE:.2f}" for name, size in parts)
    return f"stage {stage.stage} peaks at {stage.peak / GIBIBYTE:.2f} GiB ({listed}), {stage.moment}"
