"""The continuation of a run from a checkpoint: the same run or not, the changes since, and where its data continues."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from megapar.arguments import Config
from megapar.checkpoints.ownership.data_facts import DataFacts
from megapar.checkpoints.ownership.identity import (
    HELDOUT_ORDER,
    RECORD,
    DataPhase,
    Identity,
    changes,
    flags_of,
    made_by,
    refused,
)
from megapar.checkpoints.ownership.scalars import Loaded
from megapar.core.comm import json_messages as messages
from megapar.core.comm.world import World
from megapar.data.corpus import Corpus
from megapar.data.sampling.data_phases import Phase, Phases, first_lanes
from megapar.data.sampling.skipping import Range, sample_at
from megapar.data.tokenizers.ids import facts_of
from megapar.errors import Complaint, ConfigError, MegaparError
from megapar.files.location import Location


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
    if before is None and not config.checkpoint.save and not config.reliability.local_checkpoint_interval:
        return Continuation(None, corpus, ())
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
    if answer["in_phases"] and len(identity.phases) > 1:
        corpus = corpus.in_phases(_sampling_phases(identity.phases))
    return Continuation(answer["record"], corpus, tuple(answer["notes"]))


def _compare(
    config: Config, corpus: Corpus, before: Loaded | None, checkpoint: Location | None, skipped: Sequence[Range]
) -> dict[str, Any]:
    try:
        data = DataFacts.of(config)
        tokenizer = facts_of(corpus.tokenizer, config.data.tokenizer_model)
    except (MegaparError, OSError) as error:
        return {"refused": [["data", f"The data cannot be read again: {error}", ""]]}
    size = config.grid.world_size
    nodes = -(-size // int(os.environ.get("LOCAL_WORLD_SIZE", size)))
    first = DataPhase(0, first_lanes(data.weights), data)
    current = Identity(config.optimizer.optimizer, tokenizer, (first,), made_by(size, nodes), flags_of(config))
    unchanged = {"record": current.to_json(), "refused": [], "in_phases": False}
    if before is None:
        return {**unchanged, "notes": []}
    saved = Identity.from_json(before.scalars.get(RECORD))
    if saved is None:
        note = (
            f"{checkpoint} is of an older version and does not record what it was trained on: its data and tokenizer "
            "are not compared"
        )
        return {**unchanged, "notes": [note, *_evaluations(1, config, checkpoint)]}
    trains = config.training.train_iters > before.progress.iteration
    complaints = refused(saved, tokenizer, data if trains else None, config, str(checkpoint))
    next_sample = sample_at(before.progress.consumed_samples, skipped)
    phases = _phases(saved.phases, data, next_sample) if trains else saved.phases
    record = replace(current, tokenizer=tokenizer or saved.tokenizer, phases=phases)
    changed = changes(saved, current)
    notes = [f"changed since {checkpoint}: {changed}"] if changed else []
    notes += _evaluations(saved.heldout_order, config, checkpoint)
    if len(phases) > len(saved.phases):
        notes.append(_change(phases))
    if not trains and (differences := saved.data.differences(data)):
        texts = "; ".join(difference.text for difference in differences)
        notes.append(f"no step is left to train, so the data need not be that of {checkpoint}: {texts}")
    refusals = [[complaint.rule, complaint.message, complaint.fix] for complaint in complaints]
    # Without a step to train, the given data may have other sources than the phases, which are the checkpoint's.
    in_phases = trains or _is_same(saved.phases[-1], data)
    return {"record": record.to_json(), "notes": notes, "refused": refusals, "in_phases": in_phases}


def _evaluations(order: int, config: Config, checkpoint: Location | None) -> list[str]:
    """Return a line if the evaluations of the checkpoint's run were of other samples, in ``order``."""
    if order == HELDOUT_ORDER or not config.training.eval_interval:
        return []
    return [f"evaluations are of other held-out samples than before {checkpoint}, unless they read all of them"]


def _phases(before: Sequence[DataPhase], data: DataFacts, start: int) -> tuple[DataPhase, ...]:
    """Return the phases of a run that reads ``data`` from sample ``start`` on. Changed data starts a new phase."""
    last = before[-1]
    pairs = last.data.matched(data)
    if _is_same(last, data):
        return (*before[:-1], DataPhase(last.start, last.lanes, data))
    other_order = {difference.field for difference in last.data.differences(data)} & {"split", "seed", "seq-length"}
    known = {} if other_order else dict(enumerate(last.lanes))
    lanes = tuple(
        known[pair] if pair in known else f"phase/{len(before)}/{number}/" for number, pair in enumerate(pairs)
    )
    if not other_order:
        lanes = _lanes_of_earlier_phases(before, data, lanes)
    return (*before, DataPhase(start, lanes, data))


def _is_same(last: DataPhase, data: DataFacts) -> bool:
    """Return True if ``data`` is that of the phase, with its sources in the same order."""
    return not last.data.differences(data) and last.data.matched(data) == list(range(len(last.lanes)))


def _lanes_of_earlier_phases(before: Sequence[DataPhase], data: DataFacts, lanes: tuple[str, ...]) -> tuple[str, ...]:
    """Return the lanes so that a source of an earlier phase with the same order continues where that phase ended."""
    continued = list(lanes)
    for phase in reversed(before[:-1]):
        same = (phase.data.seed, phase.data.seq_length, phase.data.split) == (data.seed, data.seq_length, data.split)
        for number, pair in enumerate(phase.data.matched(data)):
            new = continued[number] not in before[-1].lanes and continued[number].startswith(f"phase/{len(before)}/")
            if same and pair is not None and new and phase.lanes[pair] not in continued:
                continued[number] = phase.lanes[pair]
    return tuple(continued)


def _sampling_phases(phases: Sequence[DataPhase]) -> Phases:
    return tuple(Phase(phase.start, phase.data.weights, phase.lanes) for phase in phases)


def _change(phases: Sequence[DataPhase]) -> str:
    """Describe the position of each source at the beginning of the last phase."""
    *before, now = _sampling_phases(phases)
    ends = [phase.start for phase in phases[1:]]
    positions = []
    for source, lane in zip(phases[-1].data.sources, now.lanes, strict=True):
        taken = sum(phase.taken(lane, end - phase.start) for phase, end in zip(before, ends, strict=True))
        positions.append(f"{source.name} {f'continues after {taken:,} samples' if taken else 'begins at its start'}")
    return f"other data from sample {now.start:,} on: {', '.join(positions)}"
