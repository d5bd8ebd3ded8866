"""The form of the translation tables, and the cases of their rows."""

from __future__ import annotations

import re

import pytest

from megapar.config.read import normal, spellings
from megapar.tools.translation import open_values
from megapar.tools.translation.cases import NotANumberError, cases
from megapar.tools.translation.launchers import LAUNCHERS
from megapar.tools.translation.table import DEFAULTS, FOREIGN
from megapar.tools.translation.translated import FUNCTIONS
from megapar.tools.translation.verdict import VERDICTS, Foreign, Given, defaults, table

OURS = {
    row.ours.lstrip("@~")
    for rows in (*FOREIGN.values(), *DEFAULTS.values(), *LAUNCHERS.values())
    for row in rows.values()
    if row.ours.startswith("@")
}
CASES = sorted(text for text in OURS if ": " in text)


def holds(condition: str, value: str = "", given: Given | None = None) -> bool:
    return cases(f"{condition}: implied | yes\nelse: implied | no")(value, given or {})[2] == "yes"


@pytest.mark.parametrize(
    ("condition", "true", "false"),
    [
        ("is rope learned", ["rope", "learned", "ROPE"], ["", "yarn", "rope learned"]),
        ("is 1", ["1", "1.0"], ["", "2", "one"]),
        ("is ''", [""], ["0", "x"]),
        ("has gpt", ["gpt-3", "a/GPT"], ["", "llama"]),
        ("above 0", ["1", "0.5"], ["0", "-1", ""]),
        ("below 1", ["0", ""], ["1", "2"]),
        ("at least 2", ["2", "3"], ["1", ""]),
        ("at most 1", ["1", "0", ""], ["2"]),
        ("equals 0 1", ["0", "1.0", ""], ["2"]),
        ("or 1 equals 1", ["1", "", open_values.mark("$N")], ["0"]),
        ("on", ["", "true", "x"], ["false", "none", "0"]),
        ("off", ["false", "0"], ["", "true"]),
        ("alike", ["8", "8 8"], ["8 16", ""]),
        ("not is rope", ["", "yarn"], ["rope"]),
        ("above 0 and below 2", ["1"], ["0", "2"]),
    ],
)
def test_a_condition_on_the_value(condition: str, true: list[str], false: list[str]) -> None:
    assert [value for value in (*true, *false) if holds(condition, value)] == true


@pytest.mark.parametrize(
    ("condition", "true", "false"),
    [
        ("with load save", {"save": "x"}, {}),
        ("without load save", {}, {"load": ""}),
        ("optim is adamw", {"optim": "AdamW"}, {"optim": "muon"}),
        ("optim or adamw is adamw", {}, {"optim": "muon"}),
        ("cp-size cp or 1 equals 1", {}, {"cp": "2"}),
        ("topk is 0", {"topk": "0"}, {"topk": open_values.mark("$K")}),
        ("not bf16 fp16 on", {"fp16": "false"}, {"fp16": ""}),
        ("latent", {"multi-latent-attention": ""}, {"multi-latent-attention": "false"}),
    ],
)
def test_a_condition_on_other_arguments(condition: str, true: Given, false: Given) -> None:
    assert holds(condition, given=true)
    assert not holds(condition, given=false)


def test_a_compared_argument_is_a_number() -> None:
    with pytest.raises(NotANumberError, match="--topk many is not a number"):
        holds("topk above 1", given={"topk": "many"})


def test_a_case_fills_in_values() -> None:
    decide = cases("on: same --a {value} --b {word} --c {lr} | of {value}\nelse: different results --{name} {absent}")
    assert decide("1 2", {"lr": "3"}) == ("same", "--a 1 2 --b 1 --c 3", "of 1 2")
    assert decide("false", {}) == ("different results", "--{name}", "")


def test_an_unknown_condition_is_refused() -> None:
    with pytest.raises(ValueError, match="sometimes cannot be read as a condition"):
        cases("sometimes: implied | never\nelse: implied | x")


def test_the_form_of_a_table() -> None:
    rows = table("""
[renamed]
a= b | --lr {value} | a reason
c | ~ |
    on: --bf16
    else: unnecessary | it is off
d= | @~above 1: --mp-degree {value} else a single rank |
h | @off: --lr 1 else implied: it is one | slow
[implied | one reason \
    for both]
e= f
[different results unless]
g= | 0 | h | it is missing
""")
    assert rows == {
        "a": Foreign("renamed", "--lr {value}", "a reason", True),
        "b": Foreign("renamed", "--lr {value}", "a reason", True),
        "c": Foreign("renamed", "@~on: --bf16\nelse: unnecessary | it is off"),
        "d": Foreign("renamed", "@~above 1: --mp-degree {value}\nelse: unnecessary | a single rank", takes_value=True),
        "h": Foreign("renamed", "@off: --lr 1 | slow\nelse: implied | it is one"),
        "e": Foreign("implied", "", "one reason for both", True),
        "f": Foreign("implied", "", "one reason for both"),
        "g": Foreign("different results", rows["g"].ours, "it is missing", True),
    }
    decide = cases(rows["g"].ours[1:])
    assert decide("1", {})[::2] == ("unnecessary", "no effect without --h")
    assert decide("0.0", {"h": ""})[::2] == ("unnecessary", "no effect with this value")
    assert decide("none", {"h": ""})[::2] == ("unnecessary", "no effect with this value")
    assert decide("1", {"h": ""})[::2] == ("different results", "it is missing")
    with pytest.raises(ValueError, match="a= has two rows"):
        table("[implied]\na | | a reason\na= | | another reason")
    assert defaults("a  b | = 0.5 | why")["a b"].ours == "= 0.5"


def test_rows_name_all_functions() -> None:
    assert OURS.difference(CASES) == set(FUNCTIONS)


def test_the_last_case_of_a_row_always_holds() -> None:
    for text in CASES:
        cases(text)  # refuses a condition that it cannot read
        conditions = [line.partition(": ")[0] for line in text.splitlines()]
        assert conditions.index("else") == len(conditions) - 1, text


@pytest.mark.parametrize("framework", FOREIGN)
def test_rows_without_cases_write_flags_that_exist(framework: str) -> None:
    for name, row in [*FOREIGN[framework].items(), *DEFAULTS[framework].items()]:
        words = [] if row.ours.startswith(("@", "megapar launch ")) else row.ours.split()
        assert [word for word in words if word.startswith("--") and normal(word[2:]) not in spellings()] == [], name
        assert [word for word in words if re.fullmatch(r"[A-Z]{2,}", word)] == [], name


def test_cases_say_what_to_write_and_why() -> None:
    assert len(CASES) > 250
    for line in {line for text in CASES for line in text.splitlines()}:
        ours, _, reason = (part.strip() for part in line.partition(": ")[2].partition("|"))
        flags = ours.removeprefix(next((word for word in VERDICTS if f"{ours} ".startswith(f"{word} ")), "")).split()
        assert not reason.endswith("."), line
        assert reason or flags, line
        assert not flags or flags[0].startswith("--"), line
        for word in flags:
            assert not re.fullmatch(r"[A-Z]{2,}", word), line
            assert not word.startswith("--") or word == "--{name}" or normal(word[2:]) in spellings(), line
