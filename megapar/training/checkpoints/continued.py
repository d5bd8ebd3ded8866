"""A run that goes on from a checkpoint: whether it is the same run, what is otherwise, and where its data goes on.

The first rank looks, and all ranks do as it says.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megapar.arguments import Config
from megapar.core.comm import json_messages as messages
from megapar.core.comm.world import World
from megapar.data.corpus import Corpus
from megapar.data.sampling import course
from megapar.data.sampling.skipping import Range, sample_at
from megapar.data.tokenizers.ids import facts_of
from megapar.errors import Complaint, ConfigError, MegaparError
from megapar.training.checkpoints.data_facts import DataFacts
from megapar.training.checkpoints.identity import (
    OPTIMIZER,
    RECORD,
    DataPhase,
    Identity,
    flags_of,
    made_by,
    refused,
    told,
)
from megapar.training.checkpoints.state import Loaded


class GoneOn(NamedTuple):
    """record: of the run for its checkpoints; None where it has none. corpus: what it reads from now on."""

    record: dict[str, Any] | None
    corpus: Corpus
    notes: tuple[str, ...]


def go_on(
    config: Config, world: World, corpus: Corpus, loaded: Loaded | None, place: Path | None, skipped: Sequence[Range]
) -> GoneOn:
    """What a run is from now on. loaded: what it goes on from, place: of that. skipped: samples that are stepped over.

    Every rank calls it. Raises ConfigError, on every rank, where the checkpoint is of another run.
    """
    before = loaded if loaded is not None and loaded.scalars else None
    if before is None and not config.checkpoint.save and not config.reliability.local_checkpoint_interval:
        return GoneOn(None, corpus, ())
    answer: dict[str, Any] = {}
    if world.rank == 0:
        answer = _look(config, corpus, before, place, skipped)
    group = world.axis("world").group
    if group is not None:
        answer = messages.broadcast(answer, group)
    if answer["refused"]:
        raise ConfigError([Complaint(*one) for one in answer["refused"]])
    identity = Identity.from_json(answer["record"])
    assert identity is not None
    if answer["on_course"] and len(identity.phases) > 1:
        corpus = corpus.on_course(_course(identity.phases))
    return GoneOn(answer["record"], corpus, tuple(answer["notes"]))


def _look(
    config: Config, corpus: Corpus, before: Loaded | None, place: Path | None, skipped: Sequence[Range]
) -> dict[str, Any]:
    try:
        data = DataFacts.of(config)
        tokenizer = facts_of(corpus.tokenizer, config.data.tokenizer_model)
    except (MegaparError, OSError) as error:
        return {"refused": [["data", f"The data cannot be read again: {error}", ""]]}
    size = config.grid.world_size
    nodes = -(-size // int(os.environ.get("LOCAL_WORLD_SIZE", size)))
    first = DataPhase(0, course.first_lanes(data.weights), data)
    here = Identity(OPTIMIZER, tokenizer, (first,), made_by(size, nodes), flags_of(config))
    alone = {"record": here.to_json(), "refused": [], "on_course": False}
    if before is None:
        return {**alone, "notes": []}
    there = Identity.from_json(before.scalars.get(RECORD))
    if there is None:
        note = f"{place} does not say what it was trained on, as older ones: its data and tokenizer are not compared"
        return {**alone, "notes": [note]}
    trains = config.training.train_iters > before.progress.iteration
    complaints = refused(there, OPTIMIZER, tokenizer, data if trains else None, config, str(place))
    next_sample = sample_at(before.progress.consumed_samples, skipped)
    phases = _phases(there.phases, data, next_sample) if trains else there.phases
    kept = Identity(OPTIMIZER, tokenizer or there.tokenizer, phases, here.made_by, here.flags)
    otherwise = told(there, here)
    notes = [f"otherwise than in {place}: {otherwise}"] if otherwise else []
    if len(phases) > len(there.phases):
        notes.append(_change(phases))
    apart = [] if trains else there.data.apart(data)
    if apart:
        said = "; ".join(one.said for one in apart)
        notes.append(f"no step is left to be trained on data that is not that of {place}: {said}")
    refusals = [[one.rule, one.message, one.fix] for one in complaints]
    # Other data that nothing is trained on may have other sources than the phases, which are the checkpoint's.
    on_course = trains or _is_read_on(there.phases[-1], data)
    return {"record": kept.to_json(), "notes": notes, "refused": refusals, "on_course": on_course}


def _phases(before: Sequence[DataPhase], data: DataFacts, start: int) -> tuple[DataPhase, ...]:
    """The phases of a run that reads ``data`` from sample ``start`` on; a new one where that is a change."""
    last = before[-1]
    pairs = last.data.matched(data)
    apart = {one.field for one in last.data.apart(data)}
    if _is_read_on(last, data):
        return (*before[:-1], DataPhase(last.start, last.lanes, data))
    known = {} if apart & {"split", "seed", "seq-length"} else dict(enumerate(last.lanes))
    lanes = tuple(
        known[pair] if pair in known else f"phase/{len(before)}/{number}/" for number, pair in enumerate(pairs)
    )
    if not apart & {"split", "seed", "seq-length"}:
        lanes = _seen_before(before, data, lanes)
    return (*before, DataPhase(start, lanes, data))


def _is_read_on(last: DataPhase, data: DataFacts) -> bool:
    """Whether ``data`` is that of the phase, its sources in the same order."""
    return not last.data.apart(data) and last.data.matched(data) == list(range(len(last.lanes)))


def _seen_before(before: Sequence[DataPhase], data: DataFacts, lanes: tuple[str, ...]) -> tuple[str, ...]:
    """A source that an earlier phase of the same order had, and a later one had not, goes on where that left it."""
    found = list(lanes)
    for phase in reversed(before[:-1]):
        same = (phase.data.seed, phase.data.seq_length, phase.data.split) == (data.seed, data.seq_length, data.split)
        for number, pair in enumerate(phase.data.matched(data)):
            new = found[number] not in before[-1].lanes and found[number].startswith(f"phase/{len(before)}/")
            if same and pair is not None and new and phase.lanes[pair] not in found:
                found[number] = phase.lanes[pair]
    return tuple(found)


def _course(phases: Sequence[DataPhase]) -> course.Course:
    return tuple(course.Phase(phase.start, phase.data.weights, phase.lanes) for phase in phases)


def _change(phases: Sequence[DataPhase]) -> str:
    """What becomes of each source where a phase begins."""
    *before, now = _course(phases)
    ends = [phase.start for phase in phases[1:]]
    said = []
    for source, lane in zip(phases[-1].data.sources, now.lanes, strict=True):
        taken = sum(phase.taken(lane, end - phase.start) for phase, end in zip(before, ends, strict=True))
        said.append(f"{source.name} {f'goes on after {taken:,} samples' if taken else 'begins at its start'}")
    return f"other data from sample {now.start:,} on: {', '.join(said)}"
