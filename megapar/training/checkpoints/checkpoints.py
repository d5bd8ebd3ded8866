"""Checkpoints of a run: when to save, how long training waited for it, and which checkpoint to resume from."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch.distributed as dist

from megapar.config.run import CheckpointOptions
from megapar.core.checkpoint import folder as folders
from megapar.core.checkpoint import store
from megapar.core.checkpoint.background import Background, Section, State, Written, no_copy, unwatched
from megapar.core.comm import json_messages as messages
from megapar.core.units import Json
from megapar.errors import CheckpointError, CheckpointMismatchError, FolderLostError, UnverifiedError
from megapar.files.location import Location, at
from megapar.files.suspects import suspects
from megapar.launch_environment import job_id, launch_id, starts_before
from megapar.training.checkpoints import ownership, state
from megapar.training.checkpoints.aftermath import Aftermath, ResumeLimits
from megapar.training.checkpoints.lineage import NAMES, Lineage, before, in_order, scalars_of
from megapar.training.checkpoints.local_saves import LocalSaves
from megapar.training.checkpoints.save_failures import SaveFailures
from megapar.training.step.job import Job

LogLine = Callable[[str], None]


def is_restart(environ: Mapping[str, str]) -> bool:
    """Return True if the launcher started this process to replace one that failed."""
    return starts_before(environ) > 0


def _unwritable(root: Location) -> str:
    """Return the reason why a folder is not writable, or "". Checked before hours of training."""
    probe = root / f".probe-{uuid.uuid4().hex[:12]}"
    try:
        probe.write().finish(durable=False)
        probe.remove()
        return ""
    except OSError as error:
        return f"--save {root} cannot be written: {error}"


@dataclass(frozen=True)
class ResumeSource:
    """The folder of checkpoints that a run resumes from.

    Attributes:
        root: The folder.
        own: True if this job saved there before it was restarted.
    """

    root: Location
    own: bool


class Checkpoints:
    """Saves and loads the checkpoints of one run. Every rank makes the same calls in the same step.

    ``section`` watches the thread that saves.

    Attributes:
        log_line: Writes a line to the log, on rank 0. None before the log is open.
        notes: Lines from before the log was open.
        failures: Counts saves that failed.
        folder: The newest checkpoint that this start saved.
        resumed_from: The checkpoint that was loaded.
        lineage: Names of the checkpoints on this run's lineage.
    """

    def __init__(self, options: CheckpointOptions, job: Job, section: Section = unwatched) -> None:
        self._options = options
        self._job = job
        self._group = job.world.axis("world").group
        self._background: Background | None = None
        self._spare: dist.ProcessGroup | None = None
        if options.save and options.async_save and (options.save_interval or options.save_interval_minutes):
            self._background = Background(job.world.device, section)
            self._spare = job.world.spare_group("save")
        self._under_way: Location | None = None
        self._saved_at = -1
        self._unremoved = ""
        self.failures = SaveFailures()
        self.log_line: LogLine | None = None
        self.notes: list[str] = []
        self.folder: Location | None = None
        self.resumed_from: Location | None = None
        self._limits = ResumeLimits({})
        self._resumed_whole: tuple[Location, int] | None = None  # (folder, iteration), unless of the weights alone
        if options.save and (problem := self._agree(_unwritable(at(options.save)) if job.world.rank == 0 else "")):
            raise CheckpointError(problem)
        self._owner = ownership.take(options.save, options.load, job.world, self._agree) if options.save else None
        self.lineage = Lineage()
        self._turned_from: set[str] = set()

    # Loading

    def clear_up(self, local_saves: LocalSaves | None) -> int | None:
        """Set aside the checkpoints that may contain the fault that ended the previous start.

        Returns the last iteration of a local checkpoint that may be loaded. Raises CheckpointError if there is nothing
        left to resume from.
        """
        aftermath = Aftermath(self._options, self._job.world, local_saves, self._agree, self._owner)
        self._limits = aftermath.clear_up()
        self.notes += aftermath.notes
        return self._limits.local

    def _allowed(self, root: Location, candidates: list[Location]) -> list[Location]:
        limit = self._limits.by_root.get(root)
        return [folder for folder in candidates if limit is None or limit.allows(folder)]

    def source(self) -> ResumeSource | None:
        """Return the folder of checkpoints to resume from: --load, or --save if this job has already saved there.

        A job that is started again under the same name counts as this job, like a restart. If --load and --save are the
        same folder, --ckpt-step selects a checkpoint as usual.
        """
        options, restart = self._options, self.is_restart
        if options.save and (restart or not self._loads_what_it_saves) and self._saved_by_this_job(at(options.save)):
            if not restart:
                instead = f", not from --load {options.load}" if options.load else ""
                name = f"{options.save} contains checkpoints of this job, {job_id(os.environ)}"
                self.notes.append(f"--save {name}: the run resumes from them{instead}")
            return ResumeSource(at(options.save), own=True)
        if not options.load:
            return None
        root = at(options.load)
        named = options.ckpt_step is not None and self._agree(sorted(suspects(root)))
        if self._loads_what_it_saves and not self._candidates(root)[0] and not named:
            return None  # scripts usually pass one folder for both, and their first run starts from scratch
        return ResumeSource(root, own=False)

    def start_from_scratch(self) -> None:
        """Check that a run without a checkpoint may start. Raises CheckpointError if --save contains checkpoints."""
        options = self._options
        if not options.save or options.load:
            return
        root = at(options.save)
        candidates, problem = self._candidates(root)
        if candidates or problem:
            readable = self._agree(self._reads and any(scalars_of(path) is not None for path in candidates))
            why = "they are not known to be of this job" if readable else "none of them can be read"
            best = f", the best one {candidates[0].name}" if candidates else ""
            raise CheckpointError(
                f"--save {root} contains checkpoints{best}, and {why}: without --load the run would begin at iteration "
                f"0 next to them. Resume from them with --load {root}, or choose another folder."
            )

    def follow(self, loaded: state.Loaded | None, *, local: bool = False) -> None:
        """Set the lineage of the run, after ``loaded`` was loaded. ``local``: from the memory of the nodes."""
        if not self._options.save:
            return
        root, place = at(self._options.save), self.resumed_from
        read = [path.name for paths in folders.every_checkpoint(root).values() for path in paths] if self._reads else []
        names: list[str] = self._agree(read)
        lineage: set[str] = set()
        in_root = place is not None and (local or place.parent.resolve() == root.resolve())
        if place is not None and in_root and loaded is not None and loaded.scalars:
            lineage = before(place.name if place.name in names else "", loaded.scalars, names)
        self.lineage.begin(names, self._agree(sorted(lineage)))

    @property
    def _reads(self) -> bool:
        """True if this rank reads folders for all ranks."""
        return self._job.world.rank == 0 or self._job.world.pretended

    @property
    def _loads_what_it_saves(self) -> bool:
        options = self._options
        return bool(options.save and options.load) and at(str(options.load)) == at(str(options.save))

    def saves_into(self, source: ResumeSource) -> bool:
        """Return True if the run saves to the folder that it resumes from."""
        return bool(self._options.save) and source.root == at(str(self._options.save))

    @cached_property
    def is_restart(self) -> bool:
        """True if the launcher started this run to replace one that failed. The first access is a collective."""
        return bool(self._agree(is_restart(os.environ)))  # under torchrun every node counts its own restarts

    def _saved_by_this_job(self, root: Location) -> bool:
        """Return True if this job saved the best readable checkpoint.

        With --ckpt-step or --finetune on this folder, only checkpoints of this launch count: those of an earlier
        launch of the job are the ones that the user wants to go back from.
        """
        options, candidates = self._options, self._candidates(root)[0]
        goes_back = self._loads_what_it_saves and (options.ckpt_step is not None or options.finetune)

        def read() -> bool:
            saved: Mapping[str, Json] = next(filter(None, map(scalars_of, candidates)), {})
            launch = saved.get("launch")
            other = bool(goes_back and launch and launch_id(os.environ) and launch != launch_id(os.environ))
            return bool(job_id(os.environ)) and saved.get("job") == job_id(os.environ) and not other

        return bool(self._agree(read() if self._reads else None))

    def load(self, read: Callable[[Location], state.Loaded], source: ResumeSource) -> state.Loaded:
        """Load the best checkpoint of a source with ``read``. If it is damaged, load an older one and report that.

        Raises CheckpointError if none is sound, or if one is damaged and --on-bad-checkpoint is stop.
        """
        options, root = self._options, source.root
        if options.ckpt_step is not None and not source.own:
            folder = self._checkpoint_of(root, options.ckpt_step)
            return self._resumed(folder, read(folder))
        candidates, problem = self._candidates(root)
        if problem and options.on_bad_checkpoint == "stop":
            raise CheckpointError(problem)
        loaded, failures = self._first_sound(read, candidates, [problem] if problem else [])
        if loaded is not None:
            return loaded
        if not failures:
            folders.find(root)  # raises an error that names what is missing
            raise UnverifiedError(f"{root} has no checkpoint from before the fault that is recorded there")
        raise CheckpointError(f"{root} has no sound checkpoint: {'; '.join(failures)}")

    def _checkpoint_of(self, root: Location, iteration: int) -> Location:
        """Return the checkpoint of an iteration, as rank 0 sees it. Raises CheckpointError, on every rank."""
        name, problem = "", ""
        if self._reads:
            try:
                name = folders.find(root, iteration).name
            except CheckpointError as error:
                problem = str(error)
        name, problem = self._agree([name, problem])
        if problem:
            raise CheckpointError(problem)
        return root / str(name)

    def load_newer(
        self, read: Callable[[Location], state.Loaded], source: ResumeSource, than: int
    ) -> state.Loaded | None:
        """Load the best checkpoint of iteration ``than`` or later like ``load``, or return None if none is sound.

        Raises CheckpointError if one is damaged and --on-bad-checkpoint is stop.
        """
        candidates = [path for path in self._candidates(source.root)[0] if folders.iteration_of(path) >= than]
        loaded, failures = self._first_sound(read, candidates, [])
        if loaded is None:
            self.notes += [f"WARNING: {failure}" for failure in failures]
        return loaded

    def _first_sound(
        self, read: Callable[[Location], state.Loaded], candidates: Sequence[Location], failures: list[str]
    ) -> tuple[state.Loaded | None, list[str]]:
        """Return (the state loaded from the first sound folder or None, the errors of the folders before it)."""
        for folder in candidates:
            try:
                loaded = read(folder)
            except CheckpointMismatchError:
                raise
            except CheckpointError as error:
                if self._options.on_bad_checkpoint == "stop":
                    raise
                failures.append(str(error))
                continue
            self.notes += [f"WARNING: {failure}" for failure in failures]
            if failures:
                other = ", which is from a lineage that the run had gone back from" * (folder.name in self._turned_from)
                self.notes.append(f"taking {folder.name} instead{other}")
            return self._resumed(folder, loaded), failures
        return None, failures

    def _resumed(self, folder: Location, loaded: state.Loaded) -> state.Loaded:
        self.resumed_from = folder
        self._resumed_whole = (folder.parent.resolve(), folders.iteration_of(folder)) if loaded.scalars else None
        self.notes += [f"{folder} has no {block}; it starts from its initial weights" for block in loaded.initial]
        return loaded

    def _candidates(self, root: Location) -> tuple[list[Location], str]:
        """Return (the checkpoints to try, best first; the problem with ``latest`` or ""), as rank 0 sees them."""
        names, problem, failure = [], "", ""
        try:
            if self._reads:
                candidates, problem = folders.candidates(root)
                candidates, self._turned_from = in_order(candidates)
                names = [path.name for path in candidates]
        except CheckpointError as error:
            failure = str(error)
        names, problem, failure = self._agree([names, problem, failure])
        if failure:
            raise CheckpointError(failure)
        return self._allowed(root, [root / name for name in names]), problem

    def _agree(self, value: Json) -> Any:
        """Return rank 0's value on every rank. A shared disk may show other ranks an older state."""
        if self._group is None or self._job.world.pretended:
            return value
        return messages.broadcast(value, self._group)

    # Saving

    def due(self, iteration: int) -> bool:
        """Return True if a checkpoint is due after this step by --save-interval."""
        interval = self._options.save_interval
        return bool(self._options.save) and interval > 0 and iteration % interval == 0

    def save(self, iteration: int, scalars: Mapping[str, Any], *, final: bool) -> None:
        """Save a checkpoint, in the background unless it is the final one.

        Raises CheckpointError if this or the previous save failed and --on-save-error is stop, or if it is the final
        one.
        """
        assert self._options.save is not None
        root = at(self._options.save)
        folder = folders.iteration_folder(root, iteration)
        layout = {"grid": state.grid_facts(self._job), "model": state.model_facts(self._job)}

        def published(named: Location) -> None:
            self._under_way = named
            self.lineage.names.add(named.name)  # first: a complete checkpoint counts, whether it is published or not
            folders.publish(root, iteration, self._owner)
            if self._options.keep:
                passed = scalars["verified"].values() if "verified" in scalars else ()
                keep, line = self._options.keep, self.lineage.names
                try:
                    removed = folders.keep_newest(root, iteration, keep, line, self._owner, passed)
                    line.difference_update(path.name for path in removed)
                except (OSError, CheckpointError) as error:  # the new checkpoint is complete nevertheless
                    self._unremoved = f"WARNING: an older checkpoint could not be removed: {error}"

        def write(shards: State | CheckpointError) -> None:
            group = self._spare if in_background else self._group
            store.save(folder, shards, scalars, layout=layout, group=group, then=published, owner=self._owner)

        in_background = self._background is not None and not final
        self.join_save()
        names = {"job": job_id(os.environ), "launch": launch_id(os.environ), NAMES: self.lineage.agree(self._agree)}
        scalars = {**scalars, **names}
        if iteration == self._saved_at or (root.resolve(), iteration) == self._resumed_whole:
            return
        self._saved_at = iteration
        shards = {**state.weights(self._job), **state.optimizer_states(self._job)}
        self._under_way = folder
        if in_background:
            assert self._background is not None
            self._background.begin(shards, write, lambda error: write(no_copy(error)), f"of iteration {iteration}")
            return
        start = time.perf_counter()
        error: BaseException | None = None
        try:
            write(shards)
        except CheckpointError as failure:
            error = failure
        seconds = time.perf_counter() - start
        self._finish(Written(seconds, seconds, error), final=final)

    def before_update(self) -> None:
        """Wait until a save has copied the state that the optimizer is about to change."""
        if self._background is not None:
            self._background.wait_for_copy()

    def poll(self) -> None:
        """Report a background save that has completed, on rank 0. All ranks act on its result in ``join_save``.

        Raises FolderLostError on the rank that owned the folder if another run owns it now, because no save can
        succeed any more.
        """
        if self._owner is not None and self._owner.lost:
            self._owner.check()
        if self._background is not None and self.log_line is not None and self._under_way and not self._background.busy:
            self._report(self._background.written)

    def check_owner(self) -> None:
        """Raise FolderLostError if another run owns the folder of ``--save`` by now. Reads the disk, on rank 0."""
        if self._owner is not None:
            self._owner.check()

    def join_save(self) -> None:
        """Wait for the save in progress. Raises CheckpointError if it failed and --on-save-error is stop."""
        written = None if self._background is None else self._background.join()
        if written is not None:
            self._finish(written, final=False)

    def _finish(self, written: Written, *, final: bool) -> None:
        folder, error = self._under_way, written.error
        self._report(written)
        self._under_way = None
        if error is None:
            self.folder = folder
            return
        self._saved_at = 0  # so that this iteration can be saved again
        stops = final or self._options.on_save_error == "stop" or isinstance(error, FolderLostError)
        if not isinstance(error, CheckpointError) or stops:
            raise error

    def _report(self, written: Written) -> None:
        if self._under_way is None or written.reported:
            return
        written.reported = True
        name = self._under_way.name
        if written.error is None:
            waited, total = written.stall_seconds, written.total_seconds
            times = f"checkpoint {name}: training waited {waited:.3f} s, on disk after {total:.3f} s"
            lines = [times, self._unremoved, self.failures.saved(name)]
        else:
            lines = [self.failures.failed(name, written.error)]
        self._unremoved = ""
        for line in lines:
            if line and self.log_line is not None:
                self.log_line(line)
