"""Random streams that depend on the computation, not on the rank that runs it.

Every place of the model that draws random numbers, such as a dropout of a layer, has a separate stream in every
micro-batch, seeded by (seed, micro-batch, place, rank). Masks therefore do not depend on the layout of data ranks or
stages, differ between data ranks, and repeat exactly when a layer is recomputed. The seed is the only state to save.

Tensors that are the same on every mp rank draw from a *replicated* stream (rank 0 on all mp ranks). A tensor that is
split over mp (heads, or positions with sequence parallelism) or over cp (positions) draws from the stream of its rank.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


def stream_seed(seed: int, *path: int | str) -> int:
    """Return the 63-bit seed of the stream named by ``path``, from the first 8 bytes of SHA-256 of ``seed/path...``."""
    text = "/".join(str(part) for part in (seed, *path))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def seed_micro_batch(seed: int, number: int, device: torch.device) -> None:
    """Seed the default generators of host and device before the forward of micro-batch ``number`` of the whole run.

    ``torch.manual_seed`` seeds the generators of all devices, and takes milliseconds where there is none.
    """
    drawn = stream_seed(seed, "dropout", number)
    torch.default_generator.manual_seed(drawn)
    _generator(device).manual_seed(drawn)


@dataclass(frozen=True)
class Streams:
    """The streams of one micro-batch.

    A recomputation of a part of the micro-batch must use the same object, which is passed along with the inputs.
    """

    seed: int

    @classmethod
    def current(cls) -> Streams:
        """Return the streams of the micro-batch that ``seed_micro_batch`` seeded last."""
        return cls(torch.initial_seed())

    @contextmanager
    def drawing(self, device: torch.device, place: str, rank: int = 0) -> Iterator[None]:
        """Let torch's generator of the device draw the numbers of ``place`` inside, from the start of the stream."""
        generator = _generator(device)
        before = generator.initial_seed()
        generator.manual_seed(stream_seed(self.seed, place, rank))
        try:
            yield
        finally:
            generator.manual_seed(before)

    def dropout(self, x: Tensor, probability: float, place: str, rank: int = 0) -> Tensor:
        """Drop elements of ``x`` by the mask of ``place``. ``rank`` is 0 if all mp ranks have the same ``x``."""
        if not probability:
            return x
        with self.drawing(x.device, place, rank):
            return F.dropout(x, probability)


def _generator(device: torch.device) -> torch.Generator:
    """Return the default generator of the device."""
    if device.type in ("cpu", "meta"):  # tensors without values draw nothing
        return torch.default_generator
    generators = torch.get_device_module(device).default_generators
    return generators[device.index or 0]
