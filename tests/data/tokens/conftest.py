"""A small tokenizer, and encoding that is killed on the way."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import megapar.data.tokens.encode as encoding
from megapar.data.text.source import all_documents, open_sources
from megapar.data.tokenizers.sentencepiece_tokenizer import train


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory, small_jsonl: Path) -> str:
    """A sentencepiece model of 600 ids, trained on ``small_jsonl``."""
    path = tmp_path_factory.mktemp("tokenizer") / "t.model"
    path.write_bytes(train(all_documents(open_sources([str(small_jsonl)])), 600))
    return str(path)


@pytest.fixture
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megapar.data.text.chunks.CHUNK_BYTES", 5000)
    monkeypatch.setattr("megapar.data.text.chunks.CHUNK_ROWS", 30)


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The chunks that are encoded; the fifth one ends in an interrupt."""
    numbers: list[int] = []
    encode: Callable[..., object] = encoding._encode_chunk

    def stop_at_the_fifth(number: int, *rest: object) -> object:
        numbers.append(number)
        if len(numbers) == 5:
            raise KeyboardInterrupt
        return encode(number, *rest)

    monkeypatch.setattr(encoding, "_encode_chunk", stop_at_the_fifth)
    return numbers
