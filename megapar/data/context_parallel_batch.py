"""Micro-batches reduced to the positions of one context parallel rank; all ranks of cp read the same samples."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megapar.core.context_parallel.positions import SequenceLayout
from megapar.data.batches import LENGTHS, Collate, MicroBatch
from megapar.data.sampling.samples import NO_LOSS, WEIGHTS

if TYPE_CHECKING:
    import numpy as np

_AHEAD = ("tokens_ahead", "labels_ahead", "weights_ahead")
_BY_POSITION = ("tokens", "labels", WEIGHTS, "positions", "token_types", "task_types", "valid", *_AHEAD)


def context_parallel_collate(collate: Collate, layout: SequenceLayout, rank: int) -> Collate:
    """Return ``collate`` with its tensors reduced to the positions of ``rank``; counts stay those of whole samples."""
    return collate if layout.size == 1 else lambda samples: _cut(collate(samples), layout, rank)


def _cut(batch: MicroBatch, layout: SequenceLayout, rank: int) -> MicroBatch:
    import numpy as np
    import torch

    whole = {name: tensor.numpy() for name, tensor in batch.tensors.items()}
    if "labels" in whole:
        whole["tokens_ahead"], whole["labels_ahead"] = tokens_and_labels_ahead(whole["tokens"], whole["labels"])
    if WEIGHTS in whole:
        whole["weights_ahead"] = _next(whole[WEIGHTS])
    length = whole["tokens"].shape[1]
    own = np.array(layout.positions(length, rank), dtype=np.int64)
    arrays = {name: array[:, own] if name in _BY_POSITION else array for name, array in whole.items()}
    if "valid" in whole:
        arrays[LENGTHS] = whole["valid"].sum(1)
    if "masked_index" in whole:
        place = np.full(length, -1, dtype=np.int64)
        place[own] = np.arange(len(own))
        sample, at = np.divmod(whole["masked_index"], length)
        here = place[at] >= 0
        arrays["masked_index"] = (sample * len(own) + place[at])[here]
        arrays["masked_labels"] = whole["masked_labels"][here]
    tensors = {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}
    return MicroBatch(tensors, batch.counts, batch.valid_tokens, batch.tokens)


def tokens_and_labels_ahead(tokens: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (token t + 1, label of t + 1) for every position t of [B, S], for multi-token prediction.

    The label is NO_LOSS if t has no label. The model does the same itself when it has whole sequences.
    """
    import numpy as np

    after = np.concatenate((labels[:, 1:], np.full_like(labels[:, :1], NO_LOSS)), axis=1)
    return _next(tokens), np.where(labels == NO_LOSS, NO_LOSS, after)


def _next(values: np.ndarray) -> np.ndarray:
    """Return the value of the next position for each of [B, S]; at the last one, which has no label, its own."""
    import numpy as np

    return np.concatenate((values[:, 1:], values[:, -1:]), axis=1)
