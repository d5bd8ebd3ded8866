"""The order of samples, and what a decoder's sample is."""

from __future__ import annotations

import numpy as np
import pytest

from megapar.data.sampling.data_phases import Phase, PhasedPieces, first_lanes
from megapar.data.sampling.draws import Draws, Permutation
from megapar.data.sampling.mixture import Blend
from megapar.data.sampling.samples import (
    NO_LOSS,
    Boundaries,
    DecoderSamples,
    DocumentWindows,
    Order,
    TokenPieces,
    WeightedPiece,
    Windows,
    weighted,
)
from megapar.data.tokens.store import TokenStore
from megapar.errors import DataError


def _store(*lengths: int) -> TokenStore:
    """Documents of these lengths, their end tokens included; ids count up from 0."""
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return TokenStore(np.arange(offsets[-1], dtype=np.uint16), offsets)


def _windows(count: int) -> Windows:
    return Windows(_store(4 * count + 1), 4)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 16, 17, 1000, 4097])
def test_a_permutation_is_a_bijection(n: int) -> None:
    order = Permutation(n, seed=3, stream="x")
    assert sorted(order[i] for i in range(n)) == list(range(n))


def test_a_permutation_depends_on_its_key_and_looks_random() -> None:
    n = 5000
    one, two, three = (np.array([Permutation(n, *key)[i] for i in range(n)]) for key in ((1, "a"), (2, "a"), (1, "b")))
    for a, b in ((one, two), (one, three), (one, np.arange(n))):
        assert (a == b).sum() < 12  # 1 is expected
        assert abs(np.corrcoef(a, b)[0, 1]) < 0.06
    assert abs(np.corrcoef(one[:-1], one[1:])[0, 1]) < 0.06


def test_a_permutation_of_a_trillion_things_costs_nothing() -> None:
    order = Permutation(10**12, seed=1, stream="x")
    assert len({order[i] for i in range(1000)}) == 1000
    with pytest.raises(IndexError):
        order[10**12]


def test_draws_are_the_same_for_ever() -> None:
    """Fixed numbers: a change here changes every run's samples."""
    assert Draws(1, "ernie", 2).integers(6, 1000).tolist() == [997, 943, 586, 691, 966, 524]
    assert [Permutation(10, 1, "windows/0")[i] for i in range(10)] == [6, 4, 9, 7, 1, 2, 5, 3, 0, 8]


def test_draws_are_uniform_and_apart() -> None:
    draws = Draws(5, "x", 1)
    values = draws.uniform(20_000)
    assert 0 <= values.min() < 0.001 < 0.999 < values.max() < 1
    assert abs(values.mean() - 0.5) < 0.01
    assert not np.isin(values, Draws(5, "x", 2).uniform(20_000)).any()
    assert set(Draws(5, "y", 1).integers(1000, 5).tolist()) == set(range(5))


def test_windows_share_one_id_with_their_neighbours() -> None:
    windows = Windows(_store(4, 9), 4)
    assert [windows[i].tolist() for i in range(len(windows))] == [[0, 1, 2, 3, 4], [4, 5, 6, 7, 8], [8, 9, 10, 11, 12]]


def test_a_corpus_shorter_than_a_sample_is_refused() -> None:
    assert len(Windows(_store(5), 4)) == 1
    with pytest.raises(DataError, match=r"has 4 tokens, fewer than one sample of 4 \+ 1"):
        Windows(_store(4), 4)


def test_labels_are_one_position_ahead() -> None:
    samples = DecoderSamples(Windows(_store(100), 8), 8, seed=1)
    for number in range(30):
        sample = samples[number]
        assert sorted(sample) == ["labels", "tokens"]
        assert np.array_equal(sample["labels"], sample["tokens"] + 1)
        assert len(sample["tokens"]) == 8


def test_every_epoch_has_every_window_once_in_its_own_order() -> None:
    samples = DecoderSamples(Windows(_store(801), 8), 8, seed=1)
    epochs = [[int(samples[e * 100 + i]["tokens"][0]) // 8 for i in range(100)] for e in range(3)]
    assert all(sorted(epoch) == list(range(100)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert Order(100, 1, "windows")[250] == epochs[2][50]


def test_the_first_heldout_samples_are_from_the_whole_corpus_in_every_run() -> None:
    """An evaluation reads the first ones: here 40 of 400 windows, from every tenth of the corpus."""
    samples = DecoderSamples(Windows(_store(3201), 8, shortest=2), 8, seed=None)
    drawn = [int(samples[i]["tokens"][0]) // 8 for i in range(800)]
    assert {place // 40 for place in drawn[:40]} == set(range(10))
    assert drawn[:6] == [167, 384, 226, 138, 32, 370]
    assert sorted(drawn[:400]) == list(range(400))
    assert drawn[400:] == drawn[:400]


def test_a_short_heldout_sample_is_padded() -> None:
    short = DecoderSamples(Windows(_store(5), 8, shortest=2), 8, seed=None)[0]
    assert short["tokens"].tolist() == [0, 1, 2, 3, 0, 0, 0, 0]
    assert short["labels"].tolist() == [1, 2, 3, 4, *[NO_LOSS] * 4]
    assert short["valid"].tolist() == [True] * 4 + [False] * 4


class OnePiece:
    """A piece of the ids 1, 2, .. with these weights, which are those of the ids as targets."""

    def __init__(self, *weights: float) -> None:
        self._weights = np.array(weights, dtype=np.float32)

    def __len__(self) -> int:
        return 1

    def __getitem__(self, number: int) -> np.ndarray:
        return np.arange(1, len(self._weights) + 1)

    def weighted(self, number: int) -> WeightedPiece:
        return WeightedPiece(self[number], self._weights)


def test_a_label_of_weight_0_is_no_label() -> None:
    sample = DecoderSamples(OnePiece(9, 0.5, 0, 1, 2), 6, None)[0]
    assert sample["tokens"].tolist() == [1, 2, 3, 4, 0, 0]
    assert sample["labels"].tolist() == [2, NO_LOSS, 4, 5, NO_LOSS, NO_LOSS]
    assert sample["weights"].dtype == np.float32
    assert sample["weights"].tolist() == [0.5, 0, 1, 2, 0, 0]


def test_weights_of_0_and_1_are_in_the_labels_alone() -> None:
    sample = DecoderSamples(OnePiece(0.5, 1, 0, 1), 3, None)[0]
    assert sorted(sample) == ["labels", "tokens"]
    assert sample["labels"].tolist() == [2, NO_LOSS, 4]


def test_a_masked_end_has_weight_0() -> None:
    """Id 3 ends a document, so that its label, id 4, has no loss whatever its weight."""
    sample = DecoderSamples(OnePiece(1, 0.5, 1, 0.25, 1), 4, None, Boundaries(3, mask_loss=True))[0]
    assert sample["labels"].tolist() == [2, 3, NO_LOSS, 5]
    assert sample["weights"].tolist() == [0.5, 1, 0, 1]
    plain = DecoderSamples(OnePiece(1, 1, 1, 1, 1), 4, None, Boundaries(3, mask_loss=True))[0]
    assert "weights" not in plain
    assert plain["labels"].tolist() == [2, 3, NO_LOSS, 5]


def test_weights_pass_through_blends_and_phases() -> None:
    blend: Blend[TokenPieces] = Blend([_windows(1), OnePiece(0.5, 2)])
    pieces = PhasedPieces(blend, (Phase(0, None, first_lanes(None)),))
    ids, weights, _ = weighted(pieces, 1)
    assert weights is not None
    assert (ids.tolist(), weights.tolist()) == ([1, 2], [0.5, 2])
    assert weighted(pieces, 0)[1] is None


def test_an_index_that_is_wrong_anywhere_is_told_where_documents_are_apart() -> None:
    tokens = np.arange(40)
    with pytest.raises(DataError, match="document 1 of the corpus ends 5 tokens before it begins"):
        DocumentWindows(TokenStore(tokens, np.array([0, 20, 15, 40])), 16)
    windows = DocumentWindows(TokenStore(tokens, np.array([0, 20, 60])), 16)
    with pytest.raises(DataError, match="document 1 of the corpus is tokens 20 to 60, but there are 40"):
        [windows[number] for number in range(len(windows))]
