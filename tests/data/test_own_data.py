"""Data that Python code passes: trained on, recorded in checkpoints, and refused where it cannot be used."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from megapar.arguments import parse
from megapar.data.own_data import CheckedPieces, OwnData
from megapar.errors import ConfigError, DataError
from megapar.trainer import Outcome, Trainer, train
from megapar.training.loop.callbacks import TrainerCallback
from tests.support.training import COMMON, SMALL, last_wins
from tests.support.weighted import WeightedSequences

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


def run(*flags: str, data: OwnData, callbacks: Sequence[TrainerCallback] = ()) -> Outcome:
    return train(parse("moe", [*OWN, *flags], {}), keep_records=True, data=data, callbacks=callbacks)


class WeightedCounting(Counting):
    """The same with a weight of each id."""

    def __init__(self, weight: float) -> None:
        super().__init__()
        self._weight = weight

    def __getitem__(self, number: int) -> Any:
        ids = super().__getitem__(number)
        return {"tokens": ids, "weights": [self._weight] * len(ids)}


class FirstLoss(TrainerCallback):
    """The loss of the first global batch, from whole logits and the weights that the dataset gives."""

    def __init__(self, dataset: WeightedSequences, samples: int) -> None:
        self._dataset, self._samples = dataset, samples

    def begin(self, trainer: Trainer) -> None:
        """Compute it before the first step."""
        samples = [trainer.corpus.train[number] for number in range(self._samples)]
        batch = trainer.corpus.collate(samples).tensors
        with torch.no_grad():
            logits = trainer.job.model.logits(batch)
        sequences = [self._dataset[number] for number in range(len(self._dataset))]
        plain = [one if isinstance(one, dict) else {"tokens": one, "weights": np.ones(len(one))} for one in sequences]
        total = count = 0.0
        for sample, own in zip(samples, logits, strict=True):
            (drawn,) = (
                one for one in plain if np.array_equal(one["tokens"][:-1], sample["tokens"][: len(one["tokens"]) - 1])
            )
            targets, weights = (torch.from_numpy(np.asarray(drawn[name])[1:]) for name in ("tokens", "weights"))
            weights = weights.float().double()
            apart = F.cross_entropy(own[: len(targets)], targets, reduction="none")
            total, count = total + float((weights * apart).sum()), count + float(weights.sum())
        self.loss, self.weight = total / count, count


def test_the_loss_is_the_weighted_mean_of_its_predictions() -> None:
    dataset = WeightedSequences(17, 101)
    expected = FirstLoss(dataset, 8)
    outcome = run("--dtype", "fp64", data=OwnData("weighted", dataset), callbacks=[expected])
    first = outcome.records[0]
    assert first.lm_loss == pytest.approx(expected.loss, rel=1e-12)
    assert first.predicted_tokens == expected.weight
    assert not float(expected.weight).is_integer()


def test_weights_of_1_change_no_bit_and_equal_weights_no_number() -> None:
    plain = run(data=OwnData("counting", Counting())).records
    ones = run(data=OwnData("counting", WeightedCounting(1.0))).records
    halves = run("--dtype", "fp64", data=OwnData("counting", WeightedCounting(0.5))).records
    exact = run("--dtype", "fp64", data=OwnData("counting", Counting())).records
    assert [(one.loss, one.grad_norm, one.predicted_tokens) for one in plain] == [
        (one.loss, one.grad_norm, one.predicted_tokens) for one in ones
    ]
    for half, one in zip(halves, exact, strict=True):
        assert half.grad_norm == pytest.approx(one.grad_norm, rel=1e-12)
        assert (half.loss, 2 * half.predicted_tokens) == (pytest.approx(one.loss, rel=1e-12), one.predicted_tokens)


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


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([1, -0.5, 1], r"from -0.5 to 1.0; return finite numbers, at least 0"),
        ([1, float("nan"), 1], r"from nan to nan"),
        ([1, float("inf"), 1], r"from 1.0 to inf"),
        ([1, 1e300, 1], r"from 1.0 to 1e\+300"),  # beyond fp32
        ([1, 1], r"int64 of shape \[2\]; return 3 numbers"),
        ([[1, 1, 1]], r"int64 of shape \[1, 3\]"),
        (["a", "b", "c"], r"<U1 of shape \[3\]"),
    ],
)
def test_weights_that_cannot_be_used_are_named(weights: Any, message: str) -> None:
    with pytest.raises(DataError, match=f"mine: the weights of sequence 0 are .*{message}"):
        CheckedPieces([{"tokens": [1, 2, 3], "weights": weights}], "mine", 8, 101)[0]


def test_a_sequence_with_other_keys_is_refused() -> None:
    with pytest.raises(DataError, match=r"sequence 0 has the keys \['labels', 'tokens'\]; return tokens and weights"):
        CheckedPieces([{"tokens": [1, 2], "labels": [1, 2]}], "mine", 8, 101)[0]


def test_arrays_and_tensors_are_taken_as_they_are() -> None:
    pieces = CheckedPieces([np.arange(5, dtype=np.uint16), torch.arange(5)], "mine", 8, 101)
    assert [pieces[number].tolist() for number in (0, 1)] == 2 * [[0, 1, 2, 3, 4]]
    assert pieces[0].dtype == np.int64
    with pytest.raises(DataError, match="mine has no sequences"):
        CheckedPieces([], "mine", 8, 101)
