"""ERNIE's samples: the frame, the order of the halves, whole-word masking and its rates."""

from __future__ import annotations

import numpy as np
import pytest

from megapar.data import Corpus
from megapar.data.sampling.draws import Draws
from megapar.data.sampling.ernie import ErnieSamples, Spans, cut_at, mask_words
from megapar.data.sampling.samples import NO_LOSS, RandomPieces, Sample
from megapar.data.tokenizers.tokenizer import MockTokenizer, SpecialTokens
from megapar.data.tokens.store import TokenStore
from megapar.errors import DataError

CLS, SEP, MASK, PAD = 4, 5, 6, 0
ORDINARY = np.arange(7, 1000)


def _store(*documents: list[int]) -> TokenStore:
    ids = [np.array([*document, 3], dtype=np.uint16) for document in documents]
    return TokenStore(np.concatenate(ids), np.cumsum([0, *map(len, ids)], dtype=np.int64))


def _original(sample: Sample) -> np.ndarray:
    return np.where(sample["labels"] == NO_LOSS, sample["tokens"], sample["labels"])


def test_spans_stay_inside_documents_and_are_near_equal() -> None:
    spans = Spans(_store(list(range(100, 125)), [1, 2, 3], list(range(200, 210)), []), 10)
    assert [spans[i].tolist() for i in range(len(spans))] == [
        list(range(100, 108)),
        list(range(108, 116)),
        list(range(116, 125)),
        list(range(200, 210)),
    ]
    with pytest.raises(DataError, match="no document"):
        Spans(_store([1, 2, 3]), 10)


def test_no_span_is_too_short_to_be_cut() -> None:
    for longest in (3, 4, 5, 9):
        for length in range(8, 40):
            spans = Spans(_store(list(range(length))), longest)
            lengths = [len(spans[i]) for i in range(len(spans))]
            assert sum(lengths) == length
            assert 2 <= min(lengths) <= max(lengths) <= longest


def test_a_sample_by_hand() -> None:
    """One document whose every id is a word; the frame and both orders."""
    ids = list(range(10, 20))
    samples = ErnieSamples(Spans(_store(ids), 17), 16, MockTokenizer(64), 0.15, seed=2)
    seen = set()
    for number in range(40):
        sample = samples[number]
        framed, types = _original(sample), sample["token_types"]
        first_end = int(np.flatnonzero(framed == SEP)[0])
        a, b = framed[1:first_end].tolist(), framed[first_end + 1 : 12].tolist()
        assert (framed[0], framed[12], framed[13:].tolist()) == (CLS, SEP, [PAD] * 3)
        assert a + b == ids if sample["label"] == 0 else b + a == ids
        assert a
        assert b
        assert types.tolist() == [0] * (first_end + 1) + [1] * (12 - first_end) + [0] * 3
        assert sample["valid"].tolist() == [True] * 13 + [False] * 3
        assert (sample["labels"] != NO_LOSS).any()
        assert (sample["labels"][[0, first_end, 12, 13, 14, 15]] == NO_LOSS).all()
        seen.add(int(sample["label"]))
    assert seen == {0, 1}


def test_the_cut_is_at_a_word_start_in_the_middle() -> None:
    starts = np.zeros(20, dtype=bool)
    starts[[0, 2, 6, 11, 19]] = True
    assert {cut_at(starts, where) for where in np.linspace(0, 0.999, 50)} == {6, 11}
    assert {cut_at(np.array([True, *[False] * 7]), where) for where in (0.0, 0.3, 0.6, 0.99)} == {2, 3, 4, 5}
    assert cut_at(np.array([True, True]), 0.9) == 1


def test_words_are_masked_whole_and_share_a_fate() -> None:
    ids = np.arange(100, 400)
    starts = np.arange(300) % 3 == 0
    fates = {"mask": 0, "random": 0, "kept": 0}
    for number in range(300):
        shown, labels = mask_words(ids, starts, 0.15, MASK, ORDINARY, Draws(1, "t", number))
        asked = (labels != NO_LOSS).reshape(100, 3)
        assert (asked.all(1) == asked.any(1)).all()
        assert np.array_equal(labels[labels != NO_LOSS], ids[labels != NO_LOSS])
        assert np.array_equal(shown[labels == NO_LOSS], ids[labels == NO_LOSS])
        for before, after in zip(ids.reshape(100, 3)[asked.all(1)], shown.reshape(100, 3)[asked.all(1)], strict=True):
            masked = (after == MASK).sum()
            assert masked in (0, 3)
            fates["mask" if masked else "kept" if np.array_equal(before, after) else "random"] += 1
    total = sum(fates.values())
    assert abs(total / (300 * 100) - 0.15) < 0.01
    assert abs(fates["mask"] / total - 0.8) < 0.02
    assert abs(fates["random"] / total - 0.1) < 0.02


def test_at_least_one_word_is_masked() -> None:
    for number in range(50):
        _, labels = mask_words(np.arange(10, 14), np.ones(4, bool), 1e-9, MASK, ORDINARY, Draws(1, "t", number))
        assert (labels != NO_LOSS).sum() == 1


def test_words_of_the_corpus_are_masked_whole(ernie_corpus: Corpus) -> None:
    marks, special = ernie_corpus.tokenizer.word_marks, [*ernie_corpus.tokenizer.special.ids]
    longer = swapped = 0
    for number in range(300):
        sample = ernie_corpus.train[number]
        framed = _original(sample)
        swapped += int(sample["label"])
        shown = sample["tokens"][sample["labels"] != NO_LOSS]
        assert not np.isin(shown[shown != MASK], special).any()
        for half in (0, 1):
            inside = sample["valid"] & (sample["token_types"] == half) & ~np.isin(framed, (CLS, SEP))
            ids, asked = framed[inside], sample["labels"][inside] != NO_LOSS
            groups = np.split(asked, np.flatnonzero(marks.word_starts(ids))[1:])
            assert all(group.all() == group.any() for group in groups)
            longer += sum(len(group) > 1 and bool(group.all()) for group in groups)
    assert longer > 100
    assert abs(swapped / 300 - 0.5) < 0.06


def test_heldout_samples_do_not_depend_on_the_seed(ernie_corpus: Corpus) -> None:
    pieces = ernie_corpus.heldout._pieces  # type: ignore[attr-defined]
    again = ErnieSamples(pieces, 64, ernie_corpus.tokenizer, 0.15, None)
    for number in range(20):
        assert np.array_equal(again[number]["tokens"], ernie_corpus.heldout[number]["tokens"])
    assert np.array_equal(again[0]["tokens"], again[len(again)]["tokens"])
    assert {again._order[number] * 4 // len(again) for number in range(32)} == {0, 1, 2, 3}  # of the whole corpus


def test_a_tokenizer_without_mask_is_refused() -> None:
    tokenizer = MockTokenizer(64)
    tokenizer.special = SpecialTokens(pad=0, cls=4, sep=5)
    with pytest.raises(DataError, match="no mask token"):
        ErnieSamples(RandomPieces(ORDINARY, 8, 16, 1, "x"), 32, tokenizer, 0.15, 1)
