"""Scalars of a checkpoint: the state of a run except its tensors, checked before a run resumes from them.

Two of them record the history of a run:

* lineage: the checkpoints under ``--save`` that it made, and those that it was resumed from. A folder contains several
  lineages if a run went back to an earlier checkpoint, or was finetuned in the folder of its base. A run neither
  removes nor resumes from checkpoints of other lineages.
* verified: the last iteration that each check has verified, as of the save. A check that passes also verifies the
  checkpoints before it, which the next one records. After a kill in between, less is known to be verified, never more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megapar.checkpoints.format.faults import NEVER
from megapar.checkpoints.format.layout import read_layout
from megapar.checkpoints.format.names import parse_checkpoint_name
from megapar.checkpoints.format.shards import read_scalars
from megapar.checkpoints.ownership.identity import RECORD, Identity
from megapar.config.values import shown
from megapar.errors import CheckpointError
from megapar.files.location import Location
from megapar.schema.legal_values import MAX_INT
from megapar.training.step.progress import Progress

NAMES = "lineage"  # the scalar with the names of the checkpoints before this one on its lineage
MOST_NAMES = 4096
"""Maximum number of names, the newest ones. ``--keep`` and going back need no more."""
_MAX_SEED = 2**64 - 1
_SHOWN = 6

_Check = Callable[[Any], bool]


def _count(value: Any, most: int = MAX_INT) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= most


def _number(value: Any) -> bool:
    return _signed(value) or (isinstance(value, float) and math.isfinite(value))


def _signed(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= MAX_INT


def _pair(value: Any) -> bool:
    return _list_of(_count)(value) and len(value) == 2 and value[0] <= value[1]


def _list_of(check: _Check, most: int = MAX_INT) -> _Check:
    return lambda value: isinstance(value, list) and len(value) <= most and all(map(check, value))


def _values(check: _Check) -> _Check:
    return lambda value: isinstance(value, dict) and all(map(check, value.values()))


_COUNT, _NUMBERS = (_count, "a whole number from 0 on"), (_list_of(_number, 1 << 16), "a list of finite numbers")
_NEEDED: Mapping[str, tuple[_Check, str]] = {"iteration": _COUNT, "consumed_samples": _COUNT}
_NEEDED_TO_GO_ON: Mapping[str, tuple[_Check, str]] = {
    "optimizer_steps": _COUNT,
    "schedule": (
        _values(lambda item: item is None or isinstance(item, str) or _number(item)),
        "an object of finite numbers and texts",
    ),
}
# Scalars that older checkpoints do not contain.
_FREE: Mapping[str, tuple[_Check, str]] = {
    **dict.fromkeys(("consumed_tokens", "micro_batches", "skipped_steps", "ampipe_degree"), _COUNT),
    "dropout_seed": (lambda value: _count(value, _MAX_SEED), "a whole number from 0 on"),
    "skip_samples": (_list_of(_pair), "a list of pairs of sample numbers"),
    "expert_places": (_values(_list_of(_list_of(_count))), "an object of lists of whole numbers from 0 on"),
    "verified": (
        _values(lambda iteration: iteration == NEVER or _count(iteration)),
        "an object of whole numbers from 0 on, or -1 for never",
    ),
    NAMES: (
        _list_of(lambda name: isinstance(name, str) and parse_checkpoint_name(name) is not None),
        "a list of names of checkpoints",
    ),
    RECORD: (lambda value: Identity.from_json(value) is not None, "a run's record of its data and its tokenizer"),
}
_INSIDE: Mapping[str, Mapping[str, tuple[_Check, str]]] = {
    "loss_scale": {
        "value": (lambda value: _number(value) and value > 0, "a number above 0"),
        "good_steps": _COUNT,
        "chances": (_signed, "a whole number"),
    },
    "spikes": {"losses": _NUMBERS, "norms": _NUMBERS},
}


def check_scalars(where: str, scalars: Mapping[str, Any], iteration: int | None, *, optimizer: bool) -> None:
    """Raise CheckpointError, with all problems, for scalars that a run cannot have written.

    The hash of their file proves only that the file is unchanged, not that a run wrote it.

    Args:
        where: Name of the checkpoint, for messages.
        iteration: The iteration in the folder's name. None if it has none.
        optimizer: Also require the scalars of the optimizer, its steps and schedule.
    """
    wrong = [*_wrong(scalars, iteration, optimizer)]
    if wrong:
        more = f"; and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise CheckpointError(f"{where} has scalars that no run wrote: {'; '.join(wrong[:_SHOWN])}{more}")


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


def _unfit(before: str, values: Mapping[str, Any], checks: Mapping[str, tuple[_Check, str]]) -> Iterator[str]:
    for name, (check, wanted) in checks.items():
        if name in values and not check(values[name]):
            yield f"{before}{name} is {shown(values[name])}, where {wanted} is needed"


@dataclass(frozen=True)
class Loaded:
    """The state of a run after loading.

    Attributes:
        scalars: Scalars of the checkpoint. Empty if only weights were loaded.
        initial: Blocks of the model that the checkpoint does not contain. They keep their initial weights.
    """

    progress: Progress
    scalars: Mapping[str, Any]
    initial: tuple[str, ...] = ()


def sound_scalars(folder: Location) -> Mapping[str, Any] | None:
    """Return the scalars of a checkpoint, or None if they cannot be read, or no run wrote them."""
    try:
        scalars = read_scalars(folder, read_layout(folder).scalars, "full")
        check_scalars(str(folder), scalars, None, optimizer=False)
    except CheckpointError:
        return None
    return scalars


class Lineage:
    """Names of the checkpoints on the lineage of a run.

    Attributes:
        names: The current names, up to date on rank 0 only.
        agreed: The names as of the last save, in order, the same on all ranks.
        others: Names of other lineages in the folder at the start of the run, the same on all ranks.
    """

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.agreed: list[str] = []
        self.others: frozenset[str] = frozenset()

    def begin(self, present: Collection[str], own: Collection[str]) -> None:
        """Start with the checkpoints ``present`` in the folder, of which ``own`` are on this lineage."""
        self.names = set(present) & set(own)
        self.others = frozenset(present) - self.names
        self.agree(lambda names: names)

    def agree(self, agree: Callable[[list[str]], list[str]]) -> list[str]:
        """Return the names for the next checkpoint's scalars. ``agree`` returns rank 0's value on all ranks."""
        self.agreed = agree(sorted(self.names, key=_position)[-MOST_NAMES:])
        return self.agreed


def names_on_lineage(name: str, scalars: Mapping[str, Any], present: Collection[str]) -> set[str]:
    """Return the names on the lineage of a checkpoint, including its ``name``, which is "" if it is in another folder.

    A checkpoint of an earlier version does not record its lineage. Then all earlier ones ``present`` there count.
    """
    recorded = scalars.get(NAMES)
    if isinstance(recorded, list):
        return {*recorded, *([name] if name else [])}
    last = scalars.get("iteration", 0)
    return {other for other in present if _position(other)[0] <= last}


def own_lineage_first(checkpoints: Sequence[Location]) -> tuple[list[Location], set[str]]:
    """Sort checkpoints, best first, so that those on the lineage of the best one come before all others.

    Unreadable checkpoints keep their position, because their lineage is unknown. Returns the checkpoints in order, and
    the names of those on other lineages.
    """
    for number, folder in enumerate(checkpoints):
        scalars = sound_scalars(folder)
        if scalars is not None:
            lineage = names_on_lineage(folder.name, scalars, [path.name for path in checkpoints[number:]])
            lineage |= {path.name for path in checkpoints[:number]}
            others = [path for path in checkpoints if path.name not in lineage]
            return [*(path for path in checkpoints if path.name in lineage), *others], {path.name for path in others}
    return list(checkpoints), set()


def _position(name: str) -> tuple[int, int]:
    return parse_checkpoint_name(name) or (-1, 0)


@dataclass(frozen=True)
class Start:
    """The iteration at which this start of a run begins.

    Attributes:
        iteration: Last iteration done before this start.
        saved: ``verified`` of the checkpoint that the run resumes from. None if it has none.
    """

    iteration: int = 0
    saved: Any = None

    @classmethod
    def after(cls, loaded: Loaded | None) -> Start:
        """Return the start of a run that resumes from ``loaded``, or from scratch if that is None."""
        return cls() if loaded is None else cls(loaded.progress.iteration, loaded.scalars.get("verified"))

    def verified(self, names: Sequence[str]) -> dict[str, int]:
        """Return check -> last verified iteration, at most the checkpoint's own. At iteration 0 all is verified."""
        return {name: 0 if self.iteration == 0 else self._of(name) for name in names}

    def _of(self, name: str) -> int:
        last = self.saved.get(name) if isinstance(self.saved, Mapping) else None
        return min(last, self.iteration) if isinstance(last, int) and last >= 0 else NEVER
