"""The start of a run from a local checkpoint, this job's own checkpoints, or those of ``--load``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from megapar.arguments import Config
from megapar.core.checkpoint.local import FoundLocal
from megapar.core.checkpoint.store import Verify
from megapar.core.optimizer.loss_scale import LossScale
from megapar.files.location import Location, at
from megapar.training.checkpoints import state
from megapar.training.checkpoints.checkpoints import Checkpoints
from megapar.training.checkpoints.local_saves import LocalSaves
from megapar.training.step.job import Job
from megapar.training.step.progress import Progress


def resume(
    config: Config,
    job: Job,
    progress: Progress,
    schedule: Mapping[str, Any],
    loss_scale: LossScale | None,
    checkpoints: Checkpoints,
    local_saves: LocalSaves | None,
) -> state.Loaded | None:
    """Fill weights and optimizer state from the newest sound checkpoint. Returns None if the run starts from scratch.

    Raises CheckpointError.

    Args:
        job: This rank's part of the model.
        progress: The progress of a run without a checkpoint.
        schedule: This run's learning-rate schedule.
        loss_scale: The loss scaling of fp16. None without it.
        checkpoints: Checkpoints on disk.
        local_saves: Checkpoints in the memory of the nodes. None without them.
    """
    limit = checkpoints.clear_up(local_saves)
    source = checkpoints.source()
    own = source is not None and source.own
    local = None if local_saves is None else _find_local(config, checkpoints, local_saves, limit, own=own)
    if source is None and local is None:
        checkpoints.start_from_scratch()
        checkpoints.follow(None)
        return None
    wanted = _load_options(config, own=own or local is not None)

    def read(folder: Location) -> state.Loaded:
        return state.load(folder, job, progress, schedule, wanted, loss_scale)

    if local is not None and local_saves is not None:
        # A newer sound checkpoint on disk takes precedence.
        newer = source is not None and checkpoints.saves_into(source)
        loaded = checkpoints.load_newer(read, source, local.iteration) if source is not None and newer else None
        if loaded is None:
            place = at(f"local checkpoint {local.iteration}")
            checkpoints.resumed_from = place
            checkpoints.notes.append(f"taking the local checkpoint of iteration {local.iteration}")
            loaded = state.restore_scalars(place, local_saves.load(local), job, progress, schedule, wanted, loss_scale)
            checkpoints.follow(loaded, local=True)
            return loaded
    else:
        assert source is not None
        loaded = checkpoints.load(read, source)
    checkpoints.follow(loaded)
    return loaded


def _find_local(
    config: Config, checkpoints: Checkpoints, local_saves: LocalSaves, limit: int | None, *, own: bool
) -> FoundLocal | None:
    """Return the newest local checkpoint that may be loaded, of iteration ``limit`` at most, or None.

    ``own``: the checkpoints on disk are those of this job.
    """
    options = config.checkpoint
    if not own and not checkpoints.is_restart and (options.ckpt_step is not None or options.finetune):
        local_saves.remove_after(-1)  # --ckpt-step and --finetune go back from all later checkpoints
        return None
    return local_saves.find(limit)


def _load_options(config: Config, *, own: bool) -> state.LoadOptions:
    """Return what is loaded of a checkpoint: all of it if it is this job's ``own``, because the job was restarted."""
    options = config.checkpoint
    return state.LoadOptions(
        finetune=options.finetune and not own,
        optimizer=own or not options.no_load_optim,
        random=own or not options.no_load_rng,
        override_schedule=config.optimizer.override_opt_param_scheduler,
        verify=cast(Verify, options.checkpoint_verify),  # one of the flag's choices
    )
