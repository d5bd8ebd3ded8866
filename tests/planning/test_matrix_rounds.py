"""Rounds of matrices in a plan: those of the run's own plan, their bytes, memory and time."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from megapar.arguments import parse
from megapar.core.device import kinds
from megapar.core.optimizer.matrix_plan import Matrix, flops, plan_matrices
from megapar.planning.devices import device_kind
from megapar.planning.matrix_rounds import stage_rounds
from megapar.planning.plan import Plan
from megapar.planning.planned_run import PlannedRun
from megapar.planning.text import describe
from megapar.training.building.matrices import boxes_of, matrices_of

MODEL = (
    *("--num-experts", "4", "--first-k-dense", "1", "--num-layers", "3", "--hidden-size", "64", "--seq-length", "32"),
    *("--num-attention-heads", "4", "--num-query-groups", "2", "--moe-ffn-hidden-size", "24", "--vocab-size", "128"),
    *("--micro-batch-size", "1", "--dtype", "bf16"),
)
WIDE = (
    *("--num-experts", "0", "--num-layers", "2", "--hidden-size", "4096", "--ffn-hidden-size", "12288"),
    *("--num-attention-heads", "32", "--seq-length", "512", "--vocab-size", "128", "--dtype", "bf16"),
)
LAYOUTS = {
    "alone": (1, ()),
    "sharding": (4, ()),
    "mp": (4, ("--mp-degree", "2", "--muon-qkv-split", "group")),
    "experts": (8, ("--mp-degree", "2", "--ep-degree", "2", "--sequence-parallel")),
    "replicas": (8, ("--sharding-degree", "2", "--hybrid-dp", "--ep-degree", "2")),
    "stage 3": (4, ("--sharding-stage", "3", "--muon-qkv-split", "head")),
    "stages": (4, ("--pp-degree", "2", "--gradient-merge-acc-step", "2")),
}


def planned(world_size: int, *flags: str, device: str = "h100-80g") -> PlannedRun:
    line = ["--optimizer", "muon", *MODEL, *flags, "--validate-only", "--world-size", str(world_size)]
    return PlannedRun(parse("moe", line, {}), device_kind(device))


@pytest.mark.parametrize("most", [1, 5000, 1 << 26])
@pytest.mark.parametrize("name", LAYOUTS)
def test_they_are_those_of_the_runs_plan(name: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, classes = kinds._tables()
    smaller = {kind: replace(one, whole_elements=most) for kind, one in classes.items()}
    monkeypatch.setattr(kinds, "_tables", lambda: (rows, smaller))
    world_size, flags = LAYOUTS[name]
    run = planned(world_size, *flags)
    for stage in range(run.config.grid.pp):
        ranks = run.config.grid.group(("dp", "sharding", "cp", "mp"), run.config.grid.rank(pp=stage))
        split = run.config.optimizer.muon_qkv_split
        matrices = [matrix for row in run.rows(stage) if row.matrix for matrix in matrices_of(row, split)]
        boxes = boxes_of(run.config.grid, ranks, full=run.cuts_parameters)

        def work(matrix: Matrix) -> int:
            return flops(matrix.rows, matrix.columns, 5)

        plans = [plan_matrices(matrices, boxes, place, len(ranks), work, most) for place in range(len(ranks))]
        found = stage_rounds(run, stage)
        for mine, theirs in zip(found.first, plans[0].rounds, strict=True):
            assert mine.sent == sum(piece.part.numel for row in theirs.sent for piece in row)
            assert mine.given == sum(piece.part.numel for row in theirs.given for piece in row)
            assert mine.returned == sum(piece.part.numel for row in theirs.returned for piece in row)
            assert mine.kept == sum(piece.part.numel for piece in theirs.returned[0] if piece.matrix in theirs.owned)
            assert mine.whole == sum(matrices[number].box.numel for number in theirs.owned)
            assert (mine.received, mine.updated) == (sum(map(len, theirs.received)), sum(map(len, theirs.returned)))
        load = Counter[int]()
        for matrix, owner in zip(matrices, plans[0].owners, strict=True):
            load[owner] += work(matrix)
        products = [product for one in found.busiest for product in one.products(5)]
        assert sum(product.flops for product in products) == max(load.values())


def test_other_optimizers_have_none() -> None:
    run = PlannedRun(parse("moe", [*MODEL, "--validate-only"], {}), device_kind("h100-80g"))
    assert stage_rounds(run, 0).held == stage_rounds(run, 0).sent == 0
    assert not any(row.matrix for row in run.table)


def test_a_matrix_has_one_state_and_other_parameters_two() -> None:
    run = planned(4)
    rows = [row for row in run.rows(0) if row.trainable]
    words = sum(run.row_numel(row) * (2 if row.matrix else 3) for row in rows)
    assert Plan(run.config, run.kind).memory[0].optimizer == 4 * words


def test_the_momentum_of_a_matrix_may_have_two_bytes() -> None:
    run = planned(4, "--exp-avg-dtype", "bf16")
    rows = [row for row in run.rows(0) if row.trainable]
    assert Plan(run.config, run.kind).memory[0].optimizer == sum(
        run.row_numel(row) * (4 + 2 if row.matrix else 4 + 2 + 4) for row in rows
    )


def test_iterations_take_the_time_of_their_steps_and_share_the_work() -> None:
    def plan(world_size: int, *flags: str) -> Plan:
        line = [*WIDE, *flags, "--validate-only", "--world-size", str(world_size)]
        return Plan(parse("moe", line, {}), device_kind("h100-80g"))

    muon = ("--optimizer", "muon")
    alone, shared, longer = plan(1, *muon), plan(2, *muon), plan(1, *muon, "--muon-num-ns-steps", "10")
    assert shared.speed.newton_schulz_seconds == pytest.approx(alone.speed.newton_schulz_seconds / 2, rel=0.1)
    assert 1.7 < longer.speed.newton_schulz_seconds / alone.speed.newton_schulz_seconds < 2
    assert alone.speed.matrix_seconds == 0 < shared.speed.matrix_seconds
    assert "  Newton-Schulz  " in describe(shared)
    assert "Newton-Schulz" not in describe(plan(2))
    assert shared.to_dict()["newton_schulz_seconds"] == shared.speed.newton_schulz_seconds


def test_two_thousand_ranks_know_each_layer_once() -> None:
    flags = ["--config", "configs/deepseek-v3.yaml", "--data-path", "mock", "--validate-only", "--optimizer", "muon"]
    run = PlannedRun(parse("moe", flags, {}), device_kind("h800-80g"))
    assert stage_rounds(run, 3) is stage_rounds(run, 9)  # four layers each, on as many ranks
    assert stage_rounds(run, 0) is not stage_rounds(run, 3)
