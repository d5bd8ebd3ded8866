"""Where a run goes on from: a local checkpoint, what this job has saved, or what ``--load`` names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megapar.arguments import Config
from megapar.core.optimizer.loss_scale import LossScale
from megapar.training.building.job import Job
from megapar.training.checkpoints import state
from megapar.training.checkpoints.checkpoints import Checkpoints
from megapar.training.checkpoints.local_saves import LocalSaves
from megapar.training.checkpoints.state import Progress


def resume(
    config: Config,
    job: Job,
    progress: Progress,
    schedule: Mapping[str, Any],
    loss_scale: LossScale | None,
    checkpoints: Checkpoints,
    local_saves: LocalSaves | None,
) -> state.Loaded | None:
    """Fill weights and moments from the newest sound checkpoint; None where the run starts from scratch.

    progress: where the run stands without one. Raises CheckpointError.
    """
    options = config.checkpoint
    limit = checkpoints.clear_up(local_saves)
    source = checkpoints.source()
    own = source is not None and source.own
    found = None
    if local_saves is not None:
        if not own and not checkpoints.is_restart and (options.ckpt_step is not None or options.finetune):
            local_saves.remove_after(-1)  # whoever asks for a step turns back from what came later
        else:
            found = local_saves.find(limit)
    if source is None and found is None:
        checkpoints.begin_anew()
        checkpoints.follow(None)
        return None
    # A restarted job goes on from what it saved itself, and that wholly.
    own = own or found is not None
    wanted = state.LoadOptions(
        finetune=options.finetune and not own,
        optimizer=own or not options.no_load_optim,
        random=own or not options.no_load_rng,
        override_schedule=config.optimizer.override_opt_param_scheduler,
        verify=options.checkpoint_verify,  # type: ignore[arg-type]  # one of the flag's choices
    )

    def read(folder: Path) -> state.Loaded:
        return state.load(folder, job, progress, schedule, wanted, loss_scale)

    if found is not None and local_saves is not None:
        # What is newer on disk goes first, if it is sound.
        newer = source is not None and checkpoints.saves_into(source)
        loaded = checkpoints.load_newer(read, source, found.iteration) if source is not None and newer else None
        if loaded is None:
            place = Path(f"local checkpoint {found.iteration}")
            checkpoints.resumed_from = place
            checkpoints.notes.append(f"taking the local checkpoint of iteration {found.iteration}")
            loaded = state.take(place, local_saves.load(found), job, progress, schedule, wanted, loss_scale)
            checkpoints.follow(loaded, local=True)
            return loaded
    else:
        assert source is not None
        loaded = checkpoints.load(read, source)
    checkpoints.follow(loaded)
    return loaded
