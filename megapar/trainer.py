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
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from megapar.arguments import Config
from megapar.config.from_hf import published_folder
from megapar.core.adaptive import Adaptive
from megapar.core.collectives import all_reduce_
from megapar.core.device.base import Device
from megapar.core.device.peak import peak_flops
from megapar.core.device.pick import pick
from megapar.core.optimizer import clip, global_norm, scale_gradients
from megapar.core.random import seed_micro_batch
from megapar.core.sharding.partial import sum_partial, sum_tied
from megapar.core.world import World
from megapar.data.batches import Loader, MicroBatch
from megapar.data.corpus import Corpus
from megapar.errors import MegaparError, TrainingError
from megapar.model.decoder import Decoder
from megapar.model.ernie import Ernie
from megapar.model.flops import flops_per_token
from megapar.model.terms import Terms
from megapar.training import build, degree, export, facts, state
from megapar.training.denominators import Denominators
from megapar.training.evaluate import evaluate
from megapar.training.load_hf import load_hf, trained_family
from megapar.training.loggers import JsonLinesLogger, PlainTerminal, ProgressTerminal, TensorBoardLogger
from megapar.training.monitor import Monitor, Step
from megapar.training.record import Logger, Record


@dataclass(frozen=True)
class Outcome:
    """How a run ended. records: of every iteration, in order. evaluation: the last one's means, if there was one."""

    iteration: int
    records: tuple[Record, ...]
    evaluation: dict[str, float] | None
    checkpoint: Path | None
    exported: Path | None


def main(config: Config) -> NoReturn:
    """Train and end the process: 0 done, 2 configuration refused, 1 anything else.

    Several ranks leave without the interpreter's own shutdown, in which gloo's threads at times abort a finished run.
    """
    status = 0
    rank = int(os.environ.get("RANK", "0"))
    try:
        train(config)
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


def train(config: Config, rendezvous_url: str | None = None) -> Outcome:
    """Train as the configuration says.

    rendezvous_url: where several ranks meet, by default as torchrun sets the environment. Raises MegaparError.
    """
    device = pick(config.runtime.device, int(os.environ.get("LOCAL_RANK", "0")))
    if config.training.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    corpus = build.make_corpus(config)
    world = World.start(config.grid, device, build.timeout(config), rendezvous_url)
    try:
        trainer = Trainer(config, world, corpus)
        outcome = trainer.run()
    except BaseException:
        # The other ranks may be gone: nobody waits for anybody on this way out.
        world.abandon()
        raise
    world.close()
    return outcome


class Trainer:
    """One run on this rank: everything built, the loop and the step."""

    def __init__(self, config: Config, world: World, corpus: Corpus) -> None:
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
        self._load()
        self.collate = build.make_collate(config, world, corpus)
        self.loader = Loader(
            corpus.train,
            self.collate,
            micro_batch_size=config.training.micro_batch_size,
            data_rank=self.data.rank,
            data_ranks=self.data.size,
        )
        self._degree = self._choose_degree()
        self.profile = build.make_profile(config, world, self.job)
        self.world.ledger.clear()  # what start-up sent is no step's
        self.terminal = self._make_terminal()
        self.monitor = self._make_monitor(world.device)
        self._records: list[Record] = []
        self._evaluation: dict[str, float] | None = None
        self._checkpoint: Path | None = None

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
        """Train to ``--train-iters``, evaluating and saving on the way and at the end."""
        training, checkpoint = self.config.training, self.config.checkpoint
        self._greet()
        try:
            while self.progress.iteration < training.train_iters:
                if self.profile is not None:
                    self.profile.before(self.progress.iteration + 1)
                self.monitor.add(self.step())
                if self.profile is not None:
                    self.profile.after(self.progress.iteration)
                self._adapt()
                iteration = self.progress.iteration
                final = iteration == training.train_iters
                if training.eval_interval and (iteration % training.eval_interval == 0 or final):
                    self.monitor.evaluated(self._evaluate())
                if iteration % self.config.logging.log_interval == 0 or final:
                    self._records += self.monitor.flush()
                if checkpoint.save and (final or _due(iteration, checkpoint.save_interval)):
                    self._save(Path(checkpoint.save))
            self.job.sharding.wait()
            exported = self._export()
        finally:
            self.loader.close()
            self.monitor.close()
            if self.profile is not None:
                self.profile.close()
        self._tell_end(exported)
        return Outcome(self.progress.iteration, tuple(self._records), self._evaluation, self._checkpoint, exported)

    # The step

    def step(self) -> Step:
        """One optimizer step: forward and backward of every micro-batch, reduce, clip, update, publish.

        In fp16 a step whose gradients are not all finite changes nothing but the loss scale.
        """
        start = time.perf_counter()
        job, progress = self.job, self.progress
        global_batch, length = self._grow()
        share = global_batch // (self.config.training.micro_batch_size * self.data.size)
        batches = self.loader.step(progress.consumed_samples, share, length)
        denominators = Denominators(batches, share * self.data.size, self.data, job.meter)
        with record_function("megapar: forward and backward"):
            totals = self._forward_backward(batches, denominators)
        with record_function("megapar: reduce"):
            norm = self._reduce(self._loss_factor(denominators))
        scale, skipped = self._check_overflow(norm)
        lr = self.learning_rate.at(progress.iteration - progress.skipped_steps)
        if not skipped:
            if self.config.optimizer.clip_grad > 0:
                clip(job.sharding.parts, norm, self.config.optimizer.clip_grad)
            with record_function("megapar: optimizer"):
                job.optimizer.step(lr)
                job.sharding.publish()
            self._move_router_bias(totals.load)
        progress.iteration += 1
        progress.skipped_steps += skipped
        progress.consumed_samples += global_batch
        progress.consumed_tokens += denominators.tokens
        progress.micro_batches += denominators.num_micro_batches
        return Step(
            iteration=progress.iteration,
            consumed_samples=progress.consumed_samples,
            consumed_tokens=progress.consumed_tokens,
            tokens=denominators.tokens,
            lr=lr,
            sums=totals.sums,
            items=denominators.items,
            num_micro_batches=denominators.num_micro_batches,
            routing=totals.routing,
            load=totals.load,
            dropped=totals.dropped,
            norm=norm,
            loss_scale=scale,
            skipped=skipped,
            sent_bytes=self._take_sent(),
            seconds=time.perf_counter() - start,
            exposed=job.meter.take() if job.metered else None,
        )

    def _grow(self) -> tuple[int, int | None]:
        """Samples of this step, and their length where that grows; dropout grows with it."""
        if self.progressive is None:
            return self.batch_size.at(self.progress.consumed_samples), None
        iteration = self.progress.iteration
        assert isinstance(self.job.model, Ernie)
        self.job.model.scale_dropout(self.progressive.share(iteration))
        return self.progressive.batch_at(iteration), self.progressive.length_at(iteration)

    def _forward_backward(self, batches: Sequence[MicroBatch], denominators: Denominators) -> _Totals:
        """Every micro-batch of this rank forward and backward; the sums of their terms."""
        job, progress, totals = self.job, self.progress, _Totals()
        first = progress.micro_batches + self.data.rank

        def seed(number: int) -> None:
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

    def _reduce(self, factor: float) -> Tensor:
        """Complete the gradients over all axes and divide ``factor`` out; their global norm."""
        job = self.job
        job.sharding.finish()
        job.traffic.check_settled()
        sum_partial(job.sharding, job.partial, self.world.axis("mp"), job.meter)
        if job.tied is not None:
            sum_tied(job.sharding, job.tied, self.world.axis("pp"), job.meter)
        if factor != 1.0:
            scale_gradients(job.sharding.parts, 1 / factor)
        return global_norm(job.sharding.parts, self.world.axis("world"))

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

    def _take_sent(self) -> dict[str, int]:
        """Bytes that this rank sent since the last call, by axis and kind of collective."""
        sent = {f"{axis}/{kind}": amount for (axis, kind), amount in sorted(self.world.ledger.items()) if amount}
        self.world.ledger.clear()
        return sent

    def _move_router_bias(self, load: Tensor) -> None:
        """Raise the correction bias of experts that got less than their share of the global batch."""
        rate = self.config.moe.moe_router_bias_update_rate
        if rate and isinstance(self.job.model, Decoder):
            total = load.clone()
            if self.data.group is not None:
                dist.all_reduce(total, group=self.data.group)
            rows = total if self.job.pipeline is None else total[self.job.model.load_rows]
            self.job.model.update_router_bias(rows, rate)

    # Around the step

    def _evaluate(self) -> dict[str, float]:
        training, heldout = self.config.training, self.corpus.heldout
        assert heldout is not None  # a rule row: who evaluates holds something out
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
        root = Path(checkpoint.load) if checkpoint.load else None
        if root is not None and checkpoint.save and root == Path(checkpoint.save) and not state.exists(root):
            root = None  # the usual script names one folder for both; its first run starts without a checkpoint
        if root is None:
            if checkpoint.load_hf:
                self._notes += load_hf(Path(checkpoint.load_hf), self.job)
            return
        options = state.LoadOptions(
            iteration=checkpoint.ckpt_step,
            finetune=checkpoint.finetune,
            optimizer=not checkpoint.no_load_optim,
            random=not checkpoint.no_load_rng,
            override_schedule=self.config.optimizer.override_opt_param_scheduler,
        )
        self.progress = state.load(
            root, self.job, self.progress, self.learning_rate.to_dict(), options, self.loss_scale
        )
        if self.progress.iteration == 0:  # --finetune, or a checkpoint of weights alone
            self._notes += (f"weights: {root}; the run starts at iteration 0",)

    def _save(self, root: Path) -> None:
        self._checkpoint = state.save(root, self.job, self.progress, self.learning_rate.to_dict(), self.loss_scale)
        self.monitor.resume_clock()

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

    def _make_terminal(self) -> PlainTerminal | None:
        if self.world.rank != 0:
            return None
        iterations, interval = self.config.training.train_iters, self.config.logging.log_interval
        if sys.stdout.isatty():
            return ProgressTerminal(iterations, interval, self.progress.iteration)
        return PlainTerminal(iterations, interval)

    def _make_monitor(self, device: Device) -> Monitor:
        logging = self.config.logging
        loggers: list[Logger] = []
        if self.terminal is not None:
            loggers.append(self.terminal)
            first = self.progress.iteration + 1
            if logging.metrics_jsonl:
                loggers.append(JsonLinesLogger(Path(logging.metrics_jsonl), first))
            if logging.tensorboard_dir:
                loggers.append(TensorBoardLogger(Path(logging.tensorboard_dir), first))
        self.peak, self.peak_source = math.nan, "unknown"
        if self.terminal is not None:  # nobody reads the other ranks' records, and all together would measure less
            self.peak, self.peak_source = peak_flops(device, build.compute_dtype(self.config, device))
            if logging.metrics_jsonl:
                parameters = sum(spec.numel for spec in self.job.table if spec.trainable)
                facts.write_facts(
                    Path(logging.metrics_jsonl).absolute().parent, self.config, self.world, self.peak, parameters
                )
        return Monitor(
            self.data,
            self.world.axis("pp"),
            self.world.axis("cp"),
            device,
            self.objective,
            loggers,
            world_size=self.world.grid.world_size,
            flops_per_token=flops_per_token(self.job.sizes, self.config.model.seq_length),
            peak=self.peak,
        )

    def _greet(self) -> None:
        if self.terminal is not None:
            total = sum(spec.numel for spec in self.job.table if spec.trainable)
            self.terminal.say(f"{self.config.grid.describe()}, {self.world.num_groups} communicators")
            self.terminal.say(
                f"{type(self.job.model).__name__}: {total:,} parameters, {self.world.device.name}, "
                f"{str(build.compute_dtype(self.config, self.world.device)).removeprefix('torch.')}, "
                f"peak {self.peak / 1e12:.3g} TFLOP/s ({self.peak_source})"
            )
            for note in self._notes:
                self.terminal.say(note)
            if self._degree:
                self.terminal.say(self._degree)
            if self.progress.iteration:
                self.terminal.say(f"resumed at iteration {self.progress.iteration} from {self.config.checkpoint.load}")

    def _tell_end(self, exported: Path | None) -> None:
        if self.terminal is not None:
            for what, where in (
                ("checkpoint", self._checkpoint),
                ("TensorBoard files", self.config.logging.tensorboard_dir),
                ("Hugging Face model", exported),
            ):
                if where:
                    self.terminal.say(f"{what}: {where}")


class _Totals:
    """Sums over this rank's micro-batches of a step, on the device."""

    sums: dict[str, Tensor]
    routing: Tensor
    load: Tensor
    dropped: Tensor

    def __init__(self) -> None:
        self._empty = True

    def add(self, terms: Terms) -> None:
        """One micro-batch's terms."""
        sums = {name: value.detach() for name, value in terms.sums.items()}
        if self._empty:
            self.sums, self.routing, self.load, self.dropped = sums, terms.routing(), terms.load, terms.dropped
            self._empty = False
            return
        self.sums = {name: value + sums[name] for name, value in self.sums.items()}
        self.routing = self.routing + terms.routing()
        self.load = self.load + terms.load
        self.dropped = self.dropped + terms.dropped


def _due(iteration: int, interval: int) -> bool:
    return interval > 0 and iteration % interval == 0
