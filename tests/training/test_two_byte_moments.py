"""A run with moments in bf16 goes on from its checkpoints on any layout, and may change the moments' dtype."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support.training import run

LINE = ("--dtype", "fp64", "--lr-decay-iters", "6", "--weight-decay", "0.3")
MUON = ("--optimizer", "muon", "--muon-extra-scale-factor", "0.2")
TWO_BYTES = ("--exp-avg-dtype", "bf16", "--exp-avg-sq-dtype", "bf16")
LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "one": (1, ()),
    "mp": (2, ("--mp-degree", "2")),
    "stage 3": (2, ("--sharding-stage", "3")),
    "ep": (2, ("--ep-degree", "2")),
    "pp": (2, ("--pp-degree", "2")),
}


@cache
def straight(*flags: str) -> list[float]:
    """The losses of six steps of one process."""
    return [record.loss for record in run(1, "moe", *LINE, *TWO_BYTES, *flags).records]


@pytest.mark.parametrize(
    ("there", "here"), [("one", "mp"), ("mp", "stage 3"), ("stage 3", "ep"), ("ep", "pp"), ("pp", "one")]
)
def test_a_run_goes_on_on_any_layout(there: str, here: str, tmp_path: Path) -> None:
    goes_on(there, here, (), tmp_path)


def test_momentum_of_matrices_is_rounded_alike_on_any_layout(tmp_path: Path) -> None:
    goes_on("mp", "ep", MUON, tmp_path)
    wide = [record.loss for record in run(1, "moe", *LINE, *MUON).records]
    assert straight(*MUON) != wide
    assert straight(*MUON) == pytest.approx(wide, rel=1e-2)


def goes_on(there: str, here: str, flags: tuple[str, ...], tmp_path: Path) -> None:
    (ranks, before), (others, after) = LAYOUTS[there], LAYOUTS[here]
    run(ranks, "moe", *LINE, *TWO_BYTES, *flags, *before, "--train-iters", "3", "--save", str(tmp_path))
    files = [load_file(path) for path in sorted((tmp_path / "iter_0000003").glob("shard-*.safetensors"))]
    moments = {tensor.dtype for file in files for name, tensor in file.items() if name.startswith("optimizer/")}
    assert moments == {torch.bfloat16}
    again = run(others, "moe", *LINE, *TWO_BYTES, *flags, *after, "--load", str(tmp_path))
    assert [record.loss for record in again.records] == pytest.approx(straight(*flags)[3:], rel=1e-10)


@pytest.mark.parametrize(("there", "here"), [(TWO_BYTES, ()), ((), TWO_BYTES), ((), TWO_BYTES[2:])])
@pytest.mark.parametrize("dtype", ["fp32", "fp64"])
def test_the_dtype_may_change(there: tuple[str, ...], here: tuple[str, ...], dtype: str, tmp_path: Path) -> None:
    line = (*LINE[2:], "--dtype", dtype)
    straight = [record.loss for record in run(1, "moe", *line, *there).records]
    run(1, "moe", *line, *there, "--train-iters", "3", "--save", str(tmp_path))
    found = [record.loss for record in run(1, "moe", *line, *here, "--load", str(tmp_path)).records]
    assert found[0] == straight[3]
    # The first update has the stored moments: those in bf16 as they are, others rounded.
    if there == TWO_BYTES:
        assert found[1] == pytest.approx(straight[4], rel=1e-12 if dtype == "fp64" else 1e-6)
    else:
        assert found[1] == pytest.approx(straight[4], rel=2e-3)
        assert dtype == "fp32" or found[1] != pytest.approx(straight[4], rel=1e-12)
