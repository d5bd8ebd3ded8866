"""What the two runs of a recomputed unit, forward and again, know of each other.

forward    .. counts^v dispatch^v experts  combine^v      counts are remembered
again      ..          dispatch^v experts                 counts are there; the last product is not made: its value
                                                          is the unit's output, which nobody needs twice

What still flies when the unit begins (slices that the layer before passes on) arrives inside it, but is no part of it:
the unit keeps what has arrived, ``arrival``, as it keeps its inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

T = TypeVar("T")


class Replay:
    """One unit in one micro-batch; lives as long as the unit's graph does. again: it is being recomputed."""

    def __init__(self) -> None:
        self.again = False
        self._found: list[Any] = []
        self._next = 0
        self._keep: Callable[[Tensor], Any] = _as_it_is
        self._whole: Callable[[Any], Tensor] = _as_it_is

    def keep_by(self, keep: Callable[[Tensor], Any], whole: Callable[[Any], Tensor]) -> None:
        """Keep arrivals so: ``keep`` gives what is kept of a tensor, ``whole`` the tensor again."""
        self._keep, self._whole = keep, whole

    def start(self) -> None:
        """From here on the unit runs again, from its beginning."""
        self.again, self._next = True, 0

    def stop(self) -> None:
        """The recomputation is over, whether it came to the unit's end or not."""
        self.again = False

    def once(self, find: Callable[[], T]) -> T:
        """What ``find`` gave in the forward; called in the order of the program."""
        if not self.again:
            self._found.append(find())
            return self._found[-1]  # type: ignore[no-any-return]
        return self._recall()  # type: ignore[no-any-return]

    def arrival(self, find: Callable[[], Tensor]) -> Tensor:
        """A tensor that ``find`` makes of what came from outside; the unit run again starts from its value."""
        if self.again:
            kept, needs_grad = self._recall()
            return self._whole(kept).detach().requires_grad_(needs_grad)
        with kept_as_it_is():
            x = find()
        self._found.append((self._keep(x.detach()), x.requires_grad))
        return x

    def _recall(self) -> Any:
        self._next += 1
        return self._found[self._next - 1]


def kept_as_it_is() -> saved_tensors_hooks:
    """Surrounds what saves small things that somebody keeps anyway: its backward asks no unit to be run again."""
    return saved_tensors_hooks(_as_it_is, _as_it_is)


def _as_it_is(kept: Any) -> Any:
    return kept


def once(replay: Replay | None, find: Callable[[], T]) -> T:
    """``replay.once(find)``; outside recomputed units ``find()``."""
    return find() if replay is None else replay.once(find)
