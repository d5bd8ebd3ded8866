"""The configurations of PaddlePaddle's pull request on sharding: its four layouts, and the size it was made for."""

from __future__ import annotations

from pathlib import Path

import pytest

from megapar.arguments import Config, parse
from megapar.planning.devices import device_kind
from megapar.planning.plan import Plan

FOLDER = Path(__file__).parents[1] / "configs"
V100 = device_kind("v100-32g")


def load(name: str, ranks: int, *more: str) -> Config:
    line = ["--config", str(FOLDER / f"{name}.yaml"), "--validate-only", "--world-size", str(ranks), *more]
    return parse("ernie", line, {}, planning=True)


@pytest.mark.parametrize(
    ("name", "sizes", "steps"),
    [
        ("sharding-32", (1, 32, 1), 1),
        ("sharding-8-dp-4", (4, 8, 1), 4),
        ("mp-8-sharding-4", (1, 4, 8), 1),
        ("mp-2-sharding-4-dp-4", (4, 4, 2), 1),
    ],
)
def test_the_four_layouts_shard_parameters(name: str, sizes: tuple[int, int, int], steps: int) -> None:
    config = load(name, 32)
    assert (config.grid.dp, config.grid.sharding, config.grid.mp) == sizes
    assert config.sharding.gradient_merge_acc_step == steps
    assert config.sharding.sharding_stage == 3
    assert config.sharding.sharding_segment_strategy == "segment_broadcast_MB"
    assert config.sharding.segment_broadcast_mb == 32


def test_a_model_that_fits_no_rank_is_cut_by_the_first_layout() -> None:
    """98 B parameters over 32 ranks: what a rank keeps of them is what stage 3 says."""
    large = ("--num-layers", "64", "--hidden-size", "11264", "--num-attention-heads", "88")
    large = (*large, "--recompute-interval", "1", "--micro-batch-size", "1")
    whole, cut = (Plan(load("sharding-32", 32, *large, "--sharding-stage", stage), V100).fullest for stage in "13")
    assert whole.parameters == pytest.approx(98.2e9 * 2, rel=0.02)  # in fp16, as a V100 has it
    assert cut.parameters == pytest.approx(98.2e9 * 4 / 32, rel=0.02)  # masters are the parameters
    assert cut.peak < whole.peak / 8


def test_the_100_b_model_fits_its_64_gpus_and_not_the_32_of_the_examples() -> None:
    config = load("ernie-100b", 64)
    plan = Plan(config, V100)
    assert sum(row.numel for row in plan.run.table) == pytest.approx(98.2e9, rel=0.01)
    assert config.training.dtype == "fp16"
    assert (config.grid.mp, config.grid.sharding, config.sharding.sharding_stage) == (8, 8, 3)
    assert plan.fits, plan.advice()
    few = Plan(load("ernie-100b", 32, "--sharding-degree", "4"), V100)
    assert not few.fits
    assert "64 ranks" in few.advice()
