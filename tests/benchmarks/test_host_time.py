"""The contestants of the host's time: they train the same model, and a layer is the difference of two depths."""

from __future__ import annotations

import pytest
import torch

from benchmarks.host_time.contestant import FLAGS, OPTIMIZERS, make_ours
from benchmarks.host_time.run import DEPTHS, KEYS, compare, layers
from benchmarks.throughput.peer_rank import batches, make_model
from benchmarks.throughput.prepare import write
from benchmarks.throughput.shape import shallow


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


@pytest.mark.parametrize("model", ["dense", "moe"])
def test_both_start_from_the_same_loss(model, tmp_path, monkeypatch):
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1")):
        monkeypatch.setenv(name, value)
    shape = shallow(model, 2)
    write(shape, "cpu", tmp_path)
    peer = make_model(shape, tmp_path, "cpu", "")
    with torch.no_grad():
        wanted = peer(**batches(shape, tmp_path, "cpu")[0]).loss
    done = make_ours(shape, tmp_path).step()
    mean = done.totals.sums["lm"].double() / done.denominators.items["lm"]
    torch.testing.assert_close(mean, wanted.double(), rtol=1e-4, atol=0.0)
