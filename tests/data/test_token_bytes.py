"""The bytes of ids: over a text they are those of the text, whatever the tokenizer cuts it into."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
from tokenizers import Tokenizer as Inner
from tokenizers import decoders, models, pre_tokenizers, trainers

from megapar.data import Corpus
from megapar.data.sampling.samples import NO_LOSS
from megapar.data.token_bytes import TokenBytes, token_bytes
from megapar.data.tokenizers.load import load_tokenizer
from megapar.data.tokenizers.sentencepiece_tokenizer import SentencePieceTokenizer
from megapar.data.tokenizers.tokenizer import MockTokenizer, NoTokenizer, Tokenizer

TEXTS = ("Hello, wörld!", " two  spaces", "你好 🙂👩‍👩‍👧", "x", "a\n\tb < ▂", "Καλημέρα, \u00a0end ")
LINES = [f"the quick brown fox {i} jumps over wörld 你好 🙂" for i in range(200)]


def exact(tokenizer: Tokenizer) -> TokenBytes:
    """The bytes of a tokenizer, after a look at whole texts."""
    found = token_bytes(tokenizer, tokenizer.size + 3)
    assert found is not None
    for text in TEXTS:
        assert found.sizes[tokenizer.encode(text)].sum() == len(text.encode()) + found.prefix, text
    assert not found.sizes[sorted(tokenizer.special.ids)].any()
    assert not found.sizes[tokenizer.size :].any()
    return found


def trained(kind: str, **options: bool) -> bytes:
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES), model_writer=out, model_type=kind, vocab_size=400, byte_fallback=True,
        hard_vocab_limit=False, normalization_rule_name="identity", remove_extra_whitespaces=False, minloglevel=2,
        **options,
    )  # fmt: skip
    return out.getvalue()


def test_pieces_of_a_trained_tokenizer(decoder_corpus: Corpus, tmp_path: Path) -> None:
    assert exact(decoder_corpus.tokenizer).prefix == 0
    decoder_corpus.tokenizer.save_hf(tmp_path)
    assert np.array_equal(exact(load_tokenizer(tmp_path / "tokenizer.json")).sizes[:50], [0] * 7 + [1] * 43)


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_the_space_before_a_text_is_no_byte_of_it(kind: str, tmp_path: Path) -> None:
    tokenizer = SentencePieceTokenizer(trained(kind))
    assert exact(tokenizer).prefix == 1
    tokenizer.save_hf(tmp_path)
    found = exact(load_tokenizer(tmp_path / "tokenizer.json"))
    assert (found.prefix, found.end) == (1, tokenizer.special.eos)
    texts = ["fox one", "a lazy dog"]
    ids = np.array([i for text in texts for i in (*tokenizer.encode(text), found.end)])
    sample = {"tokens": np.append(found.end, ids[:-1]), "labels": ids}
    assert found.of_sample(sample) == sum(len(text) for text in texts)
    weights = np.where(np.arange(len(ids)) < len(tokenizer.encode(texts[0])), np.float32(0.5), np.float32(0))
    assert found.of_sample({**sample, "weights": weights}) == len(texts[0]) / 2
    assert found.of_sample({**sample, "labels": np.full_like(ids, NO_LOSS)}) == 0


def test_byte_level_pieces_are_parts_of_characters(tmp_path: Path) -> None:
    inner = Inner(models.BPE())
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    inner.train_from_iterator(
        LINES, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, special_tokens=["<|endoftext|>"])
    )
    inner.add_tokens(["wörld"])
    inner.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path / "tokenizer.json")
    found = exact(tokenizer)
    assert found.sizes[tokenizer.encode("wörld")].tolist() == [6]
    assert found.sizes[tokenizer.encode("☃")].tolist() == [1, 1, 1]


def test_a_tokenizer_without_text_or_whose_pieces_lose_some_has_none(tmp_path: Path) -> None:
    inner = Inner(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2}, unk_token="[UNK]"))
    inner.decoder = decoders.WordPiece()
    inner.save(str(tmp_path / "tokenizer.json"))
    for tokenizer in (load_tokenizer(tmp_path / "tokenizer.json"), NoTokenizer(9), MockTokenizer(9)):
        assert token_bytes(tokenizer, 9) is None
