"""Preparing files of tokens: the same bytes however it is done, nothing half done, broken records counted."""

from __future__ import annotations

import itertools
import json
import os
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import megapar.data.tokens.encode as module
from megapar.data import build
from megapar.data.corpus import TextOptions
from megapar.data.text.chunks import BadRecords, LineNumbers, TextChunk, _stretches
from megapar.data.text.source import all_documents, open_sources
from megapar.data.tokenizers.load import load_tokenizer
from megapar.data.tokens.indexed import IndexedDataset
from megapar.data.tokens.parts import claimed, finished
from megapar.data.tokens.prepare import input_chunks, prepare
from megapar.errors import DataError
from megapar.tools.main import main

pytestmark = pytest.mark.usefixtures("_small_chunks")


def _bytes(prefix: Path) -> tuple[bytes, ...]:
    return tuple(Path(f"{prefix}.{suffix}").read_bytes() for suffix in ("bin", "idx", "hashes"))


def test_the_same_bytes_whatever_the_number_of_workers(tmp_path: Path, small_jsonl: Path, model: str) -> None:
    reports = [prepare(str(tmp_path / f"w{n}"), [str(small_jsonl)], model, workers=n) for n in (1, 2, 3)]
    assert _bytes(tmp_path / "w1") == _bytes(tmp_path / "w2") == _bytes(tmp_path / "w3")
    assert reports[0] == reports[1] == reports[2]
    tokenizer, dataset = load_tokenizer(model), IndexedDataset(tmp_path / "w1")
    texts = list(all_documents(open_sources([str(small_jsonl)])))
    assert len(dataset) == dataset.documents == len(texts) == reports[0].documents == 200
    for i in (0, 7, 199):
        assert dataset[i].tolist() == [*tokenizer.encode(texts[i]), tokenizer.special.eos]
    assert dataset.verify(600).tokens == reports[0].tokens
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [*3 * [".bin"], *3 * [".hashes"], *3 * [".idx"]]


@pytest.mark.parametrize("size", [1, 3, 7, 20, 64, 1000])
@pytest.mark.parametrize("kind", ["jsonl", "lines", "blank"])
def test_chunks_of_any_size_give_every_document_once(
    tmp_path: Path, kind: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megapar.data.text.chunks.CHUNK_BYTES", size)
    rng = random.Random(size)
    documents = ["x" * rng.randrange(1, 30) + str(i) for i in range(20)]
    if kind == "jsonl":
        text = "\n".join(json.dumps({"text": one}) + "\n" * rng.randrange(2) for one in documents)
    elif kind == "lines":
        text = "\n".join(documents)
    else:
        documents = [one if rng.random() < 0.5 else one + "\nsecond line" for one in documents]
        text = "\n" * rng.randrange(3) + "".join(one + "\n" + "\n" * rng.randrange(1, 4) for one in documents)
    path = tmp_path / ("a.jsonl" if kind == "jsonl" else "a.txt")
    path.write_text(text)
    chunks = input_chunks([str(path)])
    assert {chunk.kind for chunk in chunks} == {kind}
    assert [one for chunk in chunks for one in chunk.documents(BadRecords(stops=True))] == documents
    assert documents == list(all_documents(open_sources([str(path)])))


_LINES = st.lists(
    st.one_of(
        st.text(" \t\r\v\f\x1c\x1f\x85\xa0\u2028\u3000\ufeff\u200b\0ab\u4e00", max_size=4).map(str.encode),
        st.sampled_from([b"", b"\xff", b"\xc2", b"x" * 50, b"y" * 30]),
    ),
    max_size=12,
)


@given(lines=_LINES, size=st.integers(1, 40), longest=st.sampled_from([40, 1 << 24]))
@example(
    lines=[one.encode() for one in ("\u4e00", "\u3000", "\u4e8c", "", "\u3000\u3000", "", "\u4e09")], size=4, longest=40
)
@settings(max_examples=200, deadline=None)
def test_a_text_file_gives_the_same_documents_read_straight_and_in_chunks(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], size: int, longest: int
) -> None:
    path = tmp_path_factory.mktemp("text") / "a.txt"
    path.write_bytes(b"\n".join(lines) + b"\n")
    straight, prepared = BadRecords(), BadRecords()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megapar.data.text.chunks.CHUNK_BYTES", size)
        patch.setattr("megapar.data.text.chunks.LEAST_CHUNK_BYTES", 1)
        for place in ("files.data_files", "data.text.chunks"):
            patch.setattr(f"megapar.{place}.LONGEST_LINE", longest)
        documents = list(all_documents(open_sources([str(path)]), straight))
        chunks = input_chunks([str(path)])
        assert [one for chunk in chunks for one in chunk.documents(prepared)] == documents
    places = [[one.split(" (")[0] for one in bad.first] for bad in (prepared, straight)]
    assert (prepared.count, places[0]) == (straight.count, places[1])


def test_blank_lines_are_those_of_unicode(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("\u4e00\n\u3000\n\u4e8c\n\n\u3000\u3000\n\n\u4e09")
    (chunk,) = input_chunks([str(path)])
    assert list(chunk.documents(BadRecords(stops=True))) == ["\u4e00", "\u4e8c", "\u4e09"]


@pytest.mark.parametrize("block", [1, 5, 30, 1000])
def test_lines_keep_their_numbers_whatever_is_read_at_once(
    tmp_path: Path, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megapar.data.text.chunks._BLOCK_BYTES", block)
    path = tmp_path / "a.jsonl"
    lines = (b'\xef\xbb\xbf{"text": "one"}', b'{"text": "two"}\r', b" \t\r", b'{"text": "\xff"}')
    more = ('{"text": "drei \u00e4"}', '{"text": ', '{"text": "\\ud800"}', '{"text": "\u00a0"}', '{"text": "last"}')
    path.write_bytes(b"\n".join((*lines, *(line.encode() for line in more))))
    for size in (7, 1000):
        monkeypatch.setattr("megapar.data.text.chunks.CHUNK_BYTES", size)
        bad = BadRecords()
        chunks = input_chunks([str(path)])
        assert [one for chunk in chunks for one in chunk.documents(bad)] == ["one", "two", "drei \u00e4", "last"]
        assert [one.split(":")[0][-6:] for one in bad.first] == ["line 4", "line 6", "line 7"]
        assert bad.count == 3


def test_chunks_are_whole_and_smaller_towards_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megapar.data.text.chunks.CHUNK_BYTES", 16 << 20)
    for size in (1, 300_000, 16_000_000, 10**9, 10**12):
        pieces = list(_stretches(size))
        assert pieces[0][0] == 0
        assert pieces[-1][1] == size
        assert all(a[1] == b[0] for a, b in itertools.pairwise(pieces))
        sizes = [last - first for first, last in pieces]
        assert max(sizes) <= 16 << 20
        assert len(pieces) <= max(300, 1.01 * size / (16 << 20))
        assert len(pieces) < 20 or sizes[0] // 4 == sizes[-2]


def test_parquet_and_datasets_give_what_jsonl_gives(tmp_path: Path, small_jsonl: Path, model: str) -> None:
    datasets, parquet = pytest.importorskip("datasets"), pytest.importorskip("pyarrow.parquet")
    import pyarrow

    texts = [json.loads(line)["text"] for line in small_jsonl.read_text().splitlines()]
    parquet.write_table(pyarrow.table({"body": texts}), tmp_path / "a.parquet", row_group_size=50)
    datasets.Dataset.from_dict({"text": texts}).save_to_disk(str(tmp_path / "saved"))
    prepare(str(tmp_path / "jsonl"), [str(small_jsonl)], model, workers=1)
    prepare(str(tmp_path / "parquet"), [str(tmp_path / "a.parquet")], model, workers=2, field="body")
    prepare(str(tmp_path / "rows"), [], model, workers=2, dataset=str(tmp_path / "saved"))
    assert _bytes(tmp_path / "jsonl") == _bytes(tmp_path / "parquet") == _bytes(tmp_path / "rows")
    with pytest.raises(DataError, match=r"no field 'text'; the columns are 'body'"):
        prepare(str(tmp_path / "x"), [str(tmp_path / "a.parquet")], model, workers=1)


def test_a_killed_run_goes_on_where_it_stood(tmp_path: Path, small_jsonl: Path, model: str, encoded: list[int]) -> None:
    with pytest.raises(KeyboardInterrupt):
        prepare(str(tmp_path / "broken"), [str(small_jsonl)], model, workers=1)
    assert not (tmp_path / "broken.bin").exists()
    assert not (tmp_path / "broken.idx").exists()
    prepare(str(tmp_path / "broken"), [str(small_jsonl)], model, workers=1)
    assert encoded[:5] == [0, 1, 2, 3, 4]
    assert encoded[5] == 4
    prepare(str(tmp_path / "whole"), [str(small_jsonl)], model, workers=1)
    assert _bytes(tmp_path / "broken") == _bytes(tmp_path / "whole")
    assert not (tmp_path / "broken.parts").exists()


def test_a_part_that_a_crash_of_the_machine_has_damaged_is_made_again(
    tmp_path: Path, small_jsonl: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(str(tmp_path / "whole"), [str(small_jsonl)], model, workers=1)
    monkeypatch.setattr(module, "remove_parts", lambda _: None)
    prepare(str(tmp_path / "out"), [str(small_jsonl)], model, workers=1)
    monkeypatch.undo()
    monkeypatch.setattr("megapar.data.text.chunks.CHUNK_BYTES", 5000)
    parts = sorted((tmp_path / "out.parts").glob("*.part"))
    for path, size in ((parts[0], 0), (parts[1], 7), (parts[2], parts[2].stat().st_size - 3)):
        os.truncate(path, size)
    parts[3].write_bytes(parts[3].read_bytes()[2:])
    parts[4].write_bytes(bytes(9) + parts[4].read_bytes()[9:])
    folder = parts[0].parent
    assert [finished(folder, number) is None for number in range(6)] == [True] * 5 + [False]
    done = prepare(str(tmp_path / "out"), [str(small_jsonl)], model, workers=1, overwrite=True)
    assert done.documents == 200
    assert _bytes(tmp_path / "out") == _bytes(tmp_path / "whole")


def test_parts_of_another_input_are_not_used(tmp_path: Path, small_jsonl: Path, model: str) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text(small_jsonl.read_text().replace(" a ", " another "))
    (tmp_path / "out.parts").mkdir()
    encoding = module.Encoding("uint16", 3, False)
    (tmp_path / "out.parts" / "key").write_text("another")
    chunk, folder = TextChunk("jsonl", str(other), 0, 5000), str(tmp_path / "out.parts")
    module._encode_chunk(0, chunk, folder, encoding, load_tokenizer(model), LineNumbers())
    prepare(str(tmp_path / "out"), [str(small_jsonl)], model, workers=1)
    prepare(str(tmp_path / "good"), [str(small_jsonl)], model, workers=1)
    assert _bytes(tmp_path / "out") == _bytes(tmp_path / "good")


@pytest.mark.parametrize("workers", [1, 2])
def test_one_broken_line_among_many(tmp_path: Path, model: str, workers: int) -> None:
    path = tmp_path / "many.jsonl"
    lines = ['{"text": "word ' + str(i) + '"}' for i in range(2000)]
    lines[1234] = '{"text": "cut off'
    path.write_text("\n".join(lines))
    with pytest.raises(DataError, match=r"many.jsonl, line 1235: not a JSON record"):
        prepare(str(tmp_path / "out"), [str(path)], model, workers=workers)
    assert not list(tmp_path.glob("out.bin*")) + list(tmp_path.glob("out.idx*"))
    done = prepare(str(tmp_path / "out"), [str(path)], model, workers=workers, skip_bad=True)
    assert (done.documents, done.bad) == (1999, 1)
    assert "line 1235" in done.first_bad[0]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_field_that_is_another_s_is_told_of_the_first_line(tmp_path: Path, model: str, workers: int) -> None:
    path = tmp_path / "many.jsonl"
    path.write_text("\n" + '{"id": "7", "content": "some words of a document"}\n' * 40_000)
    with pytest.raises(DataError, match=r"many.jsonl, line 2: no field 'text'.*in megapar data: --field content"):
        prepare(str(tmp_path / "out"), [str(path)], model, workers=workers)
    assert list(tmp_path.iterdir()) == [path]


def test_a_worker_that_dies_is_an_error_and_the_rest_is_kept(
    tmp_path: Path, small_jsonl: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = module._encode_chunk

    def die_at_the_seventh(number: int, *rest: object) -> object:
        if number == 7:
            os._exit(9)
        return encode(number, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "_encode_chunk", die_at_the_seventh)
    with pytest.raises(DataError, match="a worker died"):
        prepare(str(tmp_path / "out"), [str(small_jsonl)], model, workers=2)
    assert list((tmp_path / "out.parts").glob("*.part"))
    monkeypatch.undo()
    monkeypatch.setattr("megapar.data.text.chunks.CHUNK_BYTES", 5000)
    again = prepare(str(tmp_path / "out"), [str(small_jsonl)], model, workers=2)
    assert again.documents == 200


def test_files_are_replaced_only_where_that_is_asked_for(tmp_path: Path, small_jsonl: Path, model: str) -> None:
    out = tmp_path / "out"
    prepare(str(out), [str(small_jsonl)], model, workers=1)
    before = _bytes(out)
    with pytest.raises(DataError, match=r"out.idx already exists; pass --overwrite"):
        prepare(f"{out}.bin", [str(small_jsonl)], model, workers=1, append_end=False)
    assert _bytes(out) == before
    prepare(str(out), [str(small_jsonl)], model, workers=1, append_end=False, overwrite=True)
    after = _bytes(out)
    assert len(after[0]) == len(before[0]) - 2 * 200
    (tmp_path / "out.idx").unlink()
    with pytest.raises(DataError, match=r"out.bin already exists"):
        prepare(str(out), [str(small_jsonl)], model, workers=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.bin", "out.hashes"]


def test_a_run_killed_between_giving_its_names_goes_on(
    tmp_path: Path, small_jsonl: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(str(tmp_path / "whole"), [str(small_jsonl)], model, workers=1)
    replace = os.replace

    def die_at_the_index(source: str, target: str) -> None:
        if str(target).endswith("out.idx"):
            raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr(os, "replace", die_at_the_index)
    with pytest.raises(KeyboardInterrupt):
        prepare(str(tmp_path / "out"), [str(small_jsonl)], model, workers=1)
    monkeypatch.setattr(os, "replace", replace)
    assert (tmp_path / "out.bin").exists()
    prepare(str(tmp_path / "out"), [str(small_jsonl)], model, workers=1)
    assert _bytes(tmp_path / "out") == _bytes(tmp_path / "whole")


def test_after_a_broken_record_the_finished_parts_serve_the_run_that_skips(
    tmp_path: Path, small_jsonl: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text(small_jsonl.read_text() + "{\n")
    with pytest.raises(DataError, match=r"line 201: .* chunks are finished and kept in .*out.parts"):
        prepare(str(tmp_path / "out"), [str(path)], model, workers=1)
    encoded: list[int] = []
    encode = module._encode_chunk

    def note(number: int, *rest: object) -> object:
        encoded.append(number)
        return encode(number, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "_encode_chunk", note)
    assert prepare(str(tmp_path / "out"), [str(path)], model, workers=1, skip_bad=True).bad == 1
    assert encoded == [len(input_chunks([str(path)])) - 1]
    path.write_text("{\n")
    with pytest.raises(DataError, match=r"line 1: .*; repair or remove the line, or set --on-bad-record skip$"):
        prepare(str(tmp_path / "none"), [str(path)], model, workers=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.bin", "out.hashes", "out.idx"]


def test_two_runs_do_not_write_one_file(
    tmp_path: Path, small_jsonl: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megapar.data.tokens.parts._LOCK_SECONDS", 0.0)
    with claimed(tmp_path / "out.parts", "another run's"), pytest.raises(DataError, match="another run is working in"):
        prepare(str(tmp_path / "out"), [str(small_jsonl)], model, workers=1)
    (tmp_path / "mine.parts").mkdir()
    (tmp_path / "mine.parts" / "letter.txt").write_text("keep")
    with pytest.raises(DataError, match="contains other files"):
        prepare(str(tmp_path / "mine"), [str(small_jsonl)], model, workers=1)
    assert (tmp_path / "mine.parts" / "letter.txt").read_text() == "keep"
    (tmp_path / "mine.parts" / "key").write_text("of something else")
    (tmp_path / "mine.parts" / "00000000.part").touch()
    prepare(str(tmp_path / "mine"), [str(small_jsonl)], model, workers=1)
    assert [path.name for path in (tmp_path / "mine.parts").iterdir()] == ["letter.txt"]


def test_training_passes_over_broken_lines_and_says_so(tmp_path: Path, small_jsonl: Path, model: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("{}\n" + small_jsonl.read_text() + '{"text": 7}\n')
    small = {"vocab_size": 600, "seq_length": 16, "seed": 1, "tokenizer_model": model}
    with pytest.raises(DataError, match="line 1: no field 'text'"):
        build("moe", data_path=[str(path)], **small)  # type: ignore[arg-type]
    corpus = build("moe", data_path=[str(path)], text=TextOptions(skip_bad=True), **small)  # type: ignore[arg-type]
    assert len(corpus.notes) == 1
    assert corpus.notes[0].startswith("2 broken records were skipped")
    assert "line 1:" in corpus.notes[0]
    assert "line 202:" in corpus.notes[0]
    good = build("moe", data_path=[str(small_jsonl)], **small)  # type: ignore[arg-type]
    assert good.notes == ()
    assert np.array_equal(good.train[3]["tokens"], corpus.train[3]["tokens"])


def test_the_commands(tmp_path: Path, small_jsonl: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, out = str(tmp_path / "t.model"), str(tmp_path / "out")
    source = ["--input", str(small_jsonl)]
    assert main(["data", "train-tokenizer", *source, "--output", model, "--vocab-size", "600", "--hf", out]) == 0
    assert main(["data", "prepare", *source, "--output", out, "--tokenizer-model", model, "--workers", "2"]) == 0
    said = capsys.readouterr().out
    assert "600 ids" in said
    assert "200 documents" in said
    assert "tokens/s" in said
    assert main(["data", "prepare", *source, "--output", out + "2", "--tokenizer-model", out]) == 0
    assert _bytes(Path(out)) == _bytes(Path(out + "2"))
    capsys.readouterr()
    assert main(["data", "check", out, "--vocab-size", "600"]) == 0
    assert "200 documents" in capsys.readouterr().out
    with open(out + ".bin", "r+b") as data:
        data.truncate(100)
    assert main(["data", "check", out, out + "2"]) == 2
    said, complained = capsys.readouterr()
    assert "out.bin: 100 bytes, where out.idx implies" in complained
    assert "out2: valid" in said
    assert main(["data", "prepare", *source, "--output", out + "2", "--tokenizer-model", out]) == 2
    assert "pass --overwrite" in capsys.readouterr().err
    assert main(["data", "prepare", *source, "--output", out + "2", "--tokenizer-model", out, "--overwrite"]) == 0
    assert main(["data", "prepare", *source, "--output", out + ".bin/x", "--tokenizer-model", out]) == 2
    assert "Not a directory" in capsys.readouterr().err
    assert main(["data", "prepare", "--output", out, "--tokenizer-model", model]) == 2
    with pytest.raises(SystemExit):
        main(["data", "prepare", *source, "--output", out, "--tokenizer-model", model, "--workers", "0"])
    assert "'0' is not a whole number >= 1" in capsys.readouterr().err
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n\n")
    assert main(["data", "prepare", "--input", str(empty), "--output", out + "3", "--tokenizer-model", model]) == 2
    assert "the corpus contains no documents" in capsys.readouterr().err
    for text, vocab_size, message in (
        ("\n", "600", "without text"),
        ("{", "600", "line 1: not a JSON"),
        ("7", "8", "room"),
    ):
        empty.write_text(text)
        command = ["data", "train-tokenizer", "--input", str(empty), "--output", out + "3", "--vocab-size", vocab_size]
        assert main(command) == 2
        complained = capsys.readouterr().err
        assert message in complained
        assert complained.count("\n") == 1
    assert not list(tmp_path.glob("out3*"))


@pytest.mark.parametrize("size", [1, 7, 64, 100_000])
@pytest.mark.parametrize("kind", ["jsonl", "lines", "blank"])
def test_a_line_that_is_too_long_is_named_or_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, kind: str
) -> None:
    for place in ("files.data_files", "data.text.chunks"):
        monkeypatch.setattr(f"megapar.{place}.LONGEST_LINE", 40)
        monkeypatch.setattr(f"megapar.{place}._BLOCK_BYTES", 16)
    texts = ["first", "x" * 500, "third", "y" * 41, "last"]
    path = tmp_path / f"a.{'jsonl' if kind == 'jsonl' else 'txt'}"
    records = [json.dumps({"text": text}) for text in texts] if kind == "jsonl" else texts
    path.write_text(("\n\n" if kind == "blank" else "\n").join(records) + "\n")
    end = path.stat().st_size
    chunks = [TextChunk(kind, str(path), first, min(first + size, end)) for first in range(0, end, size)]
    bad = BadRecords()
    assert [one for chunk in chunks for one in chunk.documents(bad)] == ["first", "third", "last"]
    assert bad.count == 2
    line = 3 if kind == "blank" else 2
    assert f"{path}, line {line}: it has more than 40 bytes" in bad.first[0]
    straight = BadRecords()  # by whoever trains on the file as it is
    assert list(all_documents(open_sources([str(path)]), straight)) == ["first", "third", "last"]
    assert straight.first == bad.first
    with pytest.raises(DataError, match=f"line {line}: .* split it into several"):
        list(itertools.chain.from_iterable(chunk.documents(BadRecords(stops=True)) for chunk in chunks))


def test_a_dataset_that_was_saved_anew_is_read_anew(tmp_path: Path, model: str) -> None:
    datasets = pytest.importorskip("datasets")
    for animal, bad in (("fox", 8500), ("dog", -1)):
        texts = [None if number == bad else f"{animal} {number}" for number in range(9000)]
        datasets.Dataset.from_dict({"text": texts}).save_to_disk(str(tmp_path / animal))
    (tmp_path / "rows").symlink_to("fox")
    with pytest.raises(DataError, match="row 8500"):
        prepare(str(tmp_path / "out"), [], model, workers=1, dataset=str(tmp_path / "rows"))
    (tmp_path / "rows").unlink()
    (tmp_path / "rows").symlink_to("dog")
    prepare(str(tmp_path / "out"), [], model, workers=1, dataset=str(tmp_path / "rows"))
    found = IndexedDataset(str(tmp_path / "out"))
    tokenizer = load_tokenizer(model)
    assert {tokenizer.decode(found[place].tolist())[:3] for place in (0, 4000, 8999)} == {"dog"}


def test_paths_before_and_behind_the_flag_are_all_inputs(tmp_path: Path, model: str) -> None:
    for name in "abc":
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"text": name}) + "\n")
    paths, out = [str(tmp_path / f"{name}.jsonl") for name in "abc"], str(tmp_path / "out")
    line = ["data", "prepare", paths[0], "--tokenizer-model", model, "--output", out]
    assert main([*line, "--input", paths[1], "--input", paths[2], "--workers", "1"]) == 0
    assert IndexedDataset(out).documents == 3


def test_a_model_replaces_no_text_of_an_input_folder(
    tmp_path: Path, small_jsonl: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in").mkdir()
    text = small_jsonl.read_bytes()
    (tmp_path / "in" / "c.jsonl").write_bytes(text)
    line = ["data", "train-tokenizer", str(tmp_path / "in"), "--vocab-size", "200", "--overwrite"]
    assert main([*line, "--output", str(tmp_path / "in" / "c.jsonl")]) == 2
    assert "is one of the inputs" in capsys.readouterr().err
    assert (tmp_path / "in" / "c.jsonl").read_bytes() == text
