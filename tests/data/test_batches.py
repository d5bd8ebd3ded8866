"""Micro-batches and the loader: shapes, counts, who gets which sample, the thread that works ahead."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import closing

import numpy as np
import pytest
import torch

from megapar.data import Corpus
from megapar.data.batches import Loader, MicroBatch, collate_decoder, collate_ernie
from megapar.data.sampling.samples import NO_LOSS, Sample


class Numbered:
    """Samples that only say their number; asking for one at or after ``broken`` fails."""

    def __init__(self, broken: int = 1 << 60) -> None:
        self.asked: list[int] = []
        self.readers: set[int] = set()
        self._broken = broken

    def __len__(self) -> int:
        return 10

    def __getitem__(self, number: int) -> Sample:
        if number >= self._broken:
            raise OSError(f"sample {number} cannot be read")
        self.asked.append(number)
        self.readers.add(threading.get_ident())
        return {"tokens": np.full(4, number), "labels": np.full(4, number)}


def _numbers(batches: Sequence[MicroBatch]) -> list[list[int]]:
    return [batch.tensors["tokens"][:, 0].tolist() for batch in batches]


def _threads() -> int:
    return sum(thread.name.startswith("megapar-loader") for thread in threading.enumerate())


def test_a_decoder_batch(decoder_corpus: Corpus) -> None:
    samples = [decoder_corpus.train[i] for i in range(3)]
    batch = collate_decoder(samples)
    assert sorted(batch.tensors) == ["labels", "positions", "tokens"]
    for tensor in batch.tensors.values():
        assert (tensor.shape, tensor.dtype) == ((3, 64), torch.int64)
    assert torch.equal(batch.tensors["positions"][2], torch.arange(64))
    assert (batch.counts, batch.valid_tokens, batch.tokens) == ({"lm": 192, "mtp": 189, "sequences": 3}, 192, 192)
    assert np.array_equal(batch.tensors["tokens"][1].numpy(), samples[1]["tokens"])


def test_padding_is_marked_only_where_there_is_some() -> None:
    whole = {"tokens": np.arange(4), "labels": np.arange(4)}
    short = {
        "tokens": np.array([1, 2, 0, 0]),
        "labels": np.array([2, 3, NO_LOSS, NO_LOSS]),
        "valid": np.array([True, True, False, False]),
    }
    batch = collate_decoder([whole, short])
    assert batch.tensors["valid"].tolist() == [[True] * 4, [True, True, False, False]]
    assert (batch.counts, batch.valid_tokens, batch.tokens) == ({"lm": 6, "mtp": 4, "sequences": 2}, 6, 8)


def test_weights_are_summed_in_the_place_of_counts() -> None:
    plain = {"tokens": np.arange(4), "labels": np.array([1, 2, NO_LOSS, 4])}
    weighed = {
        "tokens": np.arange(4),
        "labels": np.array([1, NO_LOSS, 3, 4]),
        "weights": np.array([0.5, 0, 0.75, 0.1], np.float32),
    }
    batch = collate_decoder([plain, weighed])
    assert batch.tensors["weights"].dtype == torch.float32
    assert batch.tensors["weights"].tolist() == [[1, 1, 0, 1], [0.5, 0, 0.75, float(np.float32(0.1))]]
    assert batch.counts["lm"] == 4.25 + float(np.float32(0.1))
    assert batch.counts["mtp"] == 1 + float(np.float32(0.1))  # labels whose position before has one, too
    assert "weights" not in collate_decoder([plain]).tensors


def test_an_ernie_batch(ernie_corpus: Corpus) -> None:
    samples = [ernie_corpus.train[i] for i in range(4)]
    batch = collate_ernie(samples)
    tensors = batch.tensors
    for name in ("tokens", "token_types", "task_types", "positions"):
        assert (tensors[name].shape, tensors[name].dtype) == ((4, 64), torch.int64)
    labels = np.stack([sample["labels"] for sample in samples]).reshape(-1)
    index = tensors["masked_index"].numpy()
    assert np.array_equal(index, np.flatnonzero(labels != NO_LOSS))
    assert np.array_equal(tensors["masked_labels"].numpy(), labels[index])
    assert tensors["sop_labels"].tolist() == [int(sample["label"]) for sample in samples]
    assert batch.counts == {"lm": len(index), "sop": 4}
    assert batch.valid_tokens == int(tensors["valid"].sum()) < batch.tokens == 256
    assert int(tensors["task_types"].sum()) == 0


def test_masked_counts_differ_between_micro_batches(ernie_corpus: Corpus) -> None:
    batches = Loader(ernie_corpus.train, collate_ernie, 2, prefetch=False).step(0, 8)
    assert len({batch.counts["lm"] for batch in batches}) > 1


def test_ranks_take_micro_batches_in_turn() -> None:
    loaders = [Loader(Numbered(), collate_decoder, 2, rank, 2, prefetch=False) for rank in range(2)]
    assert _numbers(loaders[0].step(100, 2)) == [[100, 101], [104, 105]]
    assert _numbers(loaders[1].step(100, 2)) == [[102, 103], [106, 107]]


@pytest.mark.parametrize("kind", ["decoder_corpus", "ernie_corpus"])
def test_the_same_thousand_samples_on_1_2_and_4_ranks(kind: str, request: pytest.FixtureRequest) -> None:
    corpus: Corpus = request.getfixturevalue(kind)
    runs = []
    for ranks in (1, 2, 4):
        loaders = [Loader(corpus.train, corpus.collate, 5, r, ranks, prefetch=False) for r in range(ranks)]
        share = 40 // (5 * ranks)
        run = []
        for step in range(25):
            per_rank = [loader.step(step * 40, share) for loader in loaders]
            run += [per_rank[j % ranks][j // ranks] for j in range(8)]
        runs.append(run)
    for other in runs[1:]:
        for one, two in zip(runs[0], other, strict=True):
            assert one.counts == two.counts
            assert all(torch.equal(one.tensors[name], two.tensors[name]) for name in one.tensors)


def test_the_thread_works_one_step_ahead_and_no_further() -> None:
    samples = Numbered()
    with closing(Loader(samples, collate_decoder, 2)) as loader:
        assert _numbers(loader.step(0, 2)) == [[0, 1], [2, 3]]
        loader.settle()
        assert samples.asked == list(range(8))
        assert _numbers(loader.step(4, 2)) == [[4, 5], [6, 7]]
    assert samples.asked[:8] == list(range(8))  # what was made ahead was not made again
    assert _threads() == 0


def test_a_step_elsewhere_or_of_another_size_is_right_too() -> None:
    samples = Numbered()
    with closing(Loader(samples, collate_decoder, 2)) as loader:
        assert _numbers(loader.step(0, 1)) == [[0, 1]]
        assert _numbers(loader.step(2, 2)) == [[2, 3], [4, 5]]  # ramp-up
        assert _numbers(loader.step(50, 1)) == [[50, 51]]  # resumed
        assert _numbers([loader.first_of(0, 70)]) == [[70, 71]]
    assert len(samples.readers) == 1, "one thread reads, because samples may keep a file's position"


def test_an_error_in_the_thread_reaches_the_step_it_belongs_to() -> None:
    with closing(Loader(Numbered(broken=4), collate_decoder, 2)) as loader:
        assert _numbers(loader.step(0, 2)) == [[0, 1], [2, 3]]
        with pytest.raises(OSError, match="sample 4 cannot be read"):
            loader.step(4, 2)
        assert _numbers(loader.step(0, 2)) == [[0, 1], [2, 3]]
    assert _threads() == 0


def test_a_closed_loader_still_answers_without_a_thread() -> None:
    loader = Loader(Numbered(), collate_decoder, 1)
    loader.step(0, 1)
    loader.close()
    loader.close()
    assert _numbers(loader.step(1, 1)) == [[1]]
    assert _threads() == 0


def test_a_batch_moves() -> None:
    batch = collate_decoder([Numbered()[1]])
    moved = batch.to("meta")
    assert all(tensor.device.type == "meta" for tensor in moved.tensors.values())
    assert (moved.counts, moved.tokens) == (batch.counts, batch.tokens)


def test_impossible_ranks_are_a_programmer_error() -> None:
    with pytest.raises(ValueError, match="data rank 2 of 2"):
        Loader(Numbered(), collate_decoder, 1, 2, 2)


def test_a_step_of_another_length_is_not_the_one_made_ahead() -> None:
    with closing(Loader(Numbered(), collate_decoder, 2)) as loader:
        lengths = [loader.step(2 * number, 1, length)[0].tensors["tokens"].shape for number, length in ((0, 2), (1, 3))]
        whole = loader.step(4, 1)[0].tensors["tokens"].shape
    assert [*lengths, whole] == [(2, 2), (2, 3), (2, 4)]
