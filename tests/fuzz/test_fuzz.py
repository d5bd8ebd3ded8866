"""A short run of the layout fuzzer with one seed, what it once found, whether it finds what is planted, and pairs."""

from __future__ import annotations

import copy
import json
import math
import random
import shlex
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from megapar.arguments import FLAGS, parse, resolved_values
from megapar.compatibility import RULES
from tests.equivalence.compare import UNITS, bits, differences, overflows, rounding_differences
from tests.fuzz.case import BOTH, GLOO, LATE, LAZY, Case, case_from, case_of, cases, continued, draw_case
from tests.fuzz.check import EQUAL, FAILED, REFUSED, Outcome, check, reference
from tests.fuzz.fuzzer import Fuzzer, PairFuzzer, Tally, smaller
from tests.fuzz.option import Drawn, Option, spell_all
from tests.fuzz.oracle import Parts
from tests.fuzz.pairs import Pairs, Search
from tests.fuzz.regressions import REGRESSIONS, Regression
from tests.fuzz.table import FIXED, OPTIONS, UNDRAWN
from tests.fuzz.texts import HELD_OUT, LONG, PIECES

CASES = 12
SEED = 11


def last(fuzzer: Fuzzer) -> Tally:
    """The result of a run."""
    *_, tally = fuzzer.run()
    return tally


@pytest.mark.table
def test_short_run() -> None:
    """The same cases every time, so that a change is judged by what it changed; the script draws new ones."""
    tally = last(Fuzzer(SEED, max_cases=CASES, shrink_seconds=30, strategy=lambda: cases(rare=False)))
    assert not tally.failures, "\n".join(
        [
            f"{len(tally.failures)} cases failed; all again: scripts/fuzz_layouts.sh --seed {SEED} --cases {CASES}",
            *(f"{case.command()}\n{text}\nagain: {case.again()}" for case, text in tally.failures.items()),
        ]
    )
    assert tally.tried == CASES
    assert tally.outcomes[EQUAL] > CASES // 4


@pytest.mark.parametrize("regression", REGRESSIONS, ids=lambda regression: regression.name)
def test_regression(regression: Regression) -> None:
    outcome = check(regression.case())
    assert outcome.kind == (REFUSED if regression.refused_by else EQUAL), outcome.text
    if regression.refused_by:
        assert regression.refused_by in outcome.rules


def drawn_cases(seed: int, count: int) -> list[Case]:
    """The cases of a run, none of which is run."""
    found: list[Case] = []

    def keep(case: Case) -> Outcome:
        found.append(case)
        return Outcome(EQUAL)

    last(Fuzzer(seed, max_cases=count, check=keep))
    return found


def test_one_seed_gives_the_same_cases() -> None:
    assert (first := drawn_cases(3, 8)) == drawn_cases(3, 8)
    assert first != drawn_cases(4, 8)


@pytest.mark.table
def test_a_failure_is_minimised_and_the_run_goes_on() -> None:
    def fails_with_two_flags(case: Case) -> Outcome:
        given = dict(case.settings)
        wrong = given.get("sharding_stage") == 2 and given.get("clip_grad") == 0.05
        return Outcome(FAILED, text="wrong") if wrong else Outcome(EQUAL)

    tally = last(Fuzzer(6, max_cases=30, check=fails_with_two_flags))
    assert tally.tried == 30
    smallest = min(tally.failures, key=lambda case: (case.world_size, len(case.settings)))
    simplest = spell_all(dict(smallest.settings))
    assert smallest.world_size <= 2
    assert {"--sharding-stage", "--clip-grad"} < set(simplest)
    assert not {"--mp-degree", "--hybrid-dp", "--rank-order", "--weight-decay", "--adam-beta1"} & set(simplest)


def test_every_row_names_a_flag_once_and_layouts_are_told_apart() -> None:
    names = [option.name for option in OPTIONS]
    assert len(set(names)) == len(names)
    case = case_of("moe", 2, "--mp-degree 2 --num-layers 1 --global-batch-size 4")
    assert "--mp-degree" in case.flags()
    assert "--mp-degree" not in case.reference_flags(4)
    assert parse("moe", case.reference_flags(4), {}).training.global_batch_size == 4


def test_every_flag_is_drawn_or_says_why_not() -> None:
    """A new flag that may change numbers is a row of the table; any other one has a reason in its field, or a role."""
    drawn = {option.name for option in OPTIONS}
    reasons = {name: flag.undrawn or (not flag.role.drawn and flag.role.reason) for name, flag in FLAGS.items()}
    assert {name for name in FLAGS if name not in drawn and not reasons[name]} <= FIXED.keys()
    assert not {name for name in drawn if FLAGS[name].undrawn}
    assert drawn <= FLAGS.keys()


@cache
def offered() -> dict[str, set[object]]:
    """The values of each row that drawn cases have or could have had, and those that all cases have."""
    rng = random.Random(SEED)
    found = {name: {value} for name, value in FIXED.items()}

    def choose(name: str, values: Sequence[Any], drawn: Drawn) -> Any:
        found.setdefault(name, set()).update(values)
        return rng.choice(values)

    for _ in range(3000):
        drawn = draw_case(rng.choice(("moe", "ernie")), rng.choice((1, 2, 4, 8)), choose)
        for name, value in drawn.items():
            found.setdefault(name, set()).add(value)
    return found


def test_every_value_of_a_row_is_drawn_somewhere() -> None:
    """A row whose condition never holds would be silent."""
    rows = [row for row in OPTIONS if not callable(row.values)]
    assert {(row.name, value) for row in rows for value in row.values if value not in offered()[row.name]} == set()
    silent = {row.name for row in OPTIONS if callable(row.values) and offered()[row.name] == {None}}
    assert silent == set()


def test_every_choice_of_a_flag_that_is_drawn_is_drawn_or_says_why_not() -> None:
    """A new choice is a value of its row, or has a reason in ``UNDRAWN``."""
    rows = {row.name for row in OPTIONS} & {name for name, flag in FLAGS.items() if flag.choices}
    undrawn = {
        (name, choice)
        for name in rows
        for choice in FLAGS[name].choices
        if choice not in {*offered()[name], *FLAGS[name].defaults.values()}
    }
    assert undrawn == UNDRAWN.keys()


# Drawn in a share of the cases that no short run has.
RARE = {"data_path", "eval_interval", "eval_data_path", "train_iters", "save_interval", "deterministic"}
SMALL = "--num-layers 1 --num-attention-heads 2 --hidden-size 8 --ffn-hidden-size 8 --seq-length 4 --vocab-size 17"


def test_a_wrong_number_a_late_error_and_a_needless_refusal_are_seen(tmp_path: Path) -> None:
    """Planted: an option that changes the numbers, a record that is broken, a refusal of what should be legal."""
    dense = f"{SMALL} --num-experts 0 --sharding-degree 2"
    case = case_of("moe", 2, f"{dense} --weight-decay 0.5")
    rows = (*(row for row in OPTIONS if row.name != "weight_decay"), Option(name="weight_decay", layout=True))
    wrong = check(case, rows)
    assert wrong.kind == FAILED
    assert "parameter" in wrong.text
    assert check(case).kind == EQUAL

    broken = tmp_path / "second.jsonl"
    broken.write_text('{"text": "a"}\n{"body": "b"}\n', encoding="utf-8")
    late = check(case_of("moe", 2, f"{dense} --data-path {broken}"))
    assert late.kind == FAILED
    assert "Error" in late.text

    needless = check(Case("moe", 2, (("mp_degree", 3),)))
    assert needless.kind == FAILED
    assert "world-size" in needless.rules
    assert check(Case("moe", 2, (("mp_degree", 3),), wild=("mp_degree",))).kind == REFUSED


def test_a_run_is_continued_on_another_layout() -> None:
    """Planted: a run that continues with other numbers."""
    batch = "--micro-batch-size 1 --global-batch-size 4"
    first = f"{SMALL} --num-experts 4 --moe-router-topk 2 --ep-degree 2 {batch}"
    rest = f"{SMALL} --num-experts 4 --moe-router-topk 2 --mp-degree 2 {batch}"
    case = case_of("moe", 2, f"{first} then 2 {rest}")
    outcome = check(case)
    assert outcome.kind == EQUAL, outcome.text
    wrong = check(case_of("moe", 2, f"{first} then 2 {rest} --weight-decay 0.5"))
    assert wrong.kind == FAILED
    assert "parameter" in wrong.text
    assert "step 0" not in wrong.text


def test_an_evaluation_with_other_numbers_is_seen() -> None:
    """Of held-out text that no number of samples divides, after each step; planted: fewer batches of it."""
    line = (
        f"{SMALL.replace('--vocab-size 17', '--vocab-size 401')} --num-experts 2 --ep-degree 2 --micro-batch-size 3 "
        f"--data-path {LONG} --tokenizer-model {PIECES} --eval-data-path {HELD_OUT[60]} --eval-interval 1 "
    )
    case = case_of("moe", 2, f"{line} --eval-iters 9")
    outcome = check(case)
    assert outcome.kind == EQUAL, outcome.text
    wrong = case_of("moe", 2, f"{line} --eval-iters 1")
    rows = (*(row for row in OPTIONS if row.name != "eval_iters"), Option(name="eval_iters", layout=True))
    assert check(wrong, rows).text.startswith("gloo: loss/evaluation")


def test_dropout_of_a_layout_is_compared_with_itself_by_bits() -> None:
    """With recompute against without, and continued against uninterrupted; planted: a last bit."""
    line = f"{SMALL} --num-experts 0 --micro-batch-size 2 --mp-degree 2 --sequence-parallel --hidden-dropout 0.2"
    case = continued(case_of("moe", 2, f"{line} --recompute-interval 1 --train-iters 3 --save-interval 2"), _no_choice)
    assert case.by_bits
    assert case.resumed_at == 2
    outcome = check(case)
    assert outcome.kind == EQUAL, outcome.text
    got = reference("moe", tuple(case.reference_flags(2)))
    wrong = copy.deepcopy(got)
    name, value = next(iter(wrong.parameters.items()))
    value.view(-1)[0] = math.nextafter(float(value.view(-1)[0]), math.inf)
    wrong.logged[1]["loss/lm"] = math.nextafter(wrong.logged[1]["loss/lm"], 0)
    assert [text.split(":")[0] for text in bits(wrong, got)] == ["loss/lm, step 1", f"parameter {name}"]


def _no_choice(name: str, values: Sequence[Any], drawn: Drawn) -> Any:
    raise AssertionError(name)


def test_every_case_is_told_so_that_it_can_be_run_again() -> None:
    found = drawn_cases(9012, 160)
    assert sum(case.by_bits for case in found) > 2
    assert {name for case in found for name, _ in case.settings} >= RARE
    assert {case.backend for case in found} == {GLOO, LATE, LAZY, BOTH}
    assert {case.bucket for case in found} == {False, True}
    both = [case for case in found if case.continued]
    assert len(both) > 3
    for case in found:
        words = shlex.split(case.again())
        forced = json.loads(words[words.index("--forced") + 1]) if "--forced" in words else ({}, {})
        kind, world_size, *line = words[words.index("--case") + 1 :]
        again = case_of(kind, int(world_size), line, words[2], forced)
        assert again.forced == case.forced
        assert _resolved(again) == _resolved(case)
        assert again.backends == case.backends
        assert case.bucket == ("--bucket" in words)
    for case in both:
        assert case.continued
        assert case.continued.reference_flags(1) == case.reference_flags(1)
    for case in found:  # functions that were compiled, or sums that were cut in pieces, round otherwise
        assert not case.by_bits or (case.continued and case.continued.forced == case.forced)


def _resolved(case: Case) -> list[object]:
    """The values of all flags, of both runs."""
    runs = [case] if case.continued is None else [case, case.continued]
    values = [resolved_values(run.kind, run.flags(), {"WORLD_SIZE": str(run.world_size)}) for run in runs]
    return [{name: value for name, value in each.items() if name not in ("requested", "given")} for each in values]


POLICIES = ("token", "choice", "probs")


@pytest.mark.parametrize(
    ("world_size", "layout", "policies", "batch", "parts"),
    [
        (2, "--mp-degree 2 --sequence-parallel --moe-capacity-scope rank", POLICIES, 3, ((0, 1), (2, 3))),
        (2, "--cp-degree 2 --moe-capacity-scope rank", POLICIES, 3, ((0, 3), (1, 2))),
        (2, "--ep-degree 2 --ampipe-degree 2 --ampipe-slicing balanced", POLICIES[::2], 6, ((0, 1, 2), (3,))),
        (4, "--ep-degree 2 --mp-degree 2 --sequence-parallel --ampipe-degree 2", POLICIES[::2], 6, ((0, 1), (2, 3))),
    ],
)
def test_capacity_of_ranks_and_slices_is_held_to_the_oracle(
    world_size: int, layout: str, policies: tuple[str, ...], batch: int, parts: Parts
) -> None:
    """They differ from one process, which counts over the whole micro-batch; any policy works by slices, too."""
    line = (
        f"{SMALL} --init-std 0.5 --num-experts 4 --moe-router-topk 2 --moe-model-type deepspeed_moe "
        f"--moe-capacity-factor 0.5 --moe-min-capacity 1 --micro-batch-size 3 {layout}"
    )
    line += " --ampipe-capacity slice" if "--ampipe-degree" in layout else ""
    for policy in policies:
        case = case_of("moe", world_size, f"{line} --moe-drop-policy {policy}")
        outcome = check(case)
        assert outcome.kind == EQUAL, outcome.text
        flags = tuple(case.reference_flags(batch))
        assert differences(reference("moe", flags), reference("moe", flags, parts)) != []


def test_a_coarse_precision_is_held_to_what_it_rounds() -> None:
    line = f"{SMALL} --init-std 0.1 --num-experts 4 --moe-router-topk 2 --ep-degree 2 --micro-batch-size 2"
    case = case_of("moe", 2, f"{line} --dtype fp32")
    assert check(case).kind == EQUAL
    exact = reference("moe", tuple(case.reference_flags(4, dtype="fp64")))
    alone = reference("moe", tuple(case.reference_flags(4)))
    assert rounding_differences(alone, alone, exact, UNITS["fp32"]) == []
    name = max(exact.gradients[0], key=lambda name: float(exact.gradients[0][name].norm()))
    wrong = copy.deepcopy(alone)
    wrong.gradients[0][name] *= 1.001
    wrong.losses[1] = math.nan
    found = rounding_differences(wrong, alone, exact, UNITS["fp32"])
    assert [text.split(",")[0] for text in found] == ["loss", f"gradient of {name}"]
    wrong.gradients[0][name][:] = math.inf
    for got, single in ((wrong, wrong), (wrong, alone), (alone, wrong)):  # not finite, on both or on one
        found = rounding_differences(got, single, exact, UNITS["fp32"])
        assert f"gradient of {name}" in [text.split(",")[0] for text in found]
    assert overflows(wrong) == [0]
    assert overflows(alone) == []


def test_rules_that_refuse_are_rows() -> None:
    ids = {rule.id for rule in RULES}
    assert {regression.refused_by for regression in REGRESSIONS} - {""} <= ids


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
    *_, tally = PairFuzzer(pairs, seed=6, max_cases=4 * DRAWS, check=lambda case: Outcome(EQUAL)).run()
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
