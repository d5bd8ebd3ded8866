"""The continuation of a run from a checkpoint: the same run or not, the changes since, and where its data continues."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from megapar.arguments import Config
from megapar.checkpoints.ownership.data_facts import DataFacts
from megapar.checkpoints.ownership.data_history import (
    DataPhase,
    continued,
    is_continued,
    off_plan,
    past_differences,
    planned_data,
    positions,
    sampling_phases,
)
from megapar.checkpoints.ownership.identity import HELDOUT_ORDER, RECORD, Identity, changes, flags_of, made_by, refused
from megapar.checkpoints.ownership.scalars import Loaded
from megapar.core.comm import json_messages as messages
from megapar.core.comm.world import World
from megapar.data.corpus import Corpus
from megapar.data.sampling.skipping import Range, sample_at
from megapar.data.tokenizers.ids import facts_of
from megapar.errors import Complaint, ConfigError, MegaparError
from megapar.files.data_files import blend_of
from megapar.files.location import Location

STOP = "stop"  # a value of --on-source-end


class Continuation(NamedTuple):
    """The continuation of a run.

    Attributes:
        record: Identity of the run for its checkpoints. None if it saves none.
        corpus: The data to read from now on.
        notes: Lines for the log.
    """

    record: dict[str, Any] | None
    corpus: Corpus
    notes: tuple[str, ...]


def continue_run(
    config: Config,
    world: World,
    corpus: Corpus,
    loaded: Loaded | None,
    checkpoint: Location | None,
    skipped: Sequence[Range],
) -> Continuation:
    """Compare a run with the checkpoint that it resumes from, on rank 0. Every rank must call it.

    Raises ConfigError, on every rank, if the checkpoint is of another run.

    Args:
        corpus: The data of the configuration.
        checkpoint: Its folder, for messages.
        skipped: Ranges of samples that the run leaves out.
    """
    before = loaded if loaded is not None and loaded.scalars else None
    now = sample_at(0 if before is None else before.progress.consumed_samples, skipped)
    if before is None and not config.checkpoint.save and not config.reliability.local_checkpoint_interval:
        if not _reads_phases(config):
            return Continuation(None, corpus, ())
        phases = continued((), planned_data(config, skipped, may_read=False))
        return Continuation(None, _in_phases(corpus, phases, config, now), _notes(phases, 1))
    answer: dict[str, Any] = {}
    if world.rank == 0:
        answer = _compare(config, corpus, before, checkpoint, skipped)
    group = world.axis("world").group
    if group is not None:
        answer = messages.broadcast(answer, group)
    if answer["refused"]:
        raise ConfigError([Complaint(*complaint) for complaint in answer["refused"]])
    identity = Identity.from_json(answer["record"])
    assert identity is not None
    if answer["in_phases"] and (len(identity.phases) > 1 or _reads_phases(config)):
        corpus = _in_phases(corpus, identity.phases, config, now)
    return Continuation(answer["record"], corpus, tuple(answer["notes"]))


def _reads_phases(config: Config) -> bool:
    """Return True if the order of a run's samples is not that of ``Corpus.train`` from its start."""
    items = () if config.data.data_source == "hf" else blend_of(config.data.data_path)
    return config.data.on_source_end == STOP or any(item.name for item in items)


def _in_phases(corpus: Corpus, phases: Sequence[DataPhase], config: Config, now: int) -> Corpus:
    return corpus.in_phases(*sampling_phases(phases, config, now))


def _notes(phases: Sequence[DataPhase], first: int) -> tuple[str, ...]:
    """Return a line for each phase from ``first`` on."""
    return tuple(positions(phases, number) for number in range(first, len(phases)))


def _compare(
    config: Config, corpus: Corpus, before: Loaded | None, checkpoint: Location | None, skipped: Sequence[Range]
) -> dict[str, Any]:
    try:
        chat = corpus.chat_facts()
        plan = [(start, replace(data, chat=chat)) for start, data in planned_data(config, skipped)]
        tokenizer = facts_of(corpus.tokenizer, config.data.tokenizer_model)
    except (MegaparError, OSError) as error:
        return {"refused": [["data", f"The data cannot be read again: {error}", ""]]}
    size = config.grid.world_size
    nodes = -(-size // int(os.environ.get("LOCAL_WORLD_SIZE") or size))
    new = continued((), plan)
    current = Identity(config.optimizer.optimizer, tokenizer, new, made_by(size, nodes), flags_of(config))
    unchanged = {"record": current.to_json(), "refused": [], "in_phases": True}
    if before is None:
        return {**unchanged, "notes": list(_notes(new, 1))}
    saved = Identity.from_json(before.scalars.get(RECORD))
    if saved is None:
        note = (
            f"{checkpoint} is of an older version and does not record what it was trained on: its data and tokenizer "
            "are not compared"
        )
        return {**unchanged, "notes": [note, *_evaluations(1, config, checkpoint)]}
    trains = config.training.train_iters > before.progress.iteration
    progress, where = before.progress, str(checkpoint)
    now = sample_at(progress.consumed_samples, skipped)
    complaints = refused(saved, tokenizer, plan if trains else None, config, where, now)
    complaints += off_plan(config, progress.iteration, progress.consumed_samples, where) if trains else []
    same = is_continued(saved.phases, plan, now)
    phases = continued(saved.phases, plan, now) if trains or same else saved.phases
    record = replace(current, tokenizer=tokenizer or saved.tokenizer, phases=phases)
    changed = changes(saved, current)
    notes = [f"changed since {checkpoint}: {changed}"] if changed else []
    notes += _evaluations(saved.heldout_order, config, checkpoint)
    went_on = sum(phase.start < now or not phase.planned for phase in saved.phases)
    if trains and _places(phases, went_on) != _places(saved.phases, went_on):
        notes += _notes(phases, went_on) or [f"no other data is planned from sample {now:,} on"]
    if not trains and (differences := past_differences(saved.phases, plan, now)):
        texts = "; ".join(difference.text for difference in differences)
        notes.append(f"no step is left to train, so the data need not be that of {checkpoint}: {texts}")
    refusals = [[complaint.rule, complaint.message, complaint.fix] for complaint in complaints]
    # Without a step to train, the given data may have other sources than the phases, which are the checkpoint's.
    in_phases = trains or same
    return {"record": record.to_json(), "notes": notes, "refused": refusals, "in_phases": in_phases}


def _places(phases: Sequence[DataPhase], first: int) -> list[tuple[int, DataFacts]]:
    return [(phase.start, phase.data) for phase in phases[first:]]


def _evaluations(order: int, config: Config, checkpoint: Location | None) -> list[str]:
    """Return a line if the evaluations of the checkpoint's run were of other samples, in ``order``."""
    if order == HELDOUT_ORDER or not config.training.eval_interval:
        return []
    return [f"evaluations are of other held-out samples than before {checkpoint}, unless they read all of them"]
