"""A micro-batch cut down to the positions that one rank of cp holds; all ranks of cp read the same samples."""

from __future__ import annotations

from megapar.core.context_parallel.layout import Layout
from megapar.core.following import following
from megapar.data.batches import LENGTHS, Collate, MicroBatch

AHEAD = ("tokens_ahead", "labels_ahead")
_BY_POSITION = ("tokens", "labels", "positions", "token_types", "task_types", "valid")


def own_positions(collate: Collate, layout: Layout, rank: int) -> Collate:
    """``collate``, and of its tensors the positions of ``rank``; what the host knows stays that of the whole."""
    return collate if layout.size == 1 else lambda samples: _cut(collate(samples), layout, rank)


def _cut(batch: MicroBatch, layout: Layout, rank: int) -> MicroBatch:
    import numpy as np
    import torch

    whole = {name: tensor.numpy() for name, tensor in batch.tensors.items()}
    length = whole["tokens"].shape[1]
    own = np.array(layout.positions(length, rank), dtype=np.int64)
    arrays = {name: array[:, own] if name in _BY_POSITION else array for name, array in whole.items()}
    if "labels" in whole:
        ahead = following(batch.tensors["tokens"], batch.tensors["labels"])
        arrays |= {name: x.numpy()[:, own] for name, x in zip(AHEAD, ahead, strict=True)}
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
