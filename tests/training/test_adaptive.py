"""Adaptive recompute in whole runs."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megapar.arguments import parse
from megapar.core.attention_mask import AttentionMask
from megapar.core.device.attention.mask import DeviceMask
from megapar.core.device.base import Device
from megapar.core.device.memory_tracker import MemoryTracker
from megapar.core.recompute.adaptive import Adaptive
from megapar.core.units import MEGABYTE
from megapar.errors import TrainingError
from megapar.model.layers.context import Context
from megapar.trainer import Trainer, train
from tests.equivalence.table import COMMON, MODELS
from tests.support.ranks import run_ranks
from tests.support.training import make_trainer

FLAGS = (*MODELS["moe"], *COMMON, "--micro-batch-size", "2", "--global-batch-size", "8", "--log-interval", "100")
PEAK = 1 << 29  # instead of this process' own, which depends on what ran before


def test_it_measures_what_a_layer_keeps() -> None:
    """What a recomputation leaves is what a forward leaves."""
    trainer = make_trainer("moe", [*FLAGS, "--adaptive-recompute-device-size", "1024"])
    config = trainer.config
    adaptive = trainer.job.model.recompute.choice if trainer.job.model.recompute else None
    assert isinstance(adaptive, Adaptive)
    trainer.step()
    x = torch.randn(2, config.model.seq_length, config.model.hidden_size, requires_grad=True)
    mask = DeviceMask(AttentionMask(2, config.model.seq_length, causal=True))
    context = Context(mask, None, 2 * config.model.seq_length, _angles(trainer, config))
    for layer, block in enumerate(trainer.job.model.layers.values()):
        with MemoryTracker() as tracker:
            y, stats = block(x, context)
            outside = y.untyped_storage().nbytes()
            if stats is not None:
                outside += sum(
                    t.untyped_storage().nbytes() for t in stats if isinstance(t, torch.Tensor) and t.grad_fn is None
                )
            kept = tracker.bytes - outside
        assert adaptive._kept[layer] == pytest.approx(kept, rel=0.05)


def _angles(trainer: Trainer, config: Any) -> Any:
    from megapar.model.layers.rotary import RotaryEmbedding

    positions = torch.arange(config.model.seq_length).expand(2, -1)
    return RotaryEmbedding(config.model.head_dim, config.model.rope_theta, torch.float32).angles(positions)


def run(rank: int, world_size: int, rendezvous: str, megabytes: float | None) -> tuple[list[float], Any]:
    """(losses of six steps, the layers chosen)."""
    more = () if megabytes is None else ("--adaptive-recompute-device-size", str(megabytes), "--device", "cpu")
    chosen: list[Any] = []
    end_step = Adaptive.end_step

    def noted(adaptive: Adaptive, *args: Any) -> Any:
        result = end_step(adaptive, *args)
        if result is not None:
            chosen.append(result.layers)
        return result

    with (
        patch.object(Device, "peak_memory_bytes", lambda device: PEAK - rank),
        patch.object(Adaptive, "end_step", noted),
    ):
        line = [*FLAGS, "--mp-degree", str(world_size), "--train-iters", "5", *more]
        outcome = train(parse("moe", line, dict(os.environ)), f"file://{rendezvous}", keep_records=True)
    return [record.loss for record in outcome.records], chosen


@functools.cache
def plain_losses() -> list[float]:
    """With nothing recomputed."""
    losses: list[float] = run_ranks(2, run, None, group=False)[0][0]
    return losses


@pytest.mark.parametrize(
    ("room", "layers"), [(0, (0, 1, 2)), (1 << 30, ())], ids=["for nothing more", "for everything"]
)
def test_runs(room: int, layers: tuple[int, ...]) -> None:
    """All ranks choose alike, once, and no loss changes."""
    got = run_ranks(2, run, (PEAK + room) / MEGABYTE, group=False)
    assert [chosen for _, chosen in got] == [[layers], [layers]]
    assert got[0][0] == plain_losses()


def test_too_little_is_said(tmp_path: Path) -> None:
    """With the memory it needs."""
    config = parse("moe", [*FLAGS, "--adaptive-recompute-device-size", "1", "--device", "cpu"], {})
    with pytest.raises(TrainingError, match="with every layer recomputed the largest rank needs"):
        train(config)
