"""fp16: overflow on one rank skips the step on all, the scale is saved, and small gradients survive large batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from megapar.checkpoints.export.export import collect_all
from megapar.core.optimizer.loss_scale import LossScale
from megapar.trainer import Trainer
from megapar.training.reports.record import Record
from megapar.training.step.batches import Denominators
from megapar.training.step.objective import Objective
from tests.support.ranks import RanksFailed, run_ranks
from tests.support.training import COMMON, SMALL, make_trainer, run

FP64 = ("--dtype", "fp64")
SCALE = LossScale(value=1024.0, minimum=1.0, factor=2.0, window=1000, hysteresis=1)


@dataclass(frozen=True)
class Bad:
    """Infinite gradients on one rank in one step (counted from 1; 0: in every step), of one parameter or of all."""

    step: int
    rank: int
    parameter: str | None = None


def train(
    rank: int, world_size: int, rendezvous: str, kind: str, flags: Sequence[str], scale: LossScale, bad: Bad
) -> tuple[list[Record], dict[str, Tensor]]:
    """Four steps with this loss scale whatever the dtype; the records and, on rank 0, the masters after them."""
    with patch("megapar.trainer.make_loss_scale", lambda *_: scale):
        trainer = make_trainer(kind, [*SMALL[kind], *COMMON, "--lr-decay-iters", "9", *flags], rendezvous)
    spoil(trainer, rank, bad)
    for _ in range(4):
        trainer.monitor.add(trainer.step())
    records = trainer.monitor.flush()
    trainer.loader.close()
    trainer.watch.close()
    trainer.job.sharding.wait()
    shards = trainer.job.sharding.master_shards
    masters = {
        n: t.clone()
        for n, t in collect_all(
            trainer.world, trainer.job.table, trainer.job.sharding, [shard.master for shard in shards]
        )
    }
    trainer.world.close()
    return records, masters


def spoil(trainer: Trainer, rank: int, bad: Bad) -> None:
    def infinite(value: Tensor) -> Tensor:
        wanted = bad.step in (0, trainer.progress.iteration + 1) and rank == bad.rank
        return value * float("inf") if wanted else value

    if bad.parameter is not None:
        dict(trainer.job.model.named_parameters())[bad.parameter].register_hook(infinite)
        return

    class Spoiled(Objective):
        def of(self, *args: Any) -> Tensor:
            return infinite(super().of(*args))

    trainer.stepper.gradients._objective = Spoiled(*astuple(trainer.objective))


LAYOUTS = {
    "stage 1": (2, ("--sharding-degree", "2")),
    "stage 2, dp 2": (4, ("--sharding-degree", "2", "--hybrid-dp", "--sharding-stage", "2")),
    "stage 3": (2, ("--sharding-degree", "2", "--sharding-stage", "3")),
    "mp 2, sp": (2, ("--mp-degree", "2", "--sequence-parallel")),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_overflow_on_one_rank_skips_the_step_on_all(layout: str) -> None:
    """Run in fp64, so that the steps around it can be compared exactly with one process."""
    world_size, flags = LAYOUTS[layout]
    bad = Bad(step=2, rank=world_size - 1)
    results = run_ranks(world_size, train, "moe", (*FP64, *flags), replace(SCALE), bad, group=False)
    (want, masters), *_ = run_ranks(1, train, "moe", FP64, replace(SCALE), replace(bad, rank=0), group=False)
    for records, _ in results:
        assert [r.skipped for r in records] == [False, True, False, False]
        assert [r.loss_scale for r in records] == [1024, 1024, 512, 512]
        assert records[1].lr == records[2].lr != records[3].lr
        assert [r.loss for r in records] == pytest.approx([r.loss for r in want], rel=1e-10)
        norms = [r.grad_norm for r in records if not r.skipped]
        assert norms == pytest.approx([r.grad_norm for r in want if not r.skipped], rel=1e-10)
    for name, value in results[0][1].items():
        assert torch.allclose(value, masters[name], rtol=1e-9, atol=1e-12), name


def test_overflow_at_the_least_scale_stops_and_names_the_first_bad_parameter() -> None:
    scale = replace(SCALE, value=2.0)
    flags = (*FP64, "--sharding-degree", "2")
    bad = Bad(step=0, rank=1, parameter="layers.0.attention_norm.weight")
    with pytest.raises(
        RanksFailed, match=r"at the minimum loss scale, 1; .* that of layers\.0\.attention_norm\.weight"
    ):
        run_ranks(2, train, "moe", flags, scale, bad, group=False)


def first_gradients(rank: int, world_size: int, dtype: str, tokens: int) -> tuple[dict[str, Tensor], int]:
    """Of one step that believes to be a part of a batch of so many tokens; how many gradients are zero altogether."""
    flags = ("--dtype", dtype, "--init-std", "0.02")
    if dtype == "fp16":
        flags = (*flags, "--initial-loss-scale", "1")
    trainer = make_trainer("ernie", [*SMALL["ernie"][:-2], *COMMON, *flags])
    counts = {"items": {"lm": tokens, "sop": tokens}, "tokens": tokens}
    with patch.multiple(Denominators, **counts):
        trainer.step()
    trainer.loader.close()
    grads = [shard.grad for shard in trainer.job.sharding.master_shards if shard.grad is not None]
    found = {view.spec.name: view.tensor.clone() for view in trainer.job.sharding.views(grads)}
    return found, sum(not value.any() for value in found.values())


def test_small_gradients_of_a_large_batch_do_not_underflow() -> None:
    """At 6e7 tokens a gradient per token is far below the least fp16 number; the loss scale itself is 1 here."""
    tokens = 60_000_000
    (half, zeros), *_ = run_ranks(1, first_gradients, "fp16", tokens)
    (exact, zeros_in_fp32), *_ = run_ranks(1, first_gradients, "fp32", tokens)
    assert zeros == zeros_in_fp32
    smallest = min(float(value.abs().max()) for name, value in exact.items() if value.any() and "key" not in name)
    assert smallest < torch.finfo(torch.float16).smallest_normal / 1000
    for name, value in exact.items():
        if float(value.abs().max()) > 1e-3 * max(float(v.abs().max()) for v in exact.values()):
            error = torch.linalg.vector_norm(half[name] - value) / torch.linalg.vector_norm(value)
            assert error < 0.05, name


@pytest.mark.parametrize("flags", [(), ("--sharding-stage", "3")])
def test_the_scale_is_saved_and_restored(flags: tuple[str, ...], tmp_path: Path) -> None:
    fp16 = ("--dtype", "fp16", "--loss-scale-window", "2", "--sharding-degree", "2", *flags)
    whole = run(2, "moe", *fp16, "--initial-loss-scale", "4")
    run(2, "moe", *fp16, "--initial-loss-scale", "4", "--save", str(tmp_path), "--save-interval", "3")
    rest = run(2, "moe", *fp16, "--initial-loss-scale", "64", "--load", str(tmp_path), "--ckpt-step", "3")
    assert [r.loss_scale for r in whole.records] == [4, 4, 8, 8, 16, 16]
    assert [r.loss_scale for r in rest.records] == [8, 16, 16]
    assert [r.loss for r in rest.records] == [r.loss for r in whole.records[3:]]
    assert whole.records[-1].loss < whole.records[0].loss


def test_skipped_steps_are_left_out_of_the_schedule_after_a_resume(tmp_path: Path) -> None:
    fp16 = ("--dtype", "fp16", "--hysteresis", "1", "--initial-loss-scale", str(2**40), "--lr-warmup-iters", "5")
    whole = run(1, "moe", *fp16)
    run(1, "moe", *fp16, "--save", str(tmp_path), "--save-interval", "3")
    rest = run(1, "moe", *fp16, "--load", str(tmp_path), "--ckpt-step", "3")
    assert whole.records[2].skipped
    assert [r.lr for r in rest.records] == [r.lr for r in whole.records[3:]]
