"""One split by the text through every door, and the order of before for what has no text and for text itself."""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megapar.data import Corpus, build
from megapar.data.text.source import JSONL_FILE, FileSource
from megapar.data.tokens.indexed import IndexedDataset
from megapar.data.tokens.prepare import prepare
from megapar.data.tokens.prepared import HEADER, hashes_of, read_hashes
from megapar.data.tokens.split import Split, place_of
from megapar.data.tokens.store import SelectedTokens
from megapar.errors import DataError
from megapar.tools.main import main
from tests.support.token_files import write_tokens


@pytest.fixture
def prefix(tmp_path: Path, small_jsonl: Path, model: str) -> str:
    prepare(str(tmp_path / "tokens"), [str(small_jsonl)], model, workers=1)
    return str(tmp_path / "tokens")


def _corpus(kind: str, path: str, model: str, **more: Any) -> Corpus:
    return build(kind, data_path=[path], tokenizer_model=model, vocab_size=600, **{"seq_length": 32, "seed": 3, **more})


def _digest(samples: Any, numbers: range) -> str:
    state = hashlib.sha256()
    for number in numbers:
        for name, array in sorted(samples[number].items()):
            state.update(name.encode() + np.ascontiguousarray(array, dtype=np.int64).tobytes())
    return state.hexdigest()[:16]


@pytest.mark.parametrize("kind", ["moe", "ernie"])
@pytest.mark.parametrize("split", ["95,5", "60,30,10", "100,0"])
def test_prepared_files_are_split_as_their_text(
    kind: str, split: str, prefix: str, small_jsonl: Path, model: str
) -> None:
    text = _corpus(kind, str(small_jsonl), model, split=split)
    tokens = _corpus(kind, prefix, model, split=split)
    assert len(text.train) == len(tokens.train)
    assert _digest(text.train, range(2 * len(text.train))) == _digest(tokens.train, range(2 * len(text.train)))
    assert (text.heldout is None) == (tokens.heldout is None) == split.endswith(",0")
    if text.heldout is not None and tokens.heldout is not None:
        every = range(len(text.heldout))
        assert _digest(text.heldout, every) == _digest(tokens.heldout, every)
    assert [one.documents for one in text.contents] == [one.documents for one in tokens.contents]
    assert not any("split by their numbers" in note for note in tokens.notes)


def test_foreign_files_are_cut_by_position_and_it_is_told(prefix: str, model: str) -> None:
    by_text = _corpus("moe", prefix, model)
    Path(f"{prefix}.hashes").unlink()
    foreign = _corpus("moe", prefix, model)
    (note,) = (note for note in foreign.notes if "split by their numbers" in note)
    assert "tokens.hashes" in note
    dataset = IndexedDataset(prefix)
    assert foreign.contents[0].documents == round(0.95 * dataset.documents)
    assert _digest(foreign.train, range(9)) != _digest(by_text.train, range(9))
    assert not _corpus("moe", prefix, model, split="100,0").notes  # nothing is cut


def test_hashes_of_other_files_and_damaged_ones_are_refused(
    prefix: str, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = Path(f"{prefix}.hashes")
    content = path.read_bytes()
    documents = IndexedDataset(prefix).documents
    assert len(content) == HEADER.size + 8 * documents
    for spoiled, said in (
        (content[:-8], "bytes, but"),
        (content[:30], "is not a file of hashes"),
        (content[:30] + b"\1" + content[31:], "belongs to another index"),
        (content[:8] + b"\7" + content[9:], "version 7"),
    ):
        path.write_bytes(spoiled)
        with pytest.raises(DataError, match=said):
            _corpus("moe", prefix, model)
        assert main(["data", "check", prefix]) == 2
        assert said in capsys.readouterr().err
    path.write_bytes(content)
    assert main(["data", "check", prefix]) == 0
    write_tokens(prefix, [[1, 2, 3]])  # as another program writes the same names
    assert read_hashes(prefix, 1) is None


def test_hashes_are_the_places_of_texts() -> None:
    draw = random.Random(1)
    texts = [str(draw.random()) for _ in range(2000)]
    places = hashes_of(texts).astype(np.float64) / 2.0**64
    assert places.tolist() == [place_of(text) for text in texts]
    for split in ("95,5", "969,30,1", "100,0", "90,0,10", "50,50"):
        halves = Split.parse(split)
        sides = [halves.side(text) for text in texts]
        assert halves.sides(places).tolist() == [-1 if side is None else side for side in sides]


def test_selected_tokens_are_read_like_an_array() -> None:
    draw = random.Random(2)
    lengths = [draw.randrange(0, 6) for _ in range(80)]
    edges = np.cumsum([0, *lengths])
    tokens = np.arange(edges[-1])
    chosen = [number for number in range(80) if draw.random() < 0.7]
    want = np.concatenate([tokens[edges[n] : edges[n + 1]] for n in chosen])
    offsets = np.cumsum([0, *(lengths[n] for n in chosen)])
    found = SelectedTokens(tokens, edges[chosen], offsets)
    assert len(found) == len(want)
    for _ in range(500):
        first, last = sorted(draw.randrange(-3, len(want) + 9) for _ in range(2))
        assert found[first:last].tolist() == want[first:last].tolist()
    assert found[5:5].tolist() == []


def test_the_order_of_before_is_kept(tmp_path: Path, model: str) -> None:
    """Digests of samples, sides and content hashes as they were before sources had fingerprints."""
    names = []
    for number, name in enumerate("ab"):
        rng = np.random.default_rng(number)
        documents = ([*rng.integers(10, 90, size=int(rng.integers(1, 60))), 3] for _ in range(50))
        names.append(write_tokens(tmp_path / name, documents))
    common: dict[str, Any] = {"vocab_size": 100, "seq_length": 16, "seed": 5}
    assert _digest(build("moe", data_path=names, **common).train, range(200)) == "24cda45c4127a491"
    weighted = build("moe", data_path=["3", names[0], "1", names[1]], **common)
    assert _digest(weighted.train, range(200)) == "4592b07fa7349db3"
    text = tmp_path / "t.jsonl"
    texts = [f"document {n} of a text" for n in range(40)]
    text.write_text("".join(json.dumps({"text": one}) + "\n" for one in texts))
    assert FileSource(text, JSONL_FILE).content_hash() == "f169b465ee1921139a175f722142517a"
    sides = [Split.parse("70,20,10").side(one) for one in texts]
    assert "".join("-" if side is None else str(side) for side in sides) == "001-100001001000-001000111001000000-0010"
