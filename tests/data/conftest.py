"""One cache folder and one trained tokenizer for all tests of the data package; never the user's own cache."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from megapar.data import Corpus, build
from megapar.data.text.source import all_documents, open_sources

SEQ_LENGTH = 64


@pytest.fixture(scope="session")
def cache_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def _own_cache(cache_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache_home))


@pytest.fixture
def fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder with nothing in it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "megapar"


@pytest.fixture(scope="session")
def decoder_corpus(cache_home: Path) -> Iterator[Corpus]:
    """The built-in text for a decoder, vocabulary 2,048, sequences of 64."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache_home))
        yield build("moe", vocab_size=2048, seq_length=SEQ_LENGTH, seed=7)


@pytest.fixture(scope="session")
def ernie_corpus(cache_home: Path, decoder_corpus: Corpus) -> Iterator[Corpus]:
    """The same text for ERNIE, with the same tokenizer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache_home))
        yield build("ernie", vocab_size=2048, seq_length=SEQ_LENGTH, seed=7)


@pytest.fixture(scope="session")
def small_jsonl(tmp_path_factory: pytest.TempPathFactory, decoder_corpus: Corpus, cache_home: Path) -> Path:
    """200 short documents of the built-in text, as JSONL."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache_home))
        texts = [text for _, text in zip(range(200), all_documents(open_sources(["builtin"])), strict=False)]
    path = tmp_path_factory.mktemp("small") / "small.jsonl"
    path.write_text("".join(json.dumps({"text": text[:400]}) + "\n" for text in texts))
    return path
