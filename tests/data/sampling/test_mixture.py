"""Mixtures: exact shares of every beginning, one order on every layout, epochs, splits, and nothing built."""

from __future__ import annotations

import json
import random
from collections import Counter
from contextlib import closing
from fractions import Fraction
from math import ceil, log2
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megapar.data import build
from megapar.data.batches import Loader
from megapar.data.sample_maker import Packing
from megapar.data.sampling.counts import PieceCounts
from megapar.data.sampling.mixture import Blend, Shares
from megapar.data.sampling.samples import NO_LOSS, Boundaries, DecoderSamples, DocumentWindows, Windows
from megapar.data.tokenizers.load import load_tokenizer
from megapar.data.tokenizers.sentencepiece_tokenizer import train
from megapar.data.tokens.store import TokenStore
from megapar.errors import DataError
from megapar.files.data_files import blend_of, split_name
from tests.support.token_files import write_tokens
from tests.support.unigram import unigram_entropy

SMALL: dict[str, Any] = {"vocab_size": 1000, "seq_length": 16, "seed": 5}


def _file(folder: Path, name: str, documents: int, first: int, length: int = 37) -> str:
    """Documents of ids from [first, first + 99), each closed by id 999; the first id tells the document."""
    rng = np.random.default_rng(first)
    sizes = (int(rng.integers(1, 2 * length)) for _ in range(documents))
    return write_tokens(folder / name, ([*rng.integers(first, first + 99, size=size), 999] for size in sizes))


@pytest.mark.parametrize("weights", [(), (1, 0), (-1, 2)])
def test_each_part_has_a_share(weights: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="all above 0"):
        Shares([Fraction(w) for w in weights])


@pytest.mark.parametrize("weights", [(1, 1), (7, 3), (1, 1000), (5, 1, 1, 1), tuple(range(1, 40))])
def test_every_beginning_has_its_shares(weights: tuple[int, ...]) -> None:
    shares = Shares([Fraction(w) for w in weights])
    seen: Counter[int] = Counter()
    for number in range(3000):
        part, before = shares.find(number)
        assert before == seen[part]
        seen[part] += 1
        if number % 100 == 0:
            for p, w in enumerate(weights):
                assert shares.count(p, number + 1) == seen[p]
                assert abs(seen[p] - (number + 1) * w / sum(weights)) < max(1, ceil(log2(len(weights))))
    far = 10**15
    assert sum(shares.count(p, far) for p in range(len(weights))) == far
    assert shares.find(far)[1] == shares.count(shares.find(far)[0], far)


def test_a_mixture_goes_through_epochs_of_its_parts() -> None:
    stores = [
        TokenStore(np.arange(first, first + n * 4 + 1, dtype=np.uint16), np.array([0, n * 4 + 1]))
        for first, n in ((0, 10), (1000, 30))
    ]
    blend = Blend([Windows(store, 4) for store in stores], [Fraction("0.5"), Fraction("0.5")])
    samples = DecoderSamples(blend, 4, seed=3)
    drawn = [int(samples[i]["tokens"][0]) for i in range(120)]
    first = [place for place in drawn if place < 1000]
    assert len(first) == 60
    for epoch in range(6):
        assert sorted(first[epoch * 10 : (epoch + 1) * 10]) == list(range(0, 40, 4))
    assert first[:10] != first[10:20]
    second = [place for place in drawn if place >= 1000]
    assert sorted(second[:30]) == sorted(second[30:]) == list(range(1000, 1120, 4))
    fixed = DecoderSamples(blend, 4, seed=None)
    held = [int(fixed[i]["tokens"][0]) for i in range(20)]
    assert [place < 1000 for place in held] == [False, True] * 10
    assert sorted(held[1::2]) == list(range(0, 40, 4)) != held[1::2]
    assert max(held[::2]) > 1060  # not only the first 10 of 30 windows


def test_parts_of_one_size_are_read_in_different_orders() -> None:
    stores = [TokenStore(np.arange(first, first + 121), np.array([0, 121])) for first in (0, 1000)]
    samples = DecoderSamples(Blend([Windows(store, 4) for store in stores], [Fraction(1), Fraction(1)]), 4, seed=3)
    drawn = [int(samples[i]["tokens"][0]) for i in range(60)]
    assert [place for place in drawn if place < 1000] != [place - 1000 for place in drawn if place >= 1000]


def test_without_weights_files_are_one_corpus(tmp_path: Path) -> None:
    paths = [_file(tmp_path, "a", 50, 100), _file(tmp_path, "b", 20, 300)]
    corpus = build("moe", data_path=paths, **SMALL)
    numbers = range(len(corpus.train))
    windows = {corpus.train[i]["tokens"].tobytes() for i in numbers}
    assert len(windows) == len(corpus.train)
    of_b = sum(300 <= int(np.median(corpus.train[i]["tokens"])) < 400 for i in numbers)
    assert 0.15 < of_b / len(corpus.train) < 0.45


def _read(corpus: Any, ranks: int, steps: range, size: int) -> list[list[int]]:
    """What all data ranks together read, sample by sample in the run's order."""
    loaders = [Loader(corpus.train, corpus.collate, 2, r, ranks, prefetch=False) for r in range(ranks)]
    found = []
    for step in steps:
        batches = [loader.step(step * size, size // (2 * ranks)) for loader in loaders]
        for k in range(size // (2 * ranks)):
            found += [row for r in range(ranks) for row in batches[r][k].tensors["tokens"].tolist()]
    return found


def test_the_same_thousand_samples_at_degree_1_2_4_and_after_a_resume(tmp_path: Path) -> None:
    data_path = ["0.7", _file(tmp_path, "a", 200, 100), ".2", _file(tmp_path, "b", 90, 300), "1e-1"]
    data_path.append(_file(tmp_path, "c", 40, 500))
    packing = Packing(True, True, True, True)
    tokenizer = _tokenizer(tmp_path)
    corpora = [build("moe", data_path=data_path, tokenizer_model=tokenizer, packing=packing, **SMALL) for _ in range(2)]
    one = _read(corpora[0], 1, range(125), 8)
    assert len(one) == 1000
    assert _read(corpora[0], 2, range(125), 8) == one
    assert _read(corpora[1], 4, range(125), 8) == one
    assert _read(corpora[1], 1, range(60), 8) + _read(corpora[1], 4, range(60, 125), 8) == one
    other = build("moe", data_path=data_path, tokenizer_model=tokenizer, **{**SMALL, "seed": 6})
    assert _read(other, 1, range(5), 8) != one[:40]
    shares = Counter(int(np.median(row)) // 200 for row in one)
    assert [shares[0] // 10, shares[1] // 10] == [70, 20]


def _word(number: int) -> str:
    return "".join(chr(97 + number // 26**place % 26) for place in range(3))


def _tokenizer(folder: Path) -> str:
    """A tokenizer of 1,000 ids, the first ones for the words that texts here are made of; its end token is 3."""
    path = folder / "t.model"
    ranges = (range(400), range(1600))
    texts = (" ".join(_word(i) for i in random.Random(n).choices(ranges[n % 2], k=40)) for n in range(1000))
    path.write_bytes(train(texts, 1000))
    return str(path)


def test_text_and_tokens_mix_by_weight(tmp_path: Path) -> None:
    text = tmp_path / "a.jsonl"
    rng = random.Random(1)
    lines = (json.dumps({"text": " ".join(_word(rng.randrange(400)) for _ in range(30))}) for _ in range(200))
    text.write_text("\n".join(lines))
    tokens, model = _file(tmp_path, "b", 60, 700), _tokenizer(tmp_path)
    corpus = build("moe", data_path=["1", str(text), "3", tokens], tokenizer_model=model, **SMALL)
    of_file = sum(int(np.median(corpus.train[i]["tokens"])) >= 700 for i in range(400))
    assert of_file == 300
    assert unigram_entropy(corpus).train > 3
    with pytest.raises(DataError, match=r"b contains tokens of an existing tokenizer"):
        build("moe", data_path=["1", str(text), "3", tokens], **SMALL)
    apart = build("moe", data_path=[tokens], eval_data_path=[str(text)], tokenizer_model=model, **SMALL)
    assert int(np.median(apart.heldout[0]["tokens"])) < 700 <= int(np.median(apart.train[0]["tokens"]))


def test_a_split_cuts_files_by_documents(tmp_path: Path) -> None:
    path = _file(tmp_path, "a", 1000, 100)
    corpus = build("moe", data_path=[path], split="969,30,1", **SMALL)
    assert [blend.stores[0].documents for blend in (corpus.stores.train, corpus.stores.heldout)] == [969, 30]
    with pytest.raises(DataError, match=r"a: of 1000 documents 1000 are for training and 0 held out"):
        build("moe", data_path=[path], split="99999,1", **SMALL)


def test_a_split_may_hold_nothing_out(tmp_path: Path) -> None:
    path, model = _file(tmp_path, "a", 100, 100), _tokenizer(tmp_path)
    text = tmp_path / "a.txt"
    text.write_text("\n".join(" ".join(_word(i + j) for j in range(20)) for i in range(300)))
    for split, share in (("100,0,0", 1.0), ("1,0", 1.0), ("1,0,1", 0.5)):
        one = build("moe", data_path=[path], split=split, **SMALL)
        both = build("moe", data_path=["1", path, "1", str(text)], split=split, tokenizer_model=model, **SMALL)
        assert one.heldout is None
        assert both.heldout is None
        assert np.isnan(unigram_entropy(both).heldout)
        assert one.stores.train.stores[0].documents == 100 * share
        assert both.stores.train.stores[1].documents == pytest.approx(300 * share, abs=40)


def test_ids_beyond_the_vocabulary_stop_a_run(tmp_path: Path) -> None:
    path = _file(tmp_path, "a", 100, 100)
    with pytest.raises(DataError, match=r"a.bin: token \d+ is 999, but the vocabulary has ids 0 to 998"):
        build("moe", data_path=[path], **{**SMALL, "vocab_size": 999})
    write_tokens(tmp_path / "none", [])
    with pytest.raises(DataError, match=r"none.bin: the corpus contains no tokens"):
        build("moe", data_path=[str(tmp_path / "none")], **SMALL)
    with pytest.raises(DataError, match="has no cls token"):
        build("ernie", data_path=[path], **SMALL)
    with pytest.raises(DataError, match="has no eos token"):
        build("moe", data_path=[path], packing=Packing(reset_attention=True), **SMALL)


@pytest.mark.parametrize("documents", [1, 5, 1023, 1024, 1025, 3000])
def test_sparse_sums_find_every_piece(documents: int) -> None:
    rng = np.random.default_rng(documents)
    lengths = rng.integers(0, 9, size=documents)
    lengths[-1] = 7
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    counts = PieceCounts(offsets, lambda n: n // 3)
    expected = [(d, p, n // 3) for d, n in enumerate(lengths.tolist()) for p in range(n // 3)]
    assert counts.total == len(expected)
    assert [counts.find(i) for i in range(counts.total)] == expected


def test_one_document_per_sample(tmp_path: Path) -> None:
    path = _file(tmp_path, "a", 80, 100)
    corpus = build("moe", data_path=[path], packing=Packing(packed=False), **SMALL)
    predicted = 0
    for i in range(len(corpus.train)):
        sample = corpus.train[i]
        asked = sample["labels"] != NO_LOSS
        predicted += int(asked.sum())
        assert 999 not in sample["tokens"][asked]  # an end token is only ever a label
        assert "valid" in sample or asked.all()
    (store,) = corpus.stores.train.stores
    lengths = np.diff(np.asarray(store.offsets[0 : len(store.offsets)]))
    assert predicted == int((lengths - 1).sum())
    with pytest.raises(DataError, match="no document of the corpus has two tokens"):
        DocumentWindows(TokenStore(np.zeros(3, dtype=np.uint16), np.arange(4)), 4)


def test_document_boundaries_in_a_packed_sample() -> None:
    ids = np.array([5, 9, 9, 6, 7, 8, 9, 4, 3], dtype=np.uint16)  # 9 ends a document
    store = TokenStore(ids, np.array([0, 2, 3, 7, 9]))
    sample = DecoderSamples(Windows(store, 8), 8, None, Boundaries(9, True, True, True))[0]
    assert sample["tokens"].tolist() == [5, 9, 9, 6, 7, 8, 9, 4]
    assert sample["positions"].tolist() == [0, 1, 0, 0, 1, 2, 3, 0]
    assert sample["ends"].tolist() == [2, 3, 7, 8]
    assert sample["labels"].tolist() == [9, NO_LOSS, NO_LOSS, 7, 8, 9, NO_LOSS, 3]


def test_what_a_data_path_says() -> None:
    assert blend_of(["a", "b"]) == ((None, "a", ""), (None, "b", ""))
    assert blend_of([".3", "a", "1e2", "./7"]) == ((Fraction("0.3"), "a", ""), (Fraction(100), "./7", ""))
    for wrong in (["1", "a", "b"], ["a", "1"], ["0", "a"], ["1", "2"], ["1"], ["1", "a", "x", "b"]):
        with pytest.raises(ValueError, match="weight"):
            blend_of(wrong)


def test_a_word_has_a_name_unless_a_file_has_the_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ("wiki=A", "a.b-c_1=x=y", "./x=y", "=y", "x=", "a b=c", "part=1", "year=2024")
    (tmp_path / "part=1").write_text("text")
    (tmp_path / "year=2024.idx").write_text("index")
    assert [split_name(word) for word in words] == [
        *(("wiki", "A"), ("a.b-c_1", "x=y"), ("", "./x=y"), ("", "=y"), ("", "x="), ("", "a b=c")),
        *(("", "part=1"), ("", "year=2024")),
    ]
    assert blend_of(["+0.7", "wiki=A", "0.3", "code=B"]) == (
        (Fraction("0.7"), "A", "wiki"),
        (Fraction("0.3"), "B", "code"),
    )
    for wrong in (["a=x", "a=y"], ["a=x", "y"], ["1", "x", "2", "a=y"]):
        with pytest.raises(ValueError, match="name"):
            blend_of(wrong)


def test_a_stream_is_a_function_of_seed_and_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr("megapar.data.sampling.streaming.ROWS", 64)
    rng = random.Random(2)
    texts = [" ".join(_word(rng.randrange(400)) for _ in range(rng.randrange(5, 60))) for _ in range(300)]
    datasets.Dataset.from_dict({"text": texts}).save_to_disk(str(tmp_path / "rows"))
    model = _tokenizer(tmp_path)
    wanted: dict[str, Any] = {**SMALL, "hf_dataset": str(tmp_path / "rows"), "tokenizer_model": model}
    one, two = build("moe", **wanted), build("moe", **wanted)
    numbers = [0, 1, 700, 3, 2, 10_000]
    backwards = {i: two.train[i]["tokens"].tolist() for i in reversed(numbers)}
    assert {i: one.train[i]["tokens"].tolist() for i in numbers} == backwards
    epoch = [tuple(one.train[i]["tokens"].tolist()) for i in range(len(one.train))]
    assert len(set(epoch)) == len(epoch)
    ids = load_tokenizer(model).encode_batch(texts[:285])
    total = sum(len(one) + 1 for one in ids)
    assert 0.8 < len(epoch) * 16 / total <= 1.05
    with closing(Loader(one.train, one.collate, 2, 0, 1)) as loader:
        assert loader.step(0, 1)[0].tensors["tokens"].tolist() == [one.train[i]["tokens"].tolist() for i in range(2)]
    assert build("moe", **{**wanted, "tokenizer_model": None}).tokenizer.size > 100
    assert build("moe", **{**wanted, "split": "100,0"}).heldout is None
    with pytest.raises(DataError, match="nowhere: datasets cannot read it here"):
        build("moe", **{**wanted, "hf_dataset": str(tmp_path / "nowhere")})
    with pytest.raises(DataError, match=r"no/such: datasets cannot read it here \(.*[Oo]ffline"):
        build("moe", **{**wanted, "hf_dataset": "no/such"})
    datasets.Dataset.from_dict({"body": texts}).save_to_disk(str(tmp_path / "other"))
    with pytest.raises(DataError, match="no column 'text'; the dataset has 'body'"):
        build("moe", **{**wanted, "hf_dataset": str(tmp_path / "other")})
