"""``megapar plan --trace``: a step of the real trainer as one rank, on fake tensors, with its bytes counted.

The formulas of ``megapar/planning`` and this must agree: they know nothing of each other. What is traced is the code
that runs on a CPU, whose kernels keep other things than an accelerator's (``core/device/ops.py``).
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
    """What one rank held and sent in a step that finds the buffers which are used again.

    config: what was traced, that of the run with mock data and no files.
    parameters, optimizer: bytes of tensors (masters and moments). resting: live bytes between two steps. peak: the
    most live bytes in the step. sent_bytes: "axis/kind" -> bytes. stage: the rank's coordinate on pp.
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
        """For --json."""
        return {item.name: getattr(self, item.name) for item in fields(self) if item.name != "config"}

    def describe(self, formula_peak: int, formula_sent: dict[str, float]) -> str:
        """For people, beside the formulas of the same kernels."""
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
    """A run's second step as ``rank`` of the configuration's world, on mock data.

    Where it leaves anything behind, storage by storage, it is run again and only then reported: the first time buffers
    were made that later steps find. Raises ConfigError for what only values can decide.
    """
    config = traceable(config, rank)
    start = time.perf_counter()
    tracker = MemoryTracker()
    with pretend(config, rank, tracker) as trainer:
        before = tracker.sizes()
        trainer.progress.consumed_samples = config.training.global_batch_size
        found = measure(trainer, tracker, rank, start, first=True)
        trainer.job.sharding.wait()
        gc.collect()  # what a cycle keeps for a while is no buffer
        after = tracker.bytes
        trainer.job.sharding.begin_step()  # which forgets the gradients
        if tracker.sizes() != before:
            trainer.progress.consumed_samples = config.training.global_batch_size
            found = measure(trainer, tracker, rank, start)
        return replace(found, resting=after, peak=max(found.peak, after))


def measure(trainer: Trainer, tracker: MemoryTracker, rank: int, start: float, *, first: bool = False) -> TracedStep:
    """One more step of a trainer that was built under the tracker, and has stepped unless this is the first."""
    if not first:  # the first step waits for its parameters unit by unit, which decides what buffers there will be
        trainer.job.sharding.wait()
    resting = tracker.bytes
    tracker.reset_peak()
    step = trainer.step()
    model, optimizer = trainer.job.model, trainer.job.optimizer
    held_here = (t.to_local() if isinstance(t, DTensor) else t for t in (*model.parameters(), *model.buffers()))
    tensors = list(held_here)
    parts = trainer.job.sharding.parts
    moments = [m for name in ("exp_avg", "exp_avg_sq") for m in optimizer.moments(name)]
    held = {tensor.untyped_storage()._cdata for tensor in tensors}
    masters = [part.master for part in parts if part.master.untyped_storage()._cdata not in held]
    return TracedStep(
        config=trainer.config,
        rank=rank,
        stage=trainer.world.axis("pp").rank,
        parameters=sum(tensor.nbytes for tensor in tensors),
        optimizer=sum(tensor.nbytes for tensor in (*masters, *moments)),
        resting=resting,
        peak=tracker.peak_bytes,
        sent_bytes={name: size for name, size in step.sent_bytes.items() if not name.startswith("world/")},
        seconds=time.perf_counter() - start,
    )


def traceable(config: Config, rank: int) -> Config:
    """The configuration with mock data and without files. Raises ConfigError for what fake tensors cannot run."""
    complaints = []
    if not 0 <= rank < config.grid.world_size:
        complaints.append(Complaint("trace", f"--trace-rank {rank} is none of the {config.grid.world_size} ranks."))
    for refused, what in (
        (bool(config.notes), "what this version does not have"),
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
            eval_data_path=(),
            split=None,
            tokenizer_model=None,
            data_source="files",
            hf_dataset=None,
        ),
        runtime=replace(config.runtime, device="cpu"),
        training=replace(
            # What grows over the first steps has grown.
            config.training,
            dtype=dtype,
            compile=False,
            fp8=False,
            progressive_iters=0,
            rampup_batch_size=None,
        ),
        checkpoint=replace(config.checkpoint, load=None, save=None, load_hf=None, save_hf=None),
        reliability=replace(config.reliability, local_checkpoint_interval=0),
        logging=replace(config.logging, metrics_jsonl=None, tensorboard_dir=None),
    )


def _gib(size: float) -> str:
    return f"{size / GIBIBYTE:.4g} GiB"
