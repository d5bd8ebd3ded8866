"""Fingerprints: the same for the same data wherever it lies, another for any change, and nothing read unasked."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import pytest

from megapar.data import fingerprint
from megapar.data.fingerprint import BY_POSITION, BY_TEXT, fingerprint_of_dataset, fingerprints_of
from megapar.data.text.source import open_sources, sources_hash
from megapar.errors import DataError
from tests.support.token_files import write_tokens


def _values(*paths: str, may_read: bool = True) -> list[str | None]:
    return [one.value for one in fingerprints_of(paths, may_read=may_read)]


def _text(path: Path, *words: str) -> str:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(f'{{"text": "{word}"}}\n' for word in words))
    return str(path)


def _tokens(path: Path, *ids: int) -> str:
    return write_tokens(path, ([i, i] for i in ids))


def test_text_is_known_by_its_content(tmp_path: Path, fresh_cache: Path) -> None:
    one, same = _text(tmp_path / "a.jsonl", "x", "y"), _text(tmp_path / "there" / "b.jsonl", "x", "y")
    other = _text(tmp_path / "c.jsonl", "x", "z")
    assert _values(one) == _values(same) == [sources_hash(open_sources([one]))]
    assert _values(one) != _values(other)
    assert _values(one, other) == [sources_hash(open_sources([one, other]))] != _values(other, one)
    weighted = fingerprints_of(["3", one, "1", other])
    assert [float(part.weight or 0) for part in weighted] == [3, 1]
    assert [part.value for part in weighted] == [*_values(one), *_values(other)]
    assert {part.cut for part in weighted} == {BY_TEXT}


def test_indexed_files_are_known_by_index_length_and_blocks(
    tmp_path: Path, fresh_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, same, other = (_tokens(tmp_path / n, *ids) for n, ids in (("a", (5, 6)), ("b", (5, 6)), ("c", (5, 7))))
    assert _values(one) == _values(same) == _values(f"{same}.bin") != _values(other)
    assert fingerprints_of([one])[0].cut == BY_POSITION
    monkeypatch.setattr(fingerprint, "BLOCKS", 3)
    monkeypatch.setattr(fingerprint, "BLOCK_BYTES", 4)
    seen = _values(_tokens(tmp_path / "long", *range(100)))
    content = bytearray((tmp_path / "long.bin").read_bytes())
    for place, told in ((-1, True), (0, True), (50, False)):
        changed = bytearray(content)
        changed[place] ^= 1
        (tmp_path / "long.bin").write_bytes(changed)
        os.utime(tmp_path / "long.bin", ns=(1, place + 10))
        assert (_values(str(tmp_path / "long")) != seen) is told


def test_what_cannot_be_read_is_an_error_of_the_data(tmp_path: Path, fresh_cache: Path) -> None:
    one = _tokens(tmp_path / "a", 5, 6)
    (tmp_path / "a.bin").unlink()
    with pytest.raises(DataError, match=r"a: cannot be read: .*a\.bin"):
        fingerprints_of([one])
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "0.parquet").symlink_to(tmp_path / "gone")
    with pytest.raises(DataError, match=r"rows: cannot be read: .*0\.parquet"):
        fingerprint_of_dataset(str(tmp_path / "rows"))


def test_text_and_tokens_without_weights_are_one_source(tmp_path: Path, fresh_cache: Path) -> None:
    text, tokens = _text(tmp_path / "a.jsonl", "x"), _tokens(tmp_path / "b", 5)
    (one,) = fingerprints_of([text, tokens])
    assert (one.cut, one.value) == (
        "position+text",
        fingerprint.hash_parts(*filter(None, _values("1", text, "1", tokens))),
    )
    assert _values(tokens, text) != [one.value]


def test_nothing_is_read_unasked(tmp_path: Path, fresh_cache: Path) -> None:
    text, tokens = _text(tmp_path / "a.jsonl", "x"), _tokens(tmp_path / "b", 5)
    found = fingerprints_of(["1", text, "1", tokens], may_read=False)
    sizes = [len((tmp_path / name).read_bytes()) for name in ("a.jsonl", "b.idx", "b.bin")]
    assert [(one.value, one.unread) for one in found] == [(None, sizes[0]), (None, sizes[1] + sizes[2])]
    _values(text)
    assert _values(text, may_read=False) == _values(text)
    assert _values("builtin", may_read=False) == [None]
    folder = tmp_path / "twins"
    _text(folder / "a.jsonl", "x"), _text(folder / "b.jsonl", "y")
    assert _values(str(folder), may_read=False) == [None]
    _values(str(folder))
    os.utime(folder / "a.jsonl", ns=(1, 1))
    assert _values(str(folder), may_read=False) == [None]
    assert _values(str(folder), may_read=False) == [None]
    assert _values("mock") == ["mock"]


def test_all_that_would_be_read_of_a_folder_is_counted(tmp_path: Path, fresh_cache: Path) -> None:
    folder = tmp_path / "texts"
    _text(folder / "a.jsonl", "x"), _text(folder / "b.jsonl", "y"), _text(folder / "c.jsonl", "z" * 1000)
    alone = _text(tmp_path / "alone.jsonl", "w" * 100)
    sizes = {path.name: path.stat().st_size for path in (*folder.iterdir(), Path(alone))}
    (one,) = fingerprints_of([str(folder), alone], may_read=False)
    assert (one.value, one.unread) == (None, sum(sizes.values()))
    _values(str(folder / "c.jsonl"))
    (one,) = fingerprints_of([str(folder), alone], may_read=False)
    assert (one.value, one.unread) == (None, sum(sizes.values()) - sizes["c.jsonl"])
    want = _values(str(folder), alone)
    (one,) = fingerprints_of([str(folder), alone], may_read=False)
    assert ([one.value], one.unread) == (want, 0)


def test_a_compressed_file_counts_for_more_than_its_own_bytes(tmp_path: Path, fresh_cache: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    text = "".join(f'{{"text": "{number * 7919 % 10007} and {number * 104729 % 10007}"}}\n' for number in range(2000))
    path.write_bytes(gzip.compress(text.encode()))
    (one,) = fingerprints_of([str(path)], may_read=False)
    assert len(text) / 2 < one.unread < len(text) * 2
    assert path.stat().st_size < len(text) / 2


def test_a_dataset_is_known_by_its_files_and_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def value(name: str) -> str | None:
        return fingerprint_of_dataset(name).value

    folder = tmp_path / "set"
    _text(folder / "train.jsonl", "x")
    first = value(str(folder))
    (folder / "cache-1.arrow").touch()
    assert value(str(folder)) == first
    _text(folder / "more.jsonl", "x")
    assert value(str(folder)) != first
    assert value(str(folder)) != fingerprint_of_dataset(str(folder), "body").value
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    unknown, refs = value("a/b"), tmp_path / "hub/hub/datasets--a--b/refs"
    refs.mkdir(parents=True)
    (refs / "main").write_text("1234")
    there = value("a/b")
    (refs / "main").write_text("1235")
    assert len({unknown, there, value("a/b")}) == 3
