"""Validation of a checkpoint's scalars before a run resumes from them.

The hash of their file proves only that the file is unchanged, not that a run wrote it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from megapar.config.shown import shown
from megapar.errors import CheckpointError
from megapar.files.checkpoint_names import parse_checkpoint_name
from megapar.files.suspects import NEVER
from megapar.schema.legal_values import MAX_INT
from megapar.training.checkpoints.identity import RECORD, Identity

MAX_SEED = 2**64 - 1
SHOWN = 6

Check = Callable[[Any], bool]


def _count(value: Any, most: int = MAX_INT) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= most


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _signed(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= MAX_INT


def _numbers(value: Any) -> bool:
    return isinstance(value, list) and len(value) <= 1 << 16 and all(_number(item) for item in value)


def _schedule(value: Any) -> bool:
    return isinstance(value, dict) and all(
        item is None or isinstance(item, str) or _number(item) for item in value.values()
    )


def _pairs(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(pair, list) and len(pair) == 2 and all(map(_count, pair)) and pair[0] <= pair[1] for pair in value
    )


def _iterations(value: Any) -> bool:
    return isinstance(value, dict) and all(at == NEVER or _count(at) for at in value.values())


def _names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) and parse_checkpoint_name(item) for item in value)


def _placements(value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(rows, list) and all(isinstance(row, list) and all(map(_count, row)) for row in rows)
        for rows in value.values()
    )


_COUNT, _NUMBERS = (_count, "a whole number from 0 on"), (_numbers, "a list of finite numbers")
_NEEDED: Mapping[str, tuple[Check, str]] = {"iteration": _COUNT, "consumed_samples": _COUNT}
_NEEDED_TO_GO_ON: Mapping[str, tuple[Check, str]] = {
    "optimizer_steps": _COUNT,
    "schedule": (_schedule, "an object of finite numbers and texts"),
}
# Scalars that older checkpoints do not contain.
_FREE: Mapping[str, tuple[Check, str]] = {
    **dict.fromkeys(("consumed_tokens", "micro_batches", "skipped_steps", "ampipe_degree"), _COUNT),
    "dropout_seed": (lambda value: _count(value, MAX_SEED), "a whole number from 0 on"),
    "skip_samples": (_pairs, "a list of pairs of sample numbers"),
    "expert_places": (_placements, "an object of lists of whole numbers from 0 on"),
    "verified": (_iterations, "an object of whole numbers from 0 on, or -1 for never"),
    "lineage": (_names, "a list of names of checkpoints"),
    RECORD: (lambda value: Identity.from_json(value) is not None, "a run's record of its data and its tokenizer"),
}
_INSIDE: Mapping[str, Mapping[str, tuple[Check, str]]] = {
    "loss_scale": {
        "value": (lambda value: _number(value) and value > 0, "a number above 0"),
        "good_steps": _COUNT,
        "chances": (_signed, "a whole number"),
    },
    "spikes": {"losses": _NUMBERS, "norms": _NUMBERS},
}


def check_scalars(place: str, scalars: Mapping[str, Any], iteration: int | None, *, optimizer: bool) -> None:
    """Raise CheckpointError, with all problems, for scalars that a run cannot have written.

    Args:
        place: Path of the checkpoint, for messages.
        scalars: The scalars to check.
        iteration: The iteration in the folder's name. None if it has none.
        optimizer: Also require the scalars of the optimizer, its steps and schedule.
    """
    wrong = [*_wrong(scalars, iteration, optimizer)]
    if wrong:
        more = f"; and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
        raise CheckpointError(f"{place} has scalars that no run wrote: {'; '.join(wrong[:SHOWN])}{more}")


def _wrong(scalars: Mapping[str, Any], iteration: int | None, optimizer: bool) -> Iterator[str]:
    needed = {**_NEEDED, **(_NEEDED_TO_GO_ON if optimizer else {})}
    yield from (f"{name} is missing" for name in needed if name not in scalars)
    yield from _unfit("", scalars, {**_NEEDED, **_NEEDED_TO_GO_ON, **_FREE})
    for name, fields in _INSIDE.items():
        if name not in scalars:
            continue
        if not isinstance(scalars[name], dict):
            yield f"{name} is {shown(scalars[name])}, where an object is needed"
            continue
        yield from (f"{name}.{field} is missing" for field in fields if field not in scalars[name])
        yield from _unfit(f"{name}.", scalars[name], fields)
    spikes = scalars.get("spikes")
    if isinstance(spikes, dict) and not _count(spikes.get("in_a_row", 0)):
        yield f"spikes.in_a_row is {shown(spikes['in_a_row'])}, where a whole number from 0 on is needed"
    if iteration is not None and scalars.get("iteration", iteration) != iteration:
        yield f"iteration is {shown(scalars['iteration'])}, and the folder is that of iteration {iteration}"


def _unfit(before: str, values: Mapping[str, Any], checks: Mapping[str, tuple[Check, str]]) -> Iterator[str]:
    for name, (check, wanted) in checks.items():
        if name in values and not check(values[name]):
            yield f"{before}{name} is {shown(values[name])}, where {wanted} is needed"
