"""Random streams that depend on what is computed, not on who computes it.

Dropout of micro-batch m of a run draws from a generator seeded by (seed, m). So masks do not depend on the layout of
data ranks, differ between data ranks, repeat when a run is resumed, and leave no state to save but the seed.
"""

from __future__ import annotations

import hashlib

import torch


def stream_seed(seed: int, *path: int | str) -> int:
    """A 63-bit seed of the stream named by ``path``, from the first 8 bytes of SHA-256 of ``seed/path...``."""
    text = "/".join(str(part) for part in (seed, *path))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def seed_micro_batch(seed: int, number: int, part: int = 0, chunk: int = 0) -> None:
    """Seed torch's default generators for micro-batch ``number``, counted over the whole run.

    part: which part of the positions this rank has, where sequence parallelism cuts them, so that parts draw different
    masks. chunk: of a pipeline, likewise.
    """
    path = (number, part, chunk) if chunk else (number, part)
    torch.manual_seed(stream_seed(seed, "dropout", *path))
