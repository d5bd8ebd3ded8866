"""Micro-batches with fewer positions: without their padding, or those of one context parallel rank."""

from __future__ import annotations

from dataclasses import replace

from megapar.core.context_parallel.positions import SequenceLayout
from megapar.data.batches import ENDS, LENGTHS, STARTS, Collate, MicroBatch
from megapar.data.lazy_numpy import np
from megapar.data.sampling.samples import NO_LOSS, WEIGHTS

_AHEAD = ("tokens_ahead", "labels_ahead", "weights_ahead")
_BY_POSITION = ("tokens", "labels", WEIGHTS, "positions", "token_types", "task_types", "valid", *_AHEAD)


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
    return _with_tensors(batch, arrays)


def context_parallel_collate(collate: Collate, layout: SequenceLayout, rank: int) -> Collate:
    """Return ``collate`` with its tensors reduced to the positions of ``rank``; counts stay those of whole samples."""
    return collate if layout.size == 1 else lambda samples: _cut(collate(samples), layout, rank)


def _cut(batch: MicroBatch, layout: SequenceLayout, rank: int) -> MicroBatch:
    whole = {name: tensor.numpy() for name, tensor in batch.tensors.items()}
    if "labels" in whole:
        whole["tokens_ahead"], whole["labels_ahead"] = tokens_and_labels_ahead(whole["tokens"], whole["labels"])
    if WEIGHTS in whole:
        whole["weights_ahead"] = _next(whole[WEIGHTS])
    length = whole["tokens"].shape[1]
    kept = np.array(layout.positions(length, rank), dtype=np.int64)
    arrays = {name: array[:, kept] if name in _BY_POSITION else array for name, array in whole.items()}
    if "valid" in whole:
        arrays[LENGTHS] = whole["valid"].sum(1)
    if "masked_index" in whole:
        new_position = np.full(length, -1, dtype=np.int64)
        new_position[kept] = np.arange(len(kept))
        sample, position = np.divmod(whole["masked_index"], length)
        is_kept = new_position[position] >= 0
        arrays["masked_index"] = (sample * len(kept) + new_position[position])[is_kept]
        arrays["masked_labels"] = whole["masked_labels"][is_kept]
    return _with_tensors(batch, arrays)


def tokens_and_labels_ahead(tokens: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (token t + 1, label of t + 1) for every position t of [B, S], for multi-token prediction.

    The label is NO_LOSS if t has no label. The model does the same itself when it has whole sequences.
    """
    after = np.concatenate((labels[:, 1:], np.full_like(labels[:, :1], NO_LOSS)), axis=1)
    return _next(tokens), np.where(labels == NO_LOSS, NO_LOSS, after)


def _next(values: np.ndarray) -> np.ndarray:
    """Return the value of the next position for each of [B, S]; at the last one, which has no label, its own."""
    return np.concatenate((values[:, 1:], values[:, -1:]), axis=1)


def _with_tensors(batch: MicroBatch, arrays: dict[str, np.ndarray]) -> MicroBatch:
    """Return the micro-batch with these tensors; its counts stay those of whole samples."""
    import torch

    tensors = {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}
    return replace(batch, tensors=tensors)
