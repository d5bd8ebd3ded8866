"""Facts about a run for later analysis: ``run.json`` next to the metrics."""

from __future__ import annotations

import json
import os
import platform
import sys
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from megapar import __version__
from megapar.arguments import FLAGS, Config
from megapar.core.comm.world import World
from megapar.files.disk import write_file
from megapar.files.regular_file import read_json
from megapar.files.uri import without_secrets

NAME = "run.json"
SHOWN_ENVIRONMENT = (
    "OMP_NUM_THREADS", "CUDA_DEVICE_MAX_CONNECTIONS", "NCCL_", "HCCL_", "GLOO_", "SLURM_JOB_ID", "HSA_",
)  # fmt: skip


def write_facts(
    folder: Path, config: Config, world: World, peak_flops: float, peak_source: str, parameters: int, first: int
) -> None:
    """Write the effective configuration with origins, the ranks and the environment. One rank calls it. Raises OSError.

    Args:
        peak_flops: FLOP/s of one device.
        first: First iteration of this start. Starts from earlier iterations stay in the file.
    """
    grid = {axis: config.grid.size(axis) for axis in ("dp", "pp", "sharding", "cp", "mp", "edp", "ep", "emp")}
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    start = {"iteration": first, "time": now, "world_size": config.grid.world_size, "grid": grid}
    facts: dict[str, Any] = {
        "kind": config.kind,
        "world_size": config.grid.world_size,
        "grid": grid,
        "starts": [*_earlier_starts(folder / NAME, first), start],
        "parameters": parameters,
        "device": {
            "type": world.device.type,
            "name": world.device.name,
            "peak_flops": peak_flops,
            "peak_source": peak_source,
        },
        "configuration": _configuration(config),
        "environment": {
            "megapar": __version__,
            "torch": torch.__version__,
            "python": sys.version.split()[0],
            "system": platform.platform(),
            **{name: value for name, value in sorted(os.environ.items()) if name.startswith(SHOWN_ENVIRONMENT)},
        },
    }
    folder.mkdir(parents=True, exist_ok=True)
    # In one step: a kill or a full disk leaves the file of the earlier starts.
    write_file(folder / NAME, (json.dumps(facts, indent=1) + "\n").encode())


def write_end(folder: Path, iteration: int, stopped: str) -> None:
    """Write that the last start has ended, after which iteration, and why if steps are left.

    Only ``megapar report --watch`` reads it, so a file that cannot be written is left as it is.
    """
    time = datetime.now(timezone.utc).isoformat(timespec="seconds")
    with suppress(OSError, ValueError, LookupError, TypeError):
        facts = read_json(folder / NAME)
        facts["starts"][-1]["end"] = {"iteration": iteration, "time": time, "stopped": stopped}
        write_file(folder / NAME, (json.dumps(facts, indent=1) + "\n").encode())


def _configuration(config: Config) -> dict[str, dict[str, Any]]:
    """Return each flag's value with its origin, group and spelling."""
    values = config.values()
    return {
        flag.name: {
            "value": without_secrets(values[flag.name]),
            "origin": config.origins.get(flag.name, "default"),
            "group": flag.group,
            "flag": flag.spelling,
        }
        for flag in FLAGS.values()
        if config.kind in flag.models and not flag.meta
    }


def _earlier_starts(path: Path, first: int) -> list[dict[str, Any]]:
    """Return the starts in a file from iterations before the first, which a resumed run continues; none without any."""
    try:
        starts = read_json(path)["starts"]
        return [start for start in starts if start["iteration"] < first]
    except (OSError, ValueError, LookupError, TypeError):
        return []
