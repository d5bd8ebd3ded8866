"""ERNIE's samples straight from a ``datasets`` source."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megapar.arguments import parse
from megapar.core.comm.world import World
from megapar.core.device.base import Device
from megapar.data.corpus import build
from megapar.data.sampling.ernie import Spans
from megapar.data.sampling.samples import order_of
from megapar.data.sampling.streaming import RowSpans, StreamedRows
from megapar.data.tasks.build import TaskData
from megapar.data.text.hf_dataset import open_dataset
from megapar.data.tokenizers.tokenizer import MockTokenizer
from megapar.errors import DataError
from megapar.trainer import Trainer
from megapar.training.building.corpus import make_corpus

datasets = pytest.importorskip("datasets")
SIZES: dict[str, Any] = {"vocab_size": 200, "seq_length": 24, "seed": 7}


def texts(count: int = 300) -> list[str]:
    """Documents of 2 to 60 of the mock tokenizer's words."""
    rng = random.Random(3)
    return [" ".join(f"t{rng.randrange(7, 200)}" for _ in range(rng.randrange(2, 60))) for _ in range(count)]


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A dataset on disk, of which 64 rows are a block; its words are the mock tokenizer's."""
    monkeypatch.setattr("megapar.data.sampling.streaming.ROWS", 64)
    monkeypatch.setattr("megapar.data.corpus.load_tokenizer", lambda _: MockTokenizer(200))
    datasets.Dataset.from_dict({"text": texts()}).save_to_disk(str(tmp_path / "rows"))
    return str(tmp_path / "rows")


def test_rows_are_cut_as_a_store_s_documents_are() -> None:
    """One block gives the spans of the same documents in a file, with the same documents behind them."""
    tokenizer, documents = MockTokenizer(200), texts(40)
    ids = [tokenizer.encode(text) for text in documents]
    offsets = np.cumsum([0, *(len(one) + 1 for one in ids)])
    tokens = np.array([one for document in ids for one in (*document, 3)])
    wanted = Spans(SimpleNamespace(offsets=offsets, tokens=tokens), 21)  # type: ignore[arg-type]
    found = RowSpans(
        StreamedRows(datasets.Dataset.from_dict({"text": documents}), 0, 40, tokenizer, "rows", "text"), 21
    )
    assert len(found) == len(wanted)
    assert [found[i].tolist() for i in range(len(found))] == [wanted[i].tolist() for i in range(len(wanted))]
    assert [found.document(i) for i in range(len(found))] == [wanted.document(i) for i in range(len(wanted))]


def test_samples_are_functions_of_seed_and_number(rows: str) -> None:
    wanted = {**SIZES, "hf_dataset": rows, "tokenizer_model": "mock"}
    one, two = build("ernie", **wanted), build("ernie", **wanted)
    numbers = [0, 5, 400, 1, 2, 9_999]
    backwards = {i: two.train[i]["tokens"].tolist() for i in reversed(numbers)}
    assert {i: one.train[i]["tokens"].tolist() for i in numbers} == backwards
    other = build("ernie", **{**wanted, "seed": 8})
    assert [other.train[i]["tokens"].tolist() for i in numbers] != [backwards[i] for i in numbers]
    last = set(" ".join(texts()[285:]).split())
    shown = {f"t{i}" for number in range(len(one.heldout)) for i in one.heldout[number]["labels"] if i >= 7}
    assert shown <= last  # rows behind those that are trained on
    assert build("ernie", **{**wanted, "split": "100,0"}).heldout is None


def test_heldout_blocks_and_their_windows_are_in_one_random_order() -> None:
    dataset = datasets.Dataset.from_dict({"text": texts(256)})
    pieces = RowSpans(StreamedRows(dataset, 0, 256, MockTokenizer(200), "rows", "text"), 21)
    pieces.blocks, pieces.per_block = 4, 10
    order = order_of(pieces, None, "spans")
    drawn = [order[number] for number in range(80)]
    assert sorted(drawn[:40]) == list(range(40)) != drawn[:40]
    assert len({place // 10 for place in drawn[:10]}) == 1  # one block after the other is tokenised
    assert drawn[40:] == drawn[:40]


def test_a_block_that_is_shorter_begins_again_as_other_documents() -> None:
    tokenizer = MockTokenizer(200)
    short = [" ".join(["t9"] * 4)] * 30 + [" ".join(["t8"] * 16)] * 2
    dataset = datasets.Dataset.from_dict({"text": short})
    found = RowSpans(StreamedRows(dataset, 0, 32, tokenizer, "rows", "text"), 8)
    found.per_block = 6  # of the 4 that there are
    assert [found.document(i) for i in range(6)] == [30, 30, 31, 31, 62, 62]
    assert found[4].tolist() == found[0].tolist()
    with pytest.raises(DataError, match="no row has the 8 tokens"):
        RowSpans(StreamedRows(dataset, 0, 30, tokenizer, "rows", "text"), 8)


def test_other_documents_are_looked_for_where_rows_are_tokenised_already(rows: str) -> None:
    tasks = TaskData("sentence_distance:1.0")
    corpus = build("ernie", **SIZES, hf_dataset=rows, tokenizer_model="mock", tasks=tasks)
    labels = [int(corpus.train[number]["label"]) for number in range(60)]
    assert set(labels) == {0, 1, 2}
    pieces = corpus.train._tasks[0].pieces  # type: ignore[attr-defined]
    assert isinstance(pieces, RowSpans)
    assert pieces.blocks > 3
    assert pieces._block.cache_info().misses <= 2  # and the first and last block, which tell whether there are others


def test_a_run_trains_on_it(rows: str) -> None:
    line = (
        f"--data-source hf --hf-dataset {rows} --num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 24"
    )
    more = "--vocab-size 512 --train-iters 2 --global-batch-size 4 --micro-batch-size 2 --eval-interval 0 --dtype fp64"
    config = parse("ernie", f"{line} {more}".split(), {})
    trainer = Trainer(config, World.pretend(config.grid, Device(), 0), make_corpus(config))
    trainer.start()
    trainer.monitor.add(trainer.step())
    (record,) = trainer.monitor.flush()
    trainer.loader.close()
    assert np.isfinite(record.loss)


def test_nothing_is_asked_of_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name is looked up in the cache alone, by libraries that are offline for as long as it takes."""
    from huggingface_hub import constants

    asked: list[tuple[bool, bool]] = []

    def load(name: str, *, download_config: Any) -> Any:
        asked.append((constants.HF_HUB_OFFLINE, download_config.local_files_only))
        return datasets.Dataset.from_dict({"text": ["a"]})

    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    assert len(open_dataset("somebody/something")) == 1
    assert asked == [(True, True)]
    assert constants.HF_HUB_OFFLINE is False
