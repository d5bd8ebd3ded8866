"""Calibrations by software: the shares of devices are the same, the costs of operators are not."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from benchmarks.prediction import run
from benchmarks.prediction.fit import biased_targets, table, with_biases
from benchmarks.prediction.rows import published_rows
from megapar.arguments import parse
from megapar.core.device.kinds import LINK_SHARE
from megapar.model.cost.model_cost import CommCost, OpCost, Product
from megapar.planning.assume import assumed
from megapar.planning.calibration import COMPARED, MEGAPAR, MEGATRON, NAMES, TABLE, calibrations
from megapar.planning.devices import device_kind
from megapar.planning.operator_time import OperatorTime
from megapar.planning.plan import Plan
from megapar.planning.text import describe
from megapar.tools.plan import main

EXPERTS = "--num-experts 32 --moe-router-topk 4 --hidden-size 1024 --moe-ffn-hidden-size 512 --num-layers 4"


def plan(flags: str = EXPERTS, ranks: int = 8, assume: str = "", **more: object) -> Plan:
    line = ["--ep-degree", "8", *flags.split(), "--world-size", str(ranks), "--dtype", "bf16", "--validate-only"]
    return Plan(parse("moe", line, {}, planning=True), device_kind("b200"), replace(assumed(assume.split()), **more))


def test_softwares_share_the_shares_of_devices() -> None:
    ours, theirs = (calibrations()[name] for name in NAMES)
    assert replace(ours, software=theirs.software) == theirs
    assert ours.software != theirs.software
    assert ours.inside == LINK_SHARE  # by which runs choose their overlap


def test_the_numbers_are_as_the_fit_writes_them() -> None:
    assert table(calibrations()[MEGATRON]) == TABLE.read_text(encoding="utf-8")


def test_the_cost_of_biases_is_fitted_to_runs_of_2025_alone() -> None:
    rows, fitted = biased_targets(), calibrations()[MEGATRON]
    assert {row.table for row in rows} == {"bridge-25.11"}
    assert with_biases(fitted, rows) == fitted


def test_plans_say_which_devices_were_compared() -> None:
    scored = {row.columns["device"] for row in published_rows() if not row.left_out and not row.unscored}
    assert scored | {row.device for row in run.rows() if not row.why} == COMPARED
    for kind, compared in (("b200-180g", True), ("ascend-910b", False)):
        planned = Plan(plan().config, device_kind(kind))
        assert planned.to_dict()["device_compared"] is compared
        assert (f"no run on {kind} was compared" in describe(planned)) is not compared


def test_no_device_exceeds_its_peak() -> None:
    for calibration in calibrations().values():
        for wide, narrow in ((1.0, 1.0), *calibration.clocks.values()):
            assert calibration.product * wide <= 0.901
            assert calibration.fp8 * narrow <= 0.9


def test_a_plan_names_its_software_and_the_load() -> None:
    ours, theirs = plan(), plan(software=MEGATRON, expert_imbalance=1.5)
    assert "software: megapar\nload of expert ranks: balanced\n" in describe(ours)
    assert "software: megatron\nload of expert ranks: the busiest has 1.5 times" in describe(theirs)
    assert [(p.to_dict()["software"], p.to_dict()["expert_imbalance"]) for p in (ours, theirs)] == [
        (MEGAPAR, 1.0),
        (MEGATRON, 1.5),
    ]
    assert ours.speed.step_seconds != plan(software=MEGATRON).speed.step_seconds


def test_the_busiest_expert_rank_takes_longer_and_holds_more() -> None:
    balanced, loaded = plan(), plan(expert_imbalance=2.0)
    assert loaded.speed.step_seconds > balanced.speed.step_seconds
    assert loaded.fullest.peak > balanced.fullest.peak
    assert loaded.traffic == balanced.traffic  # of the mean rank
    even = "--moe-model-type deepspeed_moe"  # padded to the capacity
    small, large = (plan(f"{EXPERTS} {even}", expert_imbalance=factor).fullest.peak for factor in (1.0, 2.0))
    assert small == large


def test_the_host_launches_what_the_software_has() -> None:
    ours, theirs = (OperatorTime(plan(software=name).run) for name in NAMES)
    launch = device_kind("b200").device_class.launch_seconds
    fitted = launch * theirs.calibration.software.launch
    norm, experts = OpCost("norm"), OpCost("up", products=(Product(64, 64, 64, groups=16),))
    assert ours.launches(norm) == (launch, 2 * launch)
    assert theirs.launches(norm) == (fitted, 2 * fitted)
    assert ours.launches(experts) == (launch, 2 * launch)
    assert theirs.launches(experts) == pytest.approx((17 * fitted, 34 * fitted))
    dispatch = next(one for one in plan().run.costs.layer(1).operators if one.name == "dispatch")
    assert theirs.launches(dispatch)[0] - theirs.launches(replace(dispatch, sent=()))[0] > 4 * launch  # the wait
    assert OperatorTime(plan(assume="cuda-graphs").run).launches(dispatch) == (0.0, 0.0)


def test_techniques_of_experts_take_less() -> None:
    flags = f"{EXPERTS} --seq-length 4096 --micro-batch-size 4"
    plain = plan(flags, assume="fp8", software=MEGATRON).speed.step_seconds
    techniques = ("cuda-graphs", "fused-experts", "hybrid-ep", "deepep", "expert-overlap")
    seconds = {name: plan(flags, assume=f"fp8 {name}", software=MEGATRON).speed.step_seconds for name in techniques}
    assert all(took < plain for took in seconds.values()), seconds
    assert seconds["hybrid-ep"] < seconds["deepep"]  # whose rows are permuted by kernels of their own


def test_experts_with_biases_move_more_in_megatron_unless_one_kernel_has_them() -> None:
    flags = f"{EXPERTS} --activation clamped_swiglu --add-bias-linear"
    runs = [plan(flags, software=MEGATRON, assume=words).run for words in ("", "fused-experts")] + [plan(flags).run]
    for run_, more in zip(runs, (True, False, False), strict=True):
        time, bias = OperatorTime(run_), calibrations()[MEGATRON].software.expert_bias
        down = next(one for one in run_.costs.layer(1).operators if one.name == "down")
        bare = time.moved(down.moved * time.calibration.software.bytes.get("down", 1.0))
        outputs = down.products[0].rows * down.products[0].columns
        assert time.rest(down) - bare == pytest.approx(time.moved(bias * outputs) if more else 0.0, abs=1e-12)


@pytest.mark.parametrize("technique", ["hybrid-ep", "deepep"])
def test_a_token_travels_once(technique: str) -> None:
    """On two nodes of 8 ranks, 15/16 of 4 copies leave a rank; 1 - (1/2)**4 = 15/16 of tokens reach the other node."""
    flags = f"{EXPERTS} --ep-degree 16"
    config = parse(
        "moe", [*flags.split(), "--world-size", "16", "--dtype", "bf16", "--validate-only"], {}, planning=True
    )
    plain, once = (Plan(config, device_kind("b200"), assumed(words)).run for words in ([], [technique]))
    copies = CommCost("ep", "all_to_all", 4 * 15 / 16 * 1e9, "forward")
    apart, together = OperatorTime(plain).message(copies), OperatorTime(once).message(copies)
    link = device_kind("b200").between * calibrations()[MEGAPAR].between
    assert apart.between * link == pytest.approx(4 * 8 / 16 * 1e9)
    assert together.between * link == pytest.approx(15 / 16 * 1e9)
    assert together.inside < apart.inside * 2


def test_the_flags_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    flags = f"{EXPERTS} --ep-degree 8 --world-size 8 --software megatron --expert-imbalance 1.25 --json"
    main(flags.split())
    found = json.loads(capsys.readouterr().out)
    assert (found["software"], found["expert_imbalance"]) == (MEGATRON, 1.25)
