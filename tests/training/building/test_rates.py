"""Rates of parameters by hand: those of the word embedding and the head, a weight decay of each step, and muP."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch

from megapar.arguments import parse
from megapar.core.comm.world import World
from megapar.core.device.base import Device
from megapar.core.optimizer.update_rule import StepRates
from megapar.model.spec import table_of
from megapar.training.building.parallelize import parallelize
from megapar.training.building.rates import width_lines, with_rates
from megapar.training.step.schedules import another_schedule, schedule_of
from tests.support.training import COMMON, SMALL, last_wins, run

FP64 = ("--dtype", "fp64")
UNTIED = ("--untie-embeddings-and-output-weights",)
LR, APART, DECAY = 0.02, 0.005, 0.3


def made(*flags: str):  # type: ignore[no-untyped-def]
    """Return the job of one process."""
    config = parse("moe", last_wins((*SMALL["moe"], *COMMON), (*FP64, *flags)), {})
    return parallelize(config, World.start(config.grid, Device(), timedelta(seconds=60), None))


def moved(*flags: str, rates: StepRates | None = None) -> dict[str, tuple[float, float]]:
    """Take a step of one process with gradients of 1 and masters of 1; the new masters' value, by parameter.

    AdamW without epsilon then moves each by its learning rate, and decays it by rate x weight decay.
    """
    job = made(*flags)
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


SINKS = ("--attention-sinks",)
WIDE = ("--mup-base-hidden-size", "8", *UNTIED)  # a model with 32 features: 4 times the width
SCALES = {"embedding.word": 1.0, "lm_head": 0.25, "moe.router": 0.25, "attention.proj": 0.5, "experts.down": 0.5}


@pytest.mark.parametrize(
    ("optimizer", "vector", "embedding", "matrix", "output"),
    [
        (("adamw",), 1.0, 1.0, 0.25, 0.25),
        (("adamw", "--decoupled-lr", "0.02"), 1.0, 1.0, 0.25, 1.0),
        (("sgd",), 4.0, 4.0, 1.0, 0.25),
        (("muon",), 1.0, 1.0, 0.5, 0.25),
        (("muon", "--muon-scale-mode", "unit_rms_norm"), 1.0, 1.0, 1.0, 0.25),
        (("muon", "--muon-scale-mode", "shape_scaling"), 1.0, 1.0, 1.0, 0.25),
    ],
)
def test_each_optimizer_has_its_factors(
    optimizer: tuple[str, ...], vector: float, embedding: float, matrix: float, output: float
) -> None:
    config = parse("moe", last_wins((*SMALL["moe"], *COMMON), (*WIDE, "--optimizer", *optimizer)), {})
    table = {spec.name: spec for spec in with_rates(config, table_of(config.model))}
    factors = {name: spec.lr_factor for name, spec in table.items()}
    assert factors["final_norm.weight"] == vector
    assert factors["embedding.word.weight"] == embedding
    assert factors["layers.1.moe.experts.down"] == factors["layers.0.attention.qkv.weight"] == matrix
    assert factors["lm_head.weight"] == output
    assert factors["layers.1.moe.router.weight"] == 0.25
    shown = [line for line in width_lines(config, tuple(table.values())) if "head, routers" in line]
    assert any(f"x {output:<8.4g} " in line for line in shown)


def test_sinks_are_vectors() -> None:
    config = parse("moe", last_wins((*SMALL["moe"], *COMMON), (*WIDE, *SINKS)), {})
    (sinks, *_) = (spec for spec in with_rates(config, table_of(config.model)) if spec.name.endswith("sinks"))
    assert (sinks.lr_factor, sinks.init_factor) == (1.0, 1.0)


def test_initial_weights_are_multiples_of_those_without() -> None:
    def masters(*flags: str) -> dict[str, torch.Tensor]:
        job = made(*flags)
        views = job.sharding.views([shard.master for shard in job.sharding.master_shards])
        return {view.spec.name: view.tensor for view in views}

    wide, plain = masters(*WIDE), masters(*UNTIED)
    for part, scale in SCALES.items():
        name = next(name for name in wide if part in name)
        torch.testing.assert_close(wide[name], plain[name] * scale, rtol=1e-6, atol=0)
    torch.testing.assert_close(wide["final_norm.weight"], plain["final_norm.weight"])


def test_the_weight_decay_of_a_step_is_that_of_the_rate_without_the_factor() -> None:
    found = moved(*WIDE, "--adam-eps", "1e-300", rates=StepRates(None, DECAY))
    assert found["layers.0.attention.proj.weight"] == pytest.approx(1 - LR * DECAY - LR / 4, rel=1e-12)
    assert found["lm_head.weight"] == pytest.approx(1 - LR * DECAY - LR / 4, rel=1e-12)
    assert found["embedding.word.weight"] == pytest.approx(after(LR, DECAY), rel=1e-12)


def test_the_base_model_is_the_model_without_the_flag() -> None:
    assert moved("--mup-base-hidden-size", "32", *UNTIED) == moved(*UNTIED)


def test_the_forward_and_a_saved_class_are_those_without_the_flag() -> None:
    """A tied head has its divisor by a flag of the model, which its class stores."""
    config = parse("moe", last_wins((*SMALL["moe"], *COMMON), WIDE), {})
    plain = parse("moe", last_wins((*SMALL["moe"], *COMMON), UNTIED), {})
    assert config.model == plain.model


def test_another_base_is_another_schedule() -> None:
    one, two = (
        schedule_of(parse("moe", last_wins((*SMALL["moe"], *COMMON), (*UNTIED, "--mup-base-hidden-size", base)), {}))
        for base in ("8", "16")
    )
    assert another_schedule(one, two)[0] == "--mup-base-hidden-size is 8 there and 16 here"
