"""Evaluation tasks: how contexts and choices become rows, their scores, and the records that are refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from megapar.arguments import parse
from megapar.data import Corpus
from megapar.data.eval_tasks import EvalTask, open_tasks
from megapar.data.sampling.samples import NO_LOSS
from megapar.data.tokenizers.tokenizer import MockTokenizer
from megapar.errors import ConfigError, DataError
from megapar.files.task_file import TaskRecord, named_tasks


def written(folder: Path, *records: Any) -> str:
    path = folder / "quiz.easy.jsonl"
    path.write_text("\n".join(json.dumps(record) for record in records))
    return str(path)


def opened(corpus: Corpus, folder: Path, *records: Any, seq_length: int = 64) -> EvalTask:
    (task,) = open_tasks([written(folder, *records)], corpus.tokenizer, seq_length)
    return task


def test_a_choice_has_the_blanks_before_it_and_the_ids_of_the_whole(decoder_corpus: Corpus, tmp_path: Path) -> None:
    encode, special = decoder_corpus.tokenizer.encode, decoder_corpus.tokenizer.special
    record = {"context": "The list is \n", "choices": ["sorted", " empty"], "gold": 0}
    task = opened(decoder_corpus, tmp_path, record, {"context": " ", "completion": "sorted"})
    before = encode("The list is")
    for row, text in enumerate(("The list is \nsorted", "The list is \n empty")):
        ids, own = task.rows[row]
        assert ids.tolist() == [*before, *encode(text)[len(before) :]]
        assert own == len(ids) - len(before)
    assert task.rows[2][0].tolist() == [special.bos, *encode(" sorted")]
    assert task.name == "quiz"


def test_a_long_context_loses_its_beginning(decoder_corpus: Corpus, tmp_path: Path) -> None:
    task = opened(decoder_corpus, tmp_path, {"context": "a b c d e f g h", "completion": " i"}, seq_length=5)
    whole = decoder_corpus.tokenizer.encode("a b c d e f g h i")
    assert task.rows[0][0].tolist() == whole[-6:]
    sample = task.sample(0, 8)
    own = task.rows[0][1]
    assert sample["labels"].tolist() == [NO_LOSS] * (5 - own) + whole[-own:] + [NO_LOSS] * 3
    assert sample["valid"].tolist() == [True] * 5 + [False] * 3
    assert "valid" not in task.sample(0, 5)
    with pytest.raises(DataError, match=r"quiz.easy.jsonl, line 1: completion has \d+ ids after the context; 1 to 5"):
        opened(decoder_corpus, tmp_path, {"context": "a", "completion": " b c d e f g h i j"}, seq_length=5)


def test_the_first_of_equal_choices_counts() -> None:
    def record(gold: int | None, *choices: str) -> TaskRecord:
        return TaskRecord("", "", choices, gold)

    task = EvalTask("t", (record(0, "a", "b"), record(1, "a", "bbbb"), record(None, "c"), record(None, "d")), ())
    scores = task.scores([-1.0, -1.0, -2.0, -3.0, -1.0, -2.0], [1, 1, 1, 1, 0, 1])
    assert scores == {"acc": 0.5, "acc_norm": 1.0, "greedy": 0.5, "perplexity": pytest.approx(math.exp(1.5))}
    assert task.scores([math.nan] * 4 + [-800.0] * 2, [0] * 6)["perplexity"] == math.inf


BAD = {
    "context is of type NoneType, not a text": {"choices": ["a", "b"], "gold": 0},
    "a record has either choices and gold, or completion": {"context": "a"},
    "choices is not a list of at least two texts": {"context": "a", "choices": ["b"], "gold": 0},
    "choices[1] is empty": {"context": "a", "choices": ["b", ""], "gold": 0},
    "gold is True, not the number of a choice, 0 to 1": {"context": "a", "choices": ["b", "c"], "gold": True},
    "gold is 2, not": {"context": "a", "choices": ["b", "c"], "gold": 2},
    "completion is of type int": {"context": "a", "completion": 7},
    "context contains half a surrogate pair": {"context": "\ud800", "completion": "a"},
    "the record is of type list": ["a"],
}


@pytest.mark.parametrize("said", BAD)
def test_a_bad_record_is_refused_by_line_and_field_before_a_rank_starts(tmp_path: Path, said: str) -> None:
    path = written(tmp_path, {"context": "a", "completion": "b"}, BAD[said])
    with pytest.raises(ConfigError) as refused:
        parse("moe", ["--eval-tasks", path], {})
    assert f"--eval-tasks {path}, line 2: {said}" in str(refused.value)


def test_files_are_found_named_and_need_a_tokenizer(tmp_path: Path) -> None:
    path = written(tmp_path)
    for line, said in (([path], "contains no record"), (["none.jsonl"], "none.jsonl does not exist")):
        with pytest.raises(ConfigError, match=said):
            parse("moe", ["--eval-tasks", *line], {})
    assert named_tasks([path, f"arc={path}"]) == [("quiz", path), ("arc", path)]
    with pytest.raises(DataError, match="pass --tokenizer-model"):
        open_tasks([path], MockTokenizer(20), 8)
