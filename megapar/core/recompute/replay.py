"""Replay: values that the forward of a recomputed unit passes to its recomputation.

forward    .. counts^v dispatch^v experts  combine^v      counts are recorded
recompute  ..          dispatch^v experts                 counts are replayed; the last product is skipped: its value
                                                          is the unit's output, which is already there

Messages in flight when the unit begins (slices of the previous layer) arrive inside it but are not computed by it: the
unit keeps what has arrived (``arrival``) as it keeps its inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

T = TypeVar("T")


class Replay:
    """The recorded values of one unit in one micro-batch; lives as long as the unit's graph.

    Attributes:
        recomputing: True during the recomputation.
    """

    def __init__(self) -> None:
        self.recomputing = False
        self._values: list[Any] = []
        self._next = 0
        self._keep: Callable[[Tensor], Any] = _identity
        self._whole: Callable[[Any], Tensor] = _identity

    def keep_by(self, keep: Callable[[Tensor], Any], whole: Callable[[Any], Tensor]) -> None:
        """Set the functions that store arrivals: ``keep`` returns the stored form, ``whole`` the tensor again."""
        self._keep, self._whole = keep, whole

    def start(self) -> None:
        """Begin the recomputation, from the start of the unit."""
        self.recomputing, self._next = True, 0

    def stop(self) -> None:
        """End the recomputation, whether or not it reached the end of the unit."""
        self.recomputing = False

    def once(self, find: Callable[[], T]) -> T:
        """Return ``find()`` in the forward, and the recorded value in the recomputation, in call order."""
        if not self.recomputing:
            value = find()
            self._values.append(value)
            return value
        return self._recall()

    def arrival(self, find: Callable[[], Tensor]) -> Tensor:
        """Return a tensor that ``find`` makes from messages in flight; the recomputation starts from its value."""
        if self.recomputing:
            kept, needs_grad = self._recall()
            return self._whole(kept).detach().requires_grad_(needs_grad)
        with kept_as_it_is():
            x = find()
        self._values.append((self._keep(x.detach()), x.requires_grad))
        return x

    def _recall(self) -> Any:
        self._next += 1
        return self._values[self._next - 1]


def kept_as_it_is() -> saved_tensors_hooks:
    """Return a context that saves tensors as they are (small, or kept anyway): reading them recomputes nothing."""
    return saved_tensors_hooks(_identity, _identity)


def _identity(kept: Any) -> Any:
    return kept


def once(replay: Replay | None, find: Callable[[], T]) -> T:
    """Return ``replay.once(find)``; outside recomputed units ``find()``."""
    return find() if replay is None else replay.once(find)
