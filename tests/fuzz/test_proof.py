"""Whether the proof of rules sees what a row is for, and a row that is for nothing."""

from __future__ import annotations

import re
from pathlib import Path
from unittest.mock import patch

import pytest

import tests.fuzz.proof as proof
from megapar.arguments import parse
from megapar.compatibility import RULES, Rule
from megapar.errors import ConfigError
from tests.fuzz.proof import ARGUMENT, LATE_ERROR, NO_EFFECT, NOTHING, Verdict, asked, page, prove, without
from tests.fuzz.proofs import PROOFS

BY_ID = {rule.id: rule for rule in RULES}


def test_a_row_is_out_within_the_context_alone() -> None:
    line = ["--sequence-parallel"]
    with without("sequence-parallel-mp"):
        assert parse("moe", line, {}).parallel.sequence_parallel
    with pytest.raises(ConfigError, match="sequence-parallel-mp"):
        parse("moe", line, {})


@pytest.mark.parametrize(
    ("row", "kind"), [("heads-groups", LATE_ERROR), ("cp-algo-unused", NO_EFFECT), ("fp8-device", ARGUMENT)]
)
def test_what_a_row_is_for(row: str, kind: str) -> None:
    verdict = prove(BY_ID[row])
    assert verdict.kind == kind, verdict.text
    assert row in page([verdict])


def test_a_row_that_is_for_nothing_is_seen() -> None:
    useless = Rule(
        id="no-odd-seeds",
        reads=("seed",),
        requires=lambda f: f.seed % 2 == 0,
        message="--seed is even",
        source="nowhere",
        passing="--seed 2",
        failing="--seed 3",
    )
    with patch.object(proof, "RULES", (*RULES, useless)):
        assert prove(useless).kind == NOTHING


def test_the_page_has_every_row_that_is_asked() -> None:
    text = Path(__file__).parents[2].joinpath("docs/rules_proof.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `([\w-]+)` \|", text, re.MULTILINE) == [rule.id for rule in asked()]


def test_a_new_verdict_keeps_the_lines_of_other_rows() -> None:
    before = Path(__file__).parents[2].joinpath("docs/rules_proof.md").read_text(encoding="utf-8")
    after = page([Verdict("warmup", "--a-case", NO_EFFECT, "of a flag")], before)
    lines = before.splitlines()
    changed = [i for i, line in enumerate(after.splitlines()) if line != lines[i]]
    assert [lines[i].split("`")[1] for i in changed] == ["warmup"]
    assert len(after.splitlines()) == len(lines)
    assert page([], before) == before


def test_every_proof_is_of_a_row() -> None:
    assert set(PROOFS) <= {rule.id for rule in asked()}
