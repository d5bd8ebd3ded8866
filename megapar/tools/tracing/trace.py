"""Trace for ``megapar plan --trace``: a step of the real trainer as one rank, on fake tensors, with its bytes counted.

The trace is independent of the formulas in ``megapar/planning``, and both must agree. It runs the CPU code, whose
kernels save other tensors than an accelerator's (``core/device/ops.py``).
"""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass, fields, replace
from typing import Any

from torch.distributed.tensor import DTensor

from megapar.arguments import Config
from megapar.core.device.memory_tracker import MemoryTracker
from megapar.core.units import GIBIBYTE
from megapar.errors import Complaint, ConfigError
from megapar.tools.tracing.pretend import pretend
from megapar.trainer import Trainer


@dataclass(frozen=True)
class TracedStep:
    """Memory and messages of one rank in a step that reuses the buffers of an earlier step.

    Attributes:
        config: The traced configuration: that of the run, with mock data and without files.
        parameters: Bytes of parameters and buffers.
        optimizer: Bytes of master weights and optimizer state.
        resting: Live bytes between two steps.
        peak: Maximum of live bytes in the step.
        sent_bytes: "axis/kind" -> bytes.
    """

    config: Config
    rank: int
    stage: int
    parameters: int
    optimizer: int
    resting: int
    peak: int
    sent_bytes: dict[str, int]
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Return the trace as a dictionary, for --json."""
        return {item.name: getattr(self, item.name) for item in fields(self) if item.name != "config"}

    def describe(self, formula_peak: int, formula_sent: dict[str, float]) -> str:
        """Return a table of the trace next to the formulas for the same kernels."""
        lines = [
            f"trace of rank {self.rank} (stage {self.stage}), a CPU's kernels, {self.seconds:.1f} s",
            f"  parameters {_gib(self.parameters)}, optimizer {_gib(self.optimizer)}, "
            f"between steps {_gib(self.resting)}",
            f"  peak {_gib(self.peak)}; by formula {_gib(formula_peak)} ({formula_peak / self.peak - 1:+.1%})",
        ]
        for name in sorted({*self.sent_bytes, *formula_sent}):
            lines.append(
                f"  {name:28} {self.sent_bytes.get(name, 0):>20,} by formula {formula_sent.get(name, 0):>20,.0f}"
            )
        return "\n".join(lines) + "\n"


def trace(config: Config, rank: int) -> TracedStep:
    """Trace the second step of a run as ``rank`` of the configuration's world, on mock data.

    Every position counts, also padding, because the formulas know no text. If the step leaves new storages behind,
    trace another step instead, because later steps reuse these buffers. Raises ConfigError if the configuration depends
    on values.
    """
    config = traceable(config, rank)
    start = time.perf_counter()
    tracker = MemoryTracker()
    with pretend(config, rank, tracker) as trainer:
        before = tracker.sizes()
        trainer.progress.consumed_samples = config.training.global_batch_size
        found = measure(trainer, tracker, rank, start, first=True)
        trainer.job.sharding.wait()
        gc.collect()  # storages in reference cycles are not buffers
        after = tracker.bytes
        trainer.job.sharding.begin_step()  # drops the gradients
        if tracker.sizes() != before:
            trainer.progress.consumed_samples = config.training.global_batch_size
            found = measure(trainer, tracker, rank, start)
        return replace(found, resting=after, peak=max(found.peak, after))


def measure(trainer: Trainer, tracker: MemoryTracker, rank: int, start: float, *, first: bool = False) -> TracedStep:
    """Measure a step of a trainer built under the tracker; ``start`` is the trace's, by ``time.perf_counter``."""
    if not first:  # the first step waits for its parameters unit by unit, which determines the buffers
        trainer.job.sharding.wait()
    resting = tracker.bytes
    tracker.reset_peak()
    step = trainer.step()
    model, optimizer = trainer.job.model, trainer.job.optimizer
    held_here = (t.to_local() if isinstance(t, DTensor) else t for t in (*model.parameters(), *model.buffers()))
    tensors = list(held_here)
    shards = trainer.job.sharding.master_shards
    states = [state for name in optimizer.states for state in optimizer.state(name) if state is not None]
    held = {tensor.untyped_storage()._cdata for tensor in tensors}
    masters = [shard.master for shard in shards if shard.master.untyped_storage()._cdata not in held]
    return TracedStep(
        config=trainer.config,
        rank=rank,
        stage=trainer.world.axis("pp").rank,
        parameters=sum(tensor.nbytes for tensor in tensors),
        optimizer=sum(tensor.nbytes for tensor in (*masters, *states)),
        resting=resting,
        peak=tracker.peak_bytes,
        sent_bytes={name: size for name, size in step.sent_bytes.items() if not name.startswith("world/")},
        seconds=time.perf_counter() - start,
    )


def traceable(config: Config, rank: int) -> Config:
    """Return the configuration with mock data and without files. Raises ConfigError if fake tensors cannot run it."""
    complaints = []
    if not 0 <= rank < config.grid.world_size:
        message = f"--trace-rank {rank} is not one of the {config.grid.world_size} ranks."
        complaints.append(Complaint("trace", message, f"Choose 0 to {config.grid.world_size - 1}."))
    for refused, what in (
        (bool(config.notes), "features that this version does not have"),
        (config.ampipe.ampipe_degree == 0, "--ampipe-degree auto, which measures"),
        (config.recompute.adaptive_recompute_device_size > 0, "adaptive recompute, which measures"),
        (config.training.dtype == "fp64" and config.model.routed_experts > 0, "experts in fp64, which run one by one"),
    ):
        if refused:
            complaints.append(Complaint("trace", f"--trace cannot run {what}.", "The formulas can."))
    if complaints:
        raise ConfigError(complaints)
    dtype = "bf16" if config.training.dtype == "auto" else config.training.dtype
    return replace(
        config,
        data=replace(
            config.data,
            data_path=("mock",),
            data_phases=None,
            eval_data_path=(),
            split=None,
            tokenizer_model=None,
            data_source="files",
            hf_dataset=None,
        ),
        runtime=replace(config.runtime, device="cpu"),
        training=replace(
            # Settings that ramp up over the first steps have their final values.
            config.training,
            dtype=dtype,
            compile="off",
            fp8=False,
            progressive_iters=0,
            rampup_batch_size=None,
        ),
        checkpoint=replace(config.checkpoint, load=None, save=None, load_hf=None, save_hf=None),
        reliability=replace(config.reliability, local_checkpoint_interval=0),
        logging=config.logging.silenced(),
    )


def _gib(size: float) -> str:
    return f"{size / GIBIBYTE:.4g} GiB"
