"""A run goes on on any layout from the checkpoint of any layout, with each optimizer, as if it had not stopped."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from megapar.training.reports.record import Record
from tests.support.training import run

LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "one process": (1, ()),
    "mp 2": (2, ("--mp-degree", "2", "--sequence-parallel")),
    "sharding 2": (2, ("--sharding-degree", "2")),
    "stage 3": (2, ("--sharding-degree", "2", "--sharding-stage", "3")),
    "ep 2": (2, ("--ep-degree", "2")),
    "pp 2": (2, ("--pp-degree", "2")),
    "cp 2": (2, ("--cp-degree", "2")),
    "dp 2, mp 2, stage 2": (4, ("--dp-degree", "2", "--sharding-stage", "2", "--mp-degree", "2")),
}
OPTIMIZERS = {"adamw": ("--lr", "1e-2"), "muon": ("--optimizer", "muon", "--muon-extra-scale-factor", "0.2")}


def records(layout: str, optimizer: str, *flags: str) -> list[Record]:
    world_size, layout_flags = LAYOUTS[layout]
    return list(run(world_size, "moe", "--dtype", "fp64", *OPTIMIZERS[optimizer], *layout_flags, *flags).records)


@cache
def whole(optimizer: str) -> list[Record]:
    return records("one process", optimizer)


@cache
def saved(folder: Path, layout: str, optimizer: str) -> Path:
    """Return the checkpoint of step 3."""
    place = folder / f"{optimizer} {layout}"
    records(layout, optimizer, "--save", str(place), "--exit-interval", "3")
    return place


@pytest.mark.table
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("second", LAYOUTS)
@pytest.mark.parametrize("first", LAYOUTS)
def test_steps_after_a_resume_are_the_uninterrupted_runs(
    first: str, second: str, optimizer: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = saved(tmp_path_factory.getbasetemp(), first, optimizer)
    rest, want = records(second, optimizer, "--load", str(folder)), whole(optimizer)[3:]
    assert len(rest) == len(want) == 3
    for got, wanted in zip(rest, want, strict=True):
        assert got.loss == pytest.approx(wanted.loss, rel=1e-12)
        assert got.grad_norm == pytest.approx(wanted.grad_norm, rel=1e-10)
