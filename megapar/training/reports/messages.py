"""Messages of a run after its first lines: its end, an evaluation without a step, the memory of a device."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from megapar.arguments import Config
from megapar.core.device.base import Device
from megapar.core.units import GIBIBYTE
from megapar.errors import TrainingError
from megapar.files.location import Location, at
from megapar.training.step.progress import Progress


def nothing_left(iteration: int, train_iters: int) -> str:
    """Return the message of a run whose checkpoint has already reached --train-iters."""
    return f"no step is left: iteration {iteration} is done, --train-iters is {train_iters}"


def evaluation(means: Mapping[str, float], read: int, samples: int) -> str:
    """Return the message of an evaluation alone, of this many held-out samples. ``means`` has terms and ``loss``."""
    terms = ", ".join(f"{name} {mean:.4f}" for name, mean in means.items() if name != "loss")
    return f"held-out loss {means['loss']:.4f} ({terms}), {read:,} of {samples:,} samples"


def how_to_continue(config: Config) -> str:
    """Return the command that continues a run that was stopped before its end."""
    saved = config.checkpoint
    back = {"--ckpt-step": saved.ckpt_step is not None, "--finetune": saved.finetune}
    back |= {"--no-load-optim": saved.no_load_optim, "--no-load-rng": saved.no_load_rng}
    without = "".join(f", without {flag}" for flag, given in back.items() if given)
    how = "again" if saved.load == saved.save else f"with --load {shlex.quote(str(saved.save))}"
    return f"to continue, run the same command {how}{without}"


def phase_begins(config: Config, progress: Progress) -> str:
    """Return the message of a phase of the data that begins with the next step; "" inside a phase."""
    spans, consumed = config.phases.spans, progress.consumed_samples
    span = config.phases.at(consumed)
    if span.first_sample != consumed or not consumed:
        return ""
    return (
        f"phase {spans.index(span) + 1} of {len(spans)} begins after {consumed:,} samples: {span.first_position:,} "
        f"positions, {progress.consumed_tokens:,} of them not padding"
    )


def farewell(
    config: Config, iteration: int, stop: str, checkpoint: Location | None, exported: Location | None, source: str
) -> Iterator[str]:
    """Yield why a run stopped, its outputs with their folders, and how to continue if it stopped before its end.

    Args:
        stop: Reason of a stop before the end. "" without one.
        source: Source of the data whose end is that of the run. "" if the run has all of its steps.
    """
    if source:
        yield (
            f"ended at iteration {iteration}: the next step would repeat a sample of {source} (--on-source-end stop)"
        )
    if stop:
        saved = "saved" if checkpoint else "nothing is saved without --save"
        yield f"stopped at iteration {iteration}: {stop}; {saved}"
    for output, folder in (
        ("metrics", config.logging.metrics_file),
        ("checkpoint", checkpoint),
        ("TensorBoard files", config.logging.tensorboard_dir),
        ("Hugging Face model", exported),
    ):
        if folder:
            yield f"{output}: {folder}"
    if checkpoint and iteration < config.training.train_iters and not source:
        yield how_to_continue(config)


def out_of_memory(config: Config, device: Device, error: torch.OutOfMemoryError, planned: str) -> TrainingError:
    """Return the error to end with: the failed request, the memory in use, the snapshot and the plan's prediction."""
    rank = os.environ.get("RANK") or "0"
    lines = [f"rank {rank} is out of device memory: {error}"]
    pressure = device.memory_pressure()
    if pressure is not None:
        lines.append(
            f"allocated in tensors: {_gib(pressure.allocated_bytes)} (peak {_gib(device.peak_memory_bytes())}), "
            f"reserved but unused: {_gib(pressure.held_bytes)}, allocation retries: {pressure.retries}"
        )
    lines.append(planned)
    snapshot = (at(config.checkpoint.save or ".").local_path() or Path(".")) / f"out-of-memory-rank{rank}.pickle"
    try:
        if device.save_memory_snapshot(snapshot):
            lines.append(f"snapshot for pytorch.org/memory_viz: {snapshot}")
    except OSError as unwritten:
        lines.append(f"no snapshot: {snapshot} cannot be written: {unwritten}")
    lines.append(
        "Run megapar plan to find a layout that fits, recompute activations (docs/recompute.md), or lower "
        "--micro-batch-size."
    )
    return TrainingError("\n  ".join(lines))


def _gib(size: int) -> str:
    return f"{size / GIBIBYTE:.2f} GiB"
