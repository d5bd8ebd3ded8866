"""Files that are not what their name says: told in one sentence, by every reader, before any rank starts."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from megapar.arguments import parse
from megapar.checkpoints.format.shards import ShardFile
from megapar.config.published import Unsupported, read_config
from megapar.data.text.source import JSONL_FILE, TEXT_FILE, FileSource, all_documents, open_sources
from megapar.data.tokenizers.load import load_tokenizer
from megapar.errors import CheckpointError, ConfigError, DataError
from megapar.files.token_index import check_corpus

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 17209920\n"
PAGE = b"<!DOCTYPE html>\n<html><title>404</title></html>\n"
TOLD = (
    r" is a Git LFS pointer, not the file itself \(17,209,920 bytes\): "
    r"run `git lfs pull`, or download it with `hf download`"
)
TEXTS = [f"café {number}" for number in range(70)]
RECORDS = [json.dumps({"text": text, "id": 1}) for text in TEXTS]
LINES = "\n".join(RECORDS) + "\n"

WHOLE = {
    "array.json": (f"[\n{','.join(RECORDS)}\n]\n".encode(), r"is a JSON array: .* `jq -c '\.\[\]'`"),
    "line.json": (f"[{', '.join(RECORDS * 20)}]".encode(), r"is a JSON array: "),
    "array.txt": (json.dumps([{"text": "a"}], indent=1).encode(), r"is a JSON array: "),
    "pretty.json": (json.dumps({"text": "a"}, indent=1).encode(), r"records over several lines: .* `jq -c \.`"),
    "pretty.jsonl": (b'{"text": "a",\n "id": 1}\n{"text": "b",\n "id": 2}\n', "records over several lines"),
    "mark.jsonl": (LINES.encode("utf-16"), "is UTF-16 text: .* `iconv -f UTF-16 -t UTF-8`"),
    "big.txt": (LINES.encode("utf-16-be"), "is UTF-16 text: .* `iconv -f UTF-16BE -t UTF-8`"),
    "cr.jsonl": (LINES.replace("\n", "\r").encode(), r"has lines that end with CR alone: .* `tr '\\r' '\\n'`"),
    "page.jsonl": (PAGE, "is a web page, not the file itself"),
    "pointer.jsonl": (POINTER, TOLD),
    "pointer.txt": (POINTER, TOLD),
    "pointer.parquet": (POINTER, TOLD),
    "pointer.jsonl.gz": (POINTER, TOLD),
}


@pytest.mark.parametrize("name", WHOLE)
def test_what_concerns_a_whole_file_is_one_sentence(name: str, tmp_path: Path) -> None:
    content, message = WHOLE[name]
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        open_sources([str(path)])
    for more in ((), ("--on-bad-record", "skip")):  # a whole file is never skipped
        with pytest.raises(ConfigError, match=message) as told:
            parse("moe", ["--data-path", str(path), *more], {})
        assert len(told.value.complaints) == 1
        assert "line 1" not in str(told.value)


@pytest.mark.parametrize("name", ["part-00000", "shard.jsonl.txt", "part.gz"])
def test_records_are_read_as_records_whatever_the_name(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(gzip.compress(LINES.encode()) if name.endswith(".gz") else LINES.encode())
    said: list[str] = []
    (source,) = open_sources([str(path)], report=said.append)
    assert list(all_documents([source])) == TEXTS
    assert said == [f"{path}: read as JSON lines, as its first records are, whatever its name"]
    (tmp_path / "same.jsonl").write_text(LINES)
    (named,) = open_sources([str(tmp_path / "same.jsonl")], report=said.append)
    assert len(said) == 1
    assert (
        source.content_hash() == named.content_hash() != FileSource(path, TEXT_FILE).content_hash()
    )  # refused on a resume


def test_text_stays_text(tmp_path: Path) -> None:
    others = {
        "late": "\n".join([*RECORDS[:63], "{no record}"]),
        "fieldless": LINES.replace('"text"', '"body"'),
        "brace.txt": "{one}\n\n[two]\n",
        "return.txt": "one\rtwo\nthree",
        "page.txt": PAGE.decode(),
    }
    for name, text in others.items():
        (tmp_path / name).write_bytes(text.encode())
    said: list[str] = []
    sources = open_sources([str(tmp_path / name) for name in others], report=said.append)
    assert [source.read_as for source in sources] == [TEXT_FILE] * len(others)
    assert said == [f"{tmp_path / 'fieldless'}: read as text; its lines are JSON objects without the field 'text'"]
    first = tmp_path / "list.jsonl"
    first.write_text(f'["one bad record"]\n{LINES}')
    assert open_sources([str(first)])[0].read_as == JSONL_FILE


def test_a_long_first_record_is_read_whole_and_an_endless_one_is_not(tmp_path: Path) -> None:
    long, endless = tmp_path / "long", tmp_path / "endless"
    long.write_text(json.dumps({"text": "x" * 100_000}) + "\n" + LINES)
    endless.write_text('{"text": "' + "x" * (5 << 20))
    kinds = [source.read_as for source in open_sources([str(long), str(endless)])]
    assert kinds == [JSONL_FILE, TEXT_FILE]


def test_a_pointer_is_told_by_every_reader(tmp_path: Path) -> None:
    names = ("config.json", "tokenizer.json", "model.safetensors", "sp.model", "a.idx", "a.bin", "run.yaml")
    for name in names:
        (tmp_path / name).write_bytes(POINTER)
    (tmp_path / "b.idx").write_bytes(PAGE)
    (tmp_path / "b.bin").write_bytes(PAGE)
    told = "config.json" + TOLD
    with pytest.raises(Unsupported, match=told):
        read_config(tmp_path)
    with pytest.raises(CheckpointError, match="model.safetensors" + TOLD):
        ShardFile(tmp_path / "model.safetensors")
    with pytest.raises(DataError, match="a.idx" + TOLD):
        check_corpus(str(tmp_path / "a"), None)
    with pytest.raises(DataError, match=r"b\.idx is a web page"):
        check_corpus(str(tmp_path / "b"), None)
    for path, name in ((tmp_path, "tokenizer.json"), (tmp_path / "sp.model", "sp.model")):
        with pytest.raises(DataError, match=name + TOLD):
            load_tokenizer(path)
        with pytest.raises(ConfigError, match=name + TOLD) as refused:
            parse("moe", ["--tokenizer-model", str(path), "--mock-data"], {})
        assert len(refused.value.complaints) == 1
    with pytest.raises(ConfigError, match="run.yaml" + TOLD):
        parse("moe", ["--config", str(tmp_path / "run.yaml")], {})
