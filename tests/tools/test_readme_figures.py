"""The README's tables: of figures, which scripts/readme_figures.py writes, and of equal numbers."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from scripts import readme_figures
from scripts.marked import opening, part, replaced
from scripts.readme_figures import PAGE, README, Figure, FiguresError, committed, main, newest, table
from tests.equivalence.report import LAYOUTS, PART, line

ROOT = Path(__file__).parents[2]


def test_the_readme_has_the_newest_figures() -> None:
    assert main(["--check"]) == 0


def test_the_readme_has_a_row_for_each_layout_within_the_tolerances() -> None:
    rows = part((ROOT / "README.md").read_text(encoding="utf-8"), PART).splitlines()[2:-2]
    assert len(rows) == len(LAYOUTS)
    for shown, (name, row) in zip(rows, LAYOUTS.items(), strict=True):
        loss, gradient = (float(cell) for cell in shown.strip("| ").split(" | ")[-2:])
        assert shown == line(name, row, loss, gradient)
        assert (loss <= 1e-10, gradient <= 1e-9) == (True, True)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with a README and three results, whose only figure is that of the newest which has it."""
    results = tmp_path / "benchmarks" / "race" / "results"
    results.mkdir(parents=True)
    (tmp_path / "docs").mkdir()
    for page in (README, PAGE):
        (tmp_path / page).write_text(f"# a\n\n{opening(readme_figures.PART)}<!-- end -->\n\nb\n")
    (results / "2026-01-01-cpu.json").write_text('{"ratio": 1.0}')
    (results / "2026-01-02-cpu.jsonl").write_text('{"ratio": 2.0}\n{"ratio": 3.0}\n{"other": 4.0}\n')
    (results / "2026-01-03-cpu.json").write_text('{"other": 5.0}')
    figure = Figure("speed", "peer", "race/results/*cpu.json*", lambda records: f"{records[-1]['ratio']:.2f}", True)
    monkeypatch.setattr(readme_figures, "FIGURES", (figure,))
    return tmp_path


def commit(folder: Path) -> str:
    git = ("git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@example.org")
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "add", "benchmarks"], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "results"], check=True)
    return subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout[:7]


def test_a_figure_is_of_the_newest_line_that_has_it(folder: Path) -> None:
    value, path, record = newest(readme_figures.FIGURES[0], folder)
    assert (value, path.name, record) == ("3.00", "2026-01-02-cpu.jsonl", {"ratio": 3.0})


def test_a_figure_without_a_result_is_refused(folder: Path) -> None:
    for path in (folder / "benchmarks").rglob("2026-01-0[12]*"):
        path.unlink()
    with pytest.raises(FiguresError, match=r"no result in benchmarks/race/results/\*cpu\.json\* has 'speed'"):
        table(folder, {}, README)


def test_the_table_is_the_same_without_history(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    revision = commit(folder)
    assert main([], folder) == 0
    written = (folder / "README.md").read_text()
    assert f"| 3.00 | speed | peer | [2026-01-02, {revision}](benchmarks/race) |" in written
    (folder / ".git").rename(folder / "history")
    assert main(["--check"], folder) == 0
    (folder / "README.md").write_text(written.replace("3.00", "4.00"))
    assert main(["--check"], folder) == 1
    assert (
        capsys.readouterr().err == "README.md, docs/figures.md and benchmarks/ differ: run scripts/readme_figures.py\n"
    )


def test_a_changed_result_needs_its_commit(folder: Path) -> None:
    commit(folder)
    path = Path("benchmarks/race/results/2026-01-02-cpu.jsonl")
    known = {path.as_posix(): committed(path, {}, folder)}
    (folder / path).write_text('{"ratio": 6.0}\n')
    with pytest.raises(FiguresError, match=r"2026-01-02-cpu\.jsonl states no commit: commit it, then run"):
        committed(path, known, folder)


def test_a_result_that_states_date_and_commit_needs_no_history(folder: Path) -> None:
    path = folder / "benchmarks" / "race" / "results" / "2026-01-04-cpu.json"
    path.write_text(json.dumps({"ratio": 7.0, "date": "2026-01-05", "commit": "0123456789"}))
    text, used = table(folder, {}, README)
    assert text.endswith("| 7.00 | speed | peer | [2026-01-05, 0123456](benchmarks/race) |")
    assert used == {}


@pytest.mark.parametrize("page", ["", "<!-- a -->\nb\n", "<!-- a -->\n<!-- end -->\n" * 2])
def test_a_page_without_the_comments_is_refused(page: str) -> None:
    with pytest.raises(ValueError, match="the comments of 'a' once"):
        replaced(page, "a", "c")
