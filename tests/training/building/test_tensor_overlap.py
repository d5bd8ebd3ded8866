"""From a configuration and a device to the way that the collectives of linear layers take."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from megapar.arguments import parse
from megapar.core.comm.axis import Axis
from megapar.core.device.base import Device
from megapar.core.device.kinds import kind_of, kinds
from megapar.core.tensor_parallel.layers import ColumnLinear, RowLinear
from megapar.core.tensor_parallel.overlap_price import CutLinear
from megapar.errors import ConfigError
from megapar.training.building.builder import make_overlap
from megapar.training.building.parallelize import check_device
from megapar.training.building.tensor_overlap import cut_linears, hiding
from tests.model.small import BIASED_MOE, DENSE, ERNIE, MOE, build

MP = "--mp-degree 2 --sequence-parallel --bf16"
H200 = kinds()["h200-141g"]


class Gpu(Device):
    """What is asked of one before its first product."""

    type = "cuda"
    name = "NVIDIA H200"  # type: ignore[assignment]

    def fused_lacks(self) -> str:
        return ""


def config_of(flags: str, ranks: int = 2):
    return parse("moe", f"--num-experts 0 {flags}".split(), {"WORLD_SIZE": str(ranks), "RANK": "0"})


@pytest.mark.parametrize("form", ["on", "off", "fused"])
def test_what_is_asked_for_is_taken(form):
    assert hiding(config_of(f"{MP} --tp-comm-overlap {form} --device cuda"), H200, "bf16") == form


def test_auto_is_what_pays():
    large = config_of(f"{MP} --hidden-size 4096 --num-attention-heads 32 --seq-length 8192")
    assert hiding(large, H200, "bf16") == "on"
    assert hiding(large, kind_of("cpu", "abacus"), "fp32") == "on"
    assert hiding(large, kinds()["v100-32g"], "bf16") == "off"  # which has no such products, so nothing is known


@pytest.mark.parametrize("sizes", [DENSE, MOE, BIASED_MOE, ERNIE], ids=["dense", "moe", "biased", "ernie"])
def test_the_layers_priced_are_those_of_the_model(sizes):
    model = build(sizes)
    found = {
        CutLinear(isinstance(m, ColumnLinear), m.weight.shape[-1], m.weight.shape[:-1].numel())
        for m in model.modules()
        if isinstance(m, ColumnLinear | RowLinear)
    }
    assert set(cut_linears(sizes, 1)) == found


def overlap_on(per_node: int, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(per_node))
    config = config_of("--mp-degree 4 --sequence-parallel --bf16 --tp-comm-overlap fused", 8)
    world = SimpleNamespace(device=Gpu(), grid=config.grid, axis=lambda name: Axis(name, 4, 0, None, (0, 1, 2, 3)))
    return make_overlap(config, world, config.model)


def test_fused_stays_in_a_node(monkeypatch):
    with pytest.raises(ConfigError, match="on nodes of 2 ranks"):
        overlap_on(2, monkeypatch)


def test_fused_needs_a_gpu():
    config = config_of(f"{MP} --tp-comm-overlap fused")
    with pytest.raises(ConfigError, match="reads the memory of other GPUs"):
        check_device(config, Device())
    check_device(config, Gpu())


def test_a_gpus_sizes_reach_the_layers():
    config = config_of(f"{MP} --tp-comm-overlap on")
    world = SimpleNamespace(device=Gpu(), grid=config.grid, axis=lambda name: Axis(name, 2, 0, None, (0, 1)))
    overlap = make_overlap(config, world, config.model)
    assert (overlap.batched, overlap.least_rows, overlap.whole) == (True, H200.device_class.least_rows, False)
