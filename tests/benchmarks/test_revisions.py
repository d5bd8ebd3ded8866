"""Two trees of megapar, compared benchmark by benchmark."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks.revisions import steps
from benchmarks.revisions.run import ENTRIES, Entry, leaves, race

RESULTS = Path(__file__).parents[2] / "benchmarks"


def trees(folder: Path, package: str, module: str, program: str) -> dict[str, Path]:
    """Two trees with a package ``benchmarks`` and one more; a step of the first takes 1.1 s, of the other 1.0 s."""
    found = {"this tree": folder / "mine", "the other": folder / "theirs"}
    for seconds, tree in zip(("1.1", "1.0"), found.values(), strict=True):
        for name in {"benchmarks", package}:
            (tree / name).mkdir(parents=True)
            (tree / name / "__init__.py").touch()
        (tree / "benchmarks" / f"{module}.py").write_text(program.replace("SECONDS", seconds))
    return found


@pytest.fixture
def two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    monkeypatch.setitem(ENTRIES, "drawn", Entry(("benchmarks.drawn",), "seconds/.*"))
    return trees(tmp_path, "benchmarks", "drawn", """print('{"seconds": {"step": SECONDS, "peer": 1.0}}')""")


def test_a_slower_tree_fails_and_the_figures_say_where(two: dict[str, Path], tmp_path: Path) -> None:
    assert not race("drawn", two, 6, tmp_path / "results.jsonl")
    figures = json.loads((tmp_path / "results.jsonl").read_text())["figures"]
    assert figures["seconds/step"]["ratio"] == pytest.approx(1.1)
    assert {path for path, figure in figures.items() if figure["slower"]} == {"seconds/step"}
    assert race("drawn", {"this tree": two["the other"], "the other": two["this tree"]}, 6, None)


def test_speeds_are_compared_as_times(two: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENTRIES, "drawn", Entry(("benchmarks.drawn",), "seconds/.*", speeds=True))
    assert race("drawn", two, 6, None)


def test_no_figure_that_matches_fails_at_once_with_what_was_printed(
    two: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(ENTRIES, "drawn", Entry(("benchmarks.drawn",), "tokens/.*"))
    assert not race("drawn", two, 6, None)
    error = capsys.readouterr().err
    assert error.count("printed nothing that matches tokens/.*") == 1
    assert '"step": 1.0' in error


RANK = """
import json, sys
for request in sys.stdin:
    print("answer: " + json.dumps({"seconds": SECONDS}), flush=True)
"""


@pytest.fixture
def steppers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    lines = {"fast": ["benchmarks.drawn_rank"], "slow": ["benchmarks.drawn_rank", "--more"]}
    monkeypatch.setitem(steps.ENTRIES, "drawn", steps.Entry(lambda tree, other, weights: lines, 1))
    return trees(tmp_path, "megapar", "drawn_rank", RANK)


def test_steps_are_those_of_each_trees_own_processes(steppers: dict[str, Path], tmp_path: Path) -> None:
    assert not steps.race("drawn", steppers, 6, tmp_path / "results.jsonl")
    figures = json.loads((tmp_path / "results.jsonl").read_text())["figures"]
    assert {name: figure["ratio"] for name, figure in figures.items()} == pytest.approx(
        {"fast step": 1.1, "slow step": 1.1}
    )
    assert steps.race("drawn", {"this tree": steppers["the other"], "the other": steppers["this tree"]}, 6, None)


def test_a_process_that_ends_is_named(steppers: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    (steppers["the other"] / "benchmarks" / "drawn_rank.py").write_text("raise SystemExit(3)")
    assert not steps.race("drawn", steppers, 6, None)
    assert re.search("drawn: a process of .*, the other ended with status 3", capsys.readouterr().err)


def test_a_tree_without_its_own_package_is_not_measured(
    steppers: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    (steppers["the other"] / "megapar" / "__init__.py").unlink()
    (steppers["the other"] / "megapar").rmdir()
    assert not steps.race("drawn", steppers, 6, None)
    assert "not that of" in capsys.readouterr().err


@pytest.mark.parametrize("name", ENTRIES)
def test_a_pattern_matches_a_figure_of_a_committed_result(name: str) -> None:
    entry = ENTRIES[name]
    folder = RESULTS / entry.line[0].split(".")[1] / "results"
    paths = [path for file in folder.glob("*.json*") for result in records(file) for path, _ in leaves(result)]
    assert any(re.fullmatch(entry.figures, path) for path in paths)


def records(file: Path) -> list[object]:
    text = file.read_text()
    return [json.loads(text)] if file.suffix == ".json" else [json.loads(line) for line in text.splitlines()]
