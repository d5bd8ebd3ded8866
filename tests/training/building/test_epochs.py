"""The steps of a run of N epochs, and what follows from them."""

from __future__ import annotations

from typing import Any, cast

import pytest

from megapar.arguments import Config, parse
from megapar.data.corpus import Corpus
from megapar.errors import ConfigError
from megapar.training.building.epochs import with_epochs


class OfSamples:
    """A corpus of so many samples."""

    def __init__(self, samples: int) -> None:
        self.train = range(samples)


def config(*flags: str, samples: int = 10) -> Config:
    line = ("--rules-only", "--task", "sft", "--tokenizer-model", "t", "--data-path", "c.jsonl", "--vocab-size", "99")
    batch = ("--micro-batch-size", "2", "--global-batch-size", "4")
    return with_epochs(parse("moe", (*line, *batch, *flags)), cast(Corpus, cast(Any, OfSamples(samples))))


def test_whole_global_batches_of_all_epochs_are_the_steps() -> None:
    made = config("--train-epochs", "3")
    assert made.training.train_iters == 7  # of 30 samples, two are not read
    assert (made.optimizer.lr_decay_iters, made.optimizer.lr_wsd_decay_iters) == (7, 1)
    assert config("--train-epochs", "3", "--lr-decay-iters", "50").optimizer.lr_decay_iters == 50


def test_without_epochs_nothing_changes() -> None:
    assert config("--train-iters", "5").training.train_iters == 5


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--train-epochs", "1"), "do not fill a global batch of 4"),
        (("--train-epochs", "2", "--lr-warmup-iters", "1"), "warmup"),
    ],
)
def test_too_few_steps_are_refused(flags: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(*flags, samples=3)
