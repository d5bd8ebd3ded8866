"""Settings without a formula: a plan refuses them, and says what to plan instead."""

from __future__ import annotations

import pytest

from megapar.planning.unpriced import RULE
from megapar.tools.main import main

MOE = ("--world-size", "4", "--ep-degree", "4", "--num-experts", "8", "--num-layers", "4")
ERNIE3 = ("--model", "ernie3", "--task-type-vocab-size", "5")
INTERLEAVED = (
    *("--world-size", "2", "--pp-degree", "2", "--pp-schedule", "interleaved", "--vpp-degree", "2"),
    *("--recompute-interval", "1", "--num-experts", "0", "--num-layers", "4", "--gradient-merge-acc-step", "2"),
)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ((*INTERLEAVED, "--recompute-in-bubble"), "does not run: [not-built-recompute-in-bubble]"),
        (("--sharding-stage", "3", "--no-overlap-grad-reduce"), "does not run: [not-built-stage-3-overlap-off]"),
        (("--adaptive-recompute-device-size", "61440"), "--recompute-interval 1, which needs the least memory"),
        ((*MOE, "--ampipe-degree", "auto"), "Plan --ampipe-degree 1, 2 and 4"),
        (("--num-experts", "0", "--fp8"), "leaves the experts in bf16"),
        (("--device-kind", "a100-80g", "--assume", "fp8-mlp"), "a100-80g has no fp8 products"),
        ((*ERNIE3, "--assume", "operator-recompute:up"), "operator-recompute with --ernie-model ernie3"),
    ],
)
def test_what_has_no_formula_is_refused(flags: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *flags]) == 2
    error = capsys.readouterr().err
    assert RULE in error
    assert said in " ".join(error.split())
