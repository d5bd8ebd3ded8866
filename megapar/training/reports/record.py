"""The record of one iteration, as loggers write it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from megapar.health.hangs.stragglers import Pace

_IF_MEASURED = ("eval_", "decoupled_lr", "weight_decay", "qk_clip")
_IF_ANY = ("tasks", "eval_tasks", "eval_sets", "eval_sets_bits_per_byte", "eval_scores", "update_norms", "weight_norms")
_LARGEST_EXPONENT = 700  # exp of more overflows


@dataclass
class Record:
    """One iteration. Losses are unweighted means over the global batch, except ``loss``. None means not measured.

    Attributes:
        iteration: Number of the step, from 1.
        time: End of the step on the host, in UTC, ISO 8601.
        consumed_samples: Samples read so far.
        consumed_tokens: Tokens read so far, without padding.
        predicted_tokens: Tokens that the step predicts, neither padding nor masked, or the sum of their weights.
            Without any, its losses are 0.
        lm_loss: Cross-entropy per predicted token; with ERNIE 3.0, over all tasks.
        sop_loss: Loss of the sentence-order task.
        mtp_loss: Loss of multi-token prediction.
        aux_loss: Load balancing loss of the router.
        z_loss: Z-loss of the router.
        sequence_loss: Load balancing loss per sample.
        orthogonal_loss: Orthogonality loss of the router's weight.
        loss: The training loss, a weighted sum.
        grad_norm: Global gradient norm before clipping.
        lr: Learning rate.
        decoupled_lr: That of the word embedding and the head, if it is another one.
        weight_decay: Weight decay, if it changes from step to step.
        qk_clip_largest: With QK-clip, the largest statistic of any head.
        qk_clipped_heads: Number of heads that it scaled after the update, over all layers.
        update_norms: With --log-update-norms, by class of tensors the 2-norm of the change of its weights.
        weight_norms: The 2-norm of the weights after it.
        loss_scale: Loss scale of fp16, else 1.
        skipped: True if the step changed nothing, because its gradients were not finite or it was a spike.
        dropped_tokens: Dropped (token, choice) pairs over all layers and the global batch.
        iteration_seconds: Duration of the step.
        tokens_per_second: Tokens without padding, of all ranks.
        mfu: Share of the peak FLOP/s.
        mfu_peak: Source of the peak: ``flag`` (--device-tflops), ``table`` (data sheet of the vendor) or ``measured``
            (a GEMM at start-up).
        peak_memory_bytes: Peak device memory of the reporting rank.
        exposed_communication_seconds: Waits for collectives (of the host on a CPU, of the stream on an accelerator).
        exposed_seconds: "axis/collective" -> the same by kind.
        sent_bytes: "axis/collective" -> bytes that the reporting rank sent in the step.
        reserved_unused_bytes: Device memory that the allocator keeps without a tensor.
        allocation_retries: Allocations that the device memory allocator had to retry.
        logging_errors: Failed writes of the log, metrics or TensorBoard files so far.
        failed_saves: Failed saves in a row so far.
        pace: Work of the ranks in the steps since the last report, without waits.
        eval_loss: Loss of an evaluation after the step.
        eval_lm_loss: Its cross-entropy per predicted token.
        eval_sop_loss: Its loss of the sentence-order task.
        eval_mtp_loss: Its loss of multi-token prediction.
        eval_bits_per_byte: Its cross-entropy in bits per UTF-8 byte of the predicted text.
        tasks: Loss of every ERNIE 3.0 task, and accuracy of tasks that predict a class.
        eval_tasks: The same for an evaluation.
        eval_sets: Loss of each of several sets of an evaluation, by name.
        eval_sets_bits_per_byte: Bits per byte of each.
        eval_scores: Scores of --eval-tasks, by task/score.
        expert_load: Per mixture-of-experts layer, percentiles of the experts' load relative to a balanced load, and
            ``busiest_rank``, the load of the busiest of several expert parallel ranks relative to their mean.
        loads_by_layer: In some steps that end a log interval, per layer the load of each expert, likewise relative.
    """

    iteration: int
    time: str
    consumed_samples: int
    consumed_tokens: int
    predicted_tokens: float
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
    decoupled_lr: float | None = None
    weight_decay: float | None = None
    qk_clip_largest: float | None = None
    qk_clipped_heads: int | None = None
    update_norms: dict[str, float] = field(default_factory=dict)
    weight_norms: dict[str, float] = field(default_factory=dict)
    eval_loss: float | None = None
    eval_lm_loss: float | None = None
    eval_sop_loss: float | None = None
    eval_mtp_loss: float | None = None
    eval_bits_per_byte: float | None = None
    tasks: dict[str, float] = field(default_factory=dict)
    eval_tasks: dict[str, float] = field(default_factory=dict)
    eval_sets: dict[str, float] = field(default_factory=dict)
    eval_sets_bits_per_byte: dict[str, float] = field(default_factory=dict)
    eval_scores: dict[str, float] = field(default_factory=dict)
    expert_load: list[dict[str, float]] = field(default_factory=list)
    loads_by_layer: list[list[float]] = field(default_factory=list)

    @property
    def perplexity(self) -> float | None:
        """exp of ``lm_loss``, or None if that is not a number of usual size."""
        return _exp(self.lm_loss)

    @property
    def eval_perplexity(self) -> float | None:
        """The same of an evaluation."""
        return _exp(self.eval_lm_loss)

    def scalars(self) -> dict[str, float]:
        """Return the numbers by name, as TensorBoard and other trackers show them, without those not measured.

        A name is ``card/curve``; the cards are sorted by name, with the loss first.
        """
        return {name: float(value) for name, value in self._scalars() if value is not None}

    def _scalars(self) -> Iterator[tuple[str, float | None]]:
        yield from {
            "loss/total": self.loss,
            "loss/lm": self.lm_loss,
            "loss/perplexity": self.perplexity,
            "loss/sop": self.sop_loss,
            "loss/mtp": self.mtp_loss,
            "loss/aux": self.aux_loss,
            "loss/z": self.z_loss,
            "loss/sequence": self.sequence_loss,
            "loss/orthogonal": self.orthogonal_loss,
            "loss/evaluation": self.eval_loss,
            "loss/evaluation_lm": self.eval_lm_loss,
            "loss/evaluation_perplexity": self.eval_perplexity,
            "loss/evaluation_sop": self.eval_sop_loss,
            "loss/evaluation_mtp": self.eval_mtp_loss,
            "loss/evaluation_bits_per_byte": self.eval_bits_per_byte,
            "memory/peak_bytes": self.peak_memory_bytes,
            "memory/reserved_unused_bytes": self.reserved_unused_bytes,
            "memory/allocation_retries": self.allocation_retries,
            "optimizer/lr": self.lr,
            "optimizer/decoupled_lr": self.decoupled_lr,
            "optimizer/weight_decay": self.weight_decay,
            "optimizer/qk_clip_largest": self.qk_clip_largest,
            "optimizer/qk_clipped_heads": self.qk_clipped_heads,
            "optimizer/grad_norm": self.grad_norm,
            "precision/loss_scale": self.loss_scale,
            "precision/skipped": self.skipped,
            "run/consumed_tokens": self.consumed_tokens,
            "run/consumed_samples": self.consumed_samples,
            "run/logging_errors": self.logging_errors,
            "run/failed_saves": self.failed_saves,
            "speed/step_seconds": self.iteration_seconds,
            "speed/tokens_per_second": self.tokens_per_second,
            "speed/model_tflops_per_device": self.model_tflops_per_device,
            "speed/mfu": self.mfu,
            "speed/exposed_seconds": self.exposed_communication_seconds,
        }.items()
        yield from self._experts()
        yield from ((f"eval_loss/{name}", value) for name, value in self.eval_sets.items())
        yield from ((f"eval_bits_per_byte/{name}", value) for name, value in self.eval_sets_bits_per_byte.items())
        yield from ((f"eval_scores/{name}", value) for name, value in self.eval_scores.items())
        yield from ((f"sent_bytes/{name}", amount) for name, amount in self.sent_bytes.items())
        yield from ((f"tasks/{name}", value) for name, value in self.tasks.items())
        yield from ((f"tasks/evaluation_{name}", value) for name, value in self.eval_tasks.items())
        yield from ((f"updates/{name}", norm) for name, norm in self.update_norms.items())
        yield from ((f"weights/{name}", norm) for name, norm in self.weight_norms.items())
        yield from ((f"waits/{name}", seconds) for name, seconds in self.exposed_seconds.items())

    def _experts(self) -> Iterator[tuple[str, float]]:
        """Yield the load over all layers: of the extremes the worst layer's, of the other percentiles the mean."""
        if layers := self.expert_load:
            yield "moe/dropped_tokens", self.dropped_tokens
            for name, over in (("min", min), ("p50", _mean), ("p90", _mean), ("max", max)):
                yield f"moe/load_{name}", over([layer[name] for layer in layers])

    def to_dict(self) -> dict[str, Any]:
        """Return the values for ``--metrics-jsonl``, without expert load; some only if they were measured."""
        values = asdict(self)
        del values["expert_load"], values["loads_by_layer"]
        values |= {"perplexity": self.perplexity, "eval_perplexity": self.eval_perplexity}
        for name in _IF_ANY:
            if not values[name]:
                del values[name]
        values["rank_seconds"] = {} if self.pace is None else self.pace.to_dict()
        del values["pace"]
        return {name: value for name, value in values.items() if value is not None or not name.startswith(_IF_MEASURED)}


def _exp(loss: float | None) -> float | None:
    return math.exp(loss) if loss is not None and loss < _LARGEST_EXPONENT else None


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
