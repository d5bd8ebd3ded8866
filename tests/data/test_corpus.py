"""Whole corpora: built once by many processes, quickly the second time, refused before training where broken."""

from __future__ import annotations

import gzip
import json
import math
import multiprocessing
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megapar.data import Corpus, build
from megapar.data.blend import open_blend, open_stores
from megapar.data.corpus import TextOptions
from megapar.data.text.source import all_documents, open_sources
from megapar.data.tokenizers.sentencepiece_tokenizer import train
from megapar.data.tokenizers.tokenizer import MockTokenizer
from megapar.data.tokens.split import Split, TrainHeldout
from megapar.data.tokens.token_cache import TokenCache
from megapar.errors import ConfigError, DataError
from tests.support.unigram import store_counts, unigram_entropy

SMALL: dict[str, Any] = {"vocab_size": 600, "seq_length": 16, "seed": 1}


def _stores(corpus: Corpus) -> tuple[Any, Any]:
    """The only training store, and the only held-out one."""
    (train,), (heldout,) = corpus.stores.train.stores, corpus.stores.heldout.stores
    return train, heldout


def test_importing_the_package_is_light() -> None:
    code = "import megapar.data, sys; print([m for m in ('torch', 'numpy', 'transformers') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


def test_no_text_is_on_both_sides(decoder_corpus: Corpus) -> None:
    train, heldout = _stores(decoder_corpus)

    def texts(store: Any) -> set[bytes]:
        return {store.tokens[a:b].tobytes() for a, b in zip(store.offsets[:-1], store.offsets[1:], strict=True)}

    assert not texts(train) & texts(heldout)
    total = train.documents + heldout.documents
    assert 0.02 < heldout.documents / total < 0.09
    ends = train.tokens[0 : len(train.tokens)][np.asarray(train.offsets[1:]) - 1]
    assert (ends == decoder_corpus.tokenizer.special.eos).all()


def test_unigram_entropy_by_hand(tmp_path: Path, fresh_cache: Path) -> None:
    (tmp_path / "train.txt").write_text("t7 t7 t8\n")
    (tmp_path / "eval.txt").write_text("t9\n")
    train_data, heldout_data = (open_blend([str(tmp_path / name)]) for name in ("train.txt", "eval.txt"))
    tokenizer = MockTokenizer(10)
    data = TrainHeldout(train_data, heldout_data)
    stores = open_stores(data, Split(0.5, 0.5), TokenCache(tokenizer, None), 10)
    corpus = Corpus([], [], tokenizer=tokenizer, vocab_size=10, collate=lambda samples: None, stores=stores)  # type: ignore[arg-type, return-value]
    unigram = unigram_entropy(corpus)
    assert unigram.train == pytest.approx(1.5 * math.log(2))  # 7 7 8 end: 1/2, 1/4, 1/4
    assert unigram.heldout == pytest.approx(-(math.log(1 / 14) + math.log(2 / 14)) / 2)  # 9 end


def test_mock_needs_no_text() -> None:
    for kind in ("moe", "ernie"):
        corpus = build(kind, data_path=["mock"], **{**SMALL, "vocab_size": 100})
        sample, same = corpus.train[5], build(kind, data_path=["mock"], **{**SMALL, "vocab_size": 100}).train[5]
        assert all(np.array_equal(sample[name], same[name]) for name in sample)
        assert len(sample["tokens"]) == 16
        assert not np.array_equal(sample["tokens"], corpus.train[6]["tokens"])
        assert len(corpus.heldout) >= 1000
        assert unigram_entropy(corpus).train == pytest.approx(math.log(93))
    with pytest.raises(DataError, match="leave --eval-data-path out"):
        build("moe", data_path=["mock"], eval_data_path=["builtin"], **SMALL)


def test_a_tokenizer_with_more_ids_than_the_embedding_is_refused(tmp_path: Path, small_jsonl: Path) -> None:
    path = str(small_jsonl)
    model = tmp_path / "t.model"
    model.write_bytes(train(all_documents(open_sources([path])), 700))
    with pytest.raises(ConfigError) as caught:
        build("moe", data_path=[path], tokenizer_model=str(model), **SMALL)
    (complaint,) = caught.value.complaints
    assert complaint.rule == "vocabulary"
    assert "700 ids" in complaint.message
    assert "600 rows" in complaint.message
    assert build("moe", data_path=[path], tokenizer_model=str(model), **{**SMALL, "vocab_size": 700}).vocab_size == 700


def test_eval_data_apart_and_splits(tmp_path: Path, small_jsonl: Path) -> None:
    path, other = str(small_jsonl), tmp_path / "b.txt"
    other.write_text("Held out apart, a sentence of some words.\n\nAnd a second document of words that are held out.\n")
    apart = build("moe", data_path=[path], eval_data_path=[str(other)], **SMALL)
    assert [store.documents for store in _stores(apart)] == [200, 2]
    assert 1 <= len(apart.heldout) < 10
    three = build("moe", data_path=[path], split="50,30,20", **SMALL)
    train, heldout = _stores(three)
    assert 70 < train.documents < 130
    assert 40 < heldout.documents < 80
    for wrong in ("100", "0,1", "a,b", "1,2,3,4", "-1,2"):
        with pytest.raises(DataError, match="is not two or three weights"):
            Split.parse(wrong)


def test_a_folder_of_texts_is_a_document_a_file_for_a_decoder(tmp_path: Path, small_jsonl: Path) -> None:
    model, folder = tmp_path / "t.model", tmp_path / "texts"
    model.write_bytes(train(all_documents(open_sources([str(small_jsonl)])), 600))
    folder.mkdir()
    for number in range(40):
        (folder / f"{number}.txt").write_text(f"The first part of {number}.\n\nA second one.\n\nThe end {number}.\n")
    options = {**SMALL, "tokenizer_model": str(model), "seq_length": 8, "split": "80,20", "data_path": [str(folder)]}

    def read(kind: str, per: str | None) -> tuple[int, int]:
        made = build(kind, **options, text=TextOptions(per=per))
        content = made.contents[0]
        assert content.mean == pytest.approx(content.tokens / content.documents)
        assert f"{content.documents:,} documents of {content.mean:,.0f} tokens on average, " in str(content)
        return sum(one.documents for one in (*made.contents, *made.heldout_contents)), content.cut_files

    assert read("moe", None) == read("moe", "file") == read("ernie", "file") == (40, 0)
    assert read("moe", "paragraph") == read("ernie", None) == read("ernie", "paragraph") == (120, 40)
    (folder / "0.txt").rename(tmp_path / "alone.txt")
    with pytest.raises(
        DataError, match=r"pass more documents \(--document-per paragraph cuts files at blank lines\), "
    ):
        build("moe", **{**options, "data_path": [str(tmp_path / "alone.txt")]}, text=TextOptions(per="file"))


def test_what_cannot_be_split_or_used_is_refused(tmp_path: Path, small_jsonl: Path) -> None:
    single, blank = tmp_path / "single.txt", tmp_path / "blank.txt"
    single.write_text("One document only, of words enough.\n" * 3 + "\n")
    blank.write_text("\n \n\n")
    model = tmp_path / "t.model"
    model.write_bytes(train(all_documents(open_sources([str(small_jsonl)])), 600))
    with_model = {**SMALL, "tokenizer_model": str(model)}
    with pytest.raises(DataError, match=r"single.txt: .*both need at least one; pass more documents, --eval-data-path"):
        build("moe", data_path=[str(single)], split="999999,1", **with_model)
    assert build("moe", data_path=[str(single)], split="999999,1", eval_data_path=(), **with_model).heldout is None
    with pytest.raises(DataError, match=r"blank.txt: the corpus contains no documents"):
        build("moe", data_path=[str(blank)], **with_model)
    with pytest.raises(DataError, match=r"blank.txt: the corpus contains no documents"):
        build("moe", data_path=[str(blank)], **SMALL)
    with pytest.raises(DataError, match="fewer than one sample"):
        build("moe", data_path=[str(single)], eval_data_path=[str(single)], **{**with_model, "seq_length": 4096})
    with pytest.raises(DataError, match="at least 6, not 5"):
        build("ernie", data_path=["mock"], **{**SMALL, "seq_length": 5})
    with pytest.raises(ValueError, match="'gpt'"):
        build("gpt", **SMALL)


def test_a_broken_line_is_found_before_training_and_leaves_nothing(
    tmp_path: Path, fresh_cache: Path, small_jsonl: Path
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(small_jsonl.read_text() + '{"text": "cut off\n')
    with pytest.raises(DataError, match=r"a.jsonl, line 201: not a JSON record"):
        build("moe", data_path=[str(path)], **SMALL)
    left = [entry for kind in ("tokenizers", "tokens") for entry in (fresh_cache / kind).glob("[!.]*")]
    assert left == []


@pytest.mark.parametrize("own", [True, False])
def test_what_was_read_under_another_longest_line_is_read_again(
    tmp_path: Path, fresh_cache: Path, small_jsonl: Path, monkeypatch: pytest.MonkeyPatch, own: bool
) -> None:
    path, model = tmp_path / "a.jsonl", tmp_path / "t.model"
    path.write_text(small_jsonl.read_text() + json.dumps({"text": "a longer text " * 100}) + "\n")
    model.write_bytes(train(all_documents(open_sources([str(small_jsonl)])), 600))
    more = {"split": "100,0", "text": TextOptions(skip_bad=True), **({} if own else {"tokenizer_model": str(model)})}

    def documents(longest: int) -> tuple[int, str]:
        monkeypatch.setattr("megapar.data.text.chunks._BLOCK_BYTES", 512)  # below it, as in earnest
        for place in ("files.data_files", "data.text.chunks", "data.tokens.token_cache", "data.corpus"):
            monkeypatch.setattr(f"megapar.{place}.LONGEST_LINE", longest, raising=False)
        corpus = build("moe", data_path=[str(path)], **SMALL, **more)
        return corpus.contents[0].documents or 0, corpus.tokenizer.fingerprint()

    before, now = documents(1 << 30), documents(1000)
    assert (before[0], now[0]) == (201, 200)
    assert (before[1] == now[1]) is not own
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another"))
    assert documents(1000) == now


def _build_and_report(path: str, queue: Any) -> None:
    corpus = build("ernie", data_path=[path], **SMALL)
    queue.put((corpus.tokenizer.fingerprint(), corpus.train[3]["tokens"].tolist()))


def test_processes_that_build_at_once_agree(fresh_cache: Path, small_jsonl: Path) -> None:
    path = str(small_jsonl)
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    processes = [context.Process(target=_build_and_report, args=(path, queue)) for _ in range(3)]
    for process in processes:
        process.start()
    reports = [queue.get(timeout=60) for _ in processes]
    for process in processes:
        process.join(20)
    assert reports[0] == reports[1] == reports[2]
    assert len(list((fresh_cache / "tokens").glob("[!.]*"))) == 1
    assert len(list((fresh_cache / "tokenizers").glob("*.model"))) == 1


def test_a_compressed_corpus_gives_the_samples_of_the_plain_one(
    tmp_path: Path, small_jsonl: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = tmp_path / "small.jsonl.gz"
    packed.write_bytes(gzip.compress(small_jsonl.read_bytes()))
    corpora = []
    for path in (small_jsonl, packed):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / path.suffix))  # each makes its own
        corpora.append(build("moe", data_path=[str(path)], vocab_size=600, seq_length=32, seed=3))
    plain, unpacked = corpora
    assert plain.tokenizer.fingerprint() == unpacked.tokenizer.fingerprint()
    assert len(plain.train) == len(unpacked.train)
    for number in (0, 1, len(plain.train) + 5):
        assert (plain.train[number]["tokens"] == unpacked.train[number]["tokens"]).all()
    (content,) = unpacked.contents
    (aside,) = unpacked.heldout_contents
    assert content.name == str(packed)
    assert (content.documents or 0) + (aside.documents or 0) == 200
    assert content.samples == len(plain.train)
    assert content.tokens == int(store_counts(_stores(unpacked)[0], 600).sum())


@pytest.mark.parametrize("kind", ["moe", "ernie"])
def test_heldout_samples_are_the_same_for_every_seed(kind: str, small_jsonl: Path) -> None:
    one, other = (build(kind, data_path=[str(small_jsonl)], **{**SMALL, "seed": seed}) for seed in (1, 2))
    assert len(one.heldout) > 3
    for number in range(len(one.heldout)):
        first, second = one.heldout[number], other.heldout[number]
        assert {name: value.tolist() for name, value in first.items()} == {n: v.tolist() for n, v in second.items()}
    assert any(one.train[number]["tokens"].tolist() != other.train[number]["tokens"].tolist() for number in range(4))


def test_the_tokenizer_of_a_stream_is_that_of_its_training_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = pytest.importorskip("datasets")
    texts = [f"fox number {n}" for n in range(300)] + [f"quite another dog {n}" for n in range(300)]
    datasets.Dataset.from_dict({"text": texts, "n": list(range(600))}).save_to_disk(str(tmp_path / "rows"))
    found = []
    for home, split in (("one", "50,50"), ("one", "95,5"), ("two", "95,5")):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / home))
        corpus = build("moe", hf_dataset=str(tmp_path / "rows"), split=split, **SMALL)
        found.append(corpus.tokenizer.fingerprint())
    assert found[0] != found[1] == found[2]
    with pytest.raises(DataError, match="row 1: field 'n' is of type int"):
        build("moe", hf_dataset=str(tmp_path / "rows"), text=TextOptions(field="n"), **SMALL)
