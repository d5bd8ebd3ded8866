"""The trainer: build the model, run the training loop, evaluate and save.

``train(config)`` is the Python entry point. The entry scripts call ``main``.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch

from megapar.arguments import Config
from megapar.checkpoints.export import export
from megapar.checkpoints.export.from_hf import load_hf
from megapar.checkpoints.ownership.continuation import STOP, continue_run
from megapar.checkpoints.ownership.identity import RECORD
from megapar.checkpoints.ownership.scalars import NAMES, Loaded, Start
from megapar.checkpoints.save_load import local_saves, state
from megapar.checkpoints.save_load.checkpoints import Checkpoints
from megapar.checkpoints.save_load.resume import resume
from megapar.core.comm.run_store import unknown_address
from megapar.core.comm.world import World
from megapar.core.device.accelerators import pick
from megapar.core.device.base import Device
from megapar.core.recompute.adaptive import Adaptive
from megapar.core.status_line import Status, StatusLine, silent
from megapar.data.batches import Loader
from megapar.data.corpus import Corpus
from megapar.data.eval_tasks import OF_TASK
from megapar.data.own_data import OwnData
from megapar.data.sampling.skipping import effective, merged, parse_range, sample_at
from megapar.data.tokenizers.load import store_tokenizer
from megapar.errors import DataError, input_status
from megapar.files.location import Location
from megapar.health.corruption.guards import Guards, make_guards
from megapar.health.declaration import make_entry
from megapar.health.hangs.stragglers import Stragglers
from megapar.health.hangs.watchdog import Watchdog
from megapar.health.stop import failure
from megapar.health.stop.control import Control, StopSignal
from megapar.health.stop.parent import end_with_launcher
from megapar.launch_environment import job_id
from megapar.planning.devices import check_memory, planned_memory
from megapar.training.building import ampipe_degree as degree
from megapar.training.building.corpus import make_corpus, make_loader, make_own_corpus, with_fetched_data, with_own_data
from megapar.training.building.epochs import with_epochs
from megapar.training.building.parallelize import check_device, parallelize
from megapar.training.building.parts import Parts
from megapar.training.loop.callbacks import TrainerCallback, check_instances, connect, make_callbacks, make_watchdog
from megapar.training.loop.stepper import Stepper
from megapar.training.reports import messages, opening
from megapar.training.reports.logger import Logger
from megapar.training.reports.monitor import Monitor, make_monitor
from megapar.training.reports.record import Record
from megapar.training.reports.run_facts import write_end
from megapar.training.reports.streams import guard_streams
from megapar.training.reports.terminal import EVALUATION, SAVE, PlainTerminal, make_terminal
from megapar.training.step.bad_steps import make_bad_step_policy
from megapar.training.step.batches import BatchFeed
from megapar.training.step.dtypes import make_loss_scale
from megapar.training.step.evaluate import evaluate, num_evaluated, score_tasks
from megapar.training.step.expert_places import PLACES, ExpertPlaces
from megapar.training.step.gradients import Gradients
from megapar.training.step.objective import make_objective
from megapar.training.step.observer import StepObserver
from megapar.training.step.progress import Progress
from megapar.training.step.result import StepResult
from megapar.training.step.schedules import make_learning_rate, make_weight_decay, schedule_of
from megapar.training.step.step_guard import StepGuard
from megapar.training.step.update_norms import UpdateNorms


@dataclass(frozen=True)
class Outcome:
    """The result of a run.

    Attributes:
        iteration: Last iteration done.
        records: Records of every iteration in order, if they were kept.
        evaluation: Means of the last evaluation. None without one.
        checkpoint: Folder of the newest checkpoint.
        exported: Folder of the exported Hugging Face model.
        stopped: Why the run stopped before its last step. "" if it did not.
        model: This rank's part of the model, which stays in its process: pickling the outcome leaves it out.
    """

    iteration: int
    records: tuple[Record, ...]
    evaluation: dict[str, float] | None
    checkpoint: Path | None
    exported: Path | None
    stopped: str
    model: torch.nn.Module = field(compare=False, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "model"}


def main(
    config: Config,
    *,
    loggers: Sequence[Logger] = (),
    callbacks: Sequence[TrainerCallback] = (),
    data: OwnData | None = None,
    after: Callable[[Outcome], None] | None = None,
) -> NoReturn:
    """Train, then exit the process: status 0 after a complete or stopped run, 2 for a refused configuration, else 1.

    Skips the interpreter's shutdown, in which gloo's threads sometimes abort a finished run of several ranks. A signal
    saves and stops the run. ``after`` is called with the outcome, on every rank; the other arguments are as in
    ``train``.
    """
    guard_streams()
    status = 0
    end_with_launcher()
    try:
        more: dict[str, Any] = {"loggers": loggers, "callbacks": callbacks, "data": data}
        outcome = train(config, stop_signal=StopSignal(), **more)
        if after is not None:
            after(outcome)
    except BaseException as error:
        status = failure.report(error, os.environ)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def train(
    config: Config,
    rendezvous_url: str | None = None,
    stop_signal: StopSignal | None = None,
    *,
    keep_records: bool = False,
    loggers: Sequence[Logger] = (),
    callbacks: Sequence[TrainerCallback] = (),
    data: OwnData | None = None,
    quiet: bool = False,
) -> Outcome:
    """Train with a configuration. Raises MegaparError.

    docs/python.md has examples. Every rank calls it with the same arguments.

    Args:
        rendezvous_url: Address at which the ranks rendezvous, by default from the environment that torchrun sets.
        stop_signal: Source of stop requests. All ranks stop together. Before the rendezvous a signal ends the process.
        keep_records: Keep the records of all iterations for the outcome. They take kilobytes each, on every rank, so
            use this for short runs only.
        loggers: Get the records, on rank 0, next to the loggers that the flags turn on.
        callbacks: Run around the steps, on every rank.
        data: Token ids to train on, in place of ``--data-path``.
        quiet: Print nothing to the terminal but errors. Files and loggers get what they get otherwise.
    """
    if not isinstance(config, Config):
        raise TypeError(f"train takes what parse returns, not {type(config).__name__}: train(parse('moe', ...))")
    check_instances(callbacks, TrainerCallback)
    check_instances(loggers, Logger)
    config = config if data is None else with_own_data(config, data)
    watch = make_watchdog(config)
    device = _prepare_device(config)
    watch.start()
    try:
        config, corpus = _read_data(config, device, data, prints=(os.environ.get("RANK") or "0") == "0" and not quiet)
        declared = make_entry(config, corpus, device)
        if rendezvous_url is None and (unknown := unknown_address()):
            sys.stderr.write(f"rank {os.environ['RANK']}: {unknown}\n")
        world = World.start(
            config.grid,
            device,
            timedelta(minutes=config.parallel.distributed_timeout_minutes),
            rendezvous_url,
            declared,
        )
    except BaseException:
        watch.close()
        raise
    if stop_signal is not None:
        stop_signal.install()
    try:
        user: dict[str, Any] = {"loggers": loggers, "callbacks": callbacks, "quiet": quiet}
        trainer = Trainer(config, world, corpus, stop_signal, keep_records=keep_records, watch=watch, **user)
        trainer.start()
        outcome = trainer.train()
    except torch.OutOfMemoryError as error:
        refusal = messages.out_of_memory(config, device, error, planned_memory(config, device.type, device.name))
        watch.close()
        world.abandon()
        raise refusal from error
    except BaseException:
        # The other ranks may have exited already, so this path waits for none of them.
        watch.close()
        world.abandon()
        raise
    world.close()
    return outcome


def _prepare_device(config: Config) -> Device:
    """Return this process's device, prepared for the run. Raises ConfigError if the device cannot do what it asks."""
    device = pick(config.runtime.device, int(os.environ.get("LOCAL_RANK") or "0"))
    device.prepare_process()
    check_device(config, device)
    check_memory(config, os.environ, device.type, device.name)
    if config.training.deterministic:
        device.repeat_results()
    return device


def _read_data(config: Config, device: Device, data: OwnData | None, *, prints: bool) -> tuple[Config, Corpus]:
    """Print what the run is, and return its corpus and the configuration with the length that follows from it."""
    for line in opening.header(config, device) if prints else ():
        sys.stdout.write(f"{line}\n")
    try:
        config = with_fetched_data(config)
        with StatusLine.on(sys.stdout) if prints else nullcontext(silent) as status:
            corpus = make_corpus(config, status) if data is None else make_own_corpus(config, data)
    except DataError as error:
        error.exit_status = input_status(error)
        raise
    return with_epochs(config, len(corpus.train)), corpus


class Trainer:
    """One run on this rank, in three calls: the constructor builds, ``start`` loads and ``train`` runs the loop.

    Attributes:
        job: The model with its gradients and optimizer state.
        places: The ranks that experts are on.
        progress: Position of the run in its data.
        loader: Reads micro-batches. This and the attributes below depend on the first iteration and are set by
            ``start``.
        terminal: Prints messages. None on every rank except rank 0.
    """

    loader: Loader
    stepper: Stepper
    guards: Guards
    monitor: Monitor
    terminal: PlainTerminal | None

    def __init__(
        self,
        config: Config,
        world: World,
        corpus: Corpus,
        stop_signal: StopSignal | None = None,
        *,
        keep_records: bool = False,
        watch: Watchdog | None = None,
        observer: StepObserver | None = None,
        parts: Parts | None = None,
        loggers: Sequence[Logger] = (),
        callbacks: Sequence[TrainerCallback] = (),
        quiet: bool = False,
    ) -> None:
        """Build everything that does not depend on the iteration that the run starts from.

        Args:
            watch: The watchdog. None makes one from the configuration.
            observer: Hooks into every step.
            parts: Factories of the replaceable parts. None uses the default ones.
            loggers: Loggers of the caller. This and the arguments that are not named here are as in ``train``.
        """
        self.config = config
        self._user_loggers, self._user_callbacks, self._quiet = tuple(loggers), tuple(callbacks), quiet
        self.world = world
        self.watch = watch or make_watchdog(config)
        connect(self.watch, world)
        self.data = world.axis("data")
        self.corpus = corpus
        self.parts = parts or Parts()
        self.job = parallelize(config, world, self.parts, observer)
        self.places = ExpertPlaces(config, self.job)
        self.objective = make_objective(config)
        self.learning_rate = make_learning_rate(config)
        self.loss_scale = make_loss_scale(config, world.device)
        self.progress = Progress(dropout_seed=config.training.seed)
        self._notes = corpus.notes
        self.control = Control(config.checkpoint, stop_signal, leader=world.rank == 0)
        self.checkpoints = Checkpoints(config.checkpoint, self.job, self.watch.section)
        if config.checkpoint.save_hf and self.job.sizes.drops_tokens:
            self._notes += (export.UNDROPPED,)
        self.local_saves, note = local_saves.make(config, self.job, job_id(os.environ), self.watch.section)
        self._notes += (note,)
        self._skipped = merged(parse_range(text) for text in config.reliability.skip_samples)
        self.bad_steps = make_bad_step_policy(config)
        self._stragglers = Stragglers(config.reliability.straggler_factor)
        self._records: list[Record] | None = [] if keep_records else None
        self._evaluation: dict[str, float] | None = None

    def start(self) -> None:
        """Load the checkpoint, if any, and prepare the first step. Call it once, on every rank.

        Also makes the choices that need the complete model, such as a measured degree of AMPipe slicing.
        """
        loaded = self.load()
        self._continue(loaded)
        self.collate = self.parts.collate(self.config, self.world, self.corpus)
        self.loader = make_loader(self.config, self.corpus, self.collate, self.data, self._skipped)
        choose = self.parts.ampipe_degree
        self._degree = degree.slice_model(self.config, self.job, self.objective, self.loader, self.progress, choose)
        self.world.sent_bytes.clear()  # bytes sent so far are not part of a step
        self._make_stepper(loaded)

    def load(self) -> Loaded | None:
        """Fill the model, and the optimizer state, from a checkpoint or published weights.

        Sets ``progress`` to that of the checkpoint. Returns None without a checkpoint. Raises CheckpointError.
        """
        with self.watch.section("load"):
            return self._load()

    def _continue(self, loaded: Loaded | None) -> None:
        """Compare the identity of the loaded run with this one, and choose the data to continue with."""
        config, world = self.config, self.world
        self._identity, self.corpus, notes = continue_run(
            config, world, self.corpus, loaded, self.checkpoints.resumed_from, self._skipped
        )
        self._notes += notes
        if config.checkpoint.save and world.rank == 0:
            self._notes += store_tokenizer(self.corpus.tokenizer, config.checkpoint.save)

    def _make_stepper(self, loaded: Loaded | None) -> None:
        """Make the terminal, the monitor, the guards and the stepper."""
        config, iteration = self.config, self.progress.iteration
        self.terminal = make_terminal(config, self.world.rank, iteration, quiet=self._quiet)
        self.monitor = make_monitor(
            config,
            self.job,
            self.objective,
            self.terminal,
            iteration,
            places=self.places,
            user_loggers=self._user_loggers,
            check_owner=self.checkpoints.check_owner,
        )
        gradients = Gradients(
            self.job, self.objective, self.loss_scale, lambda: (*self.guards.votes(), *self.control.votes())
        )
        self.guards = make_guards(
            config=config,
            job=self.job,
            gradients=gradients,
            loader=self.loader,
            log_line=self._message,
            start=Start.after(loaded),
            local_saves=self.local_saves,
            others=self.checkpoints.lineage.others,
        )
        self.stepper = Stepper(
            config=config,
            job=self.job,
            feed=BatchFeed(config, self.job, self.parts.denominators),
            progress=self.progress,
            learning_rate=self.learning_rate,
            weight_decay=make_weight_decay(config),
            gradients=gradients,
            step_guard=self._make_step_guard(gradients),
            bad_steps=self.bad_steps,
            guards=self.guards,
            control=self.control,
            update_norms=UpdateNorms(self.job.sharding, self.world) if config.logging.log_update_norms else None,
            before_update=self._before_update,
            before_gather=self.places.update,
        )

    def _make_step_guard(self, gradients: Gradients) -> StepGuard:
        return StepGuard(
            config=self.config,
            job=self.job,
            progress=self.progress,
            gradients=gradients,
            loss_scale=self.loss_scale,
            bad_steps=self.bad_steps,
            skipped_ranges=self._skipped,
            mean_loss=self.monitor.mean_loss,
        )

    # The loop

    def train(self) -> Outcome:
        """Train up to ``--train-iters`` or a request to stop, with evaluations and saves. Call ``start`` first."""
        self._greet()
        callbacks = make_callbacks(self.config, self.job, self.watch, self._user_callbacks)
        try:
            for user_callback in self._user_callbacks:
                user_callback.begin(self)
            if self._done:
                self._report_nothing_left()
            while not self._done:
                if line := messages.phase_begins(self.config, self.progress):
                    self._message(line)
                for callback in callbacks:
                    callback.before_step(self.progress.iteration + 1)
                with self.corpus.reading():
                    self.monitor.add(self.step())
                for callback in reversed(callbacks):
                    callback.after_step(self.progress.iteration)
                self._after_step()
            self._flush()
            if self.terminal is not None:
                self.terminal.print_last()
            exported = self._finish()
        except BaseException as error:
            if failure.is_own(error):
                self._end_saves()
            saved = self.checkpoints.folder is not None
            failure.note(error, os.environ, self.stepper.feed.following(self.progress, self._skipped), saved=saved)
            raise
        finally:
            with ExitStack() as closing:  # an error of one does not keep the others from closing
                closing.callback(self.monitor.close)
                for callback in callbacks:
                    closing.callback(callback.close)  # the last one first
                closing.callback(self.loader.close)  # before the watchdog's, because it waits for a thread that reads
        self._report_end(exported)
        folder = self.checkpoints.folder
        return Outcome(
            iteration=self.progress.iteration,
            records=tuple(self._records or ()),
            evaluation=self._evaluation,
            checkpoint=None if folder is None else folder.local_path(),
            exported=None if exported is None else exported.local_path(),
            stopped=self.control.stop,
            model=self.job.model,
        )

    def stop(self, reason: str) -> None:
        """End the run after the next step, on all ranks, with a checkpoint if there is ``--save``."""
        self.control.ask(reason)

    @property
    def _done(self) -> bool:
        return bool(self.control.stop) or self._ended

    @property
    def _ended(self) -> bool:
        """The run is complete: all steps are done, or the next one would repeat a sample and must not."""
        return self.progress.iteration >= self.config.training.train_iters or bool(self._ended_source)

    @property
    def _ended_source(self) -> str:
        """The source that ends the run before its last step, or ""."""
        done = self.progress.iteration >= self.config.training.train_iters
        if done or self.config.data.on_source_end != STOP or self.corpus.source_end is None:
            return ""
        (sample, source), progress = self.corpus.source_end, self.progress
        last = sample_at(progress.consumed_samples + self.stepper.feed.batch_size(progress) - 1, self._skipped)
        return source if last >= sample else ""

    def _after_step(self) -> None:
        """Adapt recomputation, check, log, save and evaluate, each if it is due."""
        training, iteration = self.config.training, self.progress.iteration
        if self.terminal is not None:
            self.terminal.stepped(iteration)
        self.adapt()
        self.control.stepped(iteration)
        self.checkpoints.poll()
        self._log_messages()
        self._check(saved=False)
        last = self._ended
        evaluates = training.eval_interval > 0 and (_due(iteration, training.eval_interval) or last)
        if evaluates or _due(iteration, self.config.logging.log_interval) or self.places.due(iteration):
            self._flush(evaluates=evaluates)
        if self.places.due(iteration) and (line := self.places.choose()):
            self._message(line)
        self._save_if_due(evaluates=evaluates)
        if evaluates:
            record = self.monitor.evaluated(self._evaluate())
            if self._records is not None:
                self._records[-1] = record

    def _save_if_due(self, *, evaluates: bool) -> None:
        """Save what is due after a step. ``evaluates``: an evaluation follows, which may fail and must not cost it."""
        iteration, done = self.progress.iteration, self._done
        wanted = self.control.save or self.checkpoints.due(iteration)
        if self.config.checkpoint.save and (evaluates if done else wanted):
            self._save(final=done)
        if self.local_saves is not None and self.local_saves.due(iteration) and not done:
            self._flush()
            self._wait_for_offloaded()
            self.local_saves.save(iteration, self._scalars())

    def _end_saves(self) -> None:
        """Wait for the saves in progress, after a failure of this rank that they do not contain."""
        with suppress(Exception):  # another error is being handled
            self.checkpoints.join_save()
            if self.local_saves is not None:
                self.local_saves.join_save()

    def _finish(self) -> Location | None:
        """Save the last checkpoint and export the model. Returns the folder of the exported model, or None."""
        self._check(saved=True)
        self._order_experts()
        if self.config.checkpoint.save:
            self._save(final=True)
        if self.local_saves is not None:
            self.local_saves.remove()
        self.job.sharding.wait()
        ended = self._ended  # even if the run was also asked to stop
        with self._status() as status:
            return export.export(self.config, self.job, self.corpus.tokenizer, status) if ended else None

    def _flush(self, *, evaluates: bool = False) -> None:
        self.stepper.resolve_pending()
        self.monitor.failed_saves = self.checkpoints.failures.in_a_row
        with self.watch.section("log", f"after step {self.progress.iteration}"):
            records = self.monitor.flush(evaluates=evaluates)
        if self._records is not None:
            self._records += records
        for callback in self._user_callbacks:
            for record in records:
                callback.logged(record)
        pace = records[-1].pace if records else None
        if pace is not None and (warning := self._stragglers.update(pace, len(records))):
            self._message(warning)
        for record in records:
            if not self.config.reliability.spike_skip and not record.skipped:
                self.bad_steps.watch(record.iteration, record.loss, record.grad_norm)
        self._log_messages()

    def _log_messages(self) -> None:
        for line in (*self.bad_steps.pop_messages(), *self._coverage()):
            self._message(line)

    def _coverage(self) -> list[str]:
        """Return the lines of the guards about what they compare, which a short log leaves out."""
        return self.guards.pop_messages() if opening.is_full(self.config) else []

    def _check(self, *, saved: bool) -> None:
        """Run the guards that are due after a step or before a save. Raises TrainingError for corrupted state."""
        if guards := self.guards.due(self.progress.iteration, saved=saved):
            self.stepper.resolve_pending()
            self.job.sharding.wait()
            self._wait_for_offloaded()
            self.guards.check(guards, self.progress.iteration)

    def _before_update(self) -> None:
        """Wait for background saves that still read the model, before it changes."""
        self.checkpoints.before_update()
        if self.local_saves is not None:
            self.local_saves.before_update()

    def _order_experts(self) -> None:
        """Put experts that have moved in the order of their numbers, after the checks of their present memory."""
        if self.places.away:
            self._before_update()
            self.guards.forget()
            with self.world.uncounted():
                self.places.put_in_order()

    def _wait_for_offloaded(self) -> None:
        """Wait until the device has written the offloaded master weights and moments, which the host reads next."""
        if self.config.sharding.optimizer_offload:
            self.world.device.synchronize()

    def _message(self, text: str) -> None:
        if self.terminal is not None:
            self.terminal.print_message(text)

    def _status(self) -> AbstractContextManager[Status]:
        """Return what says how far slow work is, on rank 0."""
        return nullcontext(silent) if self.terminal is None else self.terminal.status()

    def step(self) -> StepResult:
        """Run one optimizer step. See ``Stepper``."""
        return self.stepper.step(self.loader)

    def adapt(self) -> None:
        """Choose the layers to recompute from the memory of the first steps; report it. Call after every step."""
        recompute = self.job.model.recompute
        if recompute is not None and isinstance(recompute.choice, Adaptive):
            peak, world = self.world.device.peak_memory_bytes(), self.world.axis("world")
            chosen = recompute.choice.end_step(peak, 1, world, self.world.device.torch_device)
            if chosen is not None:
                self._message(str(chosen))

    # Around the step

    @contextmanager
    def _pause(self, name: str, detail: str) -> Iterator[None]:
        """Enter a section whose time is not that of steps."""
        with self.monitor.paused(), self.watch.section(name, detail):
            start = time.perf_counter()
            yield
        if self.terminal is not None:
            self.terminal.paused(name, time.perf_counter() - start)

    def _evaluate(self) -> dict[str, float]:
        heldout = self.corpus.evaluation_sets
        assert heldout  # the rules refuse an evaluation without held-out samples
        self.corpus.check_files()
        self.stepper.resolve_pending()
        self.loader.settle()
        with self.world.meter.paused():
            self.job.sharding.wait()
        pause = self._pause(EVALUATION, f"after step {self.progress.iteration}")
        with self.world.uncounted(), pause, self._status() as status:
            sizes = self.corpus.token_bytes if self.config.model.causal else None
            means = evaluate(self.config, self.job, heldout, self.collate, self.objective, sizes, status)
            scores = score_tasks(self.config, self.job, self.corpus.eval_tasks, self.collate, status)
        self._evaluation = means | {f"{OF_TASK}{name}": score for name, score in scores.items()}
        return self._evaluation

    def _load(self) -> Loaded | None:
        checkpoint = self.config.checkpoint
        loaded = resume(
            config=self.config,
            job=self.job,
            progress=self.progress,
            schedule=schedule_of(self.config),
            loss_scale=self.loss_scale,
            checkpoints=self.checkpoints,
            local_saves=self.local_saves,
        )
        self._notes += tuple(self.checkpoints.notes)
        if loaded is None:
            if checkpoint.load_hf:
                self._notes += load_hf(checkpoint.load_hf, self.job)
            return None
        self.progress, before = loaded.progress, [tuple(pair) for pair in loaded.scalars.get("skip_samples", [])]
        self._skipped = effective(self._skipped, before, self.progress.consumed_samples)
        if line := self.places.restore(loaded.scalars.get(PLACES, {})):
            self._notes += (line,)
        if "spikes" in loaded.scalars:
            self.bad_steps.restore(loaded.scalars["spikes"])
        if self.progress.iteration == 0:  # --finetune, or a checkpoint that contains only weights
            self._notes += (f"weights: {self.checkpoints.resumed_from}; the run starts at iteration 0",)
        return loaded

    def _save(self, *, final: bool) -> None:
        self.corpus.check_files()
        self._check(saved=True)
        self._flush()  # a resumed run does not repeat these steps, so its log and loss history must contain them
        with self._pause(SAVE, f"of iteration {self.progress.iteration}"):
            self._order_experts()
            self.checkpoints.save(self.progress.iteration, self._scalars(), final=final)
        self.control.saved()

    def _scalars(self) -> dict[str, Any]:
        scalars = state.scalars(self.job, self.progress, schedule_of(self.config), self.loss_scale)
        scalars["skip_samples"] = [list(pair) for pair in self._skipped]
        scalars["spikes"] = self.bad_steps.state()
        scalars[PLACES] = self.places.state()
        scalars["verified"] = dict(self.guards.verified)
        scalars[RECORD] = self._identity
        scalars[NAMES] = self.checkpoints.names_so_far()
        scalars["drops_tokens"] = self.job.sizes.drops_tokens
        return scalars

    # Messages to the user, from rank 0

    def _greet(self) -> None:
        self.guards.fault_record.hosts = names = opening.hosts(self.world)  # a collective of all ranks
        if self.terminal is None:
            return
        for line in (
            *opening.opening(self.config, self.world, self.corpus, names, compiled=self.job.compiled),
            *opening.model_lines(self.config, self.job, self.monitor),
        ):
            self.terminal.print_line(line)
        self.checkpoints.log_line = self.terminal.print_message
        if self.local_saves is not None:
            self.local_saves.log_line = self.terminal.print_message
        for line in (*self._notes, *self._coverage(), self._degree):
            if line:
                self.terminal.print_message(line)
        if self.progress.iteration:
            self._message(f"resumed at iteration {self.progress.iteration} from {self.checkpoints.resumed_from}")

    def _report_nothing_left(self) -> None:
        training = self.config.training
        if training.train_iters and not self._ended_source:
            self._message(messages.nothing_left(self.progress.iteration, training.train_iters))
        if training.eval_interval:  # a run without steps is the way to evaluate a checkpoint
            means, sets = self._evaluate(), self.corpus.evaluation_sets.values()
            read = sum(num_evaluated(self.config, samples) for samples in sets)
            self._message(messages.evaluation(means, read, sum(map(len, sets))))

    def _report_end(self, exported: Location | None) -> None:
        stop, folder = self.control.stop, self.checkpoints.folder
        source = self._ended_source
        if self.terminal is not None and self.config.logging.metrics_file:
            write_end(Path(self.config.logging.metrics_file).absolute().parent, self.progress.iteration, stop)
        for line in messages.farewell(self.config, self.progress.iteration, stop, folder, exported, source):
            self._message(line)


def _due(iteration: int, interval: int) -> bool:
    return interval > 0 and iteration % interval == 0
