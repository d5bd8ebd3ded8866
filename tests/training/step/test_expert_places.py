"""Runs whose experts move between ranks: the bits of a run whose experts stay, and checkpoints that know no places."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megapar.checkpoints.export.export import collect_all
from megapar.checkpoints.save_load.local_saves import LocalSaves
from megapar.core.comm.axis import Axis
from megapar.core.device.accelerators import pick
from megapar.data.batches import Loader
from megapar.training.step.expert_places import RowMoves, Rows, move_rows
from megapar.training.step.observer import StepObserver
from megapar.training.step.result import StepResult
from tests.support.ranks import run_ranks
from tests.support.training import COMMON, SMALL, last_wins, make_trainer

FLAGS = ("--num-experts", "8", "--num-layers", "3", "--clip-grad", "0.5", "--moe-dispatch", "plain")
MOVES = ("--moe-rebalance-interval", "2")
STAYS = ("--moe-rebalance-interval", "1000")
TWO = ("--ep-degree", "2")
CUT = ("--ep-degree", "2", "--sharding-degree", "4", "--sharding-stage", "2")
NODES = ("--ep-degree", "4", "--moe-dispatch", "node", "--ranks-per-node", "2", "--dtype", "fp64")


class Skewed(StepObserver):
    """Sends every other token to the first experts, which are on one rank."""

    def experts_chosen(self, layer: int, experts_Tk: Tensor) -> Tensor:
        chosen = experts_Tk.clone()
        chosen[::2] = torch.arange(chosen.shape[1])
        return chosen


@dataclass
class Run:
    """What a run left. state: weights and moments of all parameters; rows: the placement of each step."""

    losses: list[float]
    norms: list[float]
    state: dict[str, Tensor]
    rows: list[Rows]
    busiest: list[float | None]


def _train(rank: int, world_size: int, rendezvous: str, flags: Sequence[str]) -> Run:
    # A killed run leaves its local checkpoints.
    with patch.dict(os.environ, TORCHELASTIC_RUN_ID="job"), patch.object(LocalSaves, "remove", LocalSaves.join_save):
        line = last_wins((*SMALL["moe"], *COMMON), (*FLAGS, *flags))
        trainer = make_trainer("moe", line, rendezvous, observer=Skewed(), keep_records=True)
        rows, step = [], trainer.stepper.step

        def counted(loader: Loader) -> StepResult:
            result = step(loader)
            rows.append(trainer.places.rows)
            return result

        trainer.stepper.step = counted  # type: ignore[method-assign]
        records = trainer.train().records
        job, state = trainer.job, {}
        masters = [shard.master for shard in job.sharding.master_shards]
        for kind, tensors in (
            ("master", masters),
            *((name, job.optimizer.state(name)) for name in job.optimizer.states),
        ):
            for name, whole in collect_all(trainer.world, job.table, job.sharding, tensors):
                state[f"{kind} {name}"] = whole.clone()
        trainer.world.close()
    busiest = [record.expert_load[0].get("busiest_rank") for record in records]
    return Run([record.loss for record in records], [record.grad_norm for record in records], state, rows, busiest)


@cache
def train(world_size: int, *flags: str) -> Run:
    return run_ranks(world_size, _train, flags, group=False)[0]


def moved(run: Run) -> bool:
    return len(set(run.rows)) > 1


def assert_same(one: Run, other: Run) -> None:
    assert one.losses == other.losses
    assert one.norms == other.norms
    assert_state(one, other)


def assert_state(one: Run, other: Run) -> None:
    assert one.state.keys() == other.state.keys()
    assert [name for name, value in one.state.items() if not torch.equal(value, other.state[name])] == []


@pytest.mark.parametrize(
    ("ranks", "layout"), [pytest.param(2, TWO, id="two"), pytest.param(4, CUT, id="cut", marks=pytest.mark.table)]
)
def test_moving_experts_changes_no_bit(ranks: int, layout: tuple[str, ...]) -> None:
    stays, moves = train(ranks, *layout, *STAYS), train(ranks, *layout, *MOVES)
    assert not moved(stays)
    assert moved(moves)
    assert_same(moves, stays)
    assert (moves.busiest[-1] or 0) < (stays.busiest[-1] or 0)


@pytest.mark.table
def test_without_clipping_it_is_the_run_without_the_flag() -> None:
    """The flag changes how the norm is added, by which gradients are clipped."""
    free = (*TWO, "--clip-grad", "0")
    stays, moves = train(2, *free), train(2, *free, *MOVES)
    assert moved(moves)
    assert moves.losses == stays.losses
    assert_state(moves, stays)


@pytest.mark.table
def test_by_node_it_changes_rounding_only() -> None:
    stays, moves = train(4, *NODES, *STAYS), train(4, *NODES, *MOVES)
    assert moved(moves)
    assert moves.losses == pytest.approx(stays.losses, rel=1e-12)
    for name, value in moves.state.items():
        torch.testing.assert_close(value, stays.state[name], rtol=1e-12, atol=1e-14)


def test_a_run_goes_on_after_a_move_and_on_another_layout(tmp_path: Path) -> None:
    stops = train(2, *TWO, *MOVES, "--save", str(tmp_path), "--exit-interval", "3")
    assert moved(stops)
    goes_on = train(2, *TWO, *MOVES, "--load", str(tmp_path))
    whole = train(2, *TWO, *MOVES)
    assert goes_on.rows[0] == stops.rows[-1] == whole.rows[2]
    assert goes_on.losses == whole.losses[3:]
    assert_state(goes_on, whole)
    alone = ("--load", str(tmp_path), "--train-iters", "3", "--override-opt-param-scheduler")
    assert_state(train(4, "--ep-degree", "4", *alone), stops)


@pytest.mark.table
def test_a_restart_takes_experts_where_they_were(tmp_path: Path) -> None:
    local = ("--local-checkpoint-interval", "1", "--local-checkpoint-dir", str(tmp_path))
    stops = train(2, *TWO, *MOVES, *local, "--exit-interval", "5")
    goes_on, whole = train(2, *TWO, *MOVES, *local), train(2, *TWO, *MOVES)
    assert moved(stops)
    assert goes_on.rows[0] == stops.rows[-1]
    assert goes_on.losses == whole.losses[4:]
    assert_state(goes_on, whole)


def test_moves_agree_on_both_sides() -> None:
    before, after = (0, 1, 2, 3, 4, 5), (4, 1, 0, 3, 2, 5)
    ranks = [RowMoves.between(before, after, range(first, first + 2), 3) for first in (0, 2, 4)]
    for source in range(3):
        for target in range(3):
            assert ranks[source].send[target] == ranks[target].receive[source]
    assert ranks[0] == RowMoves((0,), (0,), (0, 1, 0), (0, 0, 1))


def _exchange(rank: int, world_size: int, rows: int) -> list[Tensor]:
    """Slots 0 and 2 of four change places; ``rows`` of a rank's two slots are in this shard's piece."""
    axis = Axis("ep", world_size, rank, dist.group.WORLD, tuple(range(world_size)))
    moves = RowMoves.between((0, 1, 2, 3), (2, 1, 0, 3), range(2 * rank, 2 * rank + rows), world_size)
    tensors = [torch.full((rows, 2, 3), float(rank)), torch.full((rows, 4), 10.0 + rank)]
    move_rows(tensors, moves, axis, pick("cpu"))
    return tensors


def test_rows_of_all_tensors_move_together() -> None:
    for rank, (weight, bias) in enumerate(run_ranks(2, _exchange, 2)):
        assert weight[:, 1, 2].tolist() == [1 - rank, rank]
        assert bias[:, 3].tolist() == [11 - rank, 10 + rank]


def test_ranks_whose_piece_is_empty_take_part() -> None:
    for weight, bias in run_ranks(2, _exchange, 0):
        assert (weight.shape, bias.shape) == ((0, 2, 3), (0, 4))
