"""The gate of two-byte state: what it makes of losses, broken roundings, and runs that go on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.precision import run as precision
from benchmarks.precision.run import ORDER, VARIANTS, judge, losses, run
from megapar.core.device import adamw
from megapar.data.batches import Loader

SIZE = (4, 2)  # steps, micro-batches


def found(noise: float, technique: float, broken: float) -> dict[str, list[float]]:
    """Losses that end at 2, but for what is added to those of a kind."""
    added = {"reference": 0.0, "noise": noise, "technique": technique, "broken": broken}
    return {name: [5.0, 4.0, 3.0, 2.0 + added[variant.kind]] for name, variant in VARIANTS.items()}


@pytest.mark.parametrize(
    ("noise", "technique", "broken", "wrong"),
    [
        (0.001, 0.0039, -0.0041, set()),  # 0.2 % of the loss
        (0.01, -0.029, 0.031, set()),  # three times the noise
        (0.001, 0.0041, 0.0041, {"technique"}),
        (0.01, 0.029, 0.029, {"broken"}),
    ],
)
def test_techniques_may_differ_as_noise_does_and_broken_ones_must_differ_more(
    noise: float, technique: float, broken: float, wrong: set[str]
) -> None:
    verdicts = judge(found(noise, technique, broken))
    assert {VARIANTS[name].kind for name, one in verdicts.items() if one["right"] is False} == wrong
    assert {one["right"] for name, one in verdicts.items() if VARIANTS[name].kind in ("reference", "noise")} == {None}


def test_broken_roundings_go_one_way_and_lose_what_weights_lack() -> None:
    x, random = torch.tensor([1.0 + 2.0**-9, -1.0 - 2.0**-9]), torch.zeros(2, dtype=torch.int64)
    for name, want in (("moments truncated", 1.0), ("moments rounded up", 1.0 + 2.0**-7)):
        with VARIANTS[name].change():
            made = adamw.rounded(x, adamw.random_bits(1, torch.tensor(1), random), 0)
        assert made.tolist() == [want, -want]
    with VARIANTS["masters without remainders"].change():
        weights, remainders = adamw.split_master(x)
    assert weights.tolist() == [1.0, -1.0]
    assert not remainders.any()


def test_a_run_that_was_cut_goes_on_with_its_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "SAVED_EVERY", 2)
    monkeypatch.setattr(precision, "SHAPE", (*precision.SHAPE, "--exit-interval", "2"))
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    for name in ("all together", "masters without remainders"):
        run(name, cut, *SIZE)
        assert len(losses(name, cut)) == 2
    monkeypatch.undo()
    for name in ("all together", "masters without remainders"):
        run(name, cut, *SIZE)
        run(name, whole, *SIZE)
        assert losses(name, cut) == losses(name, whole)
        assert len(losses(name, whole)) == SIZE[0]


def test_another_order_of_sums_takes_the_micro_batches_of_a_step_backwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Loader, "step", lambda *_: [1, 2, 3])
    with VARIANTS[ORDER].change():
        assert Loader.step(None, 0, 3) == [3, 2, 1]
    assert Loader.step(None, 0, 3) == [1, 2, 3]
