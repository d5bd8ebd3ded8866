"""What a run says where its device has no memory left."""

from __future__ import annotations

import pytest
import torch

import megapar.trainer as trainer_module
from megapar.arguments import parse
from megapar.core.device.base import Device, MemoryPressure
from megapar.errors import ConfigError, TrainingError
from megapar.planning.devices import planned_memory
from megapar.training.reports.messages import out_of_memory
from tests.support.training import COMMON, SMALL


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


class _OnAFullDisk(_Full):
    def save_memory_snapshot(self, path) -> bool:
        raise PermissionError("read-only")


def test_out_of_memory_is_explained_though_no_snapshot_can_be_written(tmp_path):
    config = parse("moe", [*SMALL["moe"], *COMMON, "--save", str(tmp_path)], {})
    error = out_of_memory(config, _OnAFullDisk(), torch.OutOfMemoryError("tried to allocate 2 GiB"), "megapar plan (x)")
    for part in ("2 GiB", "megapar plan (x)", "no snapshot: ", "cannot be written: read-only"):
        assert part in str(error)


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
    assert "has no figures for the device" in planned_memory(parse("moe", [], {}), "cuda", "abacus")
