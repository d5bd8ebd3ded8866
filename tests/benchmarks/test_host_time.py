"""The figures of the host's time: a layer is the difference of two depths, and ratios are within rounds."""

from __future__ import annotations

from benchmarks.host_time.contestant import FLAGS, OPTIMIZERS
from benchmarks.host_time.run import DEPTHS, KEYS, compare, layers


def figures(*values):
    return [dict.fromkeys(KEYS, value) for value in values]


def rounds(seconds):
    """Rounds in which a layer of each contestant takes these seconds, on a machine that becomes slower."""
    found = {}
    for name, layer in seconds.items():
        for depth in DEPTHS:
            found[f"{name} {depth}"] = figures(*(slow * (5.0 + depth * layer) for slow in (1, 2, 3, 4, 5, 6)))
    return found


def test_a_layer_is_the_difference_of_depths_in_each_round():
    assert layers(rounds({"megapar": 0.5}), "megapar") == figures(0.5, 1.0, 1.5, 2.0, 2.5, 3.0)


def test_ratios_are_within_rounds(capsys):
    seconds = dict.fromkeys(OPTIMIZERS, 1.0) | dict.fromkeys(FLAGS, 0.75)
    found = compare("dense", rounds(seconds))
    for way in OPTIMIZERS:
        for ratios in found[f"transformers, {way} AdamW"]["ratio_to_it"].values():
            assert ratios["user"] == {"ratio": 0.75, "interval": (0.75, 0.75)}
    assert "0.75 (0.75 to 0.75)" in capsys.readouterr().out
