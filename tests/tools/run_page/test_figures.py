"""Figures as data: units, means that do not lag, thinning that keeps spikes."""

from __future__ import annotations

import pytest

from megapar.tools.run_page import figures
from megapar.tools.run_page.figures import (
    Curve,
    Lane,
    StackedBar,
    bars,
    centered_mean,
    curves,
    heat,
    joined,
    spans,
    thinned,
)


def test_a_mean_follows_a_slope_without_lag() -> None:
    points = [(x, 3.0 * x) for x in range(200)]
    mean = centered_mean(points, 21)
    assert [y for _, y in mean] == pytest.approx([3.0 * x for x, _ in mean])
    assert (mean[0][0], mean[-1][0]) == (2, 197)


def test_only_noise_is_averaged_and_only_where_there_is_much_of_it() -> None:
    few, many = ([(x, float(x % 3)) for x in range(count)] for count in (100, 101))
    noisy = [Curve(name, points, "#000", noisy=True) for name, points in (("few", few), ("many", many))]
    figure = curves("title", [*noisy, Curve("exact", many, "#000")])
    assert figure is not None
    assert ["mean" in curve for curve in figure.body["curves"]] == [False, True, False]
    assert figure.note == "Bold: mean of 5 steps around each step."


def test_thinning_keeps_ends_and_spikes() -> None:
    points = [(x, 100.0 if x == 777 else float(x % 2)) for x in range(5000)]
    kept = thinned(points, 100)
    assert len(kept) <= 100
    assert (kept[0], kept[-1]) == (points[0], points[-1])
    assert (777, 100.0) in kept
    assert kept == sorted(kept)
    assert thinned(points, 5000) == points


def test_values_are_in_a_unit_that_fits_them() -> None:
    for quantity, value, unit, shown in (
        ("bytes", 3 * 2**30, "GiB", 3.0),
        ("bytes", 2**20, "MiB", 1.0),
        ("seconds", 0.25, "ms", 250.0),
        ("share", 0.41, "%", 41.0),
        ("times", 7.0, "times", 7.0),
    ):
        figure = curves("title", [Curve("name", [(1, value)], "#000")], quantity=quantity)
        assert figure is not None
        assert (figure.unit, figure.body["curves"][0]["points"]) == (unit, [(1, pytest.approx(shown))])


def test_nothing_makes_no_figure() -> None:
    assert curves("title", [Curve("name", [(1, float("nan"))], "#000")]) is None
    assert bars("title", [], {}, "seconds") is None
    assert heat("title", {}, [], []) is None
    assert spans("title", [Lane("empty")], {}) is None


def test_bars_have_the_parts_that_any_row_has() -> None:
    rows = [StackedBar("a", {"x": 1.0}), StackedBar("b", {"x": 2.0, "y": 3.0})]
    figure = bars("title", rows, {"x": "#1", "y": "#2", "z": "#3"}, "s")
    assert figure is not None
    assert [(part["name"], part["values"]) for part in figure.body["parts"]] == [("x", [1.0, 2.0]), ("y", [0.0, 3.0])]


def test_short_spans_are_joined_and_long_ones_are_not() -> None:
    short = [(0.1 * n, 0.1 * n + 0.05, f"k{n % 2}") for n in range(10)]
    assert joined([(5.0, 9.0, "gemm"), *short], 0.3) == [
        *[(pytest.approx(start), pytest.approx(end), "k0 ...") for start, end in ((0.0, 0.35), (0.4, 0.75))],
        (pytest.approx(0.8), pytest.approx(0.95), "k0 ..."),
        (5.0, 9.0, "gemm"),
    ]
    assert joined([(0.0, 2.0, "a"), (2.0, 4.0, "b")], 0.1) == [(0.0, 2.0, "a"), (2.0, 4.0, "b")]


def test_a_timeline_of_many_kernels_stays_small() -> None:
    lanes = [Lane(f"lane {n}", [(t, t + 0.4, f"kernel {t % 50}") for t in range(20_000)]) for n in range(6)]
    figure = spans("title", lanes, {})
    assert figure is not None
    assert len(figure.body["spans"]) <= figures.SPANS
