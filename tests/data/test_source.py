"""Sources: what a document is in each format, and errors that name file and line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megapar.data.chunks import chunks_of
from megapar.data.source import all_documents, open_sources, sources_hash
from megapar.errors import DataError


def _read(*paths: Path) -> list[str]:
    return list(all_documents(open_sources([str(path) for path in paths])))


def test_blank_lines_separate_the_documents_of_a_text_file(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("\none\ntwo  \n\n \nthree\n\nwörld\n", encoding="utf-8")
    assert _read(path) == ["one\ntwo", "three", "wörld"]


def test_without_blank_lines_every_line_is_a_document(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one\r\ntwo\nthree\n\n")
    assert _read(path) == ["one", "two", "three"]


def test_jsonl(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one\\ntwo", "id": 1}\n\n{"text": "  "}\n{"text": "three"}')
    assert _read(path) == ["one\ntwo", "three"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{broken", r"a.jsonl, line 3: not a JSON record"),
        ('{"body": "x", "id": 2}', r"a.jsonl, line 3: no field 'text'; the record has 'body', 'id'"),
        ('{"text": null}', r"a.jsonl, line 3: field 'text' is of type NoneType, not a string"),
        ('["text"]', r"a.jsonl, line 3: the record is of type list"),
        ('{"text": "\\ud800"}', r"a.jsonl, line 3: .*not valid Unicode"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"text": "fine"}}\n\n{line}\n')
    with pytest.raises(DataError, match=message):
        _read(path)


def test_text_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"fine\n\xff\xfe\n")
    with pytest.raises(DataError, match=r"a.txt, line 2: not UTF-8"):
        _read(path)


def test_parquet(tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"text": ["one", "", "two"], "id": [1, 2, 3]}), path)
    assert _read(path) == ["one", "two"]
    parquet.write_table(pyarrow.table({"body": ["one"]}), path)
    with pytest.raises(DataError, match="no field 'text'"):
        _read(path)
    path.write_bytes(b"no parquet at all")
    with pytest.raises(DataError, match="not a readable parquet file"):
        _read(path)


def test_a_folder_is_its_files_and_paths_are_joined(tmp_path: Path) -> None:
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "b.txt").write_text("third\n")
    (folder / "a.jsonl").write_text(json.dumps({"text": "second"}))
    (tmp_path / "first.txt").write_text("first\n")
    assert _read(tmp_path / "first.txt", folder) == ["first", "second", "third"]


def test_the_hash_is_of_the_content(tmp_path: Path) -> None:
    for name, text in (("a.txt", "one\n"), ("b.txt", "one\n"), ("c.txt", "two\n"), ("d.jsonl", "one\n")):
        (tmp_path / name).write_text(text)
    a, b, c, d = (sources_hash(open_sources([str(tmp_path / n)])) for n in ("a.txt", "b.txt", "c.txt", "d.jsonl"))
    assert a == b
    assert len({a, c, d}) == 3
    (tmp_path / "a.txt").write_text("longer than before\n")
    assert sources_hash(open_sources([str(tmp_path / "a.txt")])) != a


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "no such file"),
        (lambda path: path.write_text(""), "the file is empty"),
        (lambda path: path.mkdir(), "the folder holds no files"),
    ],
)
def test_a_path_without_text_is_named(tmp_path: Path, make: object, message: str) -> None:
    path = tmp_path / "a.jsonl"
    make(path)  # type: ignore[operator]
    with pytest.raises(DataError, match=f"a.jsonl: {message}"):
        open_sources([str(path)])


def test_mock_is_not_mixed_with_text() -> None:
    with pytest.raises(DataError, match="cannot be mixed"):
        open_sources(["builtin", "mock"])
    with pytest.raises(DataError, match="no data path"):
        open_sources([])


def test_packages_that_are_not_installed_are_asked_for_where_they_are_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modules = "megapar.data, megapar.data.prepare, megapar.data.streaming, megapar.tools.data, megapar.trainer"
    code = f"import sys; sys.modules |= dict.fromkeys(('datasets', 'pyarrow', 'transformers')); import {modules}"
    subprocess.run([sys.executable, "-c", code], check=True)
    for name in ("datasets", "pyarrow"):
        monkeypatch.setitem(sys.modules, name, None)
    path = tmp_path / "a.parquet"
    path.write_bytes(b"PAR1")
    with pytest.raises(DataError, match=r"a.parquet: parquet files need the package datasets"):
        _read(path)
    with pytest.raises(DataError, match=r"a.parquet: parquet files need the package pyarrow"):
        chunks_of([str(path)], None, "train", "text")
    with pytest.raises(DataError, match=r"rows: reading it needs the package datasets"):
        chunks_of([], "rows", "train", "text")
