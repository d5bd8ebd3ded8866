"""Seconds of operators' parts: slices pay for short products, and an all-to-all uses both links at once."""

from __future__ import annotations

import pytest

from megapar.arguments import parse
from megapar.model.cost.model_cost import CommCost, Product
from megapar.planning.calibration import calibrations
from megapar.planning.devices import device_kind
from megapar.planning.operator_time import MessageTime, OperatorTime
from megapar.planning.planned_run import PlannedRun

CALIBRATION = calibrations()["megapar"]


def times(*flags: str, ranks: int = 16) -> OperatorTime:
    config = parse("moe", ["--validate-only", "--world-size", str(ranks), "--dtype", "bf16", *flags], {})
    return OperatorTime(PlannedRun(config, device_kind("h100")))


def test_parts_of_a_product_take_longer_than_the_whole() -> None:
    time, product = times(), Product(4096, 2048, 2048)
    whole, parts = time.products([product]), [time.products([product], count) for count in (2, 16)]
    assert whole == pytest.approx(product.flops * (1 + CALIBRATION.small / 2048) / 989e12 / CALIBRATION.product)
    assert 2 * parts[0] == pytest.approx(whole)  # still 2,048 rows
    assert 16 * parts[1] == pytest.approx(whole * (1 + CALIBRATION.small / 256) / (1 + CALIBRATION.small / 2048))


def test_a_collective_occupies_both_links() -> None:
    time = times("--num-experts", "16", "--ep-degree", "16")
    seconds = time.message(CommCost("ep", "all_to_all", 15e9, "forward"))
    assert seconds.inside == pytest.approx(7e9 / 450e9 / CALIBRATION.inside)
    assert seconds.between == pytest.approx(8e9 / 50e9 / CALIBRATION.between)
    assert seconds.seconds == pytest.approx(seconds.between + seconds.latency)
    assert time.message(CommCost("mp", "all_reduce", 1e9, "forward")) == MessageTime()
