"""A step on a device whose optimizer divides gradients itself is the step that clips them before."""

from __future__ import annotations

from pathlib import Path

import pytest

from megapar.core.device.base import Device
from tests.support.here import losses, run_here

FLAGS = ("--dtype", "fp32", "--clip-grad", "0.05", "--lr", "1e-2")


@pytest.mark.parametrize("flags", [(), ("--optimizer-offload",)])
def test_clipping_inside_the_optimizer_is_clipping(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...]
) -> None:
    before = run_here(tmp_path / "before", *FLAGS, *flags)
    monkeypatch.setattr(Device, "scales_gradients", True)
    inside = run_here(tmp_path / "inside", *FLAGS, *flags)
    unclipped = run_here(tmp_path / "unclipped", *FLAGS, *flags, "--clip-grad", "0")
    assert losses(inside) == pytest.approx(losses(before), rel=1e-5)
    assert losses(unclipped) != pytest.approx(losses(before), rel=1e-5)
    assert [r.grad_norm for r in inside.records] == pytest.approx([r.grad_norm for r in before.records], rel=1e-4)
