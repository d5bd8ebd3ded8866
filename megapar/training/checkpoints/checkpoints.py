"""A run's checkpoints: when they are taken, how long that held training up, and which one a run goes on from."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megapar.config.launched import job_id, launch_id, starts_before
from megapar.config.run import CheckpointOptions
from megapar.config.suspects import suspects
from megapar.core.checkpoint import folder as folders
from megapar.core.checkpoint import store
from megapar.core.checkpoint.background import Background, Section, State, Written, no_copy, unwatched
from megapar.core.comm import json_messages as messages
from megapar.core.units import Json
from megapar.errors import CheckpointError, CheckpointMismatchError, FolderLostError, UnverifiedError
from megapar.training.building.job import Job
from megapar.training.checkpoints import ownership, state
from megapar.training.checkpoints.lineage import NAMES, Lineage, before, in_order, scalars_of
from megapar.training.checkpoints.local_saves import LocalSaves
from megapar.training.checkpoints.save_failures import SaveFailures
from megapar.training.health.aftermath import Aftermath, ResumeLimits

Say = Callable[[str], None]


def is_restart(environ: Mapping[str, str]) -> bool:
    """Whether the launcher started this process in place of one that failed."""
    return starts_before(environ) > 0


def _unwritable(root: Path) -> str:
    """Why no checkpoint could be saved under a folder, which is tried before hours of training; "" where one can."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=root):
            return ""
    except OSError as error:
        return f"--save {root} cannot be written: {error}"


@dataclass(frozen=True)
class ResumeSource:
    """Where a run goes on from. own: this very job has saved there before it was restarted."""

    root: Path
    own: bool


class Checkpoints:
    """Saves and loads for one run; every rank has one and calls the same in the same step.

    say: where rank 0 reports; notes: what there was to say before it could. section: what watches a thread that saves.
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
        self._under_way: Path | None = None
        self._saved_at = -1
        self._unremoved = ""
        self.failures = SaveFailures()
        self.say: Say | None = None
        self.notes: list[str] = []
        self.folder: Path | None = None
        self.resumed_from: Path | None = None
        self._limits = ResumeLimits({})
        self._resumed_whole: tuple[Path, int] | None = None  # the same, unless its weights alone were taken
        if options.save and (problem := self._agree(_unwritable(Path(options.save)) if job.world.rank == 0 else "")):
            raise CheckpointError(problem)
        self._owner = ownership.take(options.save, options.load, job.world, self._agree) if options.save else None
        self.lineage = Lineage()
        self._turned_from: set[str] = set()

    # Loading

    def clear_up(self, local_saves: LocalSaves | None) -> int | None:
        """Set aside what may hold a fault that ended the run before; the last iteration of a local checkpoint that may
        be taken. Raises CheckpointError where nothing is left to go on from.
        """
        aftermath = Aftermath(self._options, self._job.world, local_saves, self._agree, self._owner)
        self._limits = aftermath.clear_up()
        self.notes += aftermath.notes
        return self._limits.local

    def _allowed(self, root: Path, found: list[Path]) -> list[Path]:
        limit = self._limits.by_root.get(root)
        return [one for one in found if limit is None or limit.allows(one)]

    def source(self) -> ResumeSource | None:
        """The folder of checkpoints to go on from: --load, or what this very job has saved since.

        A job that is started again by the name that it was given has saved there as well as one that is restarted; who
        names the same folder by --load asks for a step of it in the usual way.
        """
        options, restart = self._options, self.is_restart
        if options.save and (restart or not self._loads_what_it_saves) and self._saved_by_this_job(Path(options.save)):
            if not restart:
                instead = f", not from --load {options.load}" if options.load else ""
                name = f"{options.save} holds checkpoints of this job, {job_id(os.environ)}"
                self.notes.append(f"--save {name}: it goes on from them{instead}")
            return ResumeSource(Path(options.save), own=True)
        if not options.load:
            return None
        root = Path(options.load)
        named = options.ckpt_step is not None and self._agree(sorted(suspects(root)))
        if self._loads_what_it_saves and not self._candidates(root)[0] and not named:
            return None  # the usual script names one folder for both; its first run starts from scratch
        return ResumeSource(root, own=False)

    def begin_anew(self) -> None:
        """There is nothing to go on from. Raises CheckpointError where the run would lose what lies in --save."""
        options = self._options
        if not options.save or options.load:
            return
        root = Path(options.save)
        found, problem = self._candidates(root)
        if found or problem:
            readable = self._agree(self._asks and any(scalars_of(path) is not None for path in found))
            why = "they are not known to be of this job" if readable else "none of them can be read"
            best = f", the best one {found[0].name}" if found else ""
            raise CheckpointError(
                f"--save {root} holds checkpoints{best}, and {why}: without --load the run would begin at iteration 0 "
                f"beside them. Go on from them by --load {root}, or give another folder."
            )

    def follow(self, loaded: state.Loaded | None, *, local: bool = False) -> None:
        """Know the run's line, once all ranks know what it goes on from. local: a checkpoint in nodes' memory."""
        if not self._options.save:
            return
        root, place = Path(self._options.save), self.resumed_from
        names = [path.name for paths in folders.every_checkpoint(root).values() for path in paths] if self._asks else []
        there: list[str] = self._agree(names)
        own: set[str] = set()
        here = place is not None and (local or place.parent.resolve() == root.resolve())
        if place is not None and here and loaded is not None and loaded.scalars:
            own = before(place.name if place.name in there else "", loaded.scalars, there)
        self.lineage.begin(there, self._agree(sorted(own)))

    @property
    def _asks(self) -> bool:
        """Whether this rank looks at folders for all."""
        return self._job.world.rank == 0 or self._job.world.pretended

    @property
    def _loads_what_it_saves(self) -> bool:
        options = self._options
        return bool(options.save and options.load) and Path(str(options.load)) == Path(str(options.save))

    def saves_into(self, source: ResumeSource) -> bool:
        """Whether the run saves where it goes on from."""
        return bool(self._options.save) and source.root == Path(str(self._options.save))

    @cached_property
    def is_restart(self) -> bool:
        """Whether the launcher started this run in place of one that failed; all ranks ask."""
        return bool(self._agree(is_restart(os.environ)))  # under torchrun every node counts for itself

    def _saved_by_this_job(self, root: Path) -> bool:
        """Whether this very job has saved the best checkpoint that can be read.

        Where a step of this folder is asked for, or tuned, by this launch: an earlier one of the same job is what it
        was to turn back from.
        """
        options, found = self._options, self._candidates(root)[0]
        named = self._loads_what_it_saves and (options.ckpt_step is not None or options.finetune)

        def look() -> bool:
            saved: Mapping[str, Json] = next(filter(None, map(scalars_of, found)), {})
            launch = saved.get("launch")
            other = bool(named and launch and launch_id(os.environ) and launch != launch_id(os.environ))
            return bool(job_id(os.environ)) and saved.get("job") == job_id(os.environ) and not other

        return bool(self._agree(look() if self._asks else None))

    def load(self, read: Callable[[Path], state.Loaded], source: ResumeSource) -> state.Loaded:
        """``read`` of the best checkpoint of a source; of an older one where that is damaged, which is told.

        Raises CheckpointError where none is sound, or --on-bad-checkpoint stop.
        """
        options, root = self._options, source.root
        if options.ckpt_step is not None and not source.own:
            folder = self._found(root, options.ckpt_step)
            return self._resumed(folder, read(folder))
        found, problem = self._candidates(root)
        if problem and options.on_bad_checkpoint == "stop":
            raise CheckpointError(problem)
        loaded, failures = self._first_sound(read, found, [problem] if problem else [])
        if loaded is not None:
            return loaded
        if not failures:
            folders.find(root)  # says what is missing
            raise UnverifiedError(f"{root} has no checkpoint from before the fault that is recorded there")
        raise CheckpointError(f"{root} has no sound checkpoint: {'; '.join(failures)}")

    def _found(self, root: Path, iteration: int) -> Path:
        """The checkpoint of an iteration, as rank 0 sees it. Raises CheckpointError, on every rank."""
        name, problem = "", ""
        if self._asks:
            try:
                name = folders.find(root, iteration).name
            except CheckpointError as error:
                problem = str(error)
        name, problem = self._agree([name, problem])
        if problem:
            raise CheckpointError(problem)
        return root / str(name)

    def load_newer(self, read: Callable[[Path], state.Loaded], source: ResumeSource, than: int) -> state.Loaded | None:
        """The same where something of this iteration or a later one is sound; None where it is not, which is told.

        Raises CheckpointError where something is damaged and --on-bad-checkpoint stop.
        """
        found = [path for path in self._candidates(source.root)[0] if folders.iteration_of(path) >= than]
        loaded, failures = self._first_sound(read, found, [])
        if loaded is None:
            self.notes += [f"WARNING: {failure}" for failure in failures]
        return loaded

    def _first_sound(
        self, read: Callable[[Path], state.Loaded], found: Sequence[Path], failures: list[str]
    ) -> tuple[state.Loaded | None, list[str]]:
        """(``read`` of the first folder that is sound, what was wrong with those before it)."""
        for folder in found:
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
                turned = ", which is of a line that the run had turned back from" * (folder.name in self._turned_from)
                self.notes.append(f"taking {folder.name} instead{turned}")
            return self._resumed(folder, loaded), failures
        return None, failures

    def _resumed(self, folder: Path, loaded: state.Loaded) -> state.Loaded:
        self.resumed_from = folder
        self._resumed_whole = (folder.parent.resolve(), folders.iteration_of(folder)) if loaded.scalars else None
        self.notes += [f"{folder} has no {what}; it starts anew" for what in loaded.initial]
        return loaded

    def _candidates(self, root: Path) -> tuple[list[Path], str]:
        """The checkpoints that may be tried, best first, and what is wrong with ``latest``, as rank 0 sees them."""
        names, told, failure = [], "", ""
        try:
            if self._asks:
                found, told = folders.candidates(root)
                found, self._turned_from = in_order(found)
                names = [path.name for path in found]
        except CheckpointError as error:
            failure = str(error)
        names, told, failure = self._agree([names, told, failure])
        if failure:
            raise CheckpointError(failure)
        return self._allowed(root, [root / name for name in names]), told

    def _agree(self, value: Json) -> Any:
        """Rank 0's view, everywhere: a shared disk may show other ranks an older state."""
        if self._group is None or self._job.world.pretended:
            return value
        return messages.broadcast(value, self._group)

    # Saving

    def due(self, iteration: int) -> bool:
        """Whether a checkpoint is to be taken after this step by count."""
        interval = self._options.save_interval
        return bool(self._options.save) and interval > 0 and iteration % interval == 0

    def save(self, iteration: int, scalars: Mapping[str, Any], *, final: bool) -> None:
        """Take a checkpoint; in the background unless it is the final one, after which nothing hides it.

        Raises CheckpointError where it (or the one before it) failed and that is to stop the run, or no other follows.
        """
        assert self._options.save is not None
        root = Path(self._options.save)
        folder = folders.iteration_folder(root, iteration)
        layout = {"grid": state.grid_facts(self._job), "model": state.model_facts(self._job)}

        def published(named: Path) -> None:
            folders.publish(root, iteration, self._owner)
            self._under_way = named
            self.lineage.names.add(named.name)
            if self._options.keep:
                passed = scalars["verified"].values() if "verified" in scalars else ()
                keep, line = self._options.keep, self.lineage.names
                try:
                    removed = folders.keep_newest(root, iteration, keep, line, self._owner, passed)
                    line.difference_update(path.name for path in removed)
                except (OSError, CheckpointError) as error:  # this one is safe all the same
                    self._unremoved = f"WARNING: an older checkpoint could not be removed: {error}"

        def write(shards: State | CheckpointError) -> None:
            group = self._spare if in_background else self._group
            store.save(folder, shards, scalars, layout=layout, group=group, then=published, owner=self._owner)

        in_background = self._background is not None and not final
        self.settle()
        names = {"job": job_id(os.environ), "launch": launch_id(os.environ), NAMES: self.lineage.tell(self._agree)}
        scalars = {**scalars, **names}
        if iteration == self._saved_at or (root.resolve(), iteration) == self._resumed_whole:
            return
        self._saved_at = iteration
        shards = {**state.weights(self._job), **state.moments(self._job)}
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
        self._tell(Written(seconds, seconds, error), final=final)

    def before_update(self) -> None:
        """The optimizer is about to change what a save may still be copying."""
        if self._background is not None:
            self._background.settle_copy()

    def look(self) -> None:
        """Tell of a save that is done by now, on the rank that speaks; all ranks act on it in ``settle``.

        Raises FolderLostError on the rank that owned the folder, where another run does by now: no save will succeed.
        """
        if self._owner is not None and self._owner.lost:
            self._owner.check()
        if self._background is not None and self.say is not None and self._under_way and not self._background.busy:
            self._report(self._background.written)

    def settle(self) -> None:
        """Wait for the save under way. Raises CheckpointError where it failed and --on-save-error is stop."""
        written = None if self._background is None else self._background.join()
        if written is not None:
            self._tell(written, final=False)

    def _tell(self, written: Written, *, final: bool) -> None:
        folder, error = self._under_way, written.error
        self._report(written)
        self._under_way = None
        if error is None:
            self.folder = folder
            return
        self._saved_at = 0  # whoever asks for this one again is to get it
        stops = final or self._options.on_save_error == "stop" or isinstance(error, FolderLostError)
        if not isinstance(error, CheckpointError) or stops:
            raise error

    def _report(self, written: Written) -> None:
        if self._under_way is None or written.told:
            return
        written.told = True
        name = self._under_way.name
        if written.error is None:
            waited, total = written.stall_seconds, written.total_seconds
            said = f"checkpoint {name}: training waited {waited:.3f} s, on disk after {total:.3f} s"
            lines = [said, self._unremoved, self.failures.saved(name)]
        else:
            lines = [self.failures.failed(name, written.error)]
        self._unremoved = ""
        for line in lines:
            if line and self.say is not None:
                self.say(line)
