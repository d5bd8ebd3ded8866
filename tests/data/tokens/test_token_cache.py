"""Text in the cache: the files that prepare writes, made by several processes, resumed and cleaned up."""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path

import numpy as np
import pytest

from megapar.data import build
from megapar.data.blend import open_blend, open_stores
from megapar.data.text.chunks import BadRecords, LineNumbers, TextChunk
from megapar.data.text.source import open_sources
from megapar.data.tokenizers.load import load_tokenizer
from megapar.data.tokenizers.tokenizer import MockTokenizer
from megapar.data.tokens.prepare import prepare
from megapar.data.tokens.split import Split, TrainHeldout
from megapar.data.tokens.token_cache import EncodedText, TokenCache
from megapar.errors import DataError

pytestmark = pytest.mark.usefixtures("_small_chunks")


def _opened(path: Path, model: str, *, skip_bad: bool = False) -> EncodedText:
    return TokenCache(load_tokenizer(model), Path(model), skip_bad).open(open_sources([str(path)]))


def _in_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megapar.data.tokens.token_cache.PARALLEL_BYTES", 0)
    monkeypatch.setattr("megapar.data.tokens.token_cache.cores", lambda: 2)


@pytest.mark.parametrize("processes", [False, True])
def test_an_entry_holds_what_prepare_writes(
    tmp_path: Path, fresh_cache: Path, small_jsonl: Path, model: str, monkeypatch: pytest.MonkeyPatch, processes: bool
) -> None:
    if processes:
        _in_processes(monkeypatch)
    prepare(str(tmp_path / "out"), [str(small_jsonl)], model, workers=1)
    found = _opened(small_jsonl, model)
    for suffix in ("bin", "idx", "hashes"):
        assert Path(f"{found.tokens.prefix}.{suffix}").read_bytes() == (tmp_path / f"out.{suffix}").read_bytes()
    assert found.notes == ()
    assert not list((fresh_cache / "tokens").glob(".*.parts"))


@pytest.mark.parametrize("processes", [False, True])
@pytest.mark.usefixtures("fresh_cache")
def test_files_or_chunks_are_counted_as_they_are_encoded(
    tmp_path: Path, small_jsonl: Path, model: str, monkeypatch: pytest.MonkeyPatch, processes: bool
) -> None:
    if processes:
        _in_processes(monkeypatch)
    for number in range(5):
        (tmp_path / f"{number}.txt").write_text(f"document {number}\n")
    told: list[tuple[object, ...]] = []
    cache = TokenCache(load_tokenizer(model), Path(model), status=lambda *now: told.append(now))
    cache.open(open_sources([str(tmp_path)], per="file"))
    assert told == [("encoding", done, 5, "files") for done in range(6)]
    told.clear()
    cache.open(open_sources([str(small_jsonl)]))
    assert told[0] == ("encoding", 0, len(told) - 1, "chunks")
    assert told[-1] == ("encoding", len(told) - 1, len(told) - 1, "chunks")
    told.clear()
    cache.open(open_sources([str(small_jsonl)]))
    assert told == []


def test_the_entry_does_not_depend_on_the_split(fresh_cache: Path, small_jsonl: Path, model: str) -> None:
    for split in ("95,5", "50,30,20", "100,0"):
        build(
            "moe",
            data_path=[str(small_jsonl)],
            tokenizer_model=model,
            vocab_size=600,
            seq_length=16,
            seed=1,
            split=split,
        )
    assert len(list((fresh_cache / "tokens").glob("[!.]*"))) == 1


@pytest.mark.parametrize("processes", [False, True])
def test_broken_records_are_raised_or_noted_by_every_process(
    tmp_path: Path, fresh_cache: Path, small_jsonl: Path, model: str, monkeypatch: pytest.MonkeyPatch, processes: bool
) -> None:
    if processes:
        _in_processes(monkeypatch)
    path = tmp_path / "a.jsonl"
    lines = small_jsonl.read_text().splitlines()
    lines[120] = "{cut off"
    path.write_text("\n".join([*lines, "7"]))
    with pytest.raises(DataError, match=r"a.jsonl, line (121|201): "):
        _opened(path, model)
    assert not list((fresh_cache / "tokens").glob("[!.]*"))
    assert not list((fresh_cache / "tokens").glob(".*.parts"))
    found = _opened(path, model, skip_bad=True)
    (note,) = found.notes
    assert note.startswith("2 broken records were skipped: ")
    assert note.index("line 121:") < note.index("line 201:")
    assert found.tokens.documents == 199
    assert _opened(path, model, skip_bad=True).notes == found.notes


def test_a_process_that_ends_early_is_an_error(
    fresh_cache: Path, small_jsonl: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _in_processes(monkeypatch)
    monkeypatch.setattr("megapar.data.tokens.token_cache.__name__", "no_such_module")
    with pytest.raises(DataError, match=r"small.jsonl: the process that encodes it ended with status 1; the same"):
        _opened(small_jsonl, model)


def test_encoding_resumes_after_it_was_killed(
    fresh_cache: Path, small_jsonl: Path, model: str, encoded: list[int]
) -> None:
    with pytest.raises(KeyboardInterrupt):
        _opened(small_jsonl, model)
    (parts,) = (fresh_cache / "tokens").glob(".*.parts")
    assert len(list(parts.glob("*.part"))) == 4
    assert _opened(small_jsonl, model).tokens.documents == 200
    assert encoded[:6] == [0, 1, 2, 3, 4, 4]
    assert not parts.exists()


def test_lines_before_a_chunk_are_counted_once(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("{\n" * 3000)
    numbers, bad = LineNumbers(), BadRecords()
    for first in range(0, 6000, 600):
        assert not list(TextChunk("jsonl", str(path), first, first + 600).documents(bad, numbers))
    assert bad.count == 3000
    assert numbers.bytes_read == 5400  # those before the last chunk
    assert [numbers.before(path, end) for end in (5400, 2, 4001)] == [2700, 1, 2000]
    assert numbers.bytes_read == 5400 + 4001


def test_the_tokens_of_text_are_those_of_earlier_versions(tmp_path: Path, fresh_cache: Path) -> None:
    """Digests of ids and offsets from before text was kept in indexed files: runs that resume read the same."""
    rng, path = random.Random(3), tmp_path / "a.jsonl"
    texts = [" ".join(f"t{rng.randrange(7, 90)}" for _ in range(rng.randrange(1, 30))) for _ in range(300)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    data = TrainHeldout(open_blend([str(path)]), None)
    stores = open_stores(data, Split.parse("70,20,10"), TokenCache(MockTokenizer(90), None), 90)
    digests = []
    for blend in (stores.train, stores.heldout):
        (store,) = blend.stores
        arrays = (store.tokens[0 : len(store.tokens)], store.offsets[0 : len(store.offsets)])
        state = b"".join(np.asarray(array, dtype=np.int64).tobytes() for array in arrays)
        digests.append((hashlib.sha256(state).hexdigest()[:16], store.documents))
    assert digests == [("b59af7acc1bb1356", 202), ("c9654b5dd2c849c3", 76)]
