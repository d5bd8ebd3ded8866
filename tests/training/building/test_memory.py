"""What a run says of memory: the bound of dropless experts, and where there is none left."""

from __future__ import annotations

import pytest
import torch

import megapar.trainer as trainer_module
from megapar.arguments import parse
from megapar.core.device.base import Device, MemoryPressure
from megapar.errors import ConfigError, TrainingError
from megapar.planning.out_of_memory import planned_memory
from megapar.training.building.memory import expert_bound, expert_rows
from tests.support.training import COMMON, SMALL

SIZES = ("--num-experts", "8", "--moe-router-topk", "2", "--seq-length", "64", "--micro-batch-size", "2")


def config_of(*flags: str, world_size: int = 1):
    return parse("moe", [*SIZES, *flags], {"WORLD_SIZE": str(world_size), "RANK": "0"})


@pytest.mark.parametrize(
    ("flags", "world_size", "rows"),
    [
        ((), 1, (256, 256)),
        (("--ep-degree", "4"), 4, (256, 1024)),
        (("--ep-degree", "8"), 8, (256, 1024)),  # one expert here: a token comes once
        (("--moe-model-type", "deepspeed_moe"), 1, None),
        (("--cp-degree", "2", "--ep-degree", "2"), 2, (128, 256)),
    ],
)
def test_rows_of_dropless_experts_by_hand(flags, world_size, rows):
    assert expert_rows(config_of(*flags, world_size=world_size)) == rows


def test_the_bound_is_said_where_nothing_is_dropped():
    flags = ("--hidden-size", "64", "--moe-ffn-hidden-size", "32", "--num-attention-heads", "4", "--ep-degree", "4")
    said = expert_bound(config_of(*flags, world_size=4), 2)
    assert "256 rows" in said
    assert "1,024 rows" in said
    assert expert_bound(config_of("--moe-model-type", "deepspeed_moe"), 2) == ""


class _Full(Device):
    """A device without memory to give."""

    @property
    def name(self) -> str:
        return "NVIDIA H200"

    def memory_pressure(self) -> MemoryPressure:
        return MemoryPressure(held_bytes=3 << 30, retries=7, allocated_bytes=100 << 30)

    def save_memory_snapshot(self, path) -> bool:
        path.write_text("snapshot")
        return True


def test_out_of_memory_is_explained_with_a_snapshot_and_the_plan(tmp_path, monkeypatch):
    def step(self):
        raise torch.OutOfMemoryError("tried to allocate 2 GiB")

    monkeypatch.setattr(trainer_module.Trainer, "step", step)
    monkeypatch.setattr(trainer_module, "pick", lambda *_: _Full())
    flags = [*SMALL["moe"], *COMMON, "--save", str(tmp_path)]
    config = parse("moe", flags, {})
    with pytest.raises(TrainingError) as failure:
        trainer_module.train(config)
    said = str(failure.value)
    for part in ("2 GiB", "100.00 GiB", "3.00 GiB", "retries: 7", "megapar plan (h200-141g): stage 0 peaks at"):
        assert part in said
    assert (tmp_path / "out-of-memory-rank0.pickle").read_text() == "snapshot"


class _Gpu(Device):
    """A device that is no CPU, of a kind that the plan knows."""

    type = "cuda"

    @property
    def name(self) -> str:
        return "NVIDIA H100 80GB HBM3"


LARGE = ("--num-experts", "0", "--hidden-size", "8192", "--num-layers", "64", "--num-attention-heads", "64")


@pytest.mark.parametrize(("device", "whose"), [(Device, "1 ranks here"), (_Gpu, "a rank of stage 0")])
def test_a_run_from_python_is_refused_before_its_model_is_built(device, whose, monkeypatch):
    monkeypatch.setattr(trainer_module, "pick", lambda *_: device())
    monkeypatch.setattr(trainer_module, "Trainer", None)
    config = parse("moe", [*LARGE, *COMMON, "--data-path", "mock", "--device", "cpu", "--seq-length", "128"], {})
    with pytest.raises(ConfigError, match=rf"needs \d+ GiB for {whose}, by megapar plan.*--no-memory-check"):
        trainer_module.train(config)


def test_a_device_that_the_plan_does_not_know():
    assert "has no figures for the device" in planned_memory(config_of(), "cuda", "abacus")
