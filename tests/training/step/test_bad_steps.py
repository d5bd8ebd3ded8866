"""Bad numbers: named, skipped up to a limit, stepped over; replicas that diverge; steps that are spikes."""

from __future__ import annotations

import json
import math
import os
import re
import warnings
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megapar.arguments import parse
from megapar.core.device.compiled import Compiled, plain
from megapar.core.sharding import replicas
from megapar.data.sampling.skipping import effective, merged, parse_range, sample_at
from megapar.errors import TrainingError
from megapar.trainer import Trainer, train
from megapar.training.reports.record import Record
from megapar.training.reports.terminal import PlainTerminal
from megapar.training.step.bad_steps import BadStepPolicy, SpikeDetector
from megapar.training.step.step_guard import StepGuard
from tests.support.ranks import RanksFailed, run_ranks
from tests.support.training import COMMON, SMALL, last_wins, make_trainer, run

LAYOUTS = {
    "sharding 2": (2, ("--sharding-degree", "2")),
    "stage 3, dp 2": (4, ("--sharding-degree", "2", "--hybrid-dp", "--sharding-stage", "3")),
    "mp 2, sp": (2, ("--mp-degree", "2", "--sequence-parallel")),
    "pp 2, interleaved": (
        2,
        ("--pp-degree", "2", "--pp-schedule", "interleaved", "--vpp-degree", "2", "--num-layers", "4"),
    ),
    "pp 2, dp 2": (4, ("--pp-degree", "2", "--sharding-degree", "1", "--hybrid-dp")),
}
FP64 = ("--dtype", "fp64")
ALL = -1


def spoiled(
    rank: int,
    world_size: int,
    rendezvous: str,
    flags: Sequence[str],
    steps: Sequence[int] = (),
    times: int = 10**6,
    bad_rank: int = 0,
    factor: float = float("nan"),
    on_device: bool = False,
) -> tuple[list[Record], list[str]]:
    """Train while a module of a rank is multiplied in these steps, so many times each; records, and what was said.

    on_device: steps are decided as on an accelerator.
    """
    told: list[str] = []
    line = last_wins((*SMALL["moe"], *COMMON), (*FP64, *flags))
    with (
        patch.object(PlainTerminal, "print_message", lambda self, text: told.append(text)),
        patch.object(Trainer, "train", run_spoiled(steps, times, bad_rank, factor)),
        patch.object(StepGuard, "_may_decide_on_device", lambda self, config: on_device),
    ):
        return list(
            train(parse("moe", line, dict(os.environ)), f"file://{rendezvous}", keep_records=True).records
        ), told


def run_spoiled(steps: Sequence[int], times: int, bad_rank: int, factor: float) -> Any:
    run = Trainer.train

    def spoil(self: Trainer) -> Any:
        left, running, forward_backward = dict.fromkeys(steps, times), [0], self.stepper.gradients._forward_backward

        def noted(work: Any) -> Any:
            running[0] = work.iteration
            return forward_backward(work)

        def hook(module: object, inputs: object, output: Any) -> Any:
            step = running[0]
            if left.get(step, 0) <= 0 or bad_rank not in (self.world.rank, ALL):
                return output
            left[step] -= 1
            return output * factor

        modules = dict(self.job.model.named_modules())
        name = "layers.1.mlp_norm" if math.isnan(factor) else "final_norm"
        if name in modules:
            modules[name].register_forward_hook(hook)
        self.stepper.gradients._forward_backward = noted
        return run(self)

    return spoil


@pytest.mark.parametrize(("layout", "on_device"), [(layout, on_device) for on_device, layout in enumerate(LAYOUTS)])
def test_a_bad_number_is_named_by_module_and_rank_and_its_step_skipped(layout: str, on_device: int) -> None:
    world_size, flags = LAYOUTS[layout]
    bad_rank, nan = world_size - 1, float("nan")
    (records, told), *_ = run_ranks(
        world_size, spoiled, flags, [2], 10**6, bad_rank, nan, on_device % 2 == 1, group=False
    )
    assert [record.skipped for record in records] == [False, True, False, False, False, False]
    (warning,) = [line for line in told if "gradient norm" in line]
    assert f"first bad: the output of layers.1.mlp_norm on rank {bad_rank}; samples 8-15" in warning.replace(
        "layers.1.mlp_norm on ranks", "layers.1.mlp_norm on rank"
    )


@pytest.mark.parametrize("on_device", [False, True])
def test_a_number_that_is_bad_once_only_costs_a_second_run_of_the_step(on_device: bool) -> None:
    clean = run_ranks(1, spoiled, (), group=False)[0][0]
    records, told = run_ranks(1, spoiled, (), [3], 1, 0, float("nan"), on_device, group=False)[0]
    assert [(r.loss, r.grad_norm, r.lr) for r in records] == [(r.loss, r.grad_norm, r.lr) for r in clean]
    assert any("a rank computed wrongly" in line for line in told)


@pytest.mark.parametrize("flags", [(), ("--optimizer-offload", "--clip-grad", "0.1"), ("--sharding-stage", "3")])
def test_what_is_decided_on_the_device_changes_nothing_either(flags: tuple[str, ...], tmp_path: Path) -> None:
    """Bad steps, also the last one, a checkpoint behind one and decay of the learning rate: as judged at once."""
    world_size = 2 if "3" in flags else 1

    def outcome(on_device: bool) -> tuple[list[tuple[Any, ...]], list[str], bytes]:
        save = ("--save", str(tmp_path / str(on_device)), "--save-interval", "3", "--log-interval", "4")
        nan = float("nan")
        records, told = run_ranks(
            world_size, spoiled, (*flags, *save), [2, 3, 6], 10**6, 0, nan, on_device, group=False
        )[0]
        scalars = json.loads((tmp_path / str(on_device) / "iter_0000003" / "scalars.json").read_text())
        assert (scalars["skipped_steps"], scalars["optimizer_steps"]) == (2, 1)
        shard = next((tmp_path / str(on_device) / "iter_0000006").glob("shard-00000*")).read_bytes()
        kept = [(r.loss, r.lr, r.skipped) for r in records]
        return kept, [line for line in told if "WARNING" in line], shard

    assert repr(outcome(True)) == repr(outcome(False))


def one_cannot_compile(
    rank: int, world_size: int, rendezvous: str, flags: Sequence[str], on_device: bool, fails: bool
) -> tuple[list[Record], list[str]]:
    """Train with compiled functions, which the last rank cannot compile; the code of the others changes the numbers."""

    def compile_(graph: Any, inputs: object) -> Any:
        if rank == world_size - 1:
            raise RuntimeError("no space left on device")
        return lambda *inputs: tuple(x * 1.001 if x.is_floating_point() else x for x in graph(*inputs))

    told: list[str] = []
    line = last_wins((*SMALL["moe"], *COMMON), ("--replica-check-interval", "1", *flags))
    with (
        patch.object(PlainTerminal, "print_message", lambda self, text: told.append(text)),
        patch("megapar.training.building.parts.make_runner", lambda *_: Compiled(compile_) if fails else plain),
        patch.object(StepGuard, "_may_decide_on_device", lambda self, config: on_device),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        config = parse("moe", line, dict(os.environ))
        return list(train(config, f"file://{rendezvous}", keep_records=True).records), told


@pytest.mark.parametrize("on_device", [False, True])
def test_what_one_rank_cannot_compile_no_rank_does(on_device: bool) -> None:
    """The norms' weights are on both ranks of mp, and compared after every step."""
    flags = ("--mp-degree", "2")
    expected = run_ranks(2, one_cannot_compile, flags, on_device, False, group=False)[0][0]
    records, told = run_ranks(2, one_cannot_compile, flags, on_device, True, group=False)[0]
    assert [(r.loss, r.grad_norm, r.skipped) for r in records] == [(r.loss, r.grad_norm, r.skipped) for r in expected]
    (line,) = [line for line in told if "was run again" in line]
    assert line.startswith("WARNING: iteration 1 was run again: compiling ")
    assert "rms_norm" in line
    assert line.endswith(" failed on rank 1; all ranks run uncompiled what one cannot compile")


def test_too_many_bad_steps_stop_the_run_and_note_the_samples(tmp_path: Path) -> None:
    # A save in the background may not be published when the run ends in an error.
    flags = ("--bad-step-limit", "1", "--save", str(tmp_path), "--save-interval", "2", "--no-async-save")
    with pytest.raises(RanksFailed, match=r"TrainingError: iteration 4: gradient norm nan.*--skip-samples 24-31"):
        run_ranks(1, spoiled, flags, [3, 4], 10**6, 0, group=False)
    noted = json.loads((tmp_path / "bad-batch-0000004.json").read_text())
    assert noted == {
        "iteration": 4,
        "samples": "24-31",
        "found": "first bad: the output of layers.1.mlp_norm on rank 0",
    }
    assert (tmp_path / "latest").read_text() == "iter_0000002 1\n"


def test_a_spike_stands_out_of_what_was_before() -> None:
    spikes = SpikeDetector(6.0)
    for step in range(40):
        assert spikes.judge(3.0 + 0.01 * (step % 3), 1.0) == ""
        spikes.add(3.0 + 0.01 * (step % 3), 1.0)
    assert spikes.judge(3.02, 1.0) == ""
    assert "loss 4" in spikes.judge(4.0, 1.0)
    assert "gradient norm 9" in spikes.judge(3.0, 9.0)
    assert SpikeDetector(0.0, spikes.losses, spikes.norms).judge(1e9, 1e9) == ""
    nothing = [0.0] * 40
    assert SpikeDetector(6.0, deque(nothing), deque(nothing)).judge(0.0, 0.0) == ""
    again = SpikeDetector(6.0)
    again.restore(json.loads(json.dumps(spikes.state())))
    assert again.judge(4.0, 1.0) == spikes.judge(4.0, 1.0)


def test_spikes_in_a_row_become_ordinary_at_the_limit() -> None:
    numbers = BadStepPolicy(2, SpikeDetector(6.0), None)
    for _ in range(20):
        assert not numbers.is_spike(1, 3.0, 1.0, "0-7")
        numbers.end_streak()
    assert [numbers.is_spike(step, 9.0, 1.0, "0-7") for step in range(3)] == [True, True, False]
    assert "taken as ordinary" in numbers.pop_messages()[-1]
    assert numbers.pop_messages() == []


@pytest.mark.parametrize("layout", [(1, ()), (2, ("--pp-degree", "2"))])
def test_a_spike_is_skipped_where_that_is_wanted(layout: tuple[int, tuple[str, ...]]) -> None:
    flags = ("--train-iters", "18", "--global-batch-size", "2", *layout[1])
    spike = ([17], 10**6, ALL, 1e3)
    records, told = run_ranks(layout[0], spoiled, (*flags, "--spike-skip"), *spike, group=False)[0]
    assert [r.iteration for r in records if r.skipped] == [17]
    assert any("iteration 17: loss" in line and "samples 32-33: step skipped" in line for line in told)
    if layout[0] == 1:  # otherwise it is told
        records, told = run_ranks(1, spoiled, flags, *spike, group=False)[0]
        assert not any(r.skipped for r in records)
        assert any("WARNING: iteration 17: loss" in line for line in told)


def test_samples_are_stepped_over_by_number() -> None:
    ranges = merged([parse_range("2-3"), parse_range("4-4"), (10, 12)])
    assert ranges == [(2, 4), (10, 12)]
    assert [sample_at(position, ranges) for position in range(8)] == [0, 1, 5, 6, 7, 8, 9, 13]
    # A run that stands at position 5 (sample 8) and is told of 2-6 and 9-9: what was read stays where it was.
    assert effective([(2, 6), (9, 9)], ranges, 5) == [(2, 4), (9, 9)]
    assert sample_at(5, effective([(2, 6), (9, 9)], ranges, 5)) == 8
    with pytest.raises(ValueError, match="is not a range"):
        parse_range("3-1")


def test_a_run_goes_on_behind_the_samples_it_steps_over(tmp_path: Path) -> None:
    skip = ("--skip-samples", "16-23", "28-35")
    whole = run_ranks(1, spoiled, skip, group=False)[0][0]
    plain = run_ranks(1, spoiled, ("--exit-interval", "1", "--save", str(tmp_path)), group=False)[0][0]
    assert plain[0].loss == whole[0].loss
    rest = run_ranks(1, spoiled, (*skip, "--load", str(tmp_path)), group=False)[0][0]
    assert [r.loss for r in rest] == [r.loss for r in whole[1:]]
    without = run_ranks(1, spoiled, (), group=False)[0][0]
    assert [r.loss for r in without[:2]] == [r.loss for r in whole[:2]]
    assert without[2].loss != whole[2].loss


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_digest_knows_every_bit_and_the_order(dtype: torch.dtype) -> None:
    x = torch.randn(3, 5000, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert replicas.replica_digest(x.clone()) == replicas.replica_digest(x)
    for byte in range(8 * dtype.itemsize, 9 * dtype.itemsize):
        for bit in range(8):  # the last one is the sign, which an even weight would move out of the sum
            other = x.clone()
            other.view(torch.uint8)[2, byte] ^= 1 << bit
            assert replicas.replica_digest(other) != replicas.replica_digest(x)
    assert replicas.replica_digest(x[:, [1, 0, *range(2, 5000)]]) != replicas.replica_digest(x)


def diverge(rank: int, world_size: int, rendezvous: str, flags: Sequence[str], name: str, bad_rank: int) -> None:
    """Flip one bit of a parameter's master, or of a buffer, on one rank after step 2."""
    trainer = make_trainer("moe", last_wins((*SMALL["moe"], *COMMON), (*FP64, *flags)), rendezvous)
    for step in range(3):
        trainer.step()
        if step == 1 and rank == bad_rank:
            masters = [shard.master for shard in trainer.job.sharding.master_shards]
            view = next((v for v in trainer.job.sharding.views(masters) if v.spec.name == name), None)
            tensor = view.tensor if view is not None else dict(trainer.job.model.named_buffers())[name]
            tensor.view(-1)[0] += 1e-12
        if step == 0:
            trainer._check(saved=True)
    trainer._check(saved=True)


BIASED = ("--num-experts", "4", "--moe-router-bias-update-rate", "0.01")


@pytest.mark.parametrize(
    ("flags", "name", "told"),
    [
        (("--sharding-degree", "2", "--hybrid-dp"), "layers.0.mlp.down.weight", r"ranks \[0, 2\] of replica"),
        (("--sharding-degree", "2", "--hybrid-dp", "--sharding-stage", "3"), "final_norm.weight", r"ranks \[0, 2\]"),
        (("--mp-degree", "4"), "final_norm.weight", r"on ranks \[2\], against \[0, 1, 3\] of mp"),
        (
            ("--cp-degree", "4", "--seq-length", "16", *BIASED),
            "layers.1.moe.router.correction_bias",
            r"on ranks \[2\], against \[0, 1, 3\]",
        ),
    ],
)
def test_a_replica_that_diverges_is_named(flags: tuple[str, ...], name: str, told: str) -> None:
    if "--mp-degree" in flags:
        flags = (*flags, "--num-query-groups", "4")
    wanted = rf"CorruptionError: iteration 3: replicas .* differ: .*{name} .*{told}"
    with pytest.raises(RanksFailed, match=wanted) as raised:
        run_ranks(4, diverge, flags, name, 2, group=False)
    assert all(re.search(wanted, text) for text in raised.value.failures.values())  # also ranks that are right


def test_limits_are_counted_in_a_row_and_over_a_restart() -> None:
    before, after = BadStepPolicy(1, SpikeDetector(0.0), None), BadStepPolicy(1, SpikeDetector(0.0), None)
    for step in range(4):
        before.not_finite(step, float("nan"), "0-7", "first bad: x")
        before.end_streak()
    before.not_finite(5, float("inf"), "0-7", "first bad: x")
    after.restore(json.loads(json.dumps(before.state())))
    for policy in (before, after):
        with pytest.raises(TrainingError, match="2 steps in a row were bad, --bad-step-limit is 1"):
            policy.not_finite(6, float("inf"), "0-7", "first bad: x")


def test_replicas_stay_the_same_beside_pieces_of_uneven_lengths() -> None:
    """An optimizer's kernel rounds the end of a range otherwise: ranges must not join what mp splits and repeats."""
    flags = ("--mp-degree", "2", "--replica-check-interval", "1", "--train-iters", "40", "--lr", "3e-2")
    assert run(2, "ernie", *flags, "--vocab-size", "103").iteration == 40


def test_a_good_step_before_the_first_log_is_one() -> None:
    policy = BadStepPolicy(0, SpikeDetector(6.0), None)
    policy.end_streak()
    with pytest.raises(TrainingError, match="--skip-samples 40-47, beside"):
        policy.not_finite(6, math.nan, "40-47", "x")
    with pytest.raises(TrainingError, match="No step was good before"):
        BadStepPolicy(0, SpikeDetector(6.0), None).not_finite(1, math.nan, "0-7", "x")


def test_a_spike_that_is_taken_says_after_how_many_skipped_steps() -> None:
    policy = BadStepPolicy(3, SpikeDetector(6.0), None)
    for step in range(20):
        policy.spikes.add(1.0 + 0.05 * (step % 2), 1.0)
    for step in range(3):
        policy.not_finite(step, math.nan, "0-7", "x")
    policy.pop_messages()
    assert not policy.is_spike(24, 9.0, 1.0, "8-15")
    (said,) = policy.pop_messages()
    assert "again" not in said
    assert "after 3 skipped steps in a row (--bad-step-limit 3): taken as ordinary" in said
