"""Every file in configs/ starts and steps at its own number of ranks, as rank 0 in fake memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml
from torch._subclasses.fake_tensor import FakeTensor

from megapar.arguments import Config, parse
from megapar.tools.tracing.pretend import pretend
from megapar.training.step.schedules import make_progressive
from tests.test_configs import FILES, kind_of

pytestmark = pytest.mark.presets

FEW = 4
"""Micro-batches of a step without a pipeline, which has two for each stage."""


def ranks_of(path: Path) -> int:
    """What the file says, or two where it runs on any number."""
    return int(yaml.safe_load(path.read_text(encoding="utf-8")).get("world_size", 2))


def first_batch(config: Config) -> int:
    """Samples of the first step, where batches grow, too."""
    grows = make_progressive(config)
    return config.phases.spans[0].batch.at(0) if grows is None else grows.batch_at(0)


def few_micro_batches(path: Path) -> Config:
    """The file for rank 0, with so few micro-batches in a step that a pipeline still fills, runs and empties.

    Those that a step of 128 has besides repeat what these do.
    """
    flags = ["--config", str(path), "--data-path", "mock", "--device", "cpu"]
    environ = {"WORLD_SIZE": str(ranks_of(path)), "RANK": "0"}
    config = parse(kind_of(path), flags, environ)
    grid = config.grid
    samples = config.training.micro_batch_size * grid.size("dp") * grid.size("sharding")
    few = max(FEW, 2 * grid.size("pp"))
    if first_batch(config) <= few * samples:
        return config
    batch = ["--global-batch-size", str(few * samples), "--gradient-merge-acc-step", str(few)]
    config = parse(kind_of(path), [*flags, *batch], environ)
    assert first_batch(config) == few * samples
    return config


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_it_steps_as_rank_0_of_its_own_world(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # where it would save
    config = few_micro_batches(path)
    with pretend(config, 0) as trainer:
        step = trainer.step()
        assert trainer.world.grid.world_size == ranks_of(path)
        assert isinstance(step.norm, torch.Tensor)
        assert all(isinstance(shard.master, FakeTensor) for shard in trainer.job.sharding.master_shards)
        assert trainer.progress.consumed_samples == first_batch(config)
        assert any(step.sent_bytes.values()) == (config.grid.world_size > 1)
