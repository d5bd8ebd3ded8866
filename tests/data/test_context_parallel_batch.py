"""Micro-batches cut down to a rank of cp: its positions, and what stays that of whole samples."""

from __future__ import annotations

import numpy as np
import torch

from megapar.core.context_parallel.positions import SequenceLayout
from megapar.data.batches import collate_decoder, collate_ernie
from megapar.data.context_parallel_batch import context_parallel_collate, tokens_and_labels_ahead
from megapar.data.sampling.samples import NO_LOSS
from megapar.model.decoder.mtp import following, of_next

ZIGZAG = SequenceLayout(2, zigzag=True)
WHOLE = {"lm": 16, "mtp": 14, "sequences": 2}


def decoder_sample(first: int) -> dict[str, np.ndarray]:
    return {"tokens": np.arange(first, first + 8), "labels": np.arange(first + 1, first + 9), "ends": np.array([3, 8])}


def ernie_sample(valid: int, masked: list[int]) -> dict[str, np.ndarray]:
    labels = np.full(8, NO_LOSS)
    labels[masked] = [100 + at for at in masked]
    return {
        "tokens": np.arange(8),
        "token_types": np.arange(8) // 4,
        "labels": labels,
        "valid": np.arange(8) < valid,
        "label": np.array(1),
    }


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
