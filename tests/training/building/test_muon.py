"""Which parameters are matrices, how projections to heads are cut, and steps that are skipped."""

from __future__ import annotations

import os
import zlib
from dataclasses import replace
from datetime import timedelta

import pytest
import torch

from megapar.arguments import parse
from megapar.core.comm.world import World
from megapar.core.device.base import Device
from megapar.core.device.kinds import device_class
from megapar.core.optimizer.muon import COEFFICIENTS, SCALES, MuonOptimizer, orthogonalize
from megapar.model.spec import table_of
from megapar.training.building.matrices import marked, matrices_of
from megapar.training.building.parallelize import parallelize
from tests.model.small import DENSE, ERNIE, LATENT, MOE
from tests.support.ranks import run_ranks
from tests.support.training import COMMON, SMALL, last_wins, run

FLAGS = ("--dtype", "fp64", "--optimizer", "muon", "--lr", "0.02", "--muon-extra-scale-factor", "0.2")


def test_matrices_are_weights_of_layers_without_routers() -> None:
    table = {spec.name: spec.matrix for spec in marked(table_of(MOE))}
    assert {name for name, matrix in table.items() if matrix and ".1." in name} == {
        *(f"layers.1.{name}.weight" for name in ("attention.qkv", "attention.proj")),
        *(f"layers.1.moe.{name}" for name in ("experts.gate_up", "experts.down")),
        *(f"layers.1.moe.shared.{name}.weight" for name in ("gate_up", "down")),
    }
    assert not any(matrix for name, matrix in table.items() if "embedding" in name or "head" in name or "norm" in name)
    assert any(spec.matrix for spec in marked(table_of(ERNIE)))


def test_the_block_of_multi_token_prediction_has_matrices_and_the_head_has_none() -> None:
    table = {spec.name: spec.matrix for spec in marked(table_of(replace(MOE, mtp_depth=1)))}
    assert {"mtp.proj.weight", "mtp.block.attention.qkv.weight"} <= {name for name, matrix in table.items() if matrix}
    assert not any(
        matrix for name, matrix in table.items() if "norm" in name or name.startswith(("lm_head", "embedding"))
    )


@pytest.mark.parametrize(
    ("split", "shapes"),
    [
        ("tensor", [(32, 32), (16, 32), (16, 32)]),
        ("fused", [(64, 32)]),
        ("group", [(16, 32)] * 2 + [(8, 32)] * 4),
        ("head", [(8, 32)] * 8),
    ],
)
def test_projections_to_heads_are_cut_as_asked(split: str, shapes: list[tuple[int, int]]) -> None:
    spec = next(spec for spec in table_of(DENSE) if spec.name.endswith("qkv.weight"))
    made = matrices_of(spec, split)
    assert [(matrix.rows, matrix.columns) for matrix in made] == shapes
    assert sum(matrix.box.numel for matrix in made) == spec.numel
    covered = torch.zeros(spec.shape)
    for matrix in made:
        covered[matrix.box.slices] += 1
    assert covered.eq(1).all()


@pytest.mark.parametrize("split", ["tensor", "head"])
def test_latents_are_cut_as_deepseek_stores_them(split: str) -> None:
    shapes = {
        spec.name.rpartition("attention.")[2]: [(matrix.rows, matrix.columns) for matrix in matrices_of(spec, split)]
        for spec in marked(table_of(LATENT))
        if spec.matrix and spec.unit == "layers.0" and "attention" in spec.name
    }
    made = {"q_up.weight": (96, 16), "kv_up.weight": (80, 16)}
    if split == "head":
        made = {name: (rows // 4, columns) for name, (rows, columns) in made.items()}
    assert shapes == {
        "down.weight": [(16, 32), (32, 32)],  # of queries, and of keys and values with the rotary key
        **{name: [shape] * (4 if split == "head" else 1) for name, shape in made.items()},
        "proj.weight": [(32, 48)],
    }


def test_every_expert_is_a_matrix() -> None:
    table = {spec.name: spec for spec in table_of(MOE)}
    assert len(matrices_of(table["layers.1.moe.experts.gate_up"], "tensor")) == 8
    assert {(m.rows, m.columns) for m in matrices_of(table["layers.1.moe.experts.down"], "tensor")} == {(32, 16)}


def made(*flags: str):  # type: ignore[no-untyped-def]
    """Return the job of one process, with gradients."""
    config = parse("moe", last_wins((*SMALL["moe"], *COMMON), (*FLAGS, *flags)), {})
    job = parallelize(config, World.start(config.grid, Device(), timedelta(seconds=60), None))
    generator = torch.Generator().manual_seed(5)
    for shard in job.sharding.master_shards:
        shard.grad = torch.randn(shard.master.shape, dtype=torch.float64, generator=generator)
    return job


def pieces(job, tensors):  # type: ignore[no-untyped-def]
    return {view.spec.name: view.tensor.clone() for view in job.sharding.views(tensors)}


def test_a_step_by_hand() -> None:
    job = made()
    shards = job.sharding.master_shards
    before = pieces(job, [shard.master for shard in shards])
    gradients = pieces(job, [shard.grad for shard in shards])
    job.optimizer.step(0.02)
    after = pieces(job, [shard.master for shard in shards])
    name = "layers.1.attention.proj.weight"
    gradient = gradients[name].reshape(32, 32)
    momentum = 0.05 * gradient
    update = orthogonalize(gradient.lerp(momentum, 0.95)[None], COEFFICIENTS["quintic"], 5)[0]
    want = before[name].reshape(32, 32) * (1 - 0.02 * 0.1) - 0.02 * 0.2 * SCALES["spectral"](32, 32) * update
    torch.testing.assert_close(after[name].reshape(32, 32), want, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(pieces(job, job.optimizer.state("momentum_buffer"))[name].reshape(32, 32), momentum)
    others = pieces(job, job.optimizer.state("exp_avg"))
    assert "embedding.word.weight" in others
    assert name not in others
    assert job.optimizer.num_steps == 1


def test_momentum_in_bf16_is_right_in_the_mean() -> None:
    """A momentum moves to 0.05 of a fixed gradient, between neighbours whose distance is 1/128 of the lower power."""
    job = made("--exp-avg-dtype", "bf16")
    for shard in job.sharding.master_shards:
        shard.grad = torch.full_like(shard.master, 1.0)
    job.optimizer.step(0.02)
    momenta = [state for state in job.optimizer.state("momentum_buffer") if state is not None]
    values = torch.cat([state.flatten() for state in momenta if state.any()])
    assert values.dtype == torch.bfloat16
    assert len(values.unique()) == 2
    assert values.double().mean().item() == pytest.approx(0.05, rel=1e-4)


def test_a_matrix_without_a_gradient_moves_by_decay_only() -> None:
    job = made()
    for shard in job.sharding.master_shards:
        shard.grad = torch.zeros_like(shard.master)
    before = pieces(job, [shard.master for shard in job.sharding.master_shards])
    job.optimizer.step(0.02)
    after = pieces(job, [shard.master for shard in job.sharding.master_shards])
    for name in (name for name in after if name.endswith("proj.weight")):
        torch.testing.assert_close(after[name], before[name] * (1 - 0.02 * 0.1), rtol=1e-15, atol=0)


@pytest.mark.parametrize("flags", [(), ("--exp-avg-dtype", "bf16")])
@pytest.mark.parametrize("found", [0.0, 1.0])
def test_a_device_that_finds_a_bad_gradient_skips_the_update(found: float, flags: tuple[str, ...]) -> None:
    job, plain = made(*flags), made(*flags)
    optimizer = job.optimizer
    assert isinstance(optimizer, MuonOptimizer)
    if found:
        for shard in job.sharding.master_shards:
            shard.grad[0] = torch.nan
    before = [shard.master.clone() for shard in job.sharding.master_shards]
    optimizer.step(0.02, torch.tensor(found))
    plain.optimizer.step(0.02)
    wanted = before if found else [shard.master for shard in plain.sharding.master_shards]
    for shard, want in zip(job.sharding.master_shards, wanted, strict=True):
        torch.testing.assert_close(shard.master, want, rtol=1e-14, atol=1e-15)
    assert optimizer.num_steps == 1 - found
    if found:
        assert not any(state.any() for state in optimizer.state("momentum_buffer") if state is not None)


def test_several_rounds_take_the_step_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = [made()]
    few = replace(device_class("cpu"), whole_elements=1500)
    monkeypatch.setattr("megapar.training.building.muon.device_class", lambda _: few)
    jobs.append(made())
    assert len(jobs[1].optimizer._plan.rounds) > 5
    for job in jobs:
        job.optimizer.step(0.02)
    for one, two in zip(*(job.sharding.master_shards for job in jobs), strict=True):
        torch.testing.assert_close(one.master, two.master, rtol=1e-13, atol=1e-14)


def gradient_of(spec):  # type: ignore[no-untyped-def]
    """The gradient of a whole parameter, by its name."""
    generator = torch.Generator().manual_seed(zlib.crc32(spec.name.encode()))
    return torch.randn(spec.shape, dtype=torch.float64, generator=generator)


def moved(rank: int, world_size: int, rendezvous: str, flags: tuple[str, ...]):  # type: ignore[no-untyped-def]
    """This rank's pieces of matrices: parameter -> (place, what a step without decay moves it by)."""
    line = last_wins((*SMALL["moe"], *COMMON), (*FLAGS, "--weight-decay", "0", *flags))
    config = parse("moe", line, dict(os.environ))
    world = World.start(config.grid, Device(), timedelta(seconds=60), f"file://{rendezvous}")
    job = parallelize(config, world)
    shards = job.sharding.master_shards
    for shard in shards:
        shard.grad = torch.zeros_like(shard.master)
    for view in job.sharding.views([shard.grad for shard in shards]):
        view.tensor.copy_(gradient_of(view.spec)[view.box.slices])
    before = pieces(job, [shard.master for shard in shards])
    job.optimizer.step(0.02)
    views = list(job.sharding.views([shard.master for shard in shards]))
    result = {v.spec.name: (v.box.slices, v.tensor - before[v.spec.name]) for v in views if v.spec.matrix}
    world.close()
    return result


@pytest.mark.parametrize("flags", [("--mp-degree", "2"), ("--sharding-degree", "2"), ("--sharding-stage", "3")])
def test_ranks_move_whole_matrices_where_their_pieces_alone_would_move_otherwise(flags: tuple[str, ...]) -> None:
    (one,) = run_ranks(1, moved, (), group=False)
    two = run_ranks(2, moved, flags, group=False)
    assert one.keys() == two[0].keys()
    for name, (_, want) in one.items():
        whole = torch.full_like(want, torch.nan)
        for rank in two:
            place, piece = rank[name]
            whole[place] = piece
        assert (whole - want).norm() <= 1e-12 * want.norm(), name
    spec = next(spec for spec in table_of(MOE) if spec.name == "layers.1.attention.proj.weight")
    _, want = one[spec.name]
    apart, gradient = torch.empty_like(want), gradient_of(spec)
    for rank in two:
        place, piece = rank[spec.name]
        rows = gradient[place].flatten(1) if piece.shape[0] < 32 else gradient[place].reshape(32, -1)
        made = orthogonalize(rows[None], COEFFICIENTS["quintic"], 5)[0]
        apart[place] = -0.02 * 0.2 * SCALES["spectral"](32, 32) * made.reshape(piece.shape)
    assert (apart - want).norm() > 0.1 * want.norm()


def test_a_run_goes_on_on_another_layout(tmp_path) -> None:  # type: ignore[no-untyped-def]
    save = ("--save", str(tmp_path / "c"), "--save-interval", "3")
    whole = run(1, "moe", *FLAGS, "--save", str(tmp_path / "whole"))
    run(2, "moe", *FLAGS, "--mp-degree", "2", "--exit-interval", "3", *save)
    rest = run(4, "moe", *FLAGS, "--sharding-degree", "2", "--ep-degree", "2", "--dp-degree", "2", "--load", save[1])
    assert [record.loss for record in rest.records] == pytest.approx([r.loss for r in whole.records[3:]], rel=1e-12)


def test_sizes_change_nothing_of_the_marks() -> None:
    assert [spec.matrix for spec in table_of(replace(MOE, num_layers=1, first_k_dense=0))] == [False] * len(
        table_of(replace(MOE, num_layers=1, first_k_dense=0))
    )
