"""Sources: what a document is in each format, and errors that name file and line."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path

import pytest

from megapar.data.text.chunks import BadRecords
from megapar.data.text.source import all_documents, check_first_records, open_sources, sources_hash
from megapar.data.tokens.prepare import input_chunks
from megapar.errors import DataError
from megapar.files.data_files import AUTO, FILE, PARAGRAPH


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


def test_a_whole_file_is_a_document_with_its_blank_lines(tmp_path: Path) -> None:
    text = "\none\ntwo  \r\n\n \nthree\n\n\nwörld\n\n".encode()
    whole = "one\ntwo\n\n\nthree\n\n\nwörld"
    (tmp_path / "a.txt").write_bytes(text)
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(text))
    (tmp_path / "a.txt.zst").write_bytes(pytest.importorskip("pyarrow").compress(text, "zstd", asbytes=True))
    (tmp_path / "d.txt").write_text(" \n\n")
    for name in ("a.txt", "a.txt.gz", "a.txt.zst"):
        sources = open_sources([str(tmp_path / name)], per=FILE)
        assert list(all_documents(sources)) == [whole], name
        assert len(sources[0].chunks()) == 1
    assert list(all_documents(open_sources([str(tmp_path / "d.txt")], per=FILE))) == []
    named, of_folder = (open_sources([str(path)], per=AUTO) for path in (tmp_path / "a.txt", tmp_path))
    assert list(all_documents(named)) == ["one\ntwo", "three", "wörld"]
    assert list(all_documents(of_folder)) == [whole]  # the others are copies, or blank
    assert len(list(all_documents(open_sources([str(tmp_path)], per=PARAGRAPH)))) == 3
    readers = [open_sources([str(tmp_path / "a.txt")], per=per) for per in (FILE, PARAGRAPH, AUTO)]
    assert sources_hash(readers[0]) != sources_hash(readers[1]) == sources_hash(readers[2])


def test_records_are_documents_whatever_a_document_of_text_is(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    found = [open_sources([str(tmp_path)], per=per) for per in (AUTO, FILE, PARAGRAPH)]
    assert [list(all_documents(sources)) for sources in found] == [["one", "two"]] * 3
    assert len(set(map(sources_hash, found))) == 1


def test_a_whole_file_is_skipped_if_a_line_is_broken_or_it_is_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megapar.data.text.chunks.LONGEST_LINE", 30)
    (tmp_path / "a.txt").write_bytes(b"fine\n\n\xff\xfe\nmore\n")
    (tmp_path / "b.txt").write_text("fine\n\n" * 6)
    (tmp_path / "c.txt").write_text("fine\n\nshort\n")
    (tmp_path / "d.txt.gz").write_bytes(gzip.compress(b"long\n\n" * 6))
    sources, bad = open_sources([str(tmp_path)], per=FILE), BadRecords()
    assert list(all_documents(sources, bad)) == ["fine\n\nshort"]
    assert bad.count == 3
    assert "a.txt, line 3: not UTF-8 text" in bad.first[0]
    for name, text in zip(("b.txt", "d.txt.gz"), bad.first[1:], strict=True):
        assert f"{name}: it has more than 30 bytes, the maximum for one document; set --document-per paragraph" in text
        assert text.endswith("or set --on-bad-record skip")
    with pytest.raises(DataError, match=r"b.txt: it has more than 30 bytes"):  # before anything is read
        check_first_records(sources)
    (tmp_path / "d.txt.gz").write_bytes(gzip.compress(b"long\n\n" * 600)[:-20])
    with pytest.raises(DataError, match="not a readable gzip file"):  # which is never skipped
        list(all_documents(open_sources([str(tmp_path / "d.txt.gz")], per=FILE), BadRecords()))


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
    with pytest.raises(DataError, match=f"{message}.*, or set --on-bad-record skip$"):
        _read(path)


def test_text_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"fine\n\xff\xfe\n")
    with pytest.raises(DataError, match=r"a.txt, line 2: not UTF-8 .*, or set --on-bad-record skip$"):
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
        (lambda path: path.mkdir(), "the folder contains no files"),
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
    for name in ("datasets", "pyarrow"):
        monkeypatch.setitem(sys.modules, name, None)
    path = tmp_path / "a.parquet"
    path.write_bytes(b"PAR1")
    with pytest.raises(DataError, match=r"a.parquet: parquet files need the package pyarrow"):
        _read(path)
    with pytest.raises(DataError, match=r"a.parquet: parquet files need the package pyarrow"):
        input_chunks([str(path)])
    with pytest.raises(DataError, match=r"rows: reading it needs the package datasets"):
        input_chunks([], "rows")


LINES = "".join(json.dumps({"text": f"document {number} of many"}) + "\n" for number in range(5000)).encode()


def _packed(path: Path, content: bytes) -> Path:
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(content))
        return path
    pyarrow = pytest.importorskip("pyarrow")
    with pyarrow.output_stream(str(path), compression="zstd") as stream:
        stream.write(content)
    return path


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.txt", "paragraphs.txt"])
def test_a_compressed_file_is_what_it_holds(tmp_path: Path, name: str, suffix: str) -> None:
    text = LINES.replace(b"{", b"").replace(b"99 of", b"99\n\nof")  # records would be read as such
    content = text if name.startswith("par") else LINES
    (tmp_path / name).write_bytes(content)
    packed = _packed(tmp_path / f"{name}{suffix}", content)
    assert _read(packed) == _read(tmp_path / name)
    assert len(_read(packed)) == (51 if name.startswith("par") else 5000)
    plain, unpacked = (open_sources([str(path)]) for path in (tmp_path / name, packed))
    assert sources_hash(plain) == sources_hash(unpacked)  # so the tokens of one serve the other
    (chunk,) = input_chunks([str(packed)])
    assert list(chunk.documents(BadRecords())) == _read(packed)


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_compressed_file_that_is_cut_off_or_none_is_named(tmp_path: Path, suffix: str) -> None:
    path = _packed(tmp_path / f"a.jsonl{suffix}", LINES)
    path.write_bytes(path.read_bytes()[:-20])
    for content in (path.read_bytes(), b"no such thing" * 100):
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"a.jsonl.*: not a readable (gzip|Zstandard) file .*truncated"):
            _read(path)


def test_several_members_are_one_text(tmp_path: Path) -> None:
    for suffix in (".gz", ".zst"):
        path = _packed(tmp_path / f"a.jsonl{suffix}", LINES)
        path.write_bytes(path.read_bytes() * 2)
        assert len(_read(path)) == 10000


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="Python reads Zstandard by itself")
def test_without_a_package_for_zstandard_it_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _packed(tmp_path / "a.jsonl.zst", LINES)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match=r"a.jsonl.zst: Zstandard files need the package pyarrow here .*zstd -d"):
        _read(path)


def test_a_folder_says_what_it_skips(tmp_path: Path) -> None:
    for name, text in (
        ("README.md", "about\n"),
        ("citations.jsonl", '{"text": "cited"}\n'),
        ("a.jsonl", '{"text": "one"}\n'),
        ("copy.jsonl", '{"text": "one"}\n'),
        ("b.jsonl", '{"text": "two"}\n'),
        ("notes.md", "three\n"),
        ("part-00000", "four\n"),
        ("table.csv", "id,text\n"),
        ("page.html", "<p>\n"),
        ("empty.txt", ""),
        ("corpus.bin", "0"),
        (".hidden", "no"),
    ):
        (tmp_path / name).write_text(text)
    (tmp_path / "sub").mkdir()
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b'{"text": "two"}\n'))
    said: list[str] = []
    found = list(all_documents(open_sources([str(tmp_path)], report=said.append)))
    assert found == ["one", "two", "cited", "three", "four"]
    (line,) = said
    assert line.startswith(f"{tmp_path}: 5 of 13 entries are read, skipped: README.md (about the data), ")
    for word in (
        "corpus.bin (indexed tokens",
        "table.csv (a table)",
        "page.html (of unknown kind .html)",
        "sub (a folder)",
    ):
        assert word in line
    assert line.endswith("b.jsonl.gz (the same content as b.jsonl), copy.jsonl (the same content as a.jsonl)")
    one = [str(tmp_path / name) for name in ("a.jsonl", "copy.jsonl")]
    assert list(all_documents(open_sources(one, report=said.append))) == ["one", "one"]  # asked for by name
    assert len(said) == 1


def test_the_field_of_the_text_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"body": "one", "text": "other"}\n')
    named = open_sources([str(path)], "body")
    assert list(all_documents(named)) == ["one"]
    assert sources_hash(named) != sources_hash(open_sources([str(path)]))
    with pytest.raises(DataError, match=r"no field 'title'; the record has 'body', 'text'. .*--text-field text"):
        list(all_documents(open_sources([str(path)], "title")))
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"body": ["one"], "text": ["other"]}), tmp_path / "a.parquet")
    assert list(all_documents(open_sources([str(tmp_path / "a.parquet")], "body"))) == ["one"]


@pytest.mark.parametrize("blank", ["", " ", "\u3000", "\u00a0", "\x1c"])
def test_a_line_of_any_white_space_separates_documents(blank: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(f"ä one\nb two\n{blank}\nc three\nd four\n", encoding="utf-8")
    assert _read(tmp_path / "a.txt") == ["ä one\nb two", "c three\nd four"]
