"""Tokenizers: training, round trips, Hugging Face's form, special ids, word starts."""

from __future__ import annotations

import io
import time
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
from tokenizers import Tokenizer as Inner
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, BertTokenizerFast

from megapar.data import Corpus
from megapar.data.text.source import all_documents, open_sources
from megapar.data.tokenizers.load import load_tokenizer
from megapar.data.tokenizers.sentencepiece_tokenizer import (
    LONG_TEXT,
    TRAINING_CHARACTERS,
    SentencePieceTokenizer,
    _Limited,
    train,
)
from megapar.data.tokenizers.tokenizer import MockTokenizer, Tokenizer
from megapar.errors import DataError
from tests.support.pace import usual_seconds

ODD = "Hello wörld 你好 🙂\t a tab\n\n    four  two ------- =====\x00 end "


def _texts(count: int) -> list[str]:
    return [text for text, _ in zip(all_documents(open_sources(["builtin"])), range(count), strict=False)]


@pytest.fixture(scope="session")
def trained(decoder_corpus: Corpus) -> Tokenizer:
    return decoder_corpus.tokenizer


def test_training_is_quick_and_gives_the_same_bytes(decoder_corpus: Corpus) -> None:
    texts = _texts(60)
    with usual_seconds() as seconds:
        first = train(texts, 1200)
    assert first == train(texts, 1200)
    assert seconds.taken < 15
    assert SentencePieceTokenizer(first).size == 1200


def test_nothing_is_lost(trained: Tokenizer) -> None:
    texts = [ODD, "", " ", *_texts(300)]
    assert [trained.decode(ids) for ids in trained.encode_batch(texts)] == texts
    assert trained.encode(ODD) == trained.encode_batch([ODD])[0]


def test_special_ids_are_reserved_and_cannot_be_spelled(trained: Tokenizer) -> None:
    special = trained.special
    assert (special.pad, special.unk, special.bos, special.eos) == (0, 1, 2, 3)
    assert (special.cls, special.sep, special.mask) == (4, 5, 6)
    assert not special.ids & set(trained.encode("[MASK] <s> </s> [CLS] [SEP] [PAD] [UNK]"))
    assert not special.ids & set(trained.ordinary_ids.tolist())
    assert trained.ordinary_ids.max() < trained.size == 2048


def test_transformers_reads_what_is_saved_and_gives_the_same_ids(trained: Tokenizer, tmp_path: Path) -> None:
    trained.save_hf(tmp_path)
    fast = AutoTokenizer.from_pretrained(tmp_path)
    texts = [ODD, "x", *_texts(1200)]
    ids = trained.encode_batch(texts)
    assert fast(texts)["input_ids"] == ids
    assert [fast.decode(one) for one in ids] == texts
    assert (fast.pad_token_id, fast.bos_token_id, fast.eos_token_id, fast.mask_token_id) == (0, 2, 3, 6)
    assert fast.encode("[MASK]") == [6]


def test_a_saved_tokenizer_is_loaded_again(trained: Tokenizer, tmp_path: Path) -> None:
    trained.save_hf(tmp_path)
    folder, file = load_tokenizer(tmp_path), load_tokenizer(tmp_path / "tokenizer.json")
    model = load_tokenizer(tmp_path / "tokenizer.model")
    for loaded in (folder, file, model):
        assert loaded.size == trained.size
        assert loaded.special == trained.special
        assert loaded.encode_batch([ODD]) == [trained.encode(ODD)]
        assert loaded.decode(trained.encode(ODD)) == ODD
        assert np.array_equal(
            loaded.word_marks.starts[loaded.ordinary_ids], trained.word_marks.starts[loaded.ordinary_ids]
        )
    assert model.fingerprint() == trained.fingerprint() != folder.fingerprint()
    folder.save_hf(tmp_path / "again")
    assert load_tokenizer(tmp_path / "again").fingerprint() == folder.fingerprint()


def test_a_small_corpus_gives_a_smaller_tokenizer_and_a_tiny_size_is_refused() -> None:
    assert SentencePieceTokenizer(train(_texts(3), 30_000)).size < 30_000
    with pytest.raises(DataError, match="tokenizer of 16 ids"):
        train(_texts(20), 16)


@pytest.mark.parametrize("suffix", [False, True])
@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_other_sentencepiece_models_are_saved_alike(kind: str, suffix: bool, tmp_path: Path) -> None:
    """With the library's own defaults: NFKC, spaces folded, a space in front; or behind, where words end with it."""
    texts, out = _texts(60), io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(line for text in texts for line in text.splitlines()),
        model_writer=out,
        model_type=kind,
        vocab_size=800,
        byte_fallback=True,
        treat_whitespace_as_suffix=suffix,
        num_threads=1,
        minloglevel=2,
    )
    tokenizer = SentencePieceTokenizer(out.getvalue())
    assert tokenizer.special.mask is None
    with pytest.raises(DataError, match="no mask token"):
        tokenizer.special.need("mask")
    tokenizer.save_hf(tmp_path)
    fast = AutoTokenizer.from_pretrained(tmp_path)
    lines = [" ".join(line.split()) for text in texts for line in text.splitlines() if line.strip()]
    ids = tokenizer.encode_batch(lines)
    same = sum(one == list(other) for one, other in zip(ids, fast(lines)["input_ids"], strict=True))
    assert same >= 0.995 * len(lines)  # their scores are not exact, see Note [Exact scores]
    assert [fast.decode(one) for one in ids[:200]] == [tokenizer.decode(one) for one in ids[:200]]


def test_a_word_starts_after_white_space_only(trained: Tokenizer) -> None:
    text = "Nothing unbelievable,\nreally: misunderstandings\n  indented"
    ids = np.array(trained.encode(text))
    starts = np.flatnonzero(trained.word_marks.word_starts(ids))
    words = [trained.decode(part).strip() for part in np.split(ids, starts[1:])]
    assert [word for word in words if word] == ["Nothing", "unbelievable,", "really:", "misunderstandings", "indented"]


def _save_wordpiece(folder: Path) -> None:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "un", "##believ", "##able", "tale", ",", "##s"]
    folder.mkdir()
    (folder / "vocab.txt").write_text("\n".join(words))
    BertTokenizerFast(vocab=str(folder / "vocab.txt")).save_pretrained(str(folder))


def test_wordpiece_tokenizers(tmp_path: Path) -> None:
    _save_wordpiece(tmp_path / "bert")
    tokenizer = load_tokenizer(tmp_path / "bert")
    ids = tokenizer.encode("the unbelievable tales, the")
    assert ids == [5, 6, 7, 8, 9, 11, 10, 5]
    assert np.flatnonzero(tokenizer.word_marks.word_starts(np.array(ids))).tolist() == [0, 1, 4, 6, 7]
    assert (tokenizer.special.cls, tokenizer.special.sep, tokenizer.special.mask) == (2, 3, 4)
    assert tokenizer.special.eos == 3  # what separates ends, where nothing else does
    assert tokenizer.ordinary_ids.tolist() == list(range(5, 12))


def test_byte_level_tokenizers(tmp_path: Path) -> None:
    inner = Inner(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.train_from_iterator(
        _texts(40),
        trainers.BpeTrainer(
            vocab_size=600,
            special_tokens=["<|endoftext|>"],
            show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
    )
    inner.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path / "tokenizer.json")
    text = "Some overwhelmingly\nlong words"
    ids = np.array(tokenizer.encode(text))
    starts = np.flatnonzero(tokenizer.word_marks.word_starts(ids))
    words = [tokenizer.decode(part.tolist()).strip() for part in np.split(ids, starts[1:])]
    assert [word for word in words if word] == text.split()
    assert tokenizer.special.eos == 0
    assert tokenizer.decode(ids.tolist()) == text


def test_what_is_no_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bad.model").write_bytes(b"not a model")
    (tmp_path / "bad.json").write_text("{}")
    (tmp_path / "empty").mkdir()
    for name, message in (
        ("bad.model", "not a sentencepiece model"),
        ("bad.json", "not a usable Hugging Face tokenizer"),
        ("empty", "not a usable Hugging Face tokenizer"),
        ("missing", "no such tokenizer"),
    ):
        with pytest.raises(DataError, match=f"{name}: {message}"):
            load_tokenizer(tmp_path / name)


def test_the_mock_tokenizer_is_saved_too(tmp_path: Path) -> None:
    mock = MockTokenizer(32)
    mock.save_hf(tmp_path)
    assert mock.encode("t7 t31 </s> t99") == [7, 31, 1, 1]
    assert AutoTokenizer.from_pretrained(tmp_path).encode("t7 t31") == [7, 31]
    assert mock.decode([7, 0, 31]) == "t7 t31"
    with pytest.raises(DataError, match="vocabulary of 7"):
        MockTokenizer(7)


def test_of_a_long_text_that_repeats_itself_the_beginning_is_trained_on() -> None:
    other = "some other text, of which there is little"
    start = time.monotonic()
    assert train(["word " * 100_000, other], 300) == train(["word " * 2000, other], 300)
    assert time.monotonic() - start < 60


def test_a_long_text_that_does_not_is_trained_on_as_a_whole() -> None:
    text = "".join(f"line {number} of {number * number % 977}\n" for number in range(5000))
    assert len(text) > LONG_TEXT
    assert [*_Limited([text])] == [text]


def test_one_long_repetition_leaves_room_for_other_texts() -> None:
    big = "spam " * (TRAINING_CHARACTERS // 5 + 1)
    assert len([*_Limited([big, "other text", "more"])]) == 3
