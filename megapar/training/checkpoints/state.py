"""A run's state as checkpoints hold it: master weights, moments, counters; saved and loaded on any layout."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from megapar.core.box import Box
from megapar.core.checkpoint import folder as folders
from megapar.core.checkpoint import store
from megapar.core.checkpoint.shard import Shard
from megapar.core.optimizer.adamw import MOMENTS
from megapar.core.optimizer.loss_scale import LossScale
from megapar.core.sharding.cut import is_primary, is_speaker
from megapar.errors import CheckpointMismatchError
from megapar.training.building.job import Job
from megapar.training.checkpoints.model_match import OptionalBlock, fitted
from megapar.training.checkpoints.scalars import check_scalars
from megapar.training.step.learning_rate import another_schedule


@dataclass
class Progress:
    """How far a run is. iteration: steps done. consumed_samples, consumed_tokens: read so far, without padding.

    micro_batches: run so far by all data ranks together. dropout_seed: of the random streams. skipped_steps: of the
    iterations those that overflowed and changed nothing. ampipe_degree: as measured at the start; 0, not measured.
    """

    iteration: int = 0
    consumed_samples: int = 0
    consumed_tokens: int = 0
    micro_batches: int = 0
    dropout_seed: int = 0
    skipped_steps: int = 0
    ampipe_degree: int = 0


def model_facts(job: Job) -> dict[str, Any]:
    """What must agree for a checkpoint to be one of this model: everything that decides names, shapes or meaning."""
    return job.sizes.facts()


def weights(job: Job) -> dict[str, Shard]:
    """Master weights and the router's correction biases."""
    state = _shards(job, "model", [part.master for part in job.sharding.parts])
    buffers = dict(job.model.named_buffers())
    for spec in job.table:
        if not spec.trainable and spec.name in buffers:
            box = Box.whole(spec.shape)
            name = f"model/{spec.name}"
            primary = is_speaker(spec, job.world.grid, job.world.rank)
            state[name] = Shard(name, spec.shape, box, buffers[spec.name], primary=primary)
    return state


def moments(job: Job) -> dict[str, Shard]:
    """The optimizer's moments of every parameter."""
    state: dict[str, Shard] = {}
    for name in MOMENTS:
        state |= _shards(job, f"optimizer/{name}", job.optimizer.moments(name))
    return state


def _shards(job: Job, prefix: str, tensors: list[Any]) -> dict[str, Shard]:
    grid, rank = job.world.grid, job.world.rank
    found = {}
    for view in job.sharding.views(tensors):
        name = f"{prefix}/{view.spec.name}"
        primary = is_primary(view.spec, grid, rank)
        found[name] = Shard(name, view.spec.shape, view.box, view.tensor, primary=primary)
    return found


def scalars(
    job: Job, progress: Progress, schedule: Mapping[str, Any], loss_scale: LossScale | None = None
) -> dict[str, Any]:
    """Everything of a run that is no tensor."""
    found = {**asdict(progress), "optimizer_steps": job.optimizer.num_steps, "schedule": dict(schedule)}
    if loss_scale is not None:
        found["loss_scale"] = loss_scale.state()
    return found


def grid_facts(job: Job) -> dict[str, int]:
    """Sizes of the axes, for people who look at a checkpoint."""
    grid = job.world.grid
    return {name: grid.size(name) for name in ("dp", "pp", "sharding", "cp", "mp", "ep", "emp")}


@dataclass(frozen=True)
class LoadOptions:
    """What of a checkpoint is taken.

    finetune: weights only, counters start anew. optimizer: moments and step count. random: the dropout seed.
    override_schedule: keep this run's schedule where the checkpoint's differs, which is otherwise refused.
    verify: what of its files is checked.
    """

    finetune: bool = False
    optimizer: bool = True
    random: bool = True
    override_schedule: bool = False
    verify: store.Verify = "full"


@dataclass(frozen=True)
class Loaded:
    """Where a run stands after loading, and the scalars of what it loaded; of weights alone there are none.

    initial: what the model has and the checkpoint has not, which starts anew.
    """

    progress: Progress
    scalars: Mapping[str, Any]
    initial: tuple[str, ...] = ()


def load(
    folder: Path,
    job: Job,
    progress: Progress,
    schedule: Mapping[str, Any],
    options: LoadOptions,
    loss_scale: LossScale | None = None,
) -> Loaded:
    """Fill weights (and moments) from a checkpoint, on whatever layout it was saved.

    A checkpoint of weights alone, as ``megapar convert`` makes it, is taken as ``finetune`` takes one.
    progress: where this run stands without it. Raises CheckpointError where it is missing or damaged, and
    CheckpointMismatchError where it is of another model or was trained on another schedule.
    """
    group = job.world.axis("world").group
    layout, targets = store.first_read_layout(folder, group), weights(job)
    if not any(name.startswith("optimizer/") for name in layout.tensors):
        options = replace(options, finetune=True)
    fit = fitted(layout.model, model_facts(job), alone=options.finetune)
    initial = _stored_names(fit.initial)
    targets = {name: one for name, one in targets.items() if not name.startswith(initial)}
    with_moments = options.optimizer and not options.finetune
    if with_moments:
        targets |= moments(job)
    saved = store.load(
        folder,
        targets,
        expect_model=fit.facts,
        ignore=() if with_moments else ("optimizer/", *_stored_names(fit.left)),
        verify=options.verify,
        group=group,
    )
    loaded = take(folder, saved, job, progress, schedule, options, loss_scale)
    return replace(loaded, initial=tuple(block.name for block in fit.initial))


def _stored_names(blocks: Iterable[OptionalBlock]) -> tuple[str, ...]:
    return tuple(f"model/{prefix}" for block in blocks for prefix in block.prefixes)


def take(
    folder: Path,
    saved: Mapping[str, Any],
    job: Job,
    progress: Progress,
    schedule: Mapping[str, Any],
    options: LoadOptions,
    loss_scale: LossScale | None,
) -> Loaded:
    """Go on from weights and moments that have been filled, and the scalars beside them. Raises CheckpointError."""
    if not options.finetune:
        named = folders.iteration_of(folder)
        check_scalars(str(folder), saved, named if named >= 0 else None, optimizer=options.optimizer)
    job.sharding.publish()
    if options.finetune:
        return Loaded(progress, {})
    if options.optimizer:
        job.optimizer.num_steps = saved["optimizer_steps"]
        _check_schedule(folder, saved["schedule"], schedule, options)
        if loss_scale is not None and "loss_scale" in saved:
            loss_scale.restore(saved["loss_scale"])
    # Checkpoints from before a counter was there have it at its start.
    fields = {name: saved.get(name, value) for name, value in asdict(progress).items()}
    if not options.random:
        fields["dropout_seed"] = progress.dropout_seed
    return Loaded(Progress(**fields), saved)


def _check_schedule(folder: Path, saved: Mapping[str, Any], now: Mapping[str, Any], options: LoadOptions) -> None:
    other = another_schedule(saved, now)
    if other is not None and not options.override_schedule:
        raise CheckpointMismatchError(f"{folder} was trained on another learning-rate schedule: {other[0]}. {other[1]}")
