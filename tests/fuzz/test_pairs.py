"""Whether directed cases cover the legal pairs of options, and what is told of the others."""

from __future__ import annotations

import random
from pathlib import Path

from tests.fuzz.case import Case, case_from, draw_case
from tests.fuzz.check import EQUAL, FAILED, Outcome
from tests.fuzz.fuzzer import PairFuzzer, smaller
from tests.fuzz.pairs import Pairs, Search

DRAWS = 8


def some() -> Pairs:
    """The pairs of a few draws."""
    rng, pairs = random.Random(5), Pairs()
    for _ in range(DRAWS):
        drawn = draw_case("ernie", 2, lambda name, values, drawn: rng.choice(values))
        for pair in case_from(drawn).pairs():
            pairs.legal.setdefault(pair, drawn)
    return pairs


def test_directed_cases_cover_every_legal_pair() -> None:
    pairs = some()
    *_, tally = PairFuzzer(pairs, seed=5, max_cases=4 * DRAWS, check=lambda case: Outcome(EQUAL)).run()
    assert pairs.missing() == []
    assert tally.tried < 3 * DRAWS


def test_pairs_of_failed_cases_are_not_covered() -> None:
    pairs = some()
    *_, tally = PairFuzzer(pairs, seed=3, max_cases=3, check=lambda case: Outcome(FAILED, text="wrong")).run()
    assert tally.outcomes[FAILED] == 3
    assert tally.failures
    assert not pairs.covered


def test_what_is_known_is_read_again(tmp_path: Path) -> None:
    pairs = some()
    first, second, *_ = sorted(pairs.legal)
    pairs.covered.add(first)
    pairs.refused[second] = "world-size"
    pairs.save(tmp_path / "pairs.json")
    again = Pairs.load(tmp_path / "pairs.json")
    assert again == pairs
    assert str(again) == str(pairs)


def test_a_pair_that_rules_exclude_is_refused_by_their_row() -> None:
    search = Search(1)
    for world_size in (1, 2, 4) * 20:
        search._keep(draw_case("moe", world_size, lambda name, values, drawn: search.rng.choice(values)))
    pair = ("pp_degree", "2"), ("sharding_stage", "3")
    search._look_for("moe", pair)
    assert search.found.refused[pair] == "pipeline-stage-3"
    assert pair not in search.found.legal


def test_a_failure_of_a_directed_case_is_made_smaller() -> None:
    def fails_with_clipping(case: Case) -> Outcome:
        return Outcome(FAILED, text="wrong") if "clip_grad" in dict(case.settings) else Outcome(EQUAL)

    case = Case("ernie", 2, (("seed", 1), ("clip_grad", 0.05), ("adam_beta1", 0.5)))
    smallest, text = smaller(case, "wrong", fails_with_clipping, seconds=5)
    assert smallest.settings == (("clip_grad", 0.05),)
    assert text == "wrong"
