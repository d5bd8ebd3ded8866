"""What a step counts: padding is not a token. The batches of an evaluation: every held-out sample counts once."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch

from megapar.arguments import parse
from megapar.core.comm.world import World
from megapar.core.device.base import Device
from megapar.trainer import train
from megapar.training.building.parallelize import parallelize
from megapar.training.step.batches import BatchFeed
from megapar.training.step.evaluate import rounds
from megapar.training.step.progress import Progress
from tests.support.training import SMALL, last_wins


def test_padding_is_no_token(tmp_path: Path) -> None:
    """Documents of a few ids, one per sample of 32 positions: tokens, their rate and MFU are of what is not padding."""
    lines = [json.dumps({"text": "a " * (3 + i % 5)}) for i in range(40)]
    (tmp_path / "short.jsonl").write_text("\n".join(lines))
    flags = (
        f"--data-path {tmp_path}/short.jsonl --no-packing --split 100,0 --eval-interval 0 --seq-length 32 "
        "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --num-experts 0 --vocab-size 64 --micro-batch-size 2 "
        "--global-batch-size 8 --train-iters 2 --lr-decay-iters 2"
    )
    outcome = train(parse("moe", flags.split(), {}), f"file://{tmp_path / 'meet'}", keep_records=True)
    first, last = outcome.records
    assert 0 < first.consumed_tokens < 8 * 32 - 8
    assert first.consumed_tokens < last.consumed_tokens < 16 * 32 - 16
    own = last.consumed_tokens - first.consumed_tokens
    assert last.tokens_per_second == pytest.approx(own / last.iteration_seconds)


@pytest.mark.parametrize(
    ("samples", "size", "ranks"), itertools.product((1, 2, 3, 7, 8, 11, 12), (1, 2, 4), (1, 2, 3, 4))
)
def test_each_sample_counts_once_and_all_ranks_run_alike(samples: int, size: int, ranks: int) -> None:
    runs = [list(rounds(samples, size, rank, ranks)) for rank in range(ranks)]
    counted = [number for run in runs for numbers, counts, _ in run if counts for number in numbers]
    assert sorted(counted) == list(range(samples))
    assert len({tuple((len(numbers), end) for numbers, _, end in run) for run in runs}) == 1
    assert all(numbers.stop <= end for run in runs for numbers, _, end in run)


def test_samples_of_the_next_step_have_their_numbers() -> None:
    config = parse("moe", last_wins(SMALL["moe"], ["--data-path", "mock", "--global-batch-size", "8"]), {})
    world = World(config.grid, 0, Device(), None, torch.distributed.default_pg_timeout)
    feed = BatchFeed(config, parallelize(config, world))
    progress = Progress(iteration=25, consumed_samples=200)
    assert feed.following(progress) == (26, "200-207")
    assert feed.following(progress, [(0, 99)]) == (26, "300-307")
    assert feed.following(progress, [(0, 99), (303, 303)]) == (26, "300-308")
