"""The bits of what a stretch of training computes, place by place, to compare with another run of the same.

    forward     the output of every unit of the model, and of every stage of a pipeline; then the losses
    backward    every gradient as this rank makes it, before ranks sum anything
    reduced     this rank's piece of the gradients' sums

A place has 64 bits, on the device: the sum of its words as integers, and its own sum. The host reads them once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

FORWARD, BACKWARD, REDUCED = range(3)
_WORD = 8  # bytes
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class DigestPoint(NamedTuple):
    """Where a digest is of. phase: FORWARD, BACKWARD or REDUCED. order: in its phase, what comes first is smaller; the
    same numbers on every rank. name: for messages.
    """

    phase: int
    order: int
    name: str


class DigestRecord(NamedTuple):
    """A trail that has ended, on the host: a digest for every place, in the order in which they came."""

    places: tuple[DigestPoint, ...]
    digests: tuple[int, ...]

    def local(self) -> DigestRecord:
        """Without what other ranks' micro-batches have a part in."""
        kept = [number for number, place in enumerate(self.places) if place.phase != REDUCED]
        return DigestRecord(
            tuple(self.places[number] for number in kept), tuple(self.digests[number] for number in kept)
        )

    def hash(self) -> int:
        """One number of all, as an int64."""
        weighed = sum((2 * number + 1) * digest for number, digest in enumerate(self.digests))
        return (weighed + (1 << 63)) % (1 << 64) - (1 << 63)


def first_difference(one: DigestRecord, other: DigestRecord) -> DigestPoint | None:
    """The earliest place at which two runs of the same differ; None: nowhere."""
    if one.places != other.places:
        pairs = zip(one.places, other.places, strict=False)
        parted = [mine for mine, theirs in pairs if mine != theirs] or [*one.places, *other.places]
        return parted[0]._replace(name=f"the order of work at {parted[0].name}")
    pairs_of_digests = zip(one.places, one.digests, other.digests, strict=True)
    return min((place for place, mine, theirs in pairs_of_digests if mine != theirs), default=None)


class DigestTrail:
    """Notes places while they are computed. units: names of the whole model's units in forward order."""

    def __init__(self, units: Sequence[str]) -> None:
        self._order: Mapping[str, int] = {name: number for number, name in enumerate(dict.fromkeys(units))}
        self._places: list[DigestPoint] = []
        self._digests: list[Tensor] = []

    def output(self, unit: str, value: Any, name: str = "") -> None:
        """What a unit gave: a tensor, or a list or tuple in which the tensors are looked at."""
        order = self._order.get(unit, len(self._order))
        values = value if isinstance(value, list | tuple) else (value,)
        for tensor in values:
            if isinstance(tensor, Tensor):
                self._add(DigestPoint(FORWARD, order, name or f"the output of {unit}"), tensor)

    def sums(self, name: str, tensor: Tensor) -> None:
        """What the forward ends with."""
        self._add(DigestPoint(FORWARD, len(self._order) + 1, name), tensor)

    def gradient(self, unit: str, name: str, tensor: Tensor) -> None:
        """A gradient that this rank has made, of a unit's parameter or of several."""
        self._add(DigestPoint(BACKWARD, -self._order.get(unit, len(self._order)), f"the gradient of {name}"), tensor)

    def reduced(self, tensor: Tensor) -> None:
        """A piece of the gradients' sums."""
        self._add(DigestPoint(REDUCED, 0, "the sum of the ranks' gradients"), tensor)

    @contextmanager
    def watching(self, units: Mapping[str, Sequence[nn.Module]]) -> Iterator[None]:
        """Inside, the outputs of a rank's units are noted; of layers that run slice by slice there are none.

        A module of several units, as the head beside the copy of a tied embedding, is the last one's: it runs there.
        """

        def hook(unit: str) -> Any:
            return lambda module, inputs, output: self.output(unit, output)

        unit_of = {module: unit for unit, modules in units.items() for module in modules}
        hooks = [module.register_forward_hook(hook(unit)) for module, unit in unit_of.items()]
        try:
            yield
        finally:
            for one in hooks:
                one.remove()

    def end(self) -> DigestRecord:
        """All that was noted; waits for the device."""
        digests: list[int] = torch.stack(self._digests).tolist() if self._digests else []
        return DigestRecord(tuple(self._places), tuple(digests))

    def _add(self, place: DigestPoint, tensor: Tensor) -> None:
        self._places.append(place)
        self._digests.append(digest(tensor))


@torch.no_grad()
def digest(tensor: Tensor) -> Tensor:
    """64 bits of a tensor, int64 on its device, at the speed of memory: equal for equal bits.

    Words of eight bytes are summed as integers. That misses what changes the topmost bit of an even number of them, as
    a sign that is wrong in two places: the sum of the numbers themselves is added.
    """
    flat = tensor.detach().contiguous().view(-1)
    words = flat.numel() * flat.element_size() // _WORD * (_WORD // flat.element_size())
    rest = flat[words:].view(_INTEGERS[flat.element_size()]).sum(dtype=torch.int64)
    if flat.storage_offset() * flat.element_size() % _WORD:
        flat = flat.clone()
    whole = flat[:words].view(torch.int64).sum()
    if not flat.is_floating_point():
        return whole * 3 + rest
    own = flat.sum().to(torch.float64).view(torch.int64)
    return whole * 3 + rest * 5 + own
