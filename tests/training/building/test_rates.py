"""Rates of parameters: those of the word embedding and the head, and a weight decay of each step, by hand."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch

from megapar.arguments import parse
from megapar.core.comm.world import World
from megapar.core.device.base import Device
from megapar.core.optimizer.update_rule import StepRates
from megapar.training.building.parallelize import parallelize
from tests.support.training import COMMON, SMALL, last_wins, run

FP64 = ("--dtype", "fp64")
UNTIED = ("--untie-embeddings-and-output-weights",)
LR, APART, DECAY = 0.02, 0.005, 0.3


def moved(*flags: str, rates: StepRates | None = None) -> dict[str, tuple[float, float]]:
    """Take a step of one process with gradients of 1 and masters of 1; the new masters' value, by parameter.

    AdamW without epsilon then moves each by its learning rate, and decays it by rate x weight decay.
    """
    config = parse("moe", last_wins((*SMALL["moe"], *COMMON), (*FP64, *flags)), {})
    job = parallelize(config, World.start(config.grid, Device(), timedelta(seconds=60), None))
    for shard in job.sharding.master_shards:
        shard.master.fill_(1.0)
        shard.grad = torch.ones_like(shard.master)
    job.optimizer.step(LR, rates=rates or StepRates())
    views = job.sharding.views([shard.master for shard in job.sharding.master_shards])
    found = {view.spec.name: view.tensor.unique().tolist() for view in views}
    assert all(max(values) - min(values) < 1e-12 for values in found.values())
    return {name: values[0] for name, values in found.items()}


def after(lr: float, decay: float) -> float:
    return (1 - lr * decay) - lr


@pytest.mark.parametrize("flags", [(), ("--sharding-stage", "1"), ("--optimizer-offload",)])
def test_the_word_embedding_and_the_head_have_rates_of_their_own(flags: tuple[str, ...]) -> None:
    rates = StepRates(APART, DECAY)
    found = moved("--decoupled-lr", "0.005", "--adam-eps", "1e-300", *UNTIED, *flags, rates=rates)
    for name in ("embedding.word.weight", "lm_head.weight"):
        assert found.pop(name) == pytest.approx(after(APART, DECAY), rel=1e-12)
    assert found.pop("final_norm.weight") == pytest.approx(after(LR, 0.0), rel=1e-12)
    assert found.pop("layers.1.moe.router.weight") == pytest.approx(after(LR, DECAY), rel=1e-12)
    assert found.pop("layers.0.attention.proj.weight") == pytest.approx(after(LR, DECAY), rel=1e-12)


def test_no_rate_is_apart_without_the_flag() -> None:
    found = moved("--adam-eps", "1e-300", rates=StepRates(APART))
    assert found["embedding.word.weight"] == pytest.approx(after(LR, 0.1), rel=1e-12)


def test_a_run_logs_its_rates_and_goes_on_with_them(tmp_path) -> None:  # type: ignore[no-untyped-def]
    flags = (
        *("--decoupled-lr", "0.004", "--decoupled-min-lr", "0.001", "--weight-decay-incr-style", "linear"),
        *("--start-weight-decay", "0.1", "--end-weight-decay", "0.4", *FP64, *UNTIED),
    )
    whole = run(1, "moe", *flags, "--save", str(tmp_path), "--save-interval", "3")
    assert [record.weight_decay for record in whole.records] == pytest.approx([0.1 + 0.05 * n for n in range(6)])
    assert whole.records[0].decoupled_lr == pytest.approx(0.4 * whole.records[0].lr)
    rest = run(1, "moe", *flags, "--load", str(tmp_path), "--ckpt-step", "3")
    assert [record.loss for record in rest.records] == [record.loss for record in whole.records[3:]]
