"""Data in object stores: copied once for each content, and refused where it does not fit."""

from __future__ import annotations

import logging
from collections import namedtuple
from pathlib import Path

import pytest

from megapar.data import fetched as module
from megapar.data.fetched import fetched, fetched_tokenizer
from megapar.errors import DataError
from megapar.files.location import Location
from tests.support.stores import put


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a cache of this test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_tokens_are_copied_once_for_each_content(bucket: Location, caplog: pytest.LogCaptureFixture) -> None:
    put(bucket / "tokens.bin", b"two")
    put(bucket / "tokens.idx", b"three")
    put(bucket / "texts" / "b.txt", b"four")
    items = ("0.3", f"{bucket}/tokens", "0.2", f"{bucket}/texts")
    with caplog.at_level(logging.WARNING):
        weight, prefix, _, folder = fetched(items)
        assert fetched(items) == fetched(items)
    assert (weight, folder) == ("0.3", f"{bucket}/texts")
    assert [Path(f"{prefix}{suffix}").read_bytes() for suffix in (".bin", ".idx")] == [b"two", b"three"]
    assert [record.getMessage().count("are copied into the cache") for record in caplog.records] == [1]
    put(bucket / "tokens.bin", b"new")
    assert Path(f"{fetched(items)[1]}.bin").read_bytes() == b"new"
    assert Path(f"{prefix}.bin").read_bytes() == b"two"


def test_what_is_missing_or_does_not_fit_is_refused(bucket: Location, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match="there is no such object"):
        fetched([f"{bucket}/a.jsonl"])
    put(bucket / "a.idx", b"one")
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: namedtuple("Usage", "free")(2))
    with pytest.raises(DataError, match=r"1 objects of 0\.000 GiB do not fit into the cache"):
        fetched([f"{bucket}/a"])


def test_a_tokenizer_is_copied_without_weights(bucket: Location) -> None:
    assert fetched_tokenizer(bucket / "hf") is None
    put(bucket / "hf" / "config.json", b"{}")
    assert fetched_tokenizer(bucket / "hf") is None
    put(bucket / "hf" / "tokenizer.json", b"one")
    put(bucket / "hf" / "model.safetensors", b"weights")
    assert (copied := fetched_tokenizer(bucket / "hf")) is not None
    assert sorted(path.name for path in Path(copied).iterdir()) == ["config.json", "tokenizer.json"]
    put(bucket / "tokenizer.tmp-1" / "tokenizer.json", b"two")
    (bucket / "tokenizer.tmp-1").publish(bucket / "tokenizer")
    assert (copied := fetched_tokenizer(bucket / "tokenizer")) is not None
    assert (Path(copied) / "tokenizer.json").read_bytes() == b"two"


def test_a_tokenizer_has_its_folders(bucket: Location) -> None:
    for name in ("plain", "tokenizer.tmp-1"):
        put(bucket / name / "tokenizer.json", b"one")
        put(bucket / name / "additional_chat_templates/tools.jinja", b"template")
    (bucket / "tokenizer.tmp-1").publish(bucket / "tokenizer")
    for name in ("plain", "tokenizer"):
        assert (copied := fetched_tokenizer(bucket / name)) is not None
        assert Path(copied, "additional_chat_templates/tools.jinja").read_bytes() == b"template"
        assert Path(copied, "tokenizer.json").read_bytes() == b"one"


def test_a_tokenizer_in_a_folder_is_not_that_of_the_model(bucket: Location) -> None:
    put(bucket / "model" / "config.json", b"{}")
    put(bucket / "model" / "original/tokenizer.model", b"of others")
    assert fetched_tokenizer(bucket / "model") is None


def test_objects_that_change_while_they_are_copied_are_refused(
    bucket: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(bucket / "a.idx", b"one")
    real = module.copy

    def late(source: Location, target: Location) -> None:
        put(source, b"other")
        real(source, target)

    monkeypatch.setattr(module, "copy", late)
    with pytest.raises(DataError, match="they have changed while they were copied"):
        fetched([f"{bucket}/a"])
    monkeypatch.undo()


def test_the_record_of_conversations_comes_along(bucket: Location) -> None:
    for suffix in ("bin", "idx", "hashes", "chat"):
        put(bucket / f"sft.{suffix}", suffix.encode())
    (prefix,) = fetched([f"{bucket}/sft"])
    assert Path(f"{prefix}.chat").read_bytes() == b"chat"
