"""What a run says of memory: before it starts, what dropless experts may need; where it ran out, what was there."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch

from megapar.arguments import Config
from megapar.core.device.base import Device
from megapar.core.units import GIBIBYTE
from megapar.errors import TrainingError
from megapar.model.decoder.expert_rows import ExpertRows
from megapar.model.decoder.sizes import MoeSizes

Planned = Callable[[Config, str], str]


def out_of_memory(
    config: Config, device: Device, error: torch.OutOfMemoryError, planned: Planned | None
) -> TrainingError:
    """The error to end with: what was asked and held, where the snapshot is, and what the plan had said.

    planned: (configuration, name of the device) to a sentence; None: nobody planned.
    """
    rank = os.environ.get("RANK", "0")
    lines = [f"rank {rank} is out of device memory: {error}"]
    pressure = device.memory_pressure()
    if pressure is not None:
        lines.append(
            f"in tensors {_gib(pressure.allocated_bytes)} (at most {_gib(device.peak_memory_bytes())} so far), held "
            f"for none {_gib(pressure.held_bytes)}, allocations that had to be repeated: {pressure.retries}"
        )
    if planned is not None:
        lines.append(planned(config, device.name))
    snapshot = Path(config.checkpoint.save or ".") / f"out-of-memory-rank{rank}.pickle"
    if device.save_memory_snapshot(snapshot):
        lines.append(f"snapshot for pytorch.org/memory_viz: {snapshot}")
    lines.append("Ask megapar plan for a layout that fits, recompute (docs/recompute.md), or lower --micro-batch-size.")
    return TrainingError("\n  ".join(lines))


def expert_rows(config: Config) -> tuple[int, int] | None:
    """Rows of a mixture-of-experts layer on one rank for one micro-batch: (where the load is even, at most).

    None where there are no experts or a capacity bounds the rows.
    """
    moe: MoeSizes | None = getattr(config.model, "moe", None)
    if moe is None or moe.has_capacity:
        return None
    grid = config.grid
    # The ranks that share the width of an expert see the tokens of all of them.
    split = grid.cp * (grid.mp if grid.emp == 1 else 1)
    positions = config.training.micro_batch_size * config.model.seq_length // split
    rows = ExpertRows.of(moe, positions, grid.ep, 1, even=False)
    return rows.multiplied, rows.most


def expert_bound(config: Config, item_bytes: int) -> str:
    """What a dropless layer may hold for its rows; "" where a capacity bounds it."""
    rows = expert_rows(config)
    if rows is None:
        return ""
    # Kept per row: what comes in, what the first product gives (gate and up), the activation, what goes out.
    inner = (3 if config.model.gated else 2) * config.value("moe_ffn_hidden_size")
    inner //= config.parallel.expert_mp_degree
    row_bytes = (2 * config.model.hidden_size + inner) * item_bytes
    usual, most = (f"{count:,} rows ({count * row_bytes / GIBIBYTE:.3g} GiB)" for count in rows)
    return f"dropless experts: a layer keeps {usual} of a micro-batch on a rank where the load is even, at most {most}"


def _gib(size: int) -> str:
    return f"{size / GIBIBYTE:.2f} GiB"
