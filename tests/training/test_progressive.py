"""Progressive learning: what grows, that samples are cropped and not drawn anew, and that runs resume exactly."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from megapar.arguments import parse
from megapar.data.batches import Loader, collate_ernie
from megapar.training.building.corpus import make_corpus
from megapar.training.step.schedules import Progressive
from tests.support.training import run

SCHEDULE = Progressive(iters=4, length=64, length_step=16, batch=12, batch_step=3)


def test_everything_grows_to_its_final_value_in_whole_steps() -> None:
    steps = range(6)
    assert [SCHEDULE.length_at(i) for i in steps] == [16, 32, 48, 64, 64, 64]
    assert [SCHEDULE.batch_at(i) for i in steps] == [3, 6, 9, 12, 12, 12]
    assert [SCHEDULE.share(i) for i in steps] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    uneven = Progressive(iters=7, length=64, length_step=16, batch=12, batch_step=3)
    assert [uneven.length_at(i) for i in range(7)] == [16, 16, 16, 32, 32, 48, 64]
    assert [uneven.batch_at(i) for i in range(7)] == [3, 3, 3, 6, 6, 9, 12]


GROWING = (
    *("--ernie-model", "ernie3", "--task-type-vocab-size", "5", "--task-num-layers", "1", "--task-hidden-size", "8"),
    *("--task-num-attention-heads", "2", "--hidden-dropout", "0.2", "--attention-dropout", "0.2", "--dtype", "fp64"),
    *("--global-batch-size", "4", "--progressive-iters", "4", "--progressive-length-multiple", "8", "--lr", "1e-3"),
    *("--lr-decay-style", "constant"),
)


def test_samples_are_cropped_and_counted_as_cropped() -> None:
    corpus = make_corpus(parse("ernie", ["--data-path", "mock", "--seq-length", "32", "--vocab-size", "67"], {}))
    loader = Loader(corpus.train, collate_ernie, 2, prefetch=False)
    whole, short = loader.step(0, 1)[0], loader.step(0, 1, 8)[0]
    assert np.array_equal(short.tensors["tokens"], whole.tensors["tokens"][:, :8])
    asked = whole.tensors["masked_index"]
    assert short.counts["lm"] == int((asked % 32 < 8).sum())
    assert short.tokens == 16


def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path) -> None:
    straight = run(1, "ernie", *GROWING, "--save", str(tmp_path), "--save-interval", "2")
    rest = run(1, "ernie", *GROWING, "--load", str(tmp_path), "--ckpt-step", "2")
    assert [record.lr for record in straight.records] == [2.5e-4, 5e-4, 7.5e-4, 1e-3, 1e-3, 1e-3]
    assert [record.consumed_samples for record in straight.records] == [1, 3, 6, 10, 14, 18]
    positions = [8, 40, 112, 240, 368, 496]
    consumed = [record.consumed_tokens for record in straight.records]  # of these, what is not padding
    assert consumed == [8, 40, 108, 199, 282, 366]
    assert all(tokens <= most for tokens, most in zip(consumed, positions, strict=True))
    assert [record.loss for record in rest.records] == [record.loss for record in straight.records[2:]]
    assert [record.grad_norm for record in rest.records] == [record.grad_norm for record in straight.records[2:]]
