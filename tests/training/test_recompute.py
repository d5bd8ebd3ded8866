"""Recompute in whole training steps: bit for bit what is computed without it, dropout and all."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path

import pytest
import torch
from _pytest.mark import ParameterSet

from megapar.arguments import parse
from megapar.tools.tracing.pretend import pretend
from tests.equivalence.run import Trace, trace
from tests.equivalence.table import COMMON, MODELS
from tests.support.pairwise import pairwise
from tests.support.ranks import run_ranks
from tests.support.training import run

DROPOUT = ("--attention-dropout", "0.1", "--hidden-dropout", "0.1")
BATCH = ("--micro-batch-size", "2", "--global-batch-size", "8", "--dtype", "fp32")
# Two micro-batches on every data rank: as many as two stages have in flight.
FEWER = ("--global-batch-size", "4")
LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "alone": (1, FEWER),
    "mp": (2, ("--mp-degree", "2", *FEWER)),
    "sp": (2, ("--mp-degree", "2", "--sequence-parallel", *FEWER)),
    "ep": (2, ("--ep-degree", "2")),
    "stage 2": (2, ("--sharding-stage", "2")),
    "stage 3": (2, ("--sharding-stage", "3")),
    # Three layers on a stage, so that units of two and of all layers differ.
    "pp": (2, ("--pp-degree", "2", "--num-layers", "6", *FEWER)),
    "mp x pp": (4, ("--mp-degree", "2", "--pp-degree", "2", "--num-layers", "6", *FEWER)),
}
WITHOUT_STAGES = ("alone", "mp", "sp", "ep", "stage 2", "stage 3")
DROPS = ("--moe-model-type", "deepspeed_moe", "--moe-capacity-factor", "0.75", "--moe-min-capacity", "1")


@functools.cache
def train(kind: str, layout: str, *flags: str) -> Trace:
    """Two steps of a small model of four layers, six where there are stages."""
    world_size, more = LAYOUTS[layout]
    line = last_wins((*MODELS[kind], *COMMON, *BATCH, *DROPOUT, "--num-layers", "4", *more, *flags))
    result = run_ranks(world_size, trace, "ernie" if kind == "ernie" else "moe", line, 2, None, "late", group=False)[0]
    assert isinstance(result, Trace)
    return result


def last_wins(line: tuple[str, ...]) -> tuple[str, ...]:
    """A flag given twice keeps its last value."""
    flags: dict[str, tuple[str, ...]] = {}
    for token in line:
        if token.startswith("--"):
            name = token
            flags[name] = ()
        else:
            flags[name] = (*flags[name], token)
    return tuple(token for name, values in flags.items() for token in (name, *values))


def assert_same(got: Trace, want: Trace) -> None:
    """Loss, norm, every gradient and every parameter, bit for bit."""
    assert got.losses == want.losses
    assert got.norms == want.norms
    assert got.dropped == want.dropped
    for mine, theirs in zip(got.gradients, want.gradients, strict=True):
        assert [name for name in theirs if not torch.equal(mine[name], theirs[name])] == []
    assert [name for name, value in want.parameters.items() if not torch.equal(got.parameters[name], value)] == []


KEPT = {
    "whole": (),
    "offload": ("--recompute-offload",),
    "partition": ("--recompute-partition",),
    "both": ("--recompute-offload", "--recompute-partition"),
}
ALL = 6
# Every model, mp 1 and 2 with pp 1 and 2, size of the units, and way to keep what they keep.
FACTORS = (("moe", "ernie"), ("alone", "mp", "pp", "mp x pp"), (1, 2, ALL), tuple(KEPT))


def _pieces_have_ranks(chosen: tuple[object, ...]) -> bool:
    return "mp" in str(chosen[1]) or chosen[3] in ("whole", "offload")


def _table() -> list[ParameterSet]:
    """The full product; what the covering set leaves out is run by ``-m table``."""
    covering = set(pairwise(FACTORS, _pieces_have_ranks))
    rows = [row for row in itertools.product(*FACTORS) if _pieces_have_ranks(row)]
    return [pytest.param(*row, marks=[] if row in covering else [pytest.mark.table]) for row in rows]


@pytest.mark.parametrize(("kind", "layout", "interval", "kept"), _table())
def test_interval(kind: str, layout: str, interval: int, kept: str) -> None:
    """Every layer kind of both models, experts that drop tokens included; what units keep comes back bit for bit."""
    drops = DROPS if kind == "moe" else ()
    got = train(kind, layout, *drops, "--recompute-interval", str(interval), *KEPT[kept])
    assert_same(got, train(kind, layout, *drops))


@pytest.mark.parametrize(
    ("layout", "interval", "kept"),
    [
        ("sp", 1, "offload"),
        ("sp", 2, "whole"),
        ("sp", ALL, "partition"),
        ("ep", 1, "whole"),
        ("ep", 2, "offload"),
        ("stage 2", 2, "whole"),
        ("stage 3", 1, "offload"),
        ("stage 3", 2, "whole"),
    ],
)
def test_interval_elsewhere(layout: str, interval: int, kept: str) -> None:
    """With sequence parallelism the partition is off."""
    got = train("moe", layout, *DROPS, "--recompute-interval", str(interval), *KEPT[kept])
    assert_same(got, train("moe", layout, *DROPS))


@pytest.mark.parametrize("layout", WITHOUT_STAGES)
def test_selective(layout: str) -> None:
    """Attention's core with its dropout, activation functions of dense layers and experts."""
    got = train("moe", layout, *DROPS, "--recompute-granularity", "selective")
    assert_same(got, train("moe", layout, *DROPS))


@pytest.mark.parametrize("layout", ["alone", "mp", "sp", "stage 3"])
def test_encoder(layout: str) -> None:
    """Post-norm layers, and attention that sees padding."""
    for flags in (("--recompute-interval", "3"), ("--recompute-granularity", "selective")):
        assert_same(train("ernie", layout, *flags), train("ernie", layout))


def test_selective_stages() -> None:
    assert_same(train("moe", "pp", *DROPS, "--recompute-granularity", "selective"), train("moe", "pp", *DROPS))


@pytest.mark.parametrize("stage", ["1", "3"])
def test_bytes_and_drops_are_counted_once(stage: str) -> None:
    """What a recomputed forward sends, drops and routes is in no record."""
    layout = ("--ep-degree", "2", "--mp-degree", "2", "--sharding-stage", stage, *DROPS, "--train-iters", "3")
    plain, again = (run(4, "moe", *layout, *more) for more in ((), ("--recompute-interval", "1")))
    assert [record.loss for record in again.records] == [record.loss for record in plain.records]
    assert [record.sent_bytes for record in again.records] == [record.sent_bytes for record in plain.records]
    assert [record.dropped_tokens for record in again.records] == [record.dropped_tokens for record in plain.records]
    assert any(record.dropped_tokens for record in plain.records)


def test_resumed_runs_draw_the_same_masks(tmp_path: Path) -> None:
    """Streams are functions of the seed and the micro-batch: nothing but these is in a checkpoint."""
    flags = (*LAYOUTS["mp"][1], *DROPOUT, "--recompute-interval", "1")
    whole = run(2, "ernie", *flags)
    run(2, "ernie", *flags, "--train-iters", "3", "--lr-decay-iters", "6", "--save", str(tmp_path))
    resumed = run(2, "ernie", *flags, "--load", str(tmp_path))
    assert [record.loss for record in resumed.records] == [record.loss for record in whole.records[3:]]


@pytest.mark.parametrize("layout", ["pp", "ep", "stage 2", "stage 3"])
def test_masks_depend_on_no_layout_but_mp_and_cp(layout: str) -> None:
    flags = ("--dtype", "fp64", "--global-batch-size", "8", "--num-layers", "6")
    split, whole = train("moe", layout, *flags), train("moe", "alone", *flags)
    assert split.losses == pytest.approx(whole.losses, rel=1e-12)
    assert split.norms == pytest.approx(whole.norms, rel=1e-12)


def pretended(rank: int, world_size: int, rendezvous: str, *flags: str) -> dict[str, int]:
    """What rank 5 of 8 sends in a step, on fake tensors."""
    line = (*MODELS["gpt"], *COMMON, "--micro-batch-size", "1", "--mp-degree", "2", "--num-layers", "4", *flags)
    config = parse("moe", last_wins(line), {"WORLD_SIZE": "8", "RANK": "5"})
    with pretend(config, 5) as trainer:
        return trainer.step().sent_bytes


def test_pretended_ranks_recompute() -> None:
    """The pieces of two units are gathered: two of four stay whole. Nothing else is sent more."""
    plain = run_ranks(1, pretended, group=False)[0]
    got = run_ranks(1, pretended, "--recompute-interval", "1", *KEPT["both"], group=False)[0]
    piece = 16 * 32 * 4 // 2
    assert got == plain | {"mp/all_gather": plain.get("mp/all_gather", 0) + 2 * piece}
