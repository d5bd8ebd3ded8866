"""Micro-batches with fewer positions: without their padding, and those of a rank of cp."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megapar.core.context_parallel.positions import SequenceLayout
from megapar.data.batches import collate_decoder, collate_ernie
from megapar.data.reduced_batch import context_parallel_collate, tokens_and_labels_ahead, unpadded_collate
from megapar.data.sampling.samples import NO_LOSS
from megapar.model.decoder.mtp import following, of_next


def ernie_sample(valid: int, masked: list[int], first: int = 0) -> dict[str, np.ndarray]:
    labels = np.full(8, NO_LOSS)
    labels[masked] = [100 + at for at in masked]
    return {
        "tokens": np.arange(first, first + 8),
        "token_types": np.arange(8) // 4,
        "labels": labels,
        "valid": np.arange(8) < valid,
        "label": np.array(1),
    }


SAMPLES = [ernie_sample(5, [1, 4], 10), ernie_sample(8, [0], 20), ernie_sample(2, [1], 30)]


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


@pytest.mark.parametrize("samples", [[ernie_sample(8, [0], 0)] * 2, [ernie_sample(8, [0], 0), ernie_sample(0, [], 0)]])
def test_batches_without_padding_or_with_an_empty_sample_stay(samples):
    batch = unpadded_collate(collate_ernie)(samples)
    assert batch.tensors["tokens"].shape == (2, 8)
    assert "ends" not in batch.tensors


ZIGZAG = SequenceLayout(2, zigzag=True)
WHOLE = {"lm": 16, "mtp": 14, "sequences": 2}


def decoder_sample(first: int) -> dict[str, np.ndarray]:
    return {"tokens": np.arange(first, first + 8), "labels": np.arange(first + 1, first + 9), "ends": np.array([3, 8])}


def test_a_decoder_batch_in_zigzag() -> None:
    samples = [decoder_sample(0), decoder_sample(20)]
    first, second = (context_parallel_collate(collate_decoder, ZIGZAG, rank)(samples) for rank in range(2))
    assert first.tensors["tokens"].tolist() == [[0, 1, 6, 7], [20, 21, 26, 27]]
    assert second.tensors["labels"].tolist() == [[3, 4, 5, 6], [23, 24, 25, 26]]
    assert second.tensors["positions"].tolist() == [[2, 3, 4, 5]] * 2
    for batch in (first, second):
        assert batch.tensors["ends"].tolist() == [3, 8, 11, 16]
        assert (batch.counts, batch.valid_tokens, batch.tokens) == (WHOLE, 16, 16)
        assert "lengths" not in batch.tensors


def test_weights_go_with_their_labels() -> None:
    weights = np.arange(1, 9, dtype=np.float32) / 2
    sample = decoder_sample(0) | {"weights": weights}
    first, second = (context_parallel_collate(collate_decoder, ZIGZAG, rank)([sample]) for rank in range(2))
    assert first.tensors["weights"].tolist() == [[0.5, 1, 3.5, 4]]
    assert second.tensors["weights"].tolist() == [[1.5, 2, 2.5, 3]]
    ahead = of_next(torch.from_numpy(weights)[None])[0]
    assert first.tensors["weights_ahead"].tolist() == [ahead[[0, 1, 6, 7]].tolist()]
    assert first.counts == second.counts == {"lm": 18.0, "mtp": 17.5, "sequences": 1}


def test_masked_words_go_to_who_holds_them() -> None:
    samples = [ernie_sample(8, [1, 5]), ernie_sample(6, [0, 3])]
    first, second = (context_parallel_collate(collate_ernie, SequenceLayout(2), rank)(samples) for rank in range(2))
    assert first.tensors["masked_index"].tolist() == [1, 4, 7]
    assert first.tensors["masked_labels"].tolist() == [101, 100, 103]
    assert second.tensors["masked_index"].tolist() == [1]
    assert second.tensors["valid"].tolist() == [[True] * 4, [True, True, False, False]]
    for batch in (first, second):
        assert batch.tensors["lengths"].tolist() == [8, 6]
        assert batch.counts == {"lm": 4, "sop": 2}
        assert batch.to("meta").tensors["lengths"].device == torch.device("cpu")


def test_one_rank_has_the_batch_as_it_is() -> None:
    assert context_parallel_collate(collate_ernie, SequenceLayout(), 0) is collate_ernie


def test_what_stands_ahead_is_what_the_model_takes_from_whole_sequences() -> None:
    generator = np.random.default_rng(0)
    tokens = generator.integers(0, 50, (3, 8))
    labels = np.where(generator.random((3, 8)) < 0.3, NO_LOSS, tokens + 1)
    for ours, theirs in zip(
        tokens_and_labels_ahead(tokens, labels),
        following(torch.from_numpy(tokens), torch.from_numpy(labels)),
        strict=True,
    ):
        assert ours.tolist() == theirs.tolist()
