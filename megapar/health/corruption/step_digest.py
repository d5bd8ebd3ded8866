"""Digests of the values that a step computes, in order, to compare with a repetition of the step.

    forward     the output of every unit of the model and of every stage of the pipeline, then the losses
    backward    every gradient that this rank computes, before the reduction
    reduced     this rank's shard of the reduced gradients

A digest has 64 bits, on the device: the sum of the words as integers combined with the sum of the values. The host
reads all of them once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

FORWARD, BACKWARD, REDUCED = range(3)
_WORD = 8  # bytes
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class DigestPoint(NamedTuple):
    """The point of a step at which a digest was taken. Points compare in order of execution.

    Attributes:
        order: Ascending within the phase; the same on every rank.
    """

    phase: int
    order: int
    name: str


class DigestRecord(NamedTuple):
    """The digests of a step, on the host."""

    points: tuple[DigestPoint, ...]
    digests: tuple[int, ...]

    def local(self) -> DigestRecord:
        """Return the record without the digests that depend on other ranks' micro-batches."""
        kept = [number for number, point in enumerate(self.points) if point.phase != REDUCED]
        return DigestRecord(
            tuple(self.points[number] for number in kept), tuple(self.digests[number] for number in kept)
        )

    def hash(self) -> int:
        """Return one int64 hash of all digests."""
        weighed = sum((2 * number + 1) * digest for number, digest in enumerate(self.digests))
        return (weighed + (1 << 63)) % (1 << 64) - (1 << 63)


def first_difference(first: DigestRecord, second: DigestRecord) -> DigestPoint | None:
    """Return the earliest point at which two runs of the same step differ, or None if they are equal."""
    pairs = list(zip(first.points, second.points, strict=False))
    alike = next((number for number, (point, other) in enumerate(pairs) if point != other), len(pairs))
    digests = zip(first.points[:alike], first.digests, second.digests, strict=False)
    point = min((point for point, digest, other in digests if digest != other), default=None)
    if point is not None or first.points == second.points:
        return point
    parts = (first.points[alike:] or second.points[alike:])[0]
    return parts._replace(name=f"the order of work at {parts.name}")


class StepDigest:
    """Records digests while a step runs. ``units`` are the names of the whole model's units in forward order."""

    def __init__(self, units: Sequence[str]) -> None:
        self._order: Mapping[str, int] = {name: number for number, name in enumerate(dict.fromkeys(units))}
        self._points: list[DigestPoint] = []
        self._digests: list[Tensor] = []

    def output(self, unit: str, value: Any, name: str = "") -> None:
        """Record the output of a unit: a tensor, or the tensors in a list or tuple, and in a tuple of tensors in it."""
        order = self._order.get(unit, len(self._order))
        values = value if isinstance(value, list | tuple) else (value,)
        for item in values:
            parts = item if isinstance(item, tuple) and all(isinstance(part, Tensor) for part in item) else (item,)
            for tensor in parts:
                if isinstance(tensor, Tensor):
                    self._add(DigestPoint(FORWARD, order, name or f"the output of {unit}"), tensor)

    def sums(self, name: str, tensor: Tensor) -> None:
        """Record a sum at the end of the forward, such as a loss."""
        self._add(DigestPoint(FORWARD, len(self._order) + 1, name), tensor)

    def gradient(self, unit: str, name: str, tensor: Tensor) -> None:
        """Record a gradient of this rank, of one or several parameters of a unit."""
        self._add(DigestPoint(BACKWARD, -self._order.get(unit, len(self._order)), f"the gradient of {name}"), tensor)

    def reduced(self, tensor: Tensor) -> None:
        """Record a shard of the reduced gradients."""
        self._add(DigestPoint(REDUCED, 0, "the sum of the ranks' gradients"), tensor)

    @contextmanager
    def watching(self, units: Mapping[str, Sequence[nn.Module]]) -> Iterator[None]:
        """Record the outputs of this rank's units inside the block. Layers that run in slices have no output to record.

        A module of several units, such as a tied embedding in the head, counts for the last of them, where it runs.
        """

        def hook(unit: str) -> Any:
            return lambda module, inputs, output: self.output(unit, output)

        unit_of = {module: unit for unit, modules in units.items() for module in modules}
        hooks = [module.register_forward_hook(hook(unit)) for module, unit in unit_of.items()]
        try:
            yield
        finally:
            for handle in hooks:
                handle.remove()

    def end(self) -> DigestRecord:
        """Return the record. Waits for the device."""
        digests: list[int] = torch.stack(self._digests).tolist() if self._digests else []
        return DigestRecord(tuple(self._points), tuple(digests))

    def _add(self, point: DigestPoint, tensor: Tensor) -> None:
        self._points.append(point)
        self._digests.append(digest(tensor))


@torch.no_grad()
def digest(tensor: Tensor) -> Tensor:
    """Digest a tensor to one int64 on its device, at the speed of memory. Equal bits have equal digests.

    Words of eight bytes are summed as integers. This alone misses a change of the top bit in an even number of words,
    such as two wrong signs. Therefore the sum of the values is added.
    """
    flat = tensor.detach().contiguous().view(-1)
    words = flat.numel() * flat.element_size() // _WORD * (_WORD // flat.element_size())
    remainder = flat[words:].view(INTEGERS[flat.element_size()]).sum(dtype=torch.int64)
    if flat.storage_offset() * flat.element_size() % _WORD:
        flat = flat.clone()
    whole = flat[:words].view(torch.int64).sum()
    if not flat.is_floating_point():
        return whole * 3 + remainder
    values = flat.sum().to(torch.float64).view(torch.int64)
    return whole * 3 + remainder * 5 + values
