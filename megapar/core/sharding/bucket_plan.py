"""The plan of buckets: groups of parameters to gather and reduce together.

The flags and Paddle call a bucket a *segment*. Sources: the two segment strategies of Paddle's sharding for ERNIE 3.0
(PaddlePaddle PR 31884), where buckets are the unit of overlap. Buckets are planned from the parameter table, in forward
order; one may span several layers or be a part of a layer. An attention module is never cut, since it reads weights of
its submodules without calling them.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from megapar.core.sharding.cut import ParameterInfo

IN_FLIGHT_BYTES = 1 << 26  # of gradients in the reductions that run at once on a CPU
LEAST_IN_FLIGHT = 2  # buckets
_ATTENTION = "attention"


class PlanError(ValueError):
    """An anchor that matches no module, or a module that another anchor also matches."""


@dataclass(frozen=True)
class PlannedBucket:
    """A bucket as planned.

    Attributes:
        names: Its parameters, in forward order.
        bytes: Bytes that one rank gathers, in the dtype of the message.
    """

    names: tuple[str, ...]
    bytes: int

    @property
    def span(self) -> str:
        """The first and the last module, for display."""
        first, last = (name.rpartition(".")[0] for name in (self.names[0], self.names[-1]))
        return first if first == last else f"{first} .. {last}"


Cost = Callable[[ParameterInfo], int]


def by_unit(rows: Sequence[ParameterInfo], cost: Cost) -> list[PlannedBucket]:
    """Plan one bucket per layer."""
    return _cut(rows, cost, lambda before, row, _: row.unit != before.unit)


def by_bytes(
    rows: Sequence[ParameterInfo], cost: Cost, limit_bytes: float, *, whole: bool = False
) -> list[PlannedBucket]:
    """Start a new bucket when one has reached ``limit_bytes``. No module is cut and, with ``whole``, no layer."""

    def owner(row: ParameterInfo) -> str:
        return row.unit if whole else _modules(row)[-1]

    return _cut(rows, cost, lambda before, row, size: size >= limit_bytes and owner(row) != owner(before))


def by_anchors(
    rows: Sequence[ParameterInfo], cost: Cost, anchors: Sequence[str], *, whole: bool = False
) -> list[PlannedBucket]:
    """Start a new bucket at each module that an anchor (a path or a pattern) matches. Raises PlanError.

    whole: do not cut layers; a bucket that would begin inside a layer begins before it.
    """
    starts = _starts(rows, anchors)
    if whole:
        units = {row.unit for row in rows if starts.intersection(_modules(row))}
        return _cut(rows, cost, lambda before, row, _: row.unit != before.unit and row.unit in units)
    seen: set[str] = set()

    def cut(before: ParameterInfo, row: ParameterInfo, size: int) -> bool:
        starting = [module for module in _modules(row) if module in starts and module not in seen]
        seen.update(starting)
        return bool(starting)

    seen.update(module for module in _modules(rows[0]) if module in starts)
    return _cut(rows, cost, cut)


def _cut(
    rows: Sequence[ParameterInfo], cost: Cost, cuts: Callable[[ParameterInfo, ParameterInfo, int], bool]
) -> list[PlannedBucket]:
    buckets: list[PlannedBucket] = []
    names: list[str] = []
    size = 0
    for before, row in zip([rows[0], *rows], rows, strict=False):
        if names and cuts(before, row, size):
            buckets.append(PlannedBucket(tuple(names), size))
            names, size = [], 0
        names.append(row.name)
        size += cost(row)
    buckets.append(PlannedBucket(tuple(names), size))
    return buckets


def _modules(row: ParameterInfo) -> list[str]:
    """Return the paths of the modules that contain the parameter, outermost first; attention is not descended into."""
    parts = row.name.split(".")[:-1]
    if _ATTENTION in parts:
        parts = parts[: parts.index(_ATTENTION) + 1]
    return [".".join(parts[: end + 1]) for end in range(len(parts))]


def _starts(rows: Iterable[ParameterInfo], anchors: Sequence[str]) -> set[str]:
    modules = list(dict.fromkeys(module for row in rows for module in _modules(row)))
    anchor_of: dict[str, str] = {}
    for anchor in anchors:
        depth = anchor.count(".")
        matches = [module for module in modules if fnmatchcase(module, anchor) and module.count(".") == depth]
        if not matches:
            near = difflib.get_close_matches(anchor, modules, n=3)
            hint = f" Near: {', '.join(near)}." if near else f" Modules are, for example, {', '.join(modules[:4])}."
            raise PlanError(f"--segment-anchors {anchor} names no module of this model.{hint}")
        for module in matches:
            if module in anchor_of:
                raise PlanError(f"--segment-anchors {anchor} and {anchor_of[module]} both name {module}. Name it once.")
            anchor_of[module] = anchor
    return set(anchor_of)
