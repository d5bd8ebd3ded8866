"""What hiding is priced at: never chosen where it is slower than not to hide."""

from __future__ import annotations

import itertools

import pytest

from megapar.core.device.kinds import kinds
from megapar.core.tensor_parallel.overlap_price import FUSED, OFF, ON, CutLinear, Price

GPUS = [kind for kind in kinds().values() if kind.kernels != "cpu" and "bf16" in kind.flops]


def layer(hidden: int, mp: int) -> tuple[CutLinear, ...]:
    """Of a dense decoder with heads of 128 and groups of 4."""
    qkv, ffn = hidden * 3 // 2, hidden * 7 // 2
    return (
        CutLinear(True, hidden, qkv // mp),
        CutLinear(False, hidden // mp, hidden),
        CutLinear(True, hidden, 2 * ffn // mp),
        CutLinear(False, ffn // mp, hidden),
    )


@pytest.mark.parametrize("kind", GPUS, ids=lambda kind: kind.name)
def test_what_is_chosen_is_never_priced_slower_than_off(kind):
    chosen = set()
    for hidden, mp, rows, gathered in itertools.product(
        (512, 4096, 8192), (2, 4, 8), (256, 8192, 65536), (True, False)
    ):
        price, layers = Price(kind, "bf16", 2, mp, rows, gathered), layer(hidden, mp)
        chosen.add(price.best(layers))
        off = price.seconds(layers, OFF)
        assert price.seconds(layers, price.best(layers)) <= off
        assert off > sum(sum(price._products(one)) for one in layers)  # messages take time
    assert chosen == {OFF, ON}


def test_a_cpus_class_hides_by_measurement():
    assert Price(kinds()["cpu"], "fp32", 4, 2, 8, True).best(layer(512, 2)) == ON


def test_hiding_is_bounded_by_what_there_is_to_hide():
    price, layers = Price(kinds()["h200-141g"], "bf16", 2, 8, 8192, True), layer(4096, 8)
    products = sum(sum(price._products(one)) for one in layers)
    prices = {form: price.seconds(layers, form) for form in (OFF, ON, FUSED)}
    assert all(products < seconds for seconds in prices.values())
    assert prices[OFF] == pytest.approx(products + 10 * price._message(layers[0]))  # ten collectives in a layer
