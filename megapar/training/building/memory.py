"""Messages about device memory: the bound of dropless experts before a run, and the state after an out-of-memory."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from megapar.arguments import Config
from megapar.core.device.base import Device
from megapar.core.units import GIBIBYTE
from megapar.errors import TrainingError
from megapar.moe.row_counts import ExpertRows
from megapar.moe.sizes import MoeSizes


def out_of_memory(config: Config, device: Device, error: torch.OutOfMemoryError, planned: str) -> TrainingError:
    """Return the error to end with: the failed request, the memory in use, the snapshot and the plan's prediction.

    Args:
        device: The device that is out of memory.
        error: torch's error.
        planned: A sentence with the planned memory.
    """
    rank = os.environ.get("RANK", "0")
    lines = [f"rank {rank} is out of device memory: {error}"]
    pressure = device.memory_pressure()
    if pressure is not None:
        lines.append(
            f"allocated in tensors: {_gib(pressure.allocated_bytes)} (peak {_gib(device.peak_memory_bytes())}), "
            f"reserved but unused: {_gib(pressure.held_bytes)}, allocation retries: {pressure.retries}"
        )
    lines.append(planned)
    snapshot = Path(config.checkpoint.save or ".") / f"out-of-memory-rank{rank}.pickle"
    if device.save_memory_snapshot(snapshot):
        lines.append(f"snapshot for pytorch.org/memory_viz: {snapshot}")
    lines.append(
        "Run megapar plan to find a layout that fits, recompute activations (docs/recompute.md), or lower "
        "--micro-batch-size."
    )
    return TrainingError("\n  ".join(lines))


def expert_rows(config: Config) -> tuple[int, int] | None:
    """Return the rows of a mixture-of-experts layer on one rank for one micro-batch: (under balanced load, at most).

    Returns None without experts, or if a capacity bounds the rows.
    """
    moe: MoeSizes | None = getattr(config.model, "moe", None)
    if moe is None or moe.has_capacity:
        return None
    grid = config.grid
    # Ranks that share the width of an expert process the tokens of all of them.
    split = grid.cp * (grid.mp if grid.emp == 1 else 1)
    positions = config.training.micro_batch_size * config.model.seq_length // split
    rows = ExpertRows.of(moe, positions, grid.ep, 1, even=False)
    return rows.multiplied, rows.most


def expert_bound(config: Config, item_bytes: int) -> str:
    """Describe the memory that a dropless layer may keep for its rows. Returns "" if a capacity bounds it."""
    rows = expert_rows(config)
    if rows is None:
        return ""
    # Kept per row: the input, the outputs of the first product (gate and up), the activation and the output.
    inner = (3 if config.model.gated else 2) * config.value("moe_ffn_hidden_size")
    inner //= config.parallel.expert_mp_degree
    row_bytes = (2 * config.model.hidden_size + inner) * item_bytes
    usual, most = (f"{count:,} rows ({count * row_bytes / GIBIBYTE:.3g} GiB)" for count in rows)
    return f"dropless experts: {usual} per rank, layer and micro-batch under balanced load, at most {most}"


def _gib(size: int) -> str:
    return f"{size / GIBIBYTE:.2f} GiB"
