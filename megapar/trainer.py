"""The monolithic trainer: build, loop, step.

``train(config)`` is the Python way in, and all that the entry scripts call.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from megapar.arguments import Config
from megapar.config.from_hf import published_folder
from megapar.core import replicas
from megapar.core.adaptive import Adaptive
from megapar.core.collectives import all_reduce_
from megapar.core.device.base import Device, Event
from megapar.core.device.peak import peak_flops
from megapar.core.device.pick import pick
from megapar.core.first_bad import FirstBad, watch
from megapar.core.optimizer import clip, global_norm, scale_gradients
from megapar.core.random import seed_micro_batch
from megapar.core.sharding.partial import sum_partial, sum_tied
from megapar.core.world import World
from megapar.data.batches import Loader, MicroBatch
from megapar.data.corpus import Corpus
from megapar.data.skipping import Skipping, effective, merged, parse_range, sample_at
from megapar.errors import MegaparError, TrainingError
from megapar.model.decoder import Decoder
from megapar.model.ernie import Ernie
from megapar.model.flops import flops_per_token
from megapar.model.terms import Terms
from megapar.training import build, degree, export, facts, local_saves, report, state
from megapar.training.checkpoints import Checkpoints, job_id
from megapar.training.control import StopSignal
from megapar.training.denominators import Denominators
from megapar.training.evaluate import evaluate
from megapar.training.load_hf import load_hf, trained_family
from megapar.training.memory import Planned, out_of_memory
from megapar.training.monitor import Monitor, Step
from megapar.training.record import Record
from megapar.training.resume import resume
from megapar.training.stragglers import Stragglers
from megapar.training.totals import Totals


@dataclass(frozen=True)
class Outcome:
    """How a run ended. records: of every iteration, in order. evaluation: the last one's means, if there was one."""

    iteration: int
    records: tuple[Record, ...]
    evaluation: dict[str, float] | None
    checkpoint: Path | None
    exported: Path | None


def main(config: Config, planned: Planned | None = None) -> NoReturn:
    """Train and end the process: 0 done (or asked to stop, and saved), 2 configuration refused, 1 anything else.

    planned: as ``train`` takes it.

    Several ranks leave without the interpreter's own shutdown, in which gloo's threads at times abort a finished run.
    """
    status = 0
    rank = int(os.environ.get("RANK", "0"))
    stop_signal = StopSignal()
    stop_signal.install()
    try:
        train(config, stop_signal=stop_signal, planned=planned)
    except MegaparError as error:
        status = error.exit_status
        if rank == 0 or status != 2:
            where = f"rank {rank}: " if int(os.environ.get("WORLD_SIZE", "1")) > 1 else ""
            sys.stderr.write(f"{where}{type(error).__name__}: {error}\n")
    except BaseException:
        status = 1
        import traceback

        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def train(
    config: Config,
    rendezvous_url: str | None = None,
    stop_signal: StopSignal | None = None,
    planned: Planned | None = None,
) -> Outcome:
    """Train as the configuration says.

    rendezvous_url: where several ranks meet, by default as torchrun sets the environment. stop_signal: what asks this
    rank to stop, which all then do together. planned: says what a plan expects of memory, where there is none left.
    Raises MegaparError.
    """
    device = pick(config.runtime.device, int(os.environ.get("LOCAL_RANK", "0")))
    device.prepare_process()
    build.check_device(config, device)
    if config.training.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    corpus = build.make_corpus(config)
    world = World.start(config.grid, device, build.timeout(config), rendezvous_url)
    try:
        trainer = Trainer(config, world, corpus, stop_signal)
        outcome = trainer.run()
    except torch.OutOfMemoryError as error:
        world.abandon()
        raise out_of_memory(config, device, error, planned) from error
    except BaseException:
        # The other ranks may be gone: nobody waits for anybody on this way out.
        world.abandon()
        raise
    world.close()
    return outcome


class Trainer:
    """One run on this rank: everything built, the loop and the step."""

    def __init__(self, config: Config, world: World, corpus: Corpus, stop_signal: StopSignal | None = None) -> None:
        self.config = config
        self.world = world
        self.data = world.axis("data")
        self.corpus = corpus
        self.job = build.make_job(config, world)
        self.objective = build.make_objective(config)
        self.learning_rate = build.make_learning_rate(config)
        self.batch_size = build.make_batch_size(config)
        self.progressive = build.make_progressive(config)
        self.loss_scale = build.make_loss_scale(config)
        self.progress = state.Progress(dropout_seed=config.training.seed)
        self._notes = corpus.notes
        self.control = build.make_control(config, stop_signal, leader=world.rank == 0)
        self.checkpoints = Checkpoints(config.checkpoint, self.job)
        self.local_saves = local_saves.make(config, self.job, job_id(os.environ))
        self._skipped = merged(parse_range(text) for text in config.reliability.skip_samples)
        self._watched: FirstBad | None = None
        self._found = ""
        self.numbers = build.make_numbers(config)
        self._judges_late = self._may_judge_late()
        self._pending: _Pending | None = None
        self._load()
        self.collate = build.make_collate(config, world, corpus)
        self.loader = Loader(
            Skipping(corpus.train, self._skipped) if self._skipped else corpus.train,
            self.collate,
            micro_batch_size=config.training.micro_batch_size,
            data_rank=self.data.rank,
            data_ranks=self.data.size,
        )
        self._degree = self._choose_degree()
        self.profile = build.make_profile(config, world, self.job)
        self.world.ledger.clear()  # what start-up sent is no step's
        self.terminal = report.make_terminal(config, world.rank, self.progress.iteration)
        self.monitor = self._make_monitor(world.device)
        self._stragglers = Stragglers(config.reliability.straggler_factor)
        self._records: list[Record] = []
        self._evaluation: dict[str, float] | None = None

    def _may_judge_late(self) -> bool:
        """Whether the host may go on before it knows that a step's gradients are finite.

        Not where the next step's loss scale or length hangs on it, or a spike is to be skipped.
        """
        late = self.world.device.runs_ahead and self.world.device.skips_updates
        return late and self.loss_scale is None and self.progressive is None and not self.config.reliability.spike_skip

    def _choose_degree(self) -> str:
        """For --ampipe-degree auto: slice the model by the checkpoint's degree or a measured one; what to say of it."""
        model, progress = self.job.model, self.progress
        if not isinstance(model, Decoder) or self.config.ampipe.ampipe_degree != degree.AUTO:
            return ""
        legal, why = degree.legal_degrees(self.config)
        if progress.ampipe_degree in legal:
            why = "as the checkpoint has it"
        elif len(legal) == 1:
            progress.ampipe_degree = legal[0]
        else:
            run, device = self._timed_micro_batch, self.world.device.torch_device
            seconds = degree.measure(legal, run, self.world.axis("world"), device)
            progress.ampipe_degree, why = degree.choose(seconds)
            self.job.meter.take()
        model.slice_by(build.make_slicing(self.config, progress.ampipe_degree))
        return f"--ampipe-degree auto: {progress.ampipe_degree} ({why})"

    def _timed_micro_batch(self, slices: int) -> float:
        """Seconds of a forward and backward in so many slices; nothing of it is kept."""
        job, progress, device = self.job, self.progress, self.world.device
        assert isinstance(job.model, Decoder)
        job.model.slice_by(build.make_slicing(self.config, slices))
        batch = self.loader.step(progress.consumed_samples, 1)[0]
        tensors = batch.to(device.torch_device).tensors
        job.sharding.begin_step()
        job.sharding.begin_micro_batch(last=True)
        device.synchronize()
        start = time.perf_counter()
        terms = job.model(tensors, batch.valid_tokens)
        self.objective.of(terms, batch.counts, 1).backward()
        job.sharding.finish()
        device.synchronize()
        seconds = time.perf_counter() - start
        job.traffic.check_settled()
        job.sharding.begin_step()
        return seconds

    # The loop

    def run(self) -> Outcome:
        """Train to ``--train-iters`` or until asked to stop, evaluating and saving on the way and at the end."""
        self._greet()
        watchdog = build.make_watchdog(self.config, self.world)
        collector = build.make_collector(self.config)
        if collector is not None:
            collector.open()
        try:
            if self._done:
                self._tell_nothing_left()
            while not self._done:
                watchdog.begin_step(self.progress.iteration + 1)
                if self.profile is not None:
                    self.profile.before(self.progress.iteration + 1)
                self.monitor.add(self.step())
                if self.profile is not None:
                    self.profile.after(self.progress.iteration)
                watchdog.end_step()
                if collector is not None:
                    collector.after_step(self.progress.iteration)
                self._adapt()
                self.control.stepped(self.progress.iteration)
                self._after_step()
            watchdog.end_step()
            self._flush()
            if self.config.checkpoint.save:
                self._save(final=True)
            if self.local_saves is not None:
                self.local_saves.remove()
            self.job.sharding.wait()
            exported = None if self.control.stop else self._export()
        finally:
            if collector is not None:
                collector.close()
            watchdog.close()
            self.loader.close()
            self.monitor.close()
            if self.profile is not None:
                self.profile.close()
        self._tell_end(exported)
        checkpoint = self.checkpoints.folder
        return Outcome(self.progress.iteration, tuple(self._records), self._evaluation, checkpoint, exported)

    @property
    def _done(self) -> bool:
        return bool(self.control.stop) or self.progress.iteration >= self.config.training.train_iters

    def _after_step(self) -> None:
        """Evaluate, log and save, each where it is due."""
        training, iteration = self.config.training, self.progress.iteration
        last = iteration == training.train_iters
        self.checkpoints.look()
        self._tell_news()
        if _due(iteration, self.config.reliability.replica_check_interval):
            self._check_replicas()
        if training.eval_interval and (_due(iteration, training.eval_interval) or last):
            self.monitor.evaluated(self._evaluate())
        if _due(iteration, self.config.logging.log_interval):
            self._flush()
        if (self.control.save or self.checkpoints.due(iteration)) and not self._done:
            self._save(final=False)
        if self.local_saves is not None and self.local_saves.due(iteration) and not self._done:
            self._settle()
            self.local_saves.save(iteration, self._scalars())

    def _flush(self) -> None:
        self._settle()
        records = self.monitor.flush()
        self._records += records
        pace = records[-1].pace if records else None
        if pace is not None and (warning := self._stragglers.hear(pace, len(records))):
            self._say(warning)
        for record in records:
            if not self.config.reliability.spike_skip and not record.skipped:
                self.numbers.watch(record.iteration, record.loss, record.grad_norm)
        self._tell_news()

    def _tell_news(self) -> None:
        for news in self.numbers.take_news():
            self._say(news)

    def _check_replicas(self) -> None:
        """Raise TrainingError where ranks that should hold the same hold something else."""
        self._settle()
        self.job.sharding.wait()
        replicas.check(build.copies(self.job), self.world, f"iteration {self.progress.iteration}")

    def _say(self, text: str) -> None:
        if self.terminal is not None:
            self.terminal.say(text)

    # The step

    def step(self) -> Step:
        """One optimizer step: forward and backward of every micro-batch, reduce, clip, update, publish.

        A step whose gradients are not all finite changes nothing (in fp16 but the loss scale). Where the host runs
        ahead of its device, the device decides that, and the host hears of it a step later (``_settle``).
        """
        start = time.perf_counter()
        progress, work = self.progress, self._next_work()
        denominators = work.denominators
        totals, norm, votes = self._gradients(work)
        if self._settle():
            totals, norm, votes = self._gradients(work)
        scale, skipped, bad = 1.0, False, None
        if self._judges_late:
            bad = norm.isfinite().logical_not().float()
        else:
            self._hear(self._values(votes))
            if self.loss_scale is None and not math.isfinite(self._values(norm.view(1))[0]):
                totals, norm = self._repeat(work, totals, norm)
            scale, skipped = self._check_overflow(norm)
            skipped = skipped or self._is_bad(work, totals, norm)
        lr = self.learning_rate.at(progress.iteration - progress.skipped_steps)
        if not skipped:
            self._update(totals, norm, lr, bad)
        progress.iteration += 1
        progress.skipped_steps += skipped
        progress.consumed_samples += work.global_batch
        progress.consumed_tokens += denominators.tokens
        progress.micro_batches += denominators.num_micro_batches
        step = self._report_step(work, totals, norm, lr, scale, skipped, time.perf_counter() - start)
        if bad is not None:
            told = torch.cat([norm.view(1).to(votes.dtype), votes])
            self._pending = _Pending(work, totals, step, *self.world.device.host_copy(told))
        return step

    def _next_work(self) -> _Work:
        """The next global batch, as far as this rank has it."""
        progress = self.progress
        global_batch, length = self._grow()
        share = global_batch // (self.config.training.micro_batch_size * self.data.size)
        batches = self.loader.step(progress.consumed_samples, share, length)
        denominators = Denominators(batches, share * self.data.size, self.data, self.job.meter)
        place = progress.iteration + 1, progress.consumed_samples, progress.micro_batches
        return _Work(batches, denominators, global_batch, *place)

    def _gradients(self, work: _Work) -> tuple[Totals, Tensor, Tensor]:
        """Forward and backward of a step, and the reduction: (sums, global norm, sums of the votes)."""
        with record_function("megapar: forward and backward"):
            totals = self._forward_backward(work)
        with record_function("megapar: reduce"):
            norm, votes = self._reduce(self._loss_factor(work.denominators))
        return totals, norm, votes

    def _update(self, totals: Totals, norm: Tensor, lr: float, bad: Tensor | None) -> None:
        """Change the model. bad: on the device, where it is 1 nothing changes; None: it is good."""
        job = self.job
        self.checkpoints.before_update()
        if self.local_saves is not None:
            self.local_saves.before_update()
        if self.config.optimizer.clip_grad > 0:
            clip(job.sharding.parts, norm, self.config.optimizer.clip_grad)
        with record_function("megapar: optimizer"):
            job.optimizer.step(lr, bad)
            job.sharding.publish()
        self._move_router_bias(totals.load, bad)
        if bad is None:
            self.numbers.good()

    def _settle(self) -> bool:
        """Hear what became of the step before, where that is judged late; whether gradients were made for it again.

        The device has changed nothing where the norm was not finite, so the step is run again as it would have been.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return False
        pending.there.synchronize()
        value, *votes = self._values(pending.told)
        self._hear(votes)
        if math.isfinite(value):
            self.numbers.good()
            return False
        step = pending.step
        totals, norm = self._repeat(pending.work, pending.totals, step.norm)
        step.skipped = self._is_bad(pending.work, totals, norm)
        self.progress.skipped_steps += step.skipped
        if not step.skipped:
            self._update(totals, norm, step.lr, None)
            step.sums, step.routing, step.load, step.dropped = totals.sums, totals.routing, totals.load, totals.dropped
            step.norm = norm
        return True

    def _report_step(
        self, work: _Work, totals: Totals, norm: Tensor, lr: float, scale: float, skipped: bool, seconds: float
    ) -> Step:
        progress, job = self.progress, self.job
        return Step(
            iteration=progress.iteration,
            consumed_samples=progress.consumed_samples,
            consumed_tokens=progress.consumed_tokens,
            tokens=work.denominators.tokens,
            lr=lr,
            sums=totals.sums,
            items=work.denominators.items,
            num_micro_batches=work.denominators.num_micro_batches,
            routing=totals.routing,
            load=totals.load,
            dropped=totals.dropped,
            norm=norm,
            loss_scale=scale,
            skipped=skipped,
            sent_bytes=self._take_sent(),
            seconds=seconds,
            exposed=job.meter.take() if job.metered else None,
            waited_seconds=self._waited,
        )

    def _grow(self) -> tuple[int, int | None]:
        """Samples of this step, and their length where that grows; dropout grows with it."""
        if self.progressive is None:
            return self.batch_size.at(self.progress.consumed_samples), None
        iteration = self.progress.iteration
        assert isinstance(self.job.model, Ernie)
        self.job.model.scale_dropout(self.progressive.share(iteration))
        return self.progressive.batch_at(iteration), self.progressive.length_at(iteration)

    def _forward_backward(self, work: _Work) -> Totals:
        """Every micro-batch of this rank forward and backward; the sums of their terms."""
        job, progress, totals = self.job, self.progress, Totals()
        batches, denominators = work.batches, work.denominators
        first = work.first_micro_batch + self.data.rank

        def seed(number: int) -> None:
            if self._watched is not None:
                self._watched.micro_batch = number
            seed_micro_batch(progress.dropout_seed, first + number * self.data.size)

        def loss_of(terms: Terms) -> Tensor:
            loss = self.objective.of(terms, denominators.items, denominators.num_micro_batches)
            factor = self._loss_factor(denominators)
            return loss if factor == 1.0 else loss * factor

        job.sharding.begin_step()
        if job.pipeline is not None:
            job.pipeline.step(batches, loss_of, seed, totals.add)
            return totals
        for number, batch in enumerate(batches):
            job.sharding.begin_micro_batch(last=number == len(batches) - 1)
            seed(number)
            tensors = batch.to(self.world.device.torch_device, non_blocking=True).tensors
            terms = job.model(tensors, batch.valid_tokens)
            loss_of(terms).backward()
            totals.add(terms)
        return totals

    def _loss_factor(self, denominators: Denominators) -> float:
        """What the loss is multiplied by, and its gradients divided by in fp32 after the reduction.

        fp16: a loss per token of the global batch has gradients too small to represent; a mean over the micro-batch
        has not.
        """
        if self.loss_scale is None:
            return 1.0
        return self.loss_scale.value * denominators.tokens / denominators.num_micro_batches

    def _reduce(self, factor: float) -> tuple[Tensor, Tensor]:
        """Complete the gradients over all axes and divide ``factor`` out; their global norm, and all ranks' votes."""
        job = self.job
        job.sharding.finish()
        job.traffic.check_settled()
        sum_partial(job.sharding, job.partial, self.world.axis("mp"), job.meter)
        if job.tied is not None:
            sum_tied(job.sharding, job.tied, self.world.axis("pp"), job.meter)
        if factor != 1.0:
            scale_gradients(job.sharding.parts, 1 / factor)
        start = time.perf_counter()
        norm, votes = global_norm(job.sharding.parts, self.world.axis("world"), self.control.votes())
        self._waited = time.perf_counter() - start
        return norm, votes

    def _hear(self, votes: Sequence[float]) -> None:
        self.control.hear([round(vote) for vote in votes])

    def _values(self, tensor: Tensor) -> list[float]:
        """What a vector holds; waits for the device."""
        values: list[float] = tensor.tolist()
        return values

    def _adapt(self) -> None:
        """After the steps that measure: choose what is recomputed from now on, and say so."""
        recompute = self.job.model.recompute
        if recompute is not None and isinstance(recompute.choice, Adaptive):
            peak, world = self.world.device.peak_memory_bytes(), self.world.axis("world")
            chosen = recompute.choice.end_step(peak, 1, world, self.world.device.torch_device)
            if chosen is not None and self.terminal is not None:
                self.terminal.say(str(chosen))

    def _check_overflow(self, norm: Tensor) -> tuple[float, bool]:
        """The loss scale of this step, and whether its gradients overflowed; the same on every rank, as the norm is.

        Raises TrainingError where no smaller scale is left, naming the first parameter that went bad.
        """
        if self.loss_scale is None:
            return 1.0, False
        scale, overflow = self.loss_scale.value, not math.isfinite(norm.item())
        if overflow and self.loss_scale.exhausted:
            raise TrainingError(
                f"iteration {self.progress.iteration + 1}: the gradients overflow at the least loss scale, {scale:g}; "
                f"{self.progress.skipped_steps} steps were skipped so far. The first gradient that is not finite, in "
                f"the order of the backward pass, is that of {self._first_bad_parameter()}. Lower --lr, use bf16, or "
                "resume from an earlier checkpoint."
            )
        self.loss_scale.update(overflow=overflow)
        return scale, overflow

    def _first_bad_parameter(self) -> str:
        """The last one in forward order, over all ranks, whose gradient is not finite."""
        order = {spec.name: number for number, spec in enumerate(self.job.table)}
        grads = [part.grad for part in self.job.sharding.parts if part.grad is not None]
        bad = [
            order[view.spec.name] for view in self.job.sharding.views(grads) if not view.tensor.isfinite().all().item()
        ]
        last = torch.tensor(max(bad, default=-1), device=self.world.device.torch_device)
        all_reduce_(last, self.world.axis("world"), dist.ReduceOp.MAX)
        return self.job.table[int(last.item())].name

    def _repeat(self, work: _Work, totals: Totals, norm: Tensor) -> tuple[Totals, Tensor]:
        """Run a step that was not finite again and watch where it goes bad; what a good second run gave, or the same.

        A number that does not come again was none of the data's or the model's: the step goes on with the second run.
        """
        with watch(self.job.model, self.world.axis("pp").rank) as self._watched:
            again = self._forward_backward(work)
            repeated, votes = self._reduce(1.0)
        self._hear(self._values(votes))
        found, self._watched = self._watched, None
        if math.isfinite(repeated.item()):
            self.numbers.news.append(
                f"WARNING: iteration {work.iteration}: gradient norm {norm.item()}, but {repeated.item()} "
                "when the step was run again: a rank computed wrongly; the step goes on with the second result"
            )
            return again, repeated
        self._found = found.agree(self.world.axis("world"))
        if not self._found:
            self._found = f"the forward is finite, the gradient of {self._first_bad_parameter()} is not"
        return totals, norm

    def _is_bad(self, work: _Work, totals: Totals, norm: Tensor) -> bool:
        """Whether the step is not to change the model; the same on every rank. Raises TrainingError at the limit."""
        iteration, value = work.iteration, self._values(norm.view(1))[0]
        first, last = work.first_sample, work.first_sample + work.global_batch - 1
        samples = f"{sample_at(first, self._skipped)}-{sample_at(last, self._skipped)}"
        if not math.isfinite(value):
            self.numbers.not_finite(iteration, value, samples, f"first bad: {self._found}")
            return True
        if not self.config.reliability.spike_skip:
            return False
        loss = self.monitor.mean_loss(totals, work.denominators.items, work.denominators.num_micro_batches)
        return self.numbers.is_spike(iteration, loss, value, samples)

    def _take_sent(self) -> dict[str, int]:
        """Bytes that this rank sent since the last call, by axis and kind of collective."""
        sent = {f"{axis}/{kind}": amount for (axis, kind), amount in sorted(self.world.ledger.items()) if amount}
        self.world.ledger.clear()
        return sent

    def _move_router_bias(self, load: Tensor, bad: Tensor | None) -> None:
        """Raise the correction bias of experts that got less than their share of the global batch."""
        rate: float | Tensor = self.config.moe.moe_router_bias_update_rate
        if rate and isinstance(self.job.model, Decoder):
            total = load.clone()
            if self.data.group is not None:
                dist.all_reduce(total, group=self.data.group)
            rows = total if self.job.pipeline is None else total[self.job.model.load_rows]
            self.job.model.update_router_bias(rows, rate if bad is None else rate * (1 - bad.double()))

    # Around the step

    def _evaluate(self) -> dict[str, float]:
        training, heldout = self.config.training, self.corpus.heldout
        assert heldout is not None  # a rule row: who evaluates holds something out
        self._settle()
        self.job.sharding.wait()
        sent = dict(self.world.ledger)
        self._evaluation = evaluate(
            self.job.model,
            heldout,
            self.collate,
            self.objective,
            num_samples=min(len(heldout), training.eval_iters * training.global_batch_size),
            micro_batch_size=training.micro_batch_size,
            data=self.data,
            device=self.world.device.torch_device,
            pp=self.world.axis("pp"),
            cp=self.world.axis("cp"),
            forward=None if self.job.pipeline is None else self.job.pipeline.evaluate,
        )
        # What an evaluation sends and waits for is no step's.
        self.world.ledger.clear()
        self.world.ledger.update(sent)
        self.job.meter.take()
        self.monitor.resume_clock()
        return self._evaluation

    def _load(self) -> None:
        checkpoint = self.config.checkpoint
        loaded = resume(
            *(self.config, self.job, self.progress, self.learning_rate.to_dict(), self.loss_scale),
            *(self.checkpoints, self.local_saves),
        )
        if loaded is None:
            if checkpoint.load_hf:
                self._notes += load_hf(Path(checkpoint.load_hf), self.job)
            return
        self.progress, before = loaded.progress, [tuple(pair) for pair in loaded.scalars.get("skip_samples", [])]
        self._skipped = effective(self._skipped, before, self.progress.consumed_samples)
        if "spikes" in loaded.scalars:
            self.numbers.spikes.restore(loaded.scalars["spikes"])
        self._notes += tuple(self.checkpoints.notes)
        if self.progress.iteration == 0:  # --finetune, or a checkpoint of weights alone
            self._notes += (f"weights: {self.checkpoints.resumed_from}; the run starts at iteration 0",)

    def _save(self, *, final: bool) -> None:
        self._settle()
        self.checkpoints.save(self.progress.iteration, self._scalars(), final=final)
        self.control.saved()
        self.monitor.resume_clock()

    def _scalars(self) -> dict[str, Any]:
        scalars = state.scalars(self.job, self.progress, self.learning_rate.to_dict(), self.loss_scale)
        scalars["skip_samples"] = [list(pair) for pair in self._skipped]
        scalars["spikes"] = self.numbers.spikes.state()
        return scalars

    def _export(self) -> Path | None:
        if not self.config.checkpoint.save_hf:
            return None
        folder = Path(self.config.checkpoint.save_hf)
        started_from = published_folder(self.config.checkpoint.load_hf, self.config.checkpoint.load)
        family = trained_family(Path(started_from)) if started_from else None
        dtype = build.compute_dtype(self.config, self.world.device)
        export.save_hf(folder, self.job, self.corpus.tokenizer, dtype, family)
        return folder

    # What people see; one rank speaks

    def _make_monitor(self, device: Device) -> Monitor:
        self.peak, self.peak_source = math.nan, "unknown"
        if self.terminal is not None:  # nobody reads the other ranks' records, and all together would measure less
            self.peak, self.peak_source = peak_flops(device, build.compute_dtype(self.config, device))
            if self.config.logging.metrics_jsonl:
                parameters = sum(spec.numel for spec in self.job.table if spec.trainable)
                facts.write_facts(
                    Path(self.config.logging.metrics_jsonl).absolute().parent,
                    self.config,
                    self.world,
                    self.peak,
                    self.peak_source,
                    parameters,
                )
        return Monitor(
            self.world.axis("world"),
            self.data,
            self.world.axis("pp"),
            self.world.axis("cp"),
            device,
            self.objective,
            report.make_loggers(self.config, self.terminal, self.progress.iteration),
            flops_per_token=flops_per_token(self.job.sizes, self.config.model.seq_length),
            peak=self.peak,
            peak_source=self.peak_source,
        )

    def _greet(self) -> None:
        if self.terminal is None:
            return
        self.checkpoints.say = self.terminal.say
        if self.local_saves is not None:
            self.local_saves.say = self.terminal.say
        peak = f"{self.peak / 1e12:.3g} TFLOP/s ({self.peak_source})"
        for line in (*report.greeting(self.config, self.job, peak), *self._notes, self._degree):
            if line:
                self.terminal.say(line)
        if self.progress.iteration:
            self._say(f"resumed at iteration {self.progress.iteration} from {self.checkpoints.resumed_from}")

    def _tell_nothing_left(self) -> None:
        training = self.config.training
        if training.train_iters:
            self._say(report.nothing_left(self.progress.iteration, training.train_iters))
        if training.eval_interval:  # the way to ask what a saved model is worth
            self._say(report.evaluation(self._evaluate()))

    def _tell_end(self, exported: Path | None) -> None:
        if self.control.stop:
            kept = "saved" if self.checkpoints.folder else "nothing is saved without --save"
            self._say(f"stopped at iteration {self.progress.iteration}: {self.control.stop}; {kept}")
        for line in report.farewell(self.config, self.checkpoints.folder, exported):
            self._say(line)


@dataclass(frozen=True)
class _Work:
    """What a step runs on."""

    batches: Sequence[MicroBatch]
    denominators: Denominators
    global_batch: int
    iteration: int
    first_sample: int
    first_micro_batch: int


@dataclass(frozen=True)
class _Pending:
    """A step of which the host does not know yet what became of it. told: its norm and the votes, when it is there."""

    work: _Work
    totals: Totals
    step: Step
    told: Tensor
    there: Event


def _due(iteration: int, interval: int) -> bool:
    return interval > 0 and iteration % interval == 0
