"""Text in object stores: the tokens of the same files on a disk, each byte asked for once, and never two versions."""

from __future__ import annotations

import gzip
import json
import time
from pathlib import Path
from typing import Any

import pytest

from megapar.data import fetched as copying
from megapar.data.fetched import fetched
from megapar.data.fingerprint import fingerprints_of
from megapar.data.text import chunks
from megapar.data.text.chunks import BadRecords, TextChunk
from megapar.data.text.source import TextSource, all_documents, open_sources, sources_hash
from megapar.data.tokenizers.sentencepiece_tokenizer import SentencePieceTokenizer, train
from megapar.data.tokenizers.tokenizer import MockTokenizer
from megapar.data.tokens import token_cache
from megapar.data.tokens.token_cache import TokenCache
from megapar.errors import DataError
from megapar.files import bucket as bucket_files
from megapar.files import data_object, objects
from megapar.files.data_files import AUTO
from megapar.files.data_object import DataObject, find, found_at
from megapar.files.location import Location, at
from megapar.files.objects import ObjectHead, Objects
from megapar.files.s3_objects import S3Objects
from tests.support.stores import in_objects, put

TEXTS = [f"document {number} " + "t17 t80 t9 " * (number % 40) for number in range(2500)]
RECORDS = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Have a cache of this test's own, and no run that began before."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(data_object, "BEGAN", {})
    return tmp_path / "cache" / "megapar"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of the ranges that S3 is asked for."""
    ranges: list[int] = []
    real = S3Objects._get

    def counted(self: S3Objects, key: str, start: int, end: int | None, etag: str) -> bytes:
        if end is not None:  # else a manifest
            ranges.append(end - start)
        return real(self, key, start, end, etag)

    monkeypatch.setattr(S3Objects, "_get", counted)
    return ranges


def _files(folder: Path) -> dict[str, Path]:
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    folder.mkdir()
    (folder / "a.jsonl").write_bytes(RECORDS)
    (folder / "b.txt").write_text("\n\n".join(TEXTS))
    (folder / "c.txt").write_text("\n".join(TEXTS[:900]))
    (folder / "d.jsonl.gz").write_bytes(gzip.compress(RECORDS))
    (folder / "e.txt.zst").write_bytes(arrow.compress("\n\n".join(TEXTS[:700]).encode(), "zstd", asbytes=True))
    parquet.write_table(arrow.table({"text": TEXTS, "n": range(len(TEXTS))}), folder / "f.parquet", row_group_size=700)
    return {path.name: path for path in folder.iterdir()}


def _tokens(sources: tuple[TextSource, ...]) -> bytes:
    return TokenCache(MockTokenizer(90), None).open(sources).tokens.tokens.tobytes()


def test_the_tokens_of_a_store_are_those_of_a_disk_and_only_they_are_kept(
    bucket: Location, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 100_000)
    monkeypatch.setattr(data_object, "_BLOCK_BYTES", 30_000)
    monkeypatch.setattr(bucket_files, "_FEW_BYTES", 3000)
    for name, path in _files(tmp_path / "files").items():
        put(bucket / "files" / name, path.read_bytes())
        (item,) = fetched([f"{bucket}/files/{name}"])
        assert list(all_documents(open_sources([item]))) == list(all_documents(open_sources([str(path)])))
    assert {path.name for path in cache.iterdir()} == {"footers"}
    put(bucket / "files" / "README.md", b"about")
    items = fetched([f"{bucket}/files"])
    there = _tokens(open_sources(items))
    assert {path.name for path in cache.iterdir()} == {"footers", "tokens"}
    assert there == _tokens(open_sources([str(tmp_path / "files")]))
    whole = [list(all_documents(open_sources([one], per=AUTO))) for one in (items[0], str(tmp_path / "files"))]
    assert whole[0] == whole[1]
    lines = [text.rstrip() for text in TEXTS]
    assert {"\n\n".join(lines), "\n".join(lines[:900]), "\n\n".join(lines[:700])} < set(whole[0])


def test_bytes_are_asked_for_once(
    bucket: Location, tmp_path: Path, asked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 300_000)
    monkeypatch.setattr(bucket_files, "_FEW_BYTES", 1000)
    for name, path in _files(tmp_path / "files").items():
        put(bucket / name, path.read_bytes())
        sources = open_sources([f"{bucket}/{name}"])
        assert sum(asked) <= 20_000  # its beginning, and that of what is compressed
        asked.clear()
        read = list(sources[0].chunks())
        if name == "c.txt":  # lines are documents if no line is blank
            assert sum(asked) == path.stat().st_size
        elif name != "f.parquet":
            assert sum(asked) <= 3000
        asked.clear()
        for chunk in read:
            list(chunk.documents(BadRecords()))
        if name == "f.parquet":  # one column of the two
            assert sum(asked) < path.stat().st_size
        else:
            assert path.stat().st_size <= sum(asked) <= path.stat().st_size + 3000 * len(read)
        asked.clear()


def test_the_footer_of_a_parquet_object_is_asked_for_once(bucket: Location, tmp_path: Path, asked: list[int]) -> None:
    path = _files(tmp_path / "files")["f.parquet"]
    put(bucket / "f.parquet", path.read_bytes())
    (source,) = open_sources([f"{bucket}/f.parquet"])
    asked.clear()
    for _ in range(3):  # processes of a node, in each of which
        chunks._footer.cache_clear()
        read = source.chunks()
        assert len(read) == 4
        for chunk in read:
            list(chunk.documents(BadRecords()))
    assert len(asked) == 1 + 3 * 4  # the footer, and the column of each row group


def test_many_objects_are_asked_about_side_by_side(bucket: Location, monkeypatch: pytest.MonkeyPatch) -> None:
    count = 60
    for number in range(count):
        bucket_files.objects_of("s3").put(f"{bucket.path}/{number}.jsonl", RECORDS[: 2000 + number])
    requests: list[str] = []
    now, most = [0], [0]
    real = S3Objects.ask

    def ask(self: S3Objects, method: str, key: str, content: int = 0, **arguments: Any) -> Any:
        requests.append(method)
        now[0] += 1
        most[0] = max(most[0], now[0])
        time.sleep(0.02)
        now[0] -= 1
        return real(self, method, key, content, **arguments)

    monkeypatch.setattr(S3Objects, "ask", ask)
    sources = open_sources(fetched([str(bucket)]))
    assert len(sources) == count
    assert requests.count("head_object") <= 8  # of the folder itself, and of what could be tokens
    assert requests.count("get_object") == count + 1  # the beginning of each, and a manifest that is not there
    assert most[0] > 8
    requests.clear()
    assert len(fetched([source.name for source in sources])) == count
    assert requests == ["head_object"] * count


def test_workers_open_the_store_themselves(bucket: Location, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.jsonl").write_bytes(RECORDS)
    put(bucket / "a.jsonl", RECORDS)
    model = tmp_path / "t.model"
    model.write_bytes(train(iter(TEXTS), 300))
    opened = TokenCache(SentencePieceTokenizer(model.read_bytes(), name=str(model)), model)
    here = opened.open(open_sources([str(tmp_path / "a.jsonl")])).tokens.tokens.tobytes()
    real = token_cache.encode_in_process
    jobs: list[Any] = []
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 100_000)
    monkeypatch.setattr(token_cache, "PARALLEL_BYTES", 0)
    monkeypatch.setattr(token_cache, "cores", lambda: 2)
    monkeypatch.setattr(token_cache, "encode_in_process", lambda job, *rest: jobs.append(job) or real(job, *rest))
    assert opened.open(open_sources([f"{bucket}/a.jsonl"])).tokens.tokens.tobytes() == here
    assert len(jobs[0].chunks) > 4


@pytest.mark.parametrize("store", ["s3", "memory"])
@pytest.mark.parametrize("name", ["a.jsonl", "b.txt", "d.jsonl.gz", "e.txt.zst", "f.parquet"])
def test_an_object_that_is_replaced_while_it_is_read_is_refused(
    store: str, name: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects, "PAUSE_SECONDS", 0.0)
    place = request.getfixturevalue("bucket") if store == "s3" else in_objects()
    content = _files(tmp_path / "files")[name].read_bytes()
    put(place / name, content)
    (source,) = open_sources([f"{place}/{name}"])
    whole = source.chunks()
    for new in (content + content, content[: len(content) // 2]):
        put(place / name, new)
        with pytest.raises(DataError, match=rf"{name}: it was replaced or removed while the run read it"):
            list(whole[0].documents(BadRecords()))
    (place / name).remove()
    with pytest.raises(DataError, match="it was replaced or removed"):
        _tokens((source,))


def test_a_run_reads_what_it_began_with(bucket: Location) -> None:
    put(bucket / "a.jsonl", RECORDS)
    uri = f"{bucket}/a.jsonl"
    assert fingerprints_of([uri])[0].value is None  # before a start no store is asked
    fetched([uri])
    (first,) = fingerprints_of([uri], may_read=False)
    assert first.value == sources_hash(open_sources([uri]))
    put(bucket / "a.jsonl", RECORDS + RECORDS)
    assert fingerprints_of([uri]) == (first,)
    with pytest.raises(DataError, match="replaced"):
        _tokens(open_sources([uri]))
    fetched([uri])
    assert fingerprints_of([uri])[0].value not in (None, first.value)
    put(bucket / "b.jsonl", RECORDS + RECORDS)
    assert sources_hash(open_sources([f"{bucket}/b.jsonl"])) == fingerprints_of([uri])[0].value  # names do not count


def test_versions_are_told_apart_where_there_are_no_etags() -> None:
    place = in_objects()
    put(place / "a.jsonl", b'{"text": "one"}\n')
    first = sources_hash(open_sources([f"{place}/a.jsonl"]))
    put(place / "a.jsonl", b'{"text": "two"}\n')
    assert sources_hash(open_sources([f"{place}/a.jsonl"])) != first


def test_what_is_missing_or_does_not_answer_is_refused(bucket: Location, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match="there is no such object"):
        found_at(f"{bucket}/a.jsonl")
    assert find(bucket / "a.jsonl") is None
    put(bucket / "a.bad", b"")
    with pytest.raises(DataError, match=r"the folder contains only a\.bad"):
        open_sources([str(bucket)])
    put(bucket / "a.jsonl", RECORDS)
    (source,) = open_sources([f"{bucket}/a.jsonl"])
    monkeypatch.setattr(S3Objects, "_get", _refusing)
    with pytest.raises(DataError, match=r"a\.jsonl: cannot be read: .*Forbidden"):
        list(source.chunks()[0].documents(BadRecords()))


def _refusing(*arguments: object) -> bytes:
    raise PermissionError("Forbidden")


def test_etags_are_the_same_with_and_without_quotes(monkeypatch: pytest.MonkeyPatch) -> None:
    place = in_objects()
    put(place / "a.txt", b"one")
    monkeypatch.setattr(Objects, "_head", lambda self, key: ObjectHead(3, '"e"'))
    for etag, same in (("e", True), ("f", False)):
        chunk = TextChunk("lines", f"{place}/a.txt", 0, 3, head=(3, etag))
        assert isinstance(chunk.file, DataObject)
        assert chunk.file.location == at(f"{place}/a.txt")
        if same:
            assert list(chunk.documents(BadRecords())) == ["one"]
        else:
            with pytest.raises(DataError, match="replaced"):
                list(chunk.documents(BadRecords()))


def test_tokens_are_copied_with_their_hashes(bucket: Location) -> None:
    for suffix in (".bin", ".idx", ".hashes"):
        put(bucket / f"t{suffix}", suffix.encode())
    (prefix,) = fetched([f"n={bucket}/t"])
    copied = Path(prefix.removeprefix("n="))
    assert sorted(path.name for path in copied.parent.iterdir()) == ["t.bin", "t.hashes", "t.idx"]
    assert fetched([f"{bucket}/t.bin"]) == (str(copied),)
    put(bucket / "t", b"text")
    assert fetched([f"{bucket}/t"]) == (f"{bucket}/t",)
    assert copying.fetched(["0.5", "here"]) == ("0.5", "here")
