"""Every rank launches the collectives of a communicator in the order in which its other ranks do.

An accelerator's communicator runs what it was given in that order, and hangs, or mixes numbers up, where ranks differ;
gloo's finds some messages in any order.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from unittest.mock import patch

import pytest

from megapar.arguments import parse
from megapar.core.comm.accounts import FlightRecorder
from megapar.core.comm.rounds import axis_ranks, axis_rounds
from megapar.core.grid import Grid
from megapar.trainer import train
from tests.support.ranks import run_ranks
from tests.support.training import COMMON, SMALL, last_wins

Launches = list[tuple[str, str]]  # axis or queue, kind
MESSAGES = ("send", "receive")


def launched(rank: int, world_size: int, rendezvous: str, flags: Sequence[str]) -> Launches:
    """All that a rank launches in a run of two steps and an evaluation."""
    found: Launches = []
    note = FlightRecorder.note

    def keep(recorder: FlightRecorder, axis: str, kind: str) -> None:
        found.append((axis, kind))
        note(recorder, axis, kind)

    with patch.object(FlightRecorder, "note", keep):
        train(parse("moe", list(flags), dict(os.environ)), f"file://{rendezvous}")
    return found


def differences(grid: Grid, launches: Sequence[Launches]) -> Iterator[str]:
    """Where ranks of a communicator differ. grid: in the order in which a run numbers its ranks."""
    known = {name: names for names in (("world",), *axis_rounds(grid)) for name in names}
    for names in dict.fromkeys(known.values()):
        own = [[one for one in found if one[0] in names and one[1] not in MESSAGES] for found in launches]
        for rank in range(grid.world_size):
            others = range(grid.world_size) if names == ("world",) else axis_ranks(grid, names[0], rank)
            if own[rank] != own[others[0]]:
                yield f"{names}: ranks {others[0]} and {rank}"
    ends: defaultdict[str, dict[str, int]] = defaultdict(dict)
    for rank, found in enumerate(launches):
        for queue in {axis for axis, _ in found if ">" in axis}:
            kinds = [kind for axis, kind in found if axis == queue]
            ends[f"{queue} of {grid.dense(rank) | {'pp': 0}}"][kinds[0]] = len(kinds)
            if len(set(kinds)) > 1:
                yield f"{queue}: rank {rank} sends and receives"
    yield from (f"{queue}: {counts}" for queue, counts in ends.items() if counts["send"] != counts["receive"])


STEPS = ("--num-layers", "4", "--train-iters", "2", "--eval-interval", "1", "--eval-iters", "1")
LAYOUTS = {
    "stages and experts": ("--pp-degree", "2", "--ep-degree", "2"),
    "chunks": ("--pp-degree", "2", "--vpp-degree", "2", "--pp-schedule", "interleaved", "--mp-degree", "2"),
    "V": ("--pp-degree", "2", "--vpp-degree", "2", "--pp-schedule", "zero_bubble", "--sharding-degree", "2"),
    "slices": ("--ep-degree", "2", "--mp-degree", "2", "--sequence-parallel", "--ampipe-degree", "2"),
    "stage 3": ("--sharding-degree", "4", "--sharding-stage", "3", "--ep-degree", "2"),
    "rings": (
        "--cp-degree",
        "2",
        "--sharding-degree",
        "2",
        "--sharding-stage",
        "2",
        "--context-parallel-algo",
        "megatron_cp_algo",
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_of_a_communicator_launch_in_one_order(layout: str) -> None:
    flags = last_wins((*SMALL["moe"], *COMMON), (*STEPS, *LAYOUTS[layout]))
    launches = run_ranks(4, launched, flags, group=False)
    assert all(len(found) > 10 for found in launches)
    grid = parse("moe", [*flags, "--validate-only", "--world-size", "4"], {}).grid
    assert list(differences(grid, launches)) == []
