"""Micro-batches without padding: the positions of all samples one after another, as documents of one sample."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megapar.data.batches import ENDS, STARTS, Collate, MicroBatch

if TYPE_CHECKING:
    import numpy as np

_BY_POSITION = ("tokens", "positions", "token_types", "task_types")


def unpadded_collate(collate: Collate, multiple: int = 1) -> Collate:
    """Return ``collate`` with the padding removed from its micro-batches; counts stay those of whole samples.

    A micro-batch without padding stays as it is.

        tokens [2, 4]: a b . .    ->    tokens [1, 6]: a b c d e filler    ends 2 5 6    starts 0 2 5 6
                       c d e .

    Args:
        collate: Makes micro-batches of ERNIE's samples, whose padding is at the end.
        multiple: Filler is appended up to a multiple of this number of positions, so that ranks can split them. It is a
            further document, which no loss reads.
    """
    return lambda samples: _unpadded(collate(samples), multiple)


def _unpadded(batch: MicroBatch, multiple: int) -> MicroBatch:
    import numpy as np
    import torch

    if "valid" not in batch.tensors:
        return batch
    whole = {name: tensor.numpy() for name, tensor in batch.tensors.items() if name != "valid"}
    valid = batch.tensors["valid"].numpy()
    lengths, rows = valid.sum(1), np.flatnonzero(valid)
    if not lengths.all():  # a sample without a position has none for the sentence order
        return batch
    filler = -len(rows) % multiple

    def selected(array: np.ndarray) -> np.ndarray:
        return np.pad(array.reshape(-1)[rows], (0, filler))[None]

    arrays = {name: selected(array) if name in _BY_POSITION else array for name, array in whole.items()}
    ends = np.cumsum([*lengths, *([filler] if filler else [])])
    arrays[ENDS], arrays[STARTS] = ends, np.append(0, ends).astype(np.int32)
    arrays["masked_index"] = np.searchsorted(rows, whole["masked_index"])
    tensors = {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}
    return MicroBatch(tensors, batch.counts, batch.valid_tokens, batch.tokens)
