"""The coordinate check at small widths, and what the search of the best rate makes of its losses."""

from __future__ import annotations

import pytest

from benchmarks.mup.run import OPTIMIZERS, KeptLosses, best, changes, coordinates, picture, slope, transfer


def grown(optimizer, widths, *, plain=False):
    """Slope of the change of each output over the width."""
    rows = [changes(width, 0 if plain else widths[0], optimizer, 5) for width in widths]
    return {name: slope(widths, [row[name] for row in rows]) for name in rows[0]}


@pytest.mark.parametrize(("name", "widths"), [("adamw", (32, 128)), ("muon spectral", (64, 256))])
def test_outputs_move_alike_at_both_widths_with_the_factors_alone(name, widths):
    """Muon's narrow model has as many features as words."""
    alike, plain = grown(OPTIMIZERS[name], widths), grown(OPTIMIZERS[name], widths, plain=True)
    assert set(alike) == {
        *("embedding", "layers.0.attention", "layers.0.mlp", "layers.1.attention", "layers.1.mlp", "logits"),
    }
    assert all(abs(value) < 0.3 for value in alike.values())
    assert plain["logits"] > 0.4


def test_the_best_rate_has_the_lowest_mean_over_seeds():
    assert best([[3.0, 1.0], [1.5, 1.5], [1.0, 3.0]]) == 1
    assert slope((32, 64, 128), (1.0, 2.0, 4.0)) == pytest.approx(1.0)


def test_a_small_search_has_a_loss_for_each_width_rate_and_seed():
    found = transfer((32, 64), (1e-2, 1e-3), seeds=2, steps=3, batch=2)
    assert {width: [len(each) for each in losses] for width, losses in found.items()} == {32: [2, 2], 64: [2, 2]}
    assert len({loss for losses in found.values() for each in losses for loss in each}) == 8


def test_a_search_that_was_cut_goes_on_with_the_losses_that_it_has(tmp_path):
    kept = KeptLosses(tmp_path / "new" / "losses.jsonl")
    assert transfer((32,), (1e-2,), seeds=1, steps=1, batch=1, kept=kept) == {
        32: [[kept.get((32, 32, 1e-2, 1, 1, 1), int)]]
    }
    found = transfer((32,), (1e-2, 1e-3), seeds=1, steps=1, batch=1, kept=kept)
    assert len((tmp_path / "new" / "losses.jsonl").read_text().splitlines()) == 2
    assert transfer((32,), (1e-2, 1e-3), seeds=1, steps=1, batch=1) == found


def test_the_picture_has_a_curve_for_each_output():
    found = coordinates(["sgd"], (32, 64), 1)
    assert picture((32, 64), found).count("<polyline") == sum(map(len, found.values())) == 12
