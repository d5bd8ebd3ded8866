"""Training with --apex, by a stand-in of apex: the losses of a run without it, and its checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest

from megapar.arguments import parse
from megapar.core.device.base import Device
from megapar.core.device.dtypes import add_product_reference
from megapar.errors import ConfigError
from megapar.trainer import train
from megapar.training.reports.record import Record
from tests.support import apex
from tests.support.training import COMMON, SMALL, last_wins


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the calls of apex, on a CPU that passes for a GPU."""
    monkeypatch.setattr("megapar.core.device.apex.add_product_wide", add_product_reference)  # torch's takes CUDA only
    monkeypatch.setattr(Device, "apex_lacks", lambda self: "")
    return apex.installed(tmp_path / "site", monkeypatch)


def run(kind: str, *flags: str) -> list[Record]:
    """Train on the CPU and return the records."""
    wide = (
        "--hidden-size",
        "256",
        "--ffn-hidden-size",
        "256",
        "--init-std",
        "0.02",
        "--lr",
        "1e-3",
        "--seq-length",
        "32",
    )
    return list(train(parse(kind, last_wins((*SMALL[kind], *COMMON), (*wide, *flags)), {}), keep_records=True).records)


@pytest.mark.parametrize(("kind", "norm"), [("moe", "rms_norm"), ("ernie", "layer_norm")])
def test_a_run_has_the_losses_of_torchs_kernels(calls: list[str], kind: str, norm: str) -> None:
    want = run(kind, "--dtype", "bf16")
    assert not calls
    got = run(kind, "--dtype", "bf16", "--apex")
    assert [record.loss for record in got] == pytest.approx([record.loss for record in want], rel=2e-2)
    assert set(calls) == {norm, "product", "adam"}


def test_a_run_goes_on_from_a_checkpoint_of_the_other(calls: list[str], tmp_path: Path) -> None:
    def saved(name: str, *flags: str) -> list[Record]:
        return run("moe", "--dtype", "fp32", "--save", str(tmp_path / name), *flags)

    want = saved("whole")[3:]
    for first, second in (((), ("--apex",)), (("--apex",), ())):
        name = f"half{len(first)}"
        saved(name, "--exit-interval", "3", *first)
        calls.clear()
        rest = saved(name, "--load", str(tmp_path / name), *second)
        assert [record.loss for record in rest] == pytest.approx([record.loss for record in want], rel=1e-4)
        assert ("adam" in calls) == bool(second)


def test_a_start_without_a_usable_apex_is_refused() -> None:
    with pytest.raises(ConfigError, match="--apex, but its kernels are for NVIDIA GPUs, and the device is cpu"):
        run("moe", "--dtype", "fp32", "--apex")
