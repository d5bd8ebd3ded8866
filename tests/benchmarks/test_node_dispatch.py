"""The arithmetic of the benchmark of dispatch by node."""

from __future__ import annotations

import pytest

from benchmarks.node_dispatch.shape import NODE, SHAPES, WAYS, ideal, rate_for
from megapar.arguments import parse
from megapar.core.device.kinds import kinds
from megapar.training.building.device_choices import dispatch_choice


def test_messages_take_their_share_of_a_step_at_the_rate():
    """Nothing hides them: a step of 3 s with 100 MB more takes 6 s at a half, and 10/9 of it at a tenth."""
    assert 100e6 * 8 / rate_for(0.5, 3.0, 100e6) == pytest.approx(3.0)
    assert 100e6 * 8 / rate_for(0.1, 3.0, 100e6) == pytest.approx(3.0 / 9)


@pytest.mark.parametrize(("name", "best"), [("top-8 of 16", 1.60), ("top-4 of 8", 1.34)])
def test_the_ideal_gain_is_that_of_the_bytes(name, best):
    layer = SHAPES[name].layer
    assert ideal(0.5, layer.plain_rows().between, layer.node_rows().between) == pytest.approx(best, abs=0.005)
    assert ideal(0.5, 1.0, 0.0) == 2.0


@pytest.mark.parametrize("name", SHAPES)
def test_each_way_is_the_dispatch_that_it_says(name):
    for way in WAYS:
        config = parse("moe", [*SHAPES[name].flags(way), "--validate-only"], {"WORLD_SIZE": "4"})
        chosen = dispatch_choice(config, kinds()["cpu"], "fp32")
        assert (chosen.name, chosen.node_ranks) == (way, NODE if way == "node" else 0)


def test_expected_bytes_by_hand():
    """Of top-8 of 16 on two nodes, four rows of a token cross by pairs, next to one by node; rows of 2048 bytes."""
    shape, tokens = SHAPES["top-8 of 16"], 4 * 4 * 512 * 2
    assert shape.between("plain") == pytest.approx(tokens * 4 * 2 * (2064 + 2048))
    assert shape.between("node") == pytest.approx(tokens * 2 * (2096 + 2048), rel=1e-4)
