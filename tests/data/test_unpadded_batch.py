"""Micro-batches without their padding: the same positions, one sample after another."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megapar.data.batches import collate_ernie
from megapar.data.sampling.samples import NO_LOSS
from megapar.data.unpadded_batch import unpadded_collate


def sample(valid: int, masked: list[int], first: int) -> dict[str, np.ndarray]:
    labels = np.full(8, NO_LOSS)
    labels[masked] = [100 + at for at in masked]
    return {
        "tokens": np.arange(first, first + 8),
        "token_types": np.arange(8) // 4,
        "labels": labels,
        "valid": np.arange(8) < valid,
        "label": np.array(1),
    }


SAMPLES = [sample(5, [1, 4], 10), sample(8, [0], 20), sample(2, [1], 30)]


@pytest.mark.parametrize("multiple", [1, 4, 5])
def test_positions_follow_one_another(multiple):
    whole, batch = collate_ernie(SAMPLES), unpadded_collate(collate_ernie, multiple)(SAMPLES)
    filler = -15 % multiple
    found = batch.tensors
    assert "valid" not in found
    assert found["tokens"].tolist() == [[*range(10, 15), *range(20, 28), 30, 31, *[0] * filler]]
    assert found["positions"].tolist() == [[*range(5), *range(8), 0, 1, *[0] * filler]]
    assert found["token_types"].shape == found["task_types"].shape == (1, 15 + filler)
    assert found["ends"].tolist() == [5, 13, 15, *[15 + filler] * bool(filler)]
    assert found["starts"].tolist() == [0, *found["ends"].tolist()]
    assert found["starts"].dtype == torch.int32
    assert found["sop_labels"].tolist() == [1, 1, 1]
    for name in ("tokens", "positions"):
        flat, index = found[name].flatten(), found["masked_index"]
        assert torch.equal(flat[index], whole.tensors[name].flatten()[whole.tensors["masked_index"]])
    assert torch.equal(found["masked_labels"], whole.tensors["masked_labels"])
    assert (batch.counts, batch.valid_tokens, batch.tokens) == (whole.counts, 15, 24)


def test_the_host_reads_the_ends_and_the_device_the_starts():
    moved = unpadded_collate(collate_ernie)(SAMPLES).to("meta").tensors
    assert moved["ends"].device.type == "cpu"
    assert moved["starts"].device.type == "meta"


@pytest.mark.parametrize("samples", [[sample(8, [0], 0)] * 2, [sample(8, [0], 0), sample(0, [], 0)]])
def test_batches_without_padding_or_with_an_empty_sample_stay(samples):
    batch = unpadded_collate(collate_ernie)(samples)
    assert batch.tensors["tokens"].shape == (2, 8)
    assert "ends" not in batch.tensors
