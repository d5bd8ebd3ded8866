"""The rows that the run and the planner share."""

from __future__ import annotations

import pytest

from megapar.core.device.kinds import COMMUNICATORS, DeviceKind, kind_called, kind_of, kinds
from megapar.core.units import MEGABYTE

DRIVERS = {
    "NVIDIA H200": "h200-141g",
    "NVIDIA B200": "b200-180g",
    "NVIDIA GB200": "gb200-186g",
    "NVIDIA B300 SXM6 AC": "b300-288g",
    "NVIDIA GB300": "gb300-288g",
    "NVIDIA H20": "h20-96g",
    "NVIDIA H100 PCIe": "h100-pcie-80g",
    "NVIDIA H100 80GB HBM3": "h100-80g",
    "NVIDIA A100-SXM4-80GB": "a100-80g",
    "NVIDIA A100 80GB PCIe": "a100-80g",
    "NVIDIA A800-SXM4-80GB": "a800-80g",
    "NVIDIA H800": "h800-80g",
    "NVIDIA A100-SXM4-40GB": "a100-40g",
    "Tesla V100-SXM2-32GB": "v100-32g",
    "Ascend910B1": "ascend-910b",
    "Ascend910B2": "ascend-910b2",
    "Ascend910B3": "ascend-910b3",
    "Ascend910B4": "ascend-910b4",
    "Ascend910_9392": "ascend-910c-die",
    "NVIDIA H100 NVL": "h100-nvl-94g",
    "Ascend910A": "ascend-910",
    "cpu (2 threads)": "cpu",
    "NVIDIA A10": "a10-24g",
    "NVIDIA L4": "l4-24g",
    "NVIDIA L40S": "l40s-48g",
    "NVIDIA RTX A6000": "rtx-a6000-48g",
    "NVIDIA GeForce RTX 4090": "rtx-4090-24g",
    "NVIDIA GeForce RTX 5090": "rtx-5090-32g",
    "AMD Instinct MI300X": "mi300x-192g",
}
# Devices whose names contain that of another one.
STRANGERS = (
    "NVIDIA A10G",
    "NVIDIA L40",
    "NVIDIA RTX A1000",
    "NVIDIA GeForce RTX 4090 D",
    "NVIDIA GeForce RTX 5090 Laptop GPU",
    "NVIDIA GH200 480GB",
    "NVIDIA H200 NVL",
    "Tesla V100-SXM2-16GB",
    "Tesla V100-PCIE-16GB",
    "NVIDIA H20-3e",
    "NVIDIA A800 40GB Active",
    "NVIDIA A100-SXM-64GB",
    "NVIDIA H800 PCIe",
    "NVIDIA A100-SXM4-40GB MIG 3g.20gb",
    "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
)


@pytest.mark.parametrize("name", DRIVERS)
def test_drivers_names_find_their_row(name: str) -> None:
    kind = kind_called(name)
    assert kind is not None
    assert kind.name == DRIVERS[name]


@pytest.mark.parametrize("name", STRANGERS)
def test_a_device_is_not_taken_for_one_whose_name_is_part_of_its_own(name: str) -> None:
    assert kind_called(name) is None


@pytest.mark.parametrize(
    "kind", [kind for kind in kinds().values() if kind.kernels == "cuda"], ids=lambda kind: kind.name
)
def test_fp8_products_are_those_of_capability_8_9_and_of_amd(kind: DeviceKind) -> None:
    assert ("fp8" in kind.flops) == (kind.capability is None or kind.capability >= (8, 9))
    assert ("bf16" in kind.flops) == (kind.capability is None or kind.capability >= (8, 0))


def test_a_device_that_nobody_knows_has_its_class() -> None:
    assert kind_called("abacus") is None
    assert [kind_of(device_type, "abacus").kernels for device_type in ("cuda", "npu", "cpu")] == ["cuda", "npu", "cpu"]


@pytest.mark.parametrize("kind", kinds().values(), ids=lambda kind: kind.name)
def test_every_row_has_what_its_class_has(kind: DeviceKind) -> None:
    assert kind.device_class.logits_bytes >= 2**20
    assert kind.peak(kind.default_dtype) > 0
    assert 0 < kind.send_seconds(1e6, 2) < kind.send_seconds(1e9, 2)


def test_two_devices_of_a_mesh_share_one_of_its_links() -> None:
    ascend, h200 = kinds()["ascend-910b3"], kinds()["h200-141g"]
    assert [ascend.inside_to(others) for others in (0, 1, 2, 7)] == [28e9, 28e9, 56e9, 196e9]
    assert [h200.inside_to(others) for others in (0, 1, 7)] == [450e9] * 3
    figures = ascend.with_figures("bf16", link_gb=50)
    assert figures.inside_to(1) == figures.inside_to(7) == 50e9


def test_only_rows_of_a_whole_family_stand_for_other_models() -> None:
    assert [name for name, kind in kinds().items() if kind.family] == ["ascend-910b"]


def test_a_wave_of_tiles_that_is_not_full_takes_as_long_as_a_full_one() -> None:
    h200 = kinds()["h200-141g"]
    full = h200.product_seconds(128 * 132, 4096, 128, "bf16")
    assert h200.product_seconds(128, 4096, 128, "bf16") == full
    assert h200.product_seconds(128 * 132 + 1, 4096, 128, "bf16") > 1.8 * full
    assert h200.product_seconds(1, 1, 1, "bf16") == h200.device_class.launch_seconds


def test_bytes_of_communicators_are_those_of_axes_and_queues() -> None:
    rounds = [("world",), ("pp",), ("sharding", "data", "shard"), ("ep",)]
    assert COMMUNICATORS["cpu"].of(rounds, 4, 7) == 0
    assert COMMUNICATORS["cuda"].of(rounds, 4, 7) == (4 * 24 + 4 + 7 * 32) * 12 * MEGABYTE
    assert COMMUNICATORS["npu"].of(rounds, 4, 7) == (3 * 400 + 40 + 4 * 40) * MEGABYTE
