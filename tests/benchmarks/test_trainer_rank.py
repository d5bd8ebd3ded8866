"""The rank program that benchmarks of whole steps share: its command line and its waits."""

from __future__ import annotations

from benchmarks.support.trainer_rank import command, summed


def test_waits_are_by_kind_or_sums_of_axes() -> None:
    waits = {"ep/all_to_all": 2.0, "ep/all_gather": 0.5, "mp/all_gather": 1.0, "shard/all_gather": 4.0}
    assert summed(waits, ()) == waits
    assert summed(waits, ("ep", "mp")) == {"ep": 2.5, "mp": 1.0}


def test_the_number_of_a_rank_comes_last() -> None:
    line = command("benchmarks.ampipe_rows.rows:ROWS", 4, "file:///tmp/meet", node=2, axes=("ep", "mp"))
    assert line[-4:] == ["--axes", "ep", "mp", "--rank"]
    assert command("benchmarks.step_hiding.ways:WAYS", 2, "file:///tmp/meet")[-1] == "--rank"
