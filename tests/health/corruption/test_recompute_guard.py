"""A micro-batch that is run again leaves no trace in any layout, and what it finds is named."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any
from unittest.mock import patch

import pytest

from megapar import trainer
from megapar.arguments import parse
from megapar.errors import CorruptionError
from megapar.health.corruption.guards import Guards
from megapar.health.corruption.recompute_guard import RecomputeGuard, suspects
from megapar.health.corruption.step_digest import DigestRecord, StepDigest
from tests.support.ranks import run_ranks
from tests.support.training import COMMON, SMALL, last_wins

FP64 = ("--dtype", "fp64", "--train-iters", "3")
PP = ("--pp-degree", "2", "--num-layers", "4")
LAYOUTS = {
    "one process": (1, "moe", ("--hidden-dropout", "0.2")),
    "sharding": (2, "moe", ("--sharding-degree", "2", "--sharding-stage", "2")),
    "data": (2, "ernie", ("--hybrid-dp", "--sharding-degree", "1", "--hidden-dropout", "0.2")),
    "stage 3": (2, "moe", ("--sharding-degree", "2", "--sharding-stage", "3")),
    "mp": (2, "moe", ("--mp-degree", "2", "--sequence-parallel", "--hidden-dropout", "0.2")),
    "ep": (2, "moe", ("--ep-degree", "2", "--ampipe-degree", "2", "--recompute-interval", "1")),
    "cp": (2, "moe", ("--cp-degree", "2")),
    "interleaved": (2, "moe", (*PP, "--pp-schedule", "interleaved", "--vpp-degree", "2")),
    "zero bubble": (2, "moe", (*PP, "--use-nanopipe")),
    "offloaded": (2, "moe", ("--sharding-degree", "2", "--optimizer-offload")),
}
SWAPPED = ("sharding", "data", "stage 3", "offloaded")


def seen(rank: int, world_size: int, rendezvous: str, kind: str, flags: Sequence[str]) -> dict[str, Any]:
    """Of a run: of every step what does not depend on the clock, the guards that passed, and whether ranks swapped."""
    kept: list[Guards] = []

    def make(**parts: Any) -> Guards:
        kept.append(trainer_makes(**parts))
        return kept[0]

    trainer_makes = trainer.make_guards
    with patch.object(trainer, "make_guards", make):
        outcome = trainer.train(parse(kind, flags, dict(os.environ)), f"file://{rendezvous}", keep_records=True)
    timed = ("seconds", "time", "tokens_per", "tflops", "mfu", "memory", "pace")
    records = [
        {name: value for name, value in asdict(record).items() if not any(word in name for word in timed)}
        for record in outcome.records
    ]
    swaps = [guard._swaps for guard in kept[0]._guards if isinstance(guard, RecomputeGuard)]
    return {"records": records, "verified": kept[0].verified.get("recompute"), "swaps": swaps}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_run_with_the_check_is_the_run_without_it(name: str) -> None:
    world_size, kind, flags = LAYOUTS[name]

    def trained(interval: int) -> dict[str, Any]:
        asked = ("--global-batch-size", "4", "--recompute-check-interval", str(interval))
        line = last_wins((*SMALL[kind], *COMMON), (*FP64, *flags, *asked))
        return run_ranks(world_size, seen, kind, line, group=False)[0]  # type: ignore[no-any-return]

    checked, plain = trained(1), trained(0)
    assert checked["records"] == plain["records"]
    assert (checked["verified"], plain["verified"]) == (3, None)
    assert checked["swaps"] == [name in SWAPPED]


def test_the_rank_that_two_results_speak_against_is_named() -> None:
    assert suspects([False, True, True, False]) == [1]  # its own, and the next one's, which it ran too
    assert suspects([True, False, False, True]) == [3]
    assert suspects([False, False, True, False]) == [1, 2]
    assert suspects([True, True]) == [0, 1]


def disturbed(
    rank: int, world_size: int, rendezvous: str, flags: Sequence[str], runs: Sequence[int], where: Sequence[int]
) -> tuple[str, str, dict[str, int]]:
    """(the error, what was printed, what was verified) where some runs of some ranks give a digest of their own."""
    count, kept = [0], StepDigest.end

    def end(self: StepDigest) -> DigestRecord:
        count[0] += 1
        trace = kept(self)
        digests = list(trace.digests)
        if rank in where and count[0] in runs:
            digests[2] += count[0]
        return trace._replace(digests=tuple(digests))

    said = io.StringIO()
    with patch.object(StepDigest, "end", end), contextlib.redirect_stdout(said):
        try:
            found = seen(rank, world_size, rendezvous, "moe", flags)
        except CorruptionError as error:
            return str(error), said.getvalue(), {}
    return "", said.getvalue(), found["verified"]


def tried(world_size: int, runs: Sequence[int], where: Sequence[int]) -> tuple[str, str, dict[str, int]]:
    """The same on rank 0, checking after every step; three runs and a swapped one in the first check."""
    layout = ("--sharding-degree", str(world_size), "--recompute-check-interval", "1")
    line = last_wins((*SMALL["moe"], *COMMON), (*FP64, *layout))
    return run_ranks(world_size, disturbed, line, runs, where, group=False)[0]  # type: ignore[no-any-return]


def test_a_device_that_does_not_repeat_turns_the_check_off_and_says_so() -> None:
    error, said, verified = tried(1, range(1, 100), [0])
    assert (error, verified) == ("", None)
    assert said.count("recompute check: off, three runs of a micro-batch gave three results") == 1
    assert "first the output of layers.1 of rank 0 on " in said


@pytest.mark.parametrize(("runs", "iteration"), [([2], 1), ([1, 2, 3, 4], 1), ([6], 2)])
def test_one_rank_that_does_not_repeat_ends_the_run_and_is_named(runs: Sequence[int], iteration: int) -> None:
    error, _, _ = tried(4, runs, [2])
    assert f"iteration {iteration}: a micro-batch that was run again gave other bits" in error
    assert "first the output of layers.1 of rank 2 on " in error
    assert "rank 1" not in error


def test_a_result_that_another_rank_does_not_share_names_the_place() -> None:
    error, _, _ = tried(2, [4], [1])  # only what rank 1 made of rank 0's micro-batch
    assert "iteration 1: ranks that ran the same micro-batch gave other bits" in error
    assert "At fault is one of rank 0 on " in error
    assert "they first differ in the output of layers.1 of rank 0" in error
