"""Shares of Muon's iterations and messages: a small run, its trace and its plan."""

from __future__ import annotations

from benchmarks.newton_schulz.run import SHAPE, figures

SMALL = {"--num-layers": "1", "--hidden-size": "64", "--ffn-hidden-size": "96", "--seq-length": "16"}


def test_run_trace_and_plan_send_the_same_bytes_and_a_step_has_the_iterations_in_it() -> None:
    pairs = dict(zip(SHAPE[::2], SHAPE[1::2], strict=True)) | SMALL
    found = figures([word for pair in pairs.items() for word in pair], steps=3)
    run, plan = found["run"], found["plan"]
    assert 0 < run["iterations"] < run["step"]
    assert 0 < plan["iterations"] < plan["step"]
    assert run["matrices"] == found["trace"]["matrices"] == plan["matrices"] > 0
    assert run["all"] == found["trace"]["all"]
    assert 0.99 < plan["all"] / run["all"] < 1.01
