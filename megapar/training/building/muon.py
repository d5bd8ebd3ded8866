"""Muon for a run: its matrices on this rank's stage, their plan, and the optimizer."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megapar.arguments import Config
from megapar.core.comm.world import World
from megapar.core.device.kinds import device_class
from megapar.core.device.tensor_piece import ShardPieces
from megapar.core.optimizer.matrix_plan import flops, plan_matrices
from megapar.core.optimizer.muon import MuonOptimizer, MuonRule
from megapar.core.optimizer.update_rule import AdamW
from megapar.core.sharding.sharding import Sharding
from megapar.model.parameter import ParameterSpec
from megapar.training.building.matrices import boxes_of, matrices_of
from megapar.training.step.dtypes import DTYPES


def make_muon(
    config: Config,
    world: World,
    sharding: Sharding,
    table: Sequence[ParameterSpec],
    others: AdamW,
    pieces: Sequence[ShardPieces] | None,
) -> MuonOptimizer:
    """Return the optimizer of this rank's masters. Collective. pieces: Per master shard, if something is rounded."""
    options, grid = config.optimizer, world.grid
    stage = world.make_stage()
    here = grid.coordinates(world.rank)["pp"]
    specs = [spec for spec in table if spec.matrix and spec.stage == here]
    matrices = [matrix for spec in specs for matrix in matrices_of(spec, options.muon_qkv_split)]
    dtype = DTYPES.get(options.muon_ns_dtype) or _dtype(world, sharding)
    rule = MuonRule(
        momentum=options.muon_momentum,
        nesterov=options.muon_use_nesterov,
        steps=options.muon_num_ns_steps,
        coefficients=options.muon_coefficient_type,
        scale=options.muon_scale_mode,
        extra_scale=options.muon_extra_scale_factor,
        weight_decay=options.weight_decay,
        dtype=dtype,
    )
    plan = plan_matrices(
        matrices,
        boxes_of(grid, stage.ranks, full=sharding.full),
        stage.rank,
        stage.size,
        lambda matrix: flops(matrix.rows, matrix.columns, rule.steps),
        device_class(world.device.type).whole_elements,
    )
    return MuonOptimizer(sharding, matrices, plan, stage, rule, others, pieces)


def _dtype(world: World, sharding: Sharding) -> torch.dtype:
    """Return the dtype of ``--muon-ns-dtype auto``: that of the masters on a CPU and in fp64, else bf16."""
    masters = sharding.master_shards[0].dtype
    return torch.bfloat16 if world.device.is_async and masters != torch.float64 else masters
