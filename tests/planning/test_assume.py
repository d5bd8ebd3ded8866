"""Load of the busiest expert rank, given or recorded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megapar.errors import ConfigError
from megapar.planning.assume import assumed, busiest, expert_imbalance, imbalance_of_any

EVEN = {"min": 1.0, "p50": 1.0, "p90": 1.0, "max": 1.0}
SKEWED = {"min": 0.2, "p50": 0.8, "p90": 1.8, "max": 4.0}


def test_the_busiest_expert_is_the_busiest_of_ranks_with_one() -> None:
    assert busiest(EVEN, 64, 64) == 1.0
    loads = busiest(SKEWED, 64, 64)
    assert loads == pytest.approx(4.0, rel=0.1)  # over the mean of the straight lines, which is near 1


def test_ranks_with_more_experts_are_more_even() -> None:
    found = [busiest(SKEWED, 64, ranks) for ranks in (1, 2, 8, 32, 64)]
    assert found[0] == 1.0
    assert found == sorted(found)
    assert found[2] < 2.0


def test_a_record_gives_the_mean_of_its_layers(tmp_path: Path) -> None:
    record = tmp_path / "metrics.experts.jsonl"
    record.write_text(json.dumps({"iteration": 7, "layers": [EVEN, SKEWED]}) + "\n")
    assert expert_imbalance(str(record), 64, 8) == pytest.approx((1 + busiest(SKEWED, 64, 8)) / 2)
    assert expert_imbalance("1.5", 64, 8) == 1.5


def test_a_search_takes_a_number() -> None:
    assert imbalance_of_any("1.5") == 1.5
    with pytest.raises(ConfigError, match="different loads"):
        imbalance_of_any("metrics.experts.jsonl")


@pytest.mark.parametrize(
    ("text", "ranks", "why"),
    [
        ("0.5", 8, "at least their mean"),
        ("nan", 8, "at least their mean"),
        ("2", 1, "one expert rank"),
        ("no-such-file", 8, "neither a number nor"),
    ],
)
def test_what_is_no_load_is_refused(text: str, ranks: int, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        expert_imbalance(text, 64, ranks)


def test_words_that_are_repeated_add_up() -> None:
    both = assumed(["operator-recompute:norm", "operator-recompute:up@1-2"])
    assert both.operators == assumed(["operator-recompute:norm+up@1-2"]).operators
    assert assumed(["fp8", "fp8-mlp"]).fp8 == assumed(["fp8-mlp", "fp8"]).fp8 == "all"
    with pytest.raises(ConfigError, match="a range of layers goes up"):
        assumed(["operator-recompute:up@8-4"])
