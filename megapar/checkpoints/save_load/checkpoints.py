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

from megapar.checkpoints.format.faults import suspects
from megapar.checkpoints.format.names import iteration_name
from megapar.checkpoints.ownership.owner import Owner, acquire_for_all_ranks
from megapar.checkpoints.ownership.scalars import (
    NAMES,
    Lineage,
    Loaded,
    names_on_lineage,
    own_lineage_first,
    sound_scalars,
)
from megapar.checkpoints.save_load import collective_io, state
from megapar.checkpoints.save_load import folder as folders
from megapar.checkpoints.save_load.background import Background, SaveFailures, Section, State, Written, unwatched
from megapar.config.run import CheckpointOptions
from megapar.config.start import check_save
from megapar.core.comm import json_messages as messages
from megapar.core.units import Json
from megapar.errors import CheckpointError, CheckpointMismatchError, Complaint, FolderLostError, UnverifiedError
from megapar.files.bucket import BucketStore
from megapar.files.location import Location, at, replace, same_place
from megapar.launch_environment import ELASTIC, job_id, launch_id, starts_before
from megapar.training.step.job import Job

LogLine = Callable[[str], None]


def _unwritable(root: Location) -> str:
    """Return the reason why a folder is not writable, or "". Checked before hours of training."""
    probe = root / f".probe-{uuid.uuid4().hex[:12]}"
    try:
        replace(probe, PROBED)
        if probe.content() != PROBED:
            return f"--save {root} does not return what is written there"
        root.list()
        probe.remove()
        return ""
    except OSError as error:
        return f"--save {root} cannot be written: {error}"


PROBED = b"megapar"
PROMISE = "the store does not refuse a second writer: that no other run saves there is your promise"


def _unguarded(root: Location) -> list[str]:
    """Return a note if nothing prevents two owners of a folder. Raises CheckpointError if nodes may come back."""
    assert isinstance(root.store, BucketStore), "a disk creates a name once"
    try:
        if root.store.excludes(root.path / f".probe-{uuid.uuid4().hex[:12]}"):
            return []
    except OSError as error:
        raise CheckpointError(f"--save {root} cannot be written: {error}") from error
    if os.environ.get(ELASTIC):
        raise CheckpointError(
            f"--save {root}: {PROMISE}, which an elastic job cannot keep: a lost node may still be writing. Pass "
            "--nnodes N in place of MIN:MAX, or use a store with conditional writes (If-None-Match)"
        )
    return [f"WARNING: --save {root}: {PROMISE}"]


@dataclass(frozen=True)
class ResumeSource:
    """The folder of checkpoints to resume from. ``same_job``: this job saved there before a restart."""

    root: Location
    same_job: bool


@dataclass(frozen=True)
class ResumeLimit:
    """The checkpoints that a run may resume from. ``others`` are on other lineages than the fault's."""

    iteration: int
    others: frozenset[str] = frozenset()

    def allows(self, folder: Location) -> bool:
        """Return True if a checkpoint is from before the fault or on another lineage."""
        return folder.name in self.others or folders.iteration_of(folder) <= self.iteration


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
        limits: Resolved folder of checkpoints -> those in it that the run may resume from. Others may contain a fault.
        owner: Ownership of the folder of --save, on rank 0.
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
        self.limits: dict[Location, ResumeLimit] = {}
        self._resumed_whole: tuple[Location, int] | None = None  # (folder, iteration), unless of the weights alone
        if options.save and (problem := self.agree(_unwritable(at(options.save)) if job.world.rank == 0 else "")):
            raise CheckpointError(problem)
        if options.save and isinstance((root := at(options.save)).store, BucketStore):
            self.notes += self.on_rank_0(lambda: _unguarded(root))
        self.owner = self._acquire(options.save, options.load) if options.save else None
        self.lineage = Lineage()
        self._other_lineages: set[str] = set()

    def _acquire(self, save: str, load: str | None) -> Owner | None:
        def check() -> list[Complaint]:
            return check_save(os.environ, {"save": save, "load": load})

        return acquire_for_all_ranks(save, self._job.world, self.agree, check)

    # Loading

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
            return ResumeSource(at(options.save), same_job=True)
        if not options.load:
            return None
        root = at(options.load)
        fresh = self._loads_what_it_saves and options.ckpt_step is None and not any(self._candidates(root))
        if fresh and not self.on_rank_0(lambda: bool(suspects(root))):
            return None  # scripts usually pass one folder for both, and their first run starts from scratch
        return ResumeSource(root, same_job=False)

    def start_from_scratch(self) -> None:
        """Check that a run without a checkpoint may start. Raises CheckpointError if --save contains checkpoints."""
        options = self._options
        if not options.save or options.load:
            return
        root = at(options.save)
        candidates, problem = self._candidates(root)
        if candidates or problem:
            readable = self.on_rank_0(lambda: any(sound_scalars(path) is not None for path in candidates))
            why = "they are not known to be of this job" if readable else "none of them can be read"
            best = f", the best one {candidates[0].name}" if candidates else ""
            raise CheckpointError(
                f"--save {root} contains checkpoints{best}, and {why}: without --load the run would begin at iteration "
                f"0 next to them. Resume from them with --load {root}, or choose another folder."
            )

    def set_lineage(self, loaded: Loaded | None, *, local: bool = False) -> None:
        """Set the lineage of the run, after ``loaded`` was loaded. ``local``: from the memory of the nodes."""
        if not self._options.save:
            return
        root, folder = at(self._options.save), self.resumed_from
        names: list[str] = self.on_rank_0(
            lambda: [path.name for paths in folders.every_checkpoint(root).values() for path in paths]
        )
        lineage: set[str] = set()
        in_root = folder is not None and (local or folder.parent.resolve() == root.resolve())
        if folder is not None and in_root and loaded is not None and loaded.scalars:
            lineage = names_on_lineage(folder.name if folder.name in names else "", loaded.scalars, names)
        self.lineage.begin(names, self.agree(sorted(lineage)))

    def names_so_far(self) -> list[str]:
        """Return the names on the lineage, with those that the newest save has or will get. Complete on rank 0."""
        epochs = {0, 0 if self.owner is None else self.owner.epoch}
        newest = {iteration_name(self._saved_at, epoch) for epoch in epochs} if self._saved_at > 0 else set()
        return sorted({*self.lineage.agreed, *(newest - set(self.lineage.others))})

    @property
    def _loads_what_it_saves(self) -> bool:
        return same_place(self._options.load or None, self._options.save or None)

    def saves_into(self, source: ResumeSource) -> bool:
        """Return True if the run saves to the folder that it resumes from."""
        return same_place(source.root, self._options.save or None)

    @cached_property
    def is_restart(self) -> bool:
        """True if the launcher started this run to replace one that failed. The first access is a collective."""
        return bool(self.agree(starts_before(os.environ) > 0))  # under torchrun every node counts its own restarts

    def _saved_by_this_job(self, root: Location) -> bool:
        """Return True if this job saved the best readable checkpoint.

        With --ckpt-step or --finetune on this folder, only checkpoints of this launch count: those of an earlier
        launch of the job are the ones that the user wants to go back from.
        """
        options, candidates = self._options, self._candidates(root)[0]
        goes_back = self._loads_what_it_saves and (options.ckpt_step is not None or options.finetune)

        def read() -> bool:
            saved: Mapping[str, Json] = next(filter(None, map(sound_scalars, candidates)), {})
            launch = saved.get("launch")
            other = bool(goes_back and launch and launch_id(os.environ) and launch != launch_id(os.environ))
            return bool(job_id(os.environ)) and saved.get("job") == job_id(os.environ) and not other

        return bool(self.on_rank_0(read))

    def load(self, read: Callable[[Location], Loaded], source: ResumeSource) -> Loaded:
        """Load the best checkpoint of a source with ``read``. If it is damaged, load an older one and report that.

        Raises CheckpointError if none is sound, or if one is damaged and --on-bad-checkpoint is stop.
        """
        options, root = self._options, source.root
        if options.ckpt_step is not None and not source.same_job:
            step = options.ckpt_step
            folder = root / str(self.on_rank_0(lambda: folders.find(root, step).name))
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

    def load_newer(self, read: Callable[[Location], Loaded], source: ResumeSource, than: int) -> Loaded | None:
        """Load the best checkpoint of iteration ``than`` or later like ``load``, or return None if none is sound.

        Raises CheckpointError if one is damaged and --on-bad-checkpoint is stop.
        """
        candidates = [path for path in self._candidates(source.root)[0] if folders.iteration_of(path) >= than]
        loaded, failures = self._first_sound(read, candidates, [])
        if loaded is None:
            self.notes += [f"WARNING: {failure}" for failure in failures]
        return loaded

    def _first_sound(
        self, read: Callable[[Location], Loaded], candidates: Sequence[Location], failures: list[str]
    ) -> tuple[Loaded | None, list[str]]:
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
                abandoned = folder.name in self._other_lineages
                why = ", which is from a lineage that the run had gone back from" if abandoned else ""
                self.notes.append(f"taking {folder.name} instead{why}")
            return self._resumed(folder, loaded), failures
        return None, failures

    def _resumed(self, folder: Location, loaded: Loaded) -> Loaded:
        self.resumed_from = folder
        self._resumed_whole = (folder.parent.resolve(), folders.iteration_of(folder)) if loaded.scalars else None
        self.notes += [f"{folder} has no {block}; it starts from its initial weights" for block in loaded.initial]
        return loaded

    def _candidates(self, root: Location) -> tuple[list[Location], str]:
        """Return (the checkpoints to try, best first; the problem with ``latest`` or ""), as rank 0 sees them."""

        def read() -> list[Json]:
            candidates, problem = folders.candidates(root)
            candidates, self._other_lineages = own_lineage_first(candidates)
            return [[path.name for path in candidates], problem]

        names, problem = self.on_rank_0(read)
        limit = self.limits.get(root.resolve())
        paths = [root / name for name in names]
        return [folder for folder in paths if limit is None or limit.allows(folder)], problem

    def agree(self, value: Json) -> Any:
        """Return rank 0's value on every rank. A shared disk may show other ranks an older state."""
        if self._group is None or self._job.world.pretended:
            return value
        return messages.broadcast(value, self._group)

    def on_rank_0(self, call: Callable[[], Any]) -> Any:
        """Call a function on rank 0. Returns its result, or raises its CheckpointError, on every rank."""
        answer: list[Any] = [None, "", False]
        if self._job.world.rank == 0 or self._job.world.pretended:
            try:
                answer[0] = call()
            except CheckpointError as error:
                answer = [None, str(error), isinstance(error, UnverifiedError)]
        value, problem, unverified = self.agree(answer)
        if problem:
            raise UnverifiedError(problem) if unverified else CheckpointError(problem)
        return value

    # Saving

    def due(self, iteration: int) -> bool:
        """Return True if a checkpoint is due after this step by --save-interval."""
        interval = self._options.save_interval
        return bool(self._options.save) and interval > 0 and iteration % interval == 0

    def save(self, iteration: int, scalars: Mapping[str, Any], *, final: bool) -> None:
        """Save a checkpoint, in the background unless it is the final one.

        Raises CheckpointError if the final save fails or, with --on-save-error stop, this or the previous one.
        """
        assert self._options.save is not None
        root = at(self._options.save)
        folder = folders.iteration_folder(root, iteration)
        layout = {"grid": state.grid_facts(self._job), "model": self._job.sizes.facts()}

        def published(named: Location) -> None:
            self._under_way = named
            self.lineage.names.add(named.name)  # first: a complete checkpoint counts, whether it is published or not
            folders.publish(root, iteration, self.owner)
            if self._options.keep:
                passed = scalars["verified"].values() if "verified" in scalars else ()
                keep, names = self._options.keep, self.lineage.names
                try:
                    removed = folders.keep_newest(root, iteration, keep, names, self.owner, passed)
                    names.difference_update(path.name for path in removed)
                except (OSError, CheckpointError) as error:  # the new checkpoint is complete nevertheless
                    self._unremoved = f"WARNING: an older checkpoint could not be removed: {error}"

        def write(shards: State | CheckpointError) -> None:
            group = self._spare if in_background else self._group
            collective_io.save(folder, shards, scalars, layout=layout, group=group, then=published, owner=self.owner)

        in_background = self._background is not None and not final
        self.join_save()
        names = {"job": job_id(os.environ), "launch": launch_id(os.environ), NAMES: self.lineage.agree(self.agree)}
        scalars = {**scalars, **names}
        if iteration == self._saved_at or (root.resolve(), iteration) == self._resumed_whole:
            return
        self._saved_at = iteration
        shards = state.shards(self._job)
        self._under_way = folder
        if in_background:
            assert self._background is not None
            self._background.begin(shards, write, f"of iteration {iteration}")
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
        if self.owner is not None and self.owner.lost:
            self.owner.check()
        if self._background is not None and self.log_line is not None and self._under_way and not self._background.busy:
            self._report(self._background.written)

    def check_owner(self) -> None:
        """Raise FolderLostError if another run owns the folder of ``--save`` by now. Reads the disk, on rank 0."""
        if self.owner is not None:
            self.owner.check()

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
