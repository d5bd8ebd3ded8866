"""Memory figures of the plan, for the error report of a run that is out of memory.

Tested in ``tests/training/building/test_memory.py``.
"""

from __future__ import annotations

from megapar.arguments import Config
from megapar.core.device.kinds import kind_called, kind_of
from megapar.core.units import GIBIBYTE
from megapar.errors import ConfigError
from megapar.planning.memory import StageMemory
from megapar.planning.plan import Plan


def planned_memory(config: Config, device_type: str, device: str) -> str:
    """Describe the plan's figures for the fullest stage, and settings that need less memory.

    Args:
        config: The configuration.
        device_type: torch's device type.
        device: Name of the device, as the driver reports it.
    """
    kind = kind_called(device)
    if kind is None and config.runtime.device_memory_gib is None:
        return f"megapar plan has no figures for the device {device!r}; --device-memory-gib gives its memory"
    kind = kind or kind_of(device_type, device)
    try:
        plan = Plan(config, kind)
        stage = plan.fullest
    except (ConfigError, NotImplementedError) as error:
        return f"megapar plan has no figures: {error}"
    advice = plan.advice()
    return f"megapar plan ({plan.kind.title}): {_parts(stage)}" + (f"; {advice}" if advice else "")


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
