"""Data that Python code passes: trained on, recorded in checkpoints, and refused where it cannot be used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megapar.arguments import parse
from megapar.data.own_data import CheckedPieces, OwnData
from megapar.errors import ConfigError, DataError
from megapar.trainer import Outcome, train
from tests.support.training import COMMON, SMALL, last_wins

FLAGS = last_wins((*SMALL["moe"], *COMMON), ("--train-iters", "2"))
OWN = [word for word in FLAGS if word not in ("--data-path", "mock")]


class Counting:
    """Sequences that count upwards, of 8 to 17 ids. reads: the numbers that were asked for."""

    def __init__(self, first: int = 0) -> None:
        self.reads: list[int] = []
        self._first = first

    def __len__(self) -> int:
        return 50

    def __getitem__(self, number: int) -> list[int]:
        self.reads.append(number)
        return [(self._first + number + i) % 101 for i in range(8 + number % 10)]


def run(*flags: str, data: OwnData) -> Outcome:
    return train(parse("moe", [*OWN, *flags], {}), keep_records=True, data=data)


def test_a_run_reads_all_of_it_once_an_epoch_and_learns(tmp_path: Path) -> None:
    train_set, heldout = Counting(), Counting(3)
    outcome = run("--eval-interval", "2", "--eval-iters", "1", data=OwnData("counting", train_set, heldout))
    assert outcome.records[1].loss < outcome.records[0].loss
    assert len(set(train_set.reads[:16])) == 16
    assert len(set(heldout.reads)) == len(heldout.reads) == 8
    assert max(heldout.reads) > 25  # of 50: a random choice, not the first ones
    assert outcome.evaluation is not None


def test_a_run_resumes_only_with_data_of_the_same_name(tmp_path: Path) -> None:
    flags = ("--save", str(tmp_path), "--load", str(tmp_path), "--lr-decay-iters", "4")
    whole = run("--train-iters", "4", "--lr-decay-iters", "4", data=OwnData("counting", Counting()))
    run(*flags, data=OwnData("counting", Counting()))
    with pytest.raises(ConfigError, match="python:counting is read there only, python:other is read here only"):
        run(*flags, "--train-iters", "4", data=OwnData("other", Counting()))
    rest = run(*flags, "--train-iters", "4", data=OwnData("counting", Counting()))
    assert [record.loss for record in rest.records] == [record.loss for record in whole.records[2:]]


@pytest.mark.parametrize(
    ("kind", "flags", "rule"),
    [
        ("moe", FLAGS, "own-data-twice"),
        ("moe", [*OWN, "--eval-interval", "1"], "own-data-heldout"),
        ("ernie", ["--eval-interval", "0"], "own-data-kind"),
    ],
)
def test_other_data_and_other_models_are_refused(kind: str, flags: list[str], rule: str) -> None:
    with pytest.raises(ConfigError) as refused:
        train(parse(kind, flags, {}), data=OwnData("counting", Counting()))
    assert [complaint.rule for complaint in refused.value.complaints] == [rule]


@pytest.mark.parametrize(
    ("sequence", "message"),
    [
        (range(10), r"2 to 9 integers"),
        ([1], r"int64 of shape \[1\]"),
        ([[1, 2]], r"int64 of shape \[1, 2\]"),
        ([0.5, 1.5], r"float64 of shape \[2\]"),
        ([5, 101], r"ids from 5 to 101, outside of the 101 rows"),
        ([-1, 4], r"ids from -1 to 4"),
    ],
)
def test_a_sequence_that_cannot_be_used_is_named(sequence: Any, message: str) -> None:
    with pytest.raises(DataError, match=f"mine: sequence 0 .*{message}"):
        CheckedPieces([list(sequence)], "mine", 8, 101)[0]


def test_arrays_and_tensors_are_taken_as_they_are() -> None:
    import torch

    pieces = CheckedPieces([np.arange(5, dtype=np.uint16), torch.arange(5)], "mine", 8, 101)
    assert [pieces[number].tolist() for number in (0, 1)] == 2 * [[0, 1, 2, 3, 4]]
    assert pieces[0].dtype == np.int64
    with pytest.raises(DataError, match="mine has no sequences"):
        CheckedPieces([], "mine", 8, 101)
