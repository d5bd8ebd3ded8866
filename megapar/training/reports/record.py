"""What is known of one iteration, as people and machines read it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from megapar.training.health.stragglers import Pace


@dataclass
class Record:
    """One iteration. Losses are unweighted means over the global batch, except ``loss``, which is differentiated.

    time: when the host had launched all of it, in UTC by ISO 8601.
    dropped_tokens: dropped (token, choice) pairs over all layers and the global batch. exposed_communication_seconds:
    time spent waiting for collectives (the host on a CPU, the stream on an accelerator); None where it is not metered.
    exposed_seconds: "axis/collective" -> the same by kind. skipped: nothing was changed, as gradients overflowed in
    fp16 or were not finite, or the step was a spike. tasks, eval_tasks: loss of every ERNIE 3.0 task, and accuracy
    where it asks for a class; lm_loss is per predicted token of all tasks then. sent_bytes: "axis/collective" -> what
    the reporting rank sent in the step. mfu_peak: where the peak that ``mfu`` is a share of comes from, ``table`` (the
    vendor's data sheet) or ``measured`` (a GEMM at start-up). pace: how long ranks worked of their own in the steps
    since the last report. expert_load: percentiles of an expert's share of the routed pairs, times the number of
    experts, per mixture-of-experts layer. logging_errors: failures so far to write a log, metrics or TensorBoard files.
    failed_saves: checkpoints in a row, up to now, that could not be written.
    """

    iteration: int
    time: str
    consumed_samples: int
    consumed_tokens: int
    lm_loss: float
    sop_loss: float | None
    mtp_loss: float | None
    aux_loss: float | None
    z_loss: float | None
    sequence_loss: float | None
    orthogonal_loss: float | None
    loss: float
    grad_norm: float
    lr: float
    loss_scale: float
    skipped: bool
    dropped_tokens: int
    iteration_seconds: float
    tokens_per_second: float
    model_tflops_per_device: float
    mfu: float
    mfu_peak: str
    peak_memory_bytes: int
    exposed_communication_seconds: float | None
    exposed_seconds: dict[str, float]
    sent_bytes: dict[str, int]
    reserved_unused_bytes: int | None = None
    allocation_retries: int | None = None
    logging_errors: int = 0
    failed_saves: int = 0
    pace: Pace | None = None
    eval_loss: float | None = None
    eval_lm_loss: float | None = None
    eval_sop_loss: float | None = None
    eval_mtp_loss: float | None = None
    tasks: dict[str, float] = field(default_factory=dict)
    eval_tasks: dict[str, float] = field(default_factory=dict)
    expert_load: list[dict[str, float]] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """As ``--metrics-jsonl`` writes it: evaluated losses only where there are any, no expert load."""
        values = asdict(self)
        del values["expert_load"]
        for name in ("tasks", "eval_tasks"):
            if not values[name]:
                del values[name]
        values["rank_seconds"] = {} if self.pace is None else self.pace.to_dict()
        del values["pace"]
        return {name: value for name, value in values.items() if value is not None or not name.startswith("eval_")}


class Logger(Protocol):
    """Something that is told of iterations on the rank that reports."""

    def log(self, record: Record) -> None:
        """One iteration, in order."""

    def flush(self) -> None:
        """Everything told so far is to be safe and visible."""

    def close(self) -> None:
        """The run is over."""
