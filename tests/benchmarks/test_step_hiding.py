"""The ways of the benchmark of whole steps, and its count of what is hidden."""

from __future__ import annotations

import pytest

from benchmarks.step_hiding.predicted import rows
from benchmarks.step_hiding.run import hidden
from benchmarks.step_hiding.ways import SERIAL, WAYS, flags
from megapar.arguments import parse


def test_hidden_is_a_share_of_what_the_link_adds() -> None:
    assert hidden(serial=6.0, this=6.0, alone=4.0) == 0
    assert hidden(serial=6.0, this=4.5, alone=4.0) == 0.75
    assert hidden(serial=6.0, this=3.0, alone=4.0) > 1


@pytest.mark.parametrize("way", WAYS)
def test_a_way_runs_as_it_is_called(way: str) -> None:
    config = parse("moe", flags(way), {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"})
    assert (config.ampipe.ampipe_degree == 1) == (way == SERIAL)
    assert config.ampipe.use_pipe_experts == way.endswith("pieces"), "no rule has switched it off"
    assert config.ampipe.ampipe_cross_layer == way.startswith("cross-layer")


def test_the_plan_of_the_run_is_within_a_twentieth_of_each_measured_step() -> None:
    found = rows()
    ways = {row.way for row in found}
    assert ways == set(WAYS) - {"ampipe 4", "cross-layer 4"}, "the ways that were measured"
    assert all(abs(row.error) <= 0.05 for row in found)
