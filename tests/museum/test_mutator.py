"""The mutator changes one line in a known way, draws the same for a seed, chooses tests by cost, and goes on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megapar.core.grid import Grid
from tests.museum import mutator
from tests.museum.museum import ROOT
from tests.museum.mutants import Mutant, candidates, differs, draw, mutants_of
from tests.museum.mutator import FATES, Verdict, in_order, read, survivors, unsound
from tests.museum.reach import Reach, Recorded, recorded
from tests.support.ranks import run_ranks

TEXT = '''"""A text of 3 words."""
LIMIT: int = 4
NAMES: dict[str, int] = {}


def f(x: Callable[[int], str], y=0.5):
    """Return 1."""
    if x < y and not x:
        raise ValueError(f"{x - 1}")
    x.add_(y)
    x += 1
    z = g(x, y, dim=-1) if x else h[x, y].permute(0, 1)
    logging.info(x, y)
    return max(z, x) - 1, zip(z, strict=True)


@case(2)
def __repr__(self):
    return 7


def f_cuda(x):
    return 7
'''
PATH = "megapar/core/box.py"


def test_each_kind_changes_one_line() -> None:
    found = [one for one in mutants_of(PATH, TEXT) if differs(one, TEXT)]
    assert {(one.line, one.kind, one.new.strip()) for one in found} == {
        (2, "constant", "LIMIT: int = 3"),
        (2, "constant", "LIMIT: int = 5"),
        (6, "constant", "def f(x: Callable[[int], str], y=-0.5):"),
        (8, "comparison", "if x <= y and not x:"),
        (8, "comparison", "if x < y or not x:"),
        (8, "comparison", "if x < y and x:"),
        (8, "swapped branches", "if not (x < y and not x):"),
        (10, "dropped statement", "pass"),
        (11, "dropped statement", "pass"),
        (11, "arithmetic", "x -= 1"),
        (11, "constant", "x += 0"),
        (11, "constant", "x += 2"),
        (12, "swapped arguments", "z = g(y, x, dim=-1) if x else h[x, y].permute(0, 1)"),
        (12, "constant", "z = g(x, y, dim=1) if x else h[x, y].permute(0, 1)"),
        (12, "constant", "z = g(x, y, dim=-0) if x else h[x, y].permute(0, 1)"),
        (12, "constant", "z = g(x, y, dim=-2) if x else h[x, y].permute(0, 1)"),
        (12, "swapped branches", "z = g(x, y, dim=-1) if not (x) else h[x, y].permute(0, 1)"),
        (12, "swapped axes", "z = g(x, y, dim=-1) if x else h[y, x].permute(0, 1)"),
        (12, "swapped axes", "z = g(x, y, dim=-1) if x else h[x, y].permute(1, 0)"),
        (12, "constant", "z = g(x, y, dim=-1) if x else h[x, y].permute(1, 1)"),
        (12, "constant", "z = g(x, y, dim=-1) if x else h[x, y].permute(0, 0)"),
        (12, "constant", "z = g(x, y, dim=-1) if x else h[x, y].permute(0, 2)"),
        (14, "arithmetic", "return max(z, x) + 1, zip(z, strict=True)"),
        (14, "constant", "return max(z, x) - 0, zip(z, strict=True)"),
        (14, "constant", "return max(z, x) - 2, zip(z, strict=True)"),
    }
    assert {one.line for one in found if one.at_import} == {2, 6}


def test_a_mutant_is_applied_to_its_line(tmp_path: Path) -> None:
    one = mutants_of(PATH, TEXT)[0]
    (tmp_path / PATH).parent.mkdir(parents=True)
    (tmp_path / PATH).write_text(TEXT)
    one.apply(tmp_path)
    assert (tmp_path / PATH).read_text() == TEXT.replace(one.old, one.new)


def test_a_draw_is_that_of_its_seed_and_stays_when_lines_move(monkeypatch: pytest.MonkeyPatch) -> None:
    def names(text: str, seed: int, number: int) -> list[str]:
        monkeypatch.setattr(Path, "read_text", lambda path, encoding="utf-8": text)
        monkeypatch.setattr(Path, "rglob", lambda path, _: [ROOT / PATH] if path.name == "core" else [])
        return [one.name for one in draw(ROOT, seed, number)]

    eight = names(TEXT, 1, 8)
    assert len(set(eight)) == 8
    assert names(TEXT, 1, 4) == eight[:4]
    assert names(TEXT.replace("LIMIT", "\nLIMIT"), 1, 8) == eight
    assert names(TEXT, 2, 8) != eight


MUTANT = Mutant(PATH, 5, "constant", "a = 1", "a = 2", "f", 5, 6, at_import=False)
OWN = "tests/core/test_box.py::"
SECONDS = {f"{OWN}slow": 9.0, f"{OWN}fast": 1.0, f"{OWN}not": 1.0, "a": 1.0, "b": 1.5, "c": 4.0, "d": 2.0}
REACH = Reach(
    SECONDS,
    {
        PATH: {
            6: frozenset(SECONDS) - {f"{OWN}not"},
            8: frozenset("cd"),
            9: frozenset({f"{OWN}not"}),
            **dict.fromkeys(range(10, 30), frozenset("c")),
        }
    },
)


def test_own_tests_come_first_and_then_those_that_reach_more_than_others_did() -> None:
    first, others, rest = in_order(REACH, MUTANT, 100)
    assert first == [f"{OWN}fast", f"{OWN}slow"]
    assert others == ["c", "a", "d", "b"]
    assert rest == [f"{OWN}not"]
    assert in_order(REACH, MUTANT, 7) == [[f"{OWN}fast"], ["c", "a"], [f"{OWN}not"]]
    assert in_order(Reach(SECONDS), MUTANT, 100) == [[], [], [f"{OWN}fast", f"{OWN}not", f"{OWN}slow"]]


def test_a_table_of_lines_is_read_as_written(tmp_path: Path) -> None:
    REACH.write(tmp_path / "reach.json.gz")
    assert Reach.read(tmp_path / "reach.json.gz") == REACH


def measure(rank: int, world_size: int) -> int:
    return Grid(mp=world_size).world_size + rank


def test_ranks_are_seen_as_their_test(tmp_path: Path) -> None:
    with recorded(tmp_path, "other"):
        pass
    assert run_ranks(2, Recorded(measure, tmp_path, "this")) == [2, 3]
    (tmp_path / "seconds.jsonl").write_text(json.dumps({"test": "this", "seconds": 1, "passed": True}))
    reach = Reach.of(tmp_path)
    assert reach.seconds == {"this": 1}
    assert reach.lines["megapar/core/grid.py"]


FAILED = "..F\nFAILED tests/a.py::test_x[1 - 2] - assert 1 == 2\n"


@pytest.mark.parametrize(
    ("status", "out", "tried"),
    [
        (0, "1 passed", None),
        (1, FAILED, ("killed", "tests/a.py::test_x[1 - 2]")),
        (2, "ERROR tests/a.py - ImportError: no\n", ("killed", "tests/a.py")),
        (4, "ImportError while loading conftest '/tests/conftest.py'.", ("killed", "does not import")),
        (1, "Timeout (0:02:00)!\nThread", ("killed", "time out")),
        (124, "", ("killed", "time out")),
        (4, "ERROR: not found: tests/a.py::test_x", ("broken", "4: ERROR: not found: tests/a.py::test_x")),
    ],
)
def test_what_pytest_says(status: int, out: str, tried: tuple[str, str] | None) -> None:
    assert read(status, out) == tried


def test_a_kill_by_a_test_that_fails_anyway_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tests = "tests/a.py::test_x[1 - 2]", "tests/a.py::test_y"
    found = [Verdict(by, "", "", "", "", "killed", by, 1, 1) for by in tests]
    monkeypatch.setattr(mutator, "run", lambda tree, tests: (1, FAILED))
    assert [(one.name, one.state) for one in unsound(tmp_path, found)] == [(tests[0], "broken")]
    monkeypatch.setattr(mutator, "run", lambda tree, tests: (4, "not found"))
    with pytest.raises(RuntimeError, match="not found"):
        unsound(tmp_path, found)


def test_a_run_goes_on_where_it_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    drawn = [one for one in mutants_of(PATH, TEXT) if differs(one, TEXT)][:3]
    tried: list[str] = []

    def judge(one: Mutant, *_: object) -> Verdict:
        tried.append(one.name)
        state = "survived" if one is drawn[0] else "killed"
        return Verdict(one.name, one.kind, one.path, one.old, one.new, state, "", 1, 1)

    monkeypatch.setattr(mutator, "copy_tree", lambda tree: None)
    monkeypatch.setattr(mutator.compileall, "compile_dir", lambda *_, **__: None)
    monkeypatch.setattr(mutator, "judge", judge)
    monkeypatch.setattr(mutator, "draw", lambda tree, seed, number: drawn[:number])
    monkeypatch.setattr(mutator.resource, "setrlimit", lambda *_: None)  # for all tests of this process
    REACH.write(tmp_path / "reach")
    files = ["--jobs", "1", "--reach", str(tmp_path / "reach"), "--state", str(tmp_path / "state")]
    names = [one.name for one in drawn]
    for options, wanted in ((["--draws", "2"], names[:2]), (["--draws", "3"], names[2:]), (["--again"], names[:1])):
        tried.clear()
        mutator.main([*files, *options])
        assert tried == wanted
    assert "3 of 3 tried: 2 killed, 1 survived" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        mutator.main([*files, "--only", "another"])
    assert "not among the mutants drawn: another" in capsys.readouterr().err


def test_what_is_told_of_survivors_is_of_todays_code() -> None:
    """A line that has changed since is another mutant: drop its row, and draw again."""
    names = {one.name for one in candidates(ROOT)}
    assert [row["name"] for row in survivors() if row["name"] not in names] == []
    assert [row["name"] for row in survivors() if len({*FATES, "left"} & row.keys()) != 1] == []
