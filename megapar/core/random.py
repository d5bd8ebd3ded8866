"""Random streams that depend on what is computed, not on who computes it.

Every place of the model that draws (a dropout of a layer) has a stream of its own in every micro-batch, seeded by
(seed, micro-batch, place, rank). So masks do not depend on the layout of data ranks or stages, differ between data
ranks, repeat exactly where a layer is computed again, and leave no state to save but the seed.

A *replicated* stream (rank 0 on all mp ranks) is for what every mp rank computes alike; a tensor that is cut over mp
(heads, or positions under sequence parallelism) draws from its rank's own.
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
    """A 63-bit seed of the stream named by ``path``, from the first 8 bytes of SHA-256 of ``seed/path...``."""
    text = "/".join(str(part) for part in (seed, *path))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def seed_micro_batch(seed: int, number: int) -> None:
    """Seed torch's default generators for micro-batch ``number``, counted over the whole run; before its forward."""
    torch.manual_seed(stream_seed(seed, "dropout", number))


@dataclass(frozen=True)
class Streams:
    """The streams of one micro-batch. seed: of the micro-batch.

    Whoever computes a part of the micro-batch again must have the same object: it travels with the inputs.
    """

    seed: int

    @classmethod
    def current(cls) -> Streams:
        """Those of the micro-batch that ``seed_micro_batch`` named last."""
        return cls(torch.initial_seed())

    @contextmanager
    def drawing(self, device: torch.device, place: str, rank: int = 0) -> Iterator[None]:
        """Inside, torch's generator of the device draws the numbers of ``place`` from its start."""
        generator = _generator(device)
        before = generator.initial_seed()
        generator.manual_seed(stream_seed(self.seed, place, rank))
        try:
            yield
        finally:
            generator.manual_seed(before)

    def dropout(self, x: Tensor, probability: float, place: str, rank: int = 0) -> Tensor:
        """``x`` with elements dropped by the mask of ``place``. rank: 0 where all mp ranks hold the same ``x``."""
        if not probability:
            return x
        with self.drawing(x.device, place, rank):
            return F.dropout(x, probability)


def _generator(device: torch.device) -> torch.Generator:
    """The one that operators of the device draw from by default."""
    if device.type in ("cpu", "meta"):  # tensors without values draw nothing
        return torch.default_generator
    generators = torch.get_device_module(device).default_generators
    generator: torch.Generator = generators[device.index or 0]
    return generator
