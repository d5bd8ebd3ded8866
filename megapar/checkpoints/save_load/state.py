"""State of a run in a checkpoint: master weights, optimizer state and counters. Can be loaded on any layout."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup

from megapar.checkpoints.format.names import stored_schedule
from megapar.checkpoints.format.shards import Shard, Verify
from megapar.checkpoints.ownership.identity import OptionalBlock, another_optimizer, flags_of_states, match_model
from megapar.checkpoints.ownership.scalars import Loaded, check_scalars
from megapar.checkpoints.save_load import collective_io
from megapar.checkpoints.save_load import folder as folders
from megapar.core.box import Box
from megapar.core.comm import json_messages as messages
from megapar.core.optimizer.loss_scale import LossScale
from megapar.core.sharding.cut import is_primary, is_speaker
from megapar.core.sharding.sharding import changed_masters
from megapar.errors import CheckpointMismatchError
from megapar.files.location import Location
from megapar.model.facts import differences
from megapar.training.step.job import Job
from megapar.training.step.progress import Progress
from megapar.training.step.schedules import another_schedule


def weights(job: Job, masters: Sequence[Tensor]) -> dict[str, Shard]:
    """Return the shards of the master weights, of the values ``masters``, and of the router's correction biases."""
    state = _shards(job, "model", masters)
    buffers = dict(job.model.named_buffers())
    for spec in job.table:
        if not spec.trainable and spec.name in buffers:
            box = Box.whole(spec.shape)
            name = f"model/{spec.name}"
            primary = is_speaker(spec, job.world.grid, job.world.rank)
            state[name] = Shard(name, spec.shape, box, buffers[spec.name], primary=primary)
    return state


def optimizer_states(job: Job) -> dict[str, Shard]:
    """Return the shards of the optimizer's states of every parameter."""
    state: dict[str, Shard] = {}
    for name in job.optimizer.states:
        state |= _shards(job, f"optimizer/{name}", job.optimizer.state(name), casts=True)
    return state


def shards(job: Job) -> dict[str, Shard]:
    """Return the shards of weights and optimizer states, to save them."""
    return {**weights(job, [shard.values for shard in job.sharding.master_shards]), **optimizer_states(job)}


@contextmanager
def filled_shards(job: Job, *, optimizer: bool = True) -> Iterator[dict[str, Shard]]:
    """Yield the shards of weights, and of optimizer states if asked for, for the block to fill."""
    with changed_masters(job.sharding) as masters:
        yield {**weights(job, masters), **(optimizer_states(job) if optimizer else {})}


def _shards(job: Job, prefix: str, tensors: Sequence[Any], *, casts: bool = False) -> dict[str, Shard]:
    grid, rank = job.world.grid, job.world.rank
    made = {}
    for view in job.sharding.views(tensors):
        name = f"{prefix}/{view.spec.name}"
        primary = is_primary(view.spec, grid, rank)
        made[name] = Shard(name, view.spec.shape, view.box, view.tensor, primary=primary, casts=casts)
    return made


def scalars(
    job: Job, progress: Progress, schedule: Mapping[str, Any], loss_scale: LossScale | None = None
) -> dict[str, Any]:
    """Return the state of a run that is not a tensor."""
    values = {**asdict(progress), "optimizer_steps": job.optimizer.num_steps, "schedule": dict(schedule)}
    if loss_scale is not None:
        values["loss_scale"] = loss_scale.state()
    return values


def grid_facts(job: Job) -> dict[str, int]:
    """Return the sizes of the device mesh's axes, for users who inspect a checkpoint."""
    grid = job.world.grid
    return {name: grid.size(name) for name in ("dp", "pp", "sharding", "cp", "mp", "ep", "emp")}


def state_dtypes(job: Job) -> dict[str, str]:
    """Return the dtype of each optimizer state."""
    kinds = {
        name: {str(state.dtype) for state in job.optimizer.state(name) if state is not None}
        for name in job.optimizer.states
    }
    return {name: " ".join(sorted(dtypes)) for name, dtypes in kinds.items()}


@dataclass(frozen=True)
class LoadOptions:
    """The parts of a checkpoint to load.

    Attributes:
        override_schedule: Keep this run's schedule if the checkpoint's differs, instead of refusing the checkpoint.
    """

    finetune: bool = False
    optimizer: bool = True
    random: bool = True
    override_schedule: bool = False
    verify: Verify = "full"


def load(
    folder: Location,
    job: Job,
    progress: Progress,
    schedule: Mapping[str, Any],
    options: LoadOptions,
    loss_scale: LossScale | None = None,
) -> Loaded:
    """Fill weights (and optimizer state) from a checkpoint that was saved on any layout.

    A checkpoint that contains only weights, as ``megapar convert`` writes it, is loaded as with ``finetune``. Raises
    CheckpointError if it is missing or damaged, and CheckpointMismatchError if it is of another model or optimizer or
    was trained on another schedule.

    Args:
        progress: The progress of this run without the checkpoint.
        schedule: This run's learning-rate schedule.
        loss_scale: The loss scaling of fp16. None without it.
    """
    group = job.world.axis("world").group
    layout = collective_io.first_read_layout(folder, group)
    stored_states = {name.split("/")[1] for name in layout.tensors if name.startswith("optimizer/")}
    if not stored_states and not _has_schedule(folder, group):
        options = replace(options, finetune=True)
    fit = match_model(layout.model, job.sizes.facts(), weights_only=options.finetune)
    initial = _stored_names(fit.initial)
    with_optimizer = options.optimizer and not options.finetune
    if with_optimizer:
        other = another_optimizer(flags_of_states(stored_states), flags_of_states(job.optimizer.states))
        if other is not None:
            raise CheckpointMismatchError(f"{folder} {other[0]}. {other[1]}")
    with filled_shards(job, optimizer=with_optimizer) as targets:
        saved = collective_io.load(
            folder,
            {name: shard for name, shard in targets.items() if not name.startswith(initial)},
            expect_model=partial(differences, expected=fit.facts),
            ignore=() if with_optimizer else ("optimizer/", *_stored_names(fit.dropped)),
            verify=options.verify,
            group=group,
        )
    loaded = restore_scalars(folder, saved, job, progress, schedule, options, loss_scale)
    return replace(loaded, initial=tuple(block.name for block in fit.initial))


def _has_schedule(folder: Location, group: ProcessGroup | None) -> bool:
    """Return True for the checkpoint of a run, on every rank: that of SGD without momentum has no optimizer state."""
    has_one = stored_schedule(folder) is not None
    return has_one if group is None else bool(messages.broadcast(has_one, group))


def _stored_names(blocks: Iterable[OptionalBlock]) -> tuple[str, ...]:
    return tuple(f"model/{prefix}" for block in blocks for prefix in block.prefixes)


def restore_scalars(
    folder: Location,
    saved: Mapping[str, Any],
    job: Job,
    progress: Progress,
    schedule: Mapping[str, Any],
    options: LoadOptions,
    loss_scale: LossScale | None,
) -> Loaded:
    """Continue from filled weights and optimizer state, and from their scalars. Raises CheckpointError."""
    if not options.finetune:
        iteration = folders.iteration_of(folder)
        check_scalars(str(folder), saved, iteration if iteration >= 0 else None, optimizer=options.optimizer)
    job.sharding.start_param_gather()
    if options.finetune:
        return Loaded(progress, {})
    if options.optimizer:
        job.optimizer.num_steps = saved["optimizer_steps"]
        _check_schedule(folder, saved, schedule, options)
        if loss_scale is not None and "loss_scale" in saved:
            loss_scale.restore(saved["loss_scale"])
    # Counters that an older checkpoint does not contain keep their initial value.
    fields = {name: saved.get(name, value) for name, value in asdict(progress).items()}
    if not options.random:
        fields["dropout_seed"] = progress.dropout_seed
    return Loaded(Progress(**fields), saved)


def _check_schedule(folder: Location, saved: Mapping[str, Any], now: Mapping[str, Any], options: LoadOptions) -> None:
    other = another_schedule(saved["schedule"], now, saved["iteration"])
    if other is not None and not options.override_schedule:
        raise CheckpointMismatchError(f"{folder} was trained on another learning-rate schedule: {other[0]}. {other[1]}")
