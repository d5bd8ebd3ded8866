"""The monitor: keeps the results of steps on the device, and turns them into records once per log interval.

It reads no values from the device between two flushes, so that training does not wait.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megapar.arguments import Config
from megapar.core.comm.accounts import Waits
from megapar.core.comm.agreement import reduce_numbers
from megapar.core.comm.world import World
from megapar.core.device.dtypes import widest
from megapar.core.device.peak import peak_flops
from megapar.data.eval_tasks import OF_TASK
from megapar.errors import TrainingError
from megapar.health.hangs.stragglers import Pace
from megapar.health.hangs.stragglers import pace as find_pace
from megapar.model.ernie3.sizes import CLASSES, TASKS
from megapar.model.flops import flops_per_token
from megapar.model.layers.loss import ROUTING
from megapar.training.reports.chosen_loggers import make_loggers
from megapar.training.reports.logger import Logger
from megapar.training.reports.record import Record
from megapar.training.reports.run_facts import NAME, write_facts
from megapar.training.reports.streams import stream_failures
from megapar.training.reports.terminal import PlainTerminal
from megapar.training.step.batches import Denominators
from megapar.training.step.dtypes import compute_dtype
from megapar.training.step.evaluate import BITS, OF_SET
from megapar.training.step.expert_places import ExpertPlaces
from megapar.training.step.job import Job
from megapar.training.step.objective import Objective
from megapar.training.step.result import StepResult, Totals
from megapar.training.step.schedules import make_progressive
from megapar.training.step.update_norms import TENSOR_CLASSES

_EVALUATED = (("loss", "loss"), ("lm_loss", "lm"), ("sop_loss", "sop"), ("mtp_loss", "mtp"), (BITS, BITS))
_LOADS_APART = 1.01  # least ratio of the iterations of two records with all loads: about 1000 in a million steps
_OF_PARTS = MappingProxyType({"eval_sets": OF_SET, "eval_sets_bits_per_byte": f"{BITS}/", "eval_scores": OF_TASK})


@dataclass(eq=False)
class Monitor:
    """Collects steps and passes their records to the loggers.

    Every rank has a monitor, because the sums need all data ranks. Only one rank has loggers.

    Attributes:
        places: The placement of experts on ranks; gets the load of each step.
        loggers: Get the records, in order.
        flops_per_token: Returns the FLOPs of the model per token in a step, forward and backward.
        peak: Peak FLOP/s of one device.
        failed_saves: Failed saves in a row, set by the trainer.
    """

    world: World
    objective: Objective
    places: ExpertPlaces
    loggers: Sequence[Logger]
    flops_per_token: Callable[[int], float]
    peak: float
    peak_source: str
    failed_saves: int = 0

    def __post_init__(self) -> None:
        self._device = self.world.device
        self._steps: list[StepResult] = []
        self._unevaluated: list[Record] = []  # at most one
        self._since = time.perf_counter()
        self._loads_from = 0  # iteration

    def add(self, step: StepResult) -> None:
        """Keep a step for the next flush."""
        self._steps.append(step)

    def evaluated(self, means: Mapping[str, float]) -> Record:
        """Log the step before an evaluation, with its ``means``: the terms and ``loss``. Returns the record."""
        (record,), self._unevaluated = self._unevaluated, []
        losses: dict[str, Any] = {f"eval_{name}": means.get(key) for name, key in _EVALUATED}
        tasks = {name: mean for name, mean in means.items() if _is_task(name)}
        for name, prefix in _OF_PARTS.items():
            losses[name] = {key.removeprefix(prefix): mean for key, mean in means.items() if key.startswith(prefix)}
        record = replace(record, eval_tasks=tasks, **losses)
        self._log([record])
        return record

    def flush(self, *, evaluates: bool = False) -> list[Record]:
        """Reduce the kept steps over all ranks and log them. Returns the records, on every rank.

        ``evaluates`` leaves the newest to ``evaluated``, or without a result to ``close``: a record is logged once.
        Raises TrainingError for a non-finite loss or norm, after logging it (``close`` logs it if it was left).
        """
        if not self._steps:
            return []
        values, scores, pace = self._reduce(), self._reduce_scores(), None
        now = time.perf_counter()
        if self._device.is_async:
            # A host that runs ahead can time only the whole interval, not single steps.
            share = (now - self._since) / len(self._steps)
            self._steps = [replace(step, seconds=share) for step in self._steps]
        work = [_work_seconds(step, step.exposed) for step in self._steps if step.exposed is not None]
        if work:  # the same steps on every rank
            pace = find_pace(work, self.world.axis("world"), self._device.torch_device, self.world.launched)
        records = [
            self._record(step, row, pace, scores.get(step.iteration))
            for step, row in zip(self._steps, values, strict=True)
        ]
        self._steps, self._since = [], now
        logged = len(records) - evaluates
        self._unevaluated = records[logged:]
        self._log(records[:logged])
        for record in records:
            if record.skipped:
                continue
            if not math.isfinite(record.loss) or not math.isfinite(record.grad_norm):
                raise TrainingError(
                    f"iteration {record.iteration}: loss {record.loss}, gradient norm {record.grad_norm} "
                    f"after {record.consumed_samples} samples. Lower --lr, or resume from an earlier checkpoint."
                )
        return records

    def mean_loss(self, totals: Totals, denominators: Denominators) -> float:
        """Return the loss of the global batch from the sums on all ranks. Waits for the device."""
        row = torch.cat([torch.stack([_wide(value) for value in totals.sums.values()]), _wide(totals.routing)])
        self._sum_over_ranks(row.unsqueeze(0), len(totals.sums))
        values = row.tolist()
        names, items = list(totals.sums), denominators.items
        means = {name: value / (items[name] or 1) for name, value in zip(names, values, strict=False)}
        routing = self.objective.routing_means(values[len(names) :], items, denominators.num_micro_batches)
        return self.objective.weighted(means, routing)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time inside (an evaluation, a checkpoint) from the time of the steps."""
        if self._device.is_async:
            self._device.synchronize()  # work that is still running belongs to the steps
        start = time.perf_counter()
        try:
            yield
        finally:
            self._since += time.perf_counter() - start

    def close(self) -> None:
        """Log a step whose evaluation failed or was not reached, and close the loggers."""
        if self._unevaluated:
            self._log(self._unevaluated)
        for logger in self.loggers:
            logger.close()

    def _log(self, records: Sequence[Record]) -> None:
        for logger in self.loggers:
            for record in records:
                logger.log(record)
            logger.flush()

    def _reduce(self) -> list[list[float]]:
        """Return per step, on the host: sums, dropped, routing losses, load (all summed over all ranks) and norm."""
        rows = []
        for step in self._steps:
            totals = step.totals
            scalars = torch.stack([_wide(value) for value in (*totals.sums.values(), totals.dropped)])
            rows.append(torch.cat([scalars, _wide(totals.routing), _wide(totals.load).flatten()]))
        stacked = torch.stack(rows)
        self._sum_over_ranks(stacked, len(self._steps[0].totals.sums))
        norms = torch.stack([_wide(step.norm) for step in self._steps]).unsqueeze(1)
        return torch.cat([stacked, norms], dim=1).tolist()

    def _reduce_scores(self) -> dict[int, tuple[float, int]]:
        """Return the largest statistic of any head and the number of clipped heads, by step with QK-clip.

        Heads are on the ranks of mp, and layers on those of pp.
        """
        steps = [step for step in self._steps if step.update.scores is not None]
        if not steps:
            return {}
        largest, heads = torch.stack([step.update.scores for step in steps if step.update.scores is not None]).T
        largest, heads = largest.contiguous(), heads.contiguous()
        for name in ("mp", "pp"):
            reduce_numbers(largest, self.world.axis(name), "qk-clip", dist.ReduceOp.MAX)
            reduce_numbers(heads, self.world.axis(name), "qk-clip")
        rows = zip(steps, largest.tolist(), heads.tolist(), strict=True)
        return {step.iteration: (value, round(count)) for step, value, count in rows if not step.skipped}

    def _sum_over_ranks(self, rows: Tensor, num_sums: int) -> None:
        """Sum rows of losses and routing statistics over all ranks, in place.

        A rank of cp has the losses of its positions and the routing of the whole sequence. A pipeline stage has the
        routing of its layers, and the last stage has the losses. Each step is a message: the order in which ranks are
        added up follows from a message's length, and what is logged must not depend on how many steps it waited for.
        """
        if self.world.axis("cp").rank:
            rows[:, num_sums:] = 0
        for name in ("data", "cp", "pp"):
            for row in rows:
                reduce_numbers(row, self.world.axis(name), "losses")

    def _record(
        self, step: StepResult, row: list[float], pace: Pace | None, scores: tuple[float, int] | None
    ) -> Record:
        """Return the record of a step. ``row``: its numbers, as ``_reduce`` returns them; ``scores`` likewise."""
        names, items, objective = list(step.totals.sums), step.denominators.items, self.objective
        words = [name for name in names if name == "lm" or (name in TASKS and name not in CLASSES)]
        predicted = sum(items[name] for name in words)
        means = {name: row[i] / (items[name] or 1) for i, name in enumerate(names)}
        routed, load = _split_routing(step, row)
        self.places.add(load)
        routing = objective.routing_means(routed, items, step.denominators.num_micro_batches)
        shown = {
            "aux": bool(load),
            "z": bool(load),
            "sequence": objective.sequence_coefficient > 0,
            "orthogonal": objective.orthogonal_coefficient > 0,
        }
        losses: dict[str, Any] = {f"{name}_loss": routing[name] if shown[name] else None for name in ROUTING}
        rate = step.denominators.tokens / step.seconds
        flops = rate * self.flops_per_token(step.iteration) / self.world.grid.world_size
        exposed = None if step.exposed is None else step.exposed.seconds()
        pressure = self._device.memory_pressure()
        return Record(
            iteration=step.iteration,
            time=datetime.fromtimestamp(step.ended, timezone.utc).isoformat(timespec="milliseconds"),
            consumed_samples=step.consumed_samples,
            consumed_tokens=step.consumed_tokens,
            predicted_tokens=predicted,
            lm_loss=sum(row[names.index(name)] for name in words) / (predicted or 1),
            tasks={name: mean for name, mean in means.items() if _is_task(name)},
            sop_loss=means.get("sop"),
            mtp_loss=means.get("mtp"),
            **losses,
            loss=objective.weighted(means, routing),
            grad_norm=row[-1],
            lr=step.lr,
            qk_clip_largest=None if scores is None else scores[0],
            qk_clipped_heads=None if scores is None else scores[1],
            update_norms=_by_class(step.update.norms, 0),
            weight_norms=_by_class(step.update.norms, 1),
            decoupled_lr=step.rates.decoupled_lr,
            weight_decay=step.rates.weight_decay,
            loss_scale=step.loss_scale,
            skipped=step.skipped,
            sent_bytes=step.sent_bytes,
            dropped_tokens=round(row[len(names)]),
            iteration_seconds=step.seconds,
            tokens_per_second=rate,
            model_tflops_per_device=flops / 1e12,
            mfu=flops / self.peak,
            mfu_peak=self.peak_source,
            peak_memory_bytes=self._device.peak_memory_bytes(),
            reserved_unused_bytes=None if pressure is None else pressure.held_bytes,
            allocation_retries=None if pressure is None else pressure.retries,
            exposed_communication_seconds=None if exposed is None else sum(exposed.values()),
            exposed_seconds=exposed or {},
            logging_errors=stream_failures() + sum(getattr(logger, "errors", 0) for logger in self.loggers),
            failed_saves=self.failed_saves,
            pace=pace,
            expert_load=self._expert_load(load, step.iteration),
            loads_by_layer=self._loads_by_layer(load, step),
        )

    def _expert_load(self, load: Sequence[Sequence[float]], iteration: int) -> list[dict[str, float]]:
        """Return, per layer, percentiles of its experts' load, and the busiest rank's load if ep has several ranks."""
        shown = []
        for layer, counts in enumerate(load):
            rank = self.places.busiest(layer, counts, iteration)
            shown.append(_percentiles(counts) | ({} if rank is None else {"busiest_rank": rank}))
        return shown

    def _loads_by_layer(self, load: Sequence[Sequence[float]], step: StepResult) -> list[list[float]]:
        """Return the load of each expert by layer, in the newest of the kept steps only, and not soon again."""
        if step is not self._steps[-1] or step.iteration < self._loads_from:
            return []
        self._loads_from = math.ceil(step.iteration * _LOADS_APART)
        means = map(_fair, load)
        return [[round(count / mean, 2) for count in counts] for counts, mean in zip(load, means, strict=True)]


def make_monitor(
    config: Config,
    job: Job,
    objective: Objective,
    terminal: PlainTerminal | None,
    iteration: int,
    places: ExpertPlaces,
    user_loggers: Sequence[Logger],
    check_owner: Callable[[], None],
) -> Monitor:
    """Return the monitor of this rank. The rank with a terminal also measures the peak and writes ``run.json``.

    ``iteration``, ``user_loggers`` and ``check_owner`` are as in ``make_loggers``.
    """
    world, metrics = job.world, config.logging.metrics_file
    of_length, growing = cache(partial(flops_per_token, job.sizes)), make_progressive(config)
    peak, source = math.nan, "unknown"
    if terminal is not None:  # only this rank's records are used, and measuring on all ranks at once would be lower
        peak, source = peak_flops(world.device, compute_dtype(config, world.device), config.runtime.device_tflops)
        if metrics:
            folder = Path(metrics).absolute().parent
            try:
                write_facts(folder, config, world, peak, source, job.num_parameters, iteration + 1)
            except OSError as error:
                terminal.print_message(f"WARNING: {folder / NAME} cannot be written: {error}")
    return Monitor(
        world=world,
        objective=objective,
        places=places,
        loggers=make_loggers(config, terminal, iteration, user_loggers, check_owner),
        flops_per_token=lambda step: of_length(
            growing.length_at(step - 1) if growing else config.phases.of_step(step - 1).seq_length
        ),
        peak=peak,
        peak_source=source,
    )


def _is_task(name: str) -> bool:
    return name.removesuffix("_accuracy") in TASKS


def _split_routing(step: StepResult, row: Sequence[float]) -> tuple[Sequence[float], list[Sequence[float]]]:
    """Return (the sums of the routing losses, the load of each expert by layer) of a row of ``Monitor._reduce``."""
    losses = len(step.totals.sums) + 1  # the terms, and the dropped tokens
    loads = losses + len(ROUTING)
    layers, experts = step.totals.load.shape
    return row[losses:loads], [row[loads + n * experts : loads + (n + 1) * experts] for n in range(layers)]


def _by_class(norms: Tensor | None, column: int) -> dict[str, float]:
    """Return a column of the norms by class, without classes that the model does not have."""
    rows = [] if norms is None else norms.tolist()
    return {name: row[column] for name, row in zip(TENSOR_CLASSES, rows, strict=False) if row[1] > 0}


def _work_seconds(step: StepResult, exposed: Waits) -> float:
    """Return the seconds that this rank worked in a step, without waits for other ranks."""
    waited = sum(exposed.seconds().values()) + sum(step.waited.seconds().values())
    return max(0.0, step.seconds - waited)


def _wide(value: Tensor) -> Tensor:
    return value.detach().to(widest(value.device))


def _percentiles(load: Sequence[float]) -> dict[str, float]:
    """Return percentiles of the load of a layer's experts, relative to a balanced load of 1.0."""
    counts, last = sorted(load), len(load) - 1
    at = {"min": 0, "p50": last // 2, "p90": math.ceil(0.9 * last), "max": last}
    fair = _fair(counts)
    return {name: counts[index] / fair for name, index in at.items()}


def _fair(counts: Sequence[float]) -> float:
    return sum(counts) / len(counts) or 1.0
