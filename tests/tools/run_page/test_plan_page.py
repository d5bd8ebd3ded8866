"""The page of ``megapar plan --html``: what it shows is what the plan says."""

from __future__ import annotations

from pathlib import Path

import pytest

from megapar.core.grid import Grid
from megapar.tools.main import main
from megapar.tools.run_page.plan_page import ranks_by_node
from tests.tools.test_report import figures


def test_the_page_has_the_verdict_and_every_stage_and_rank(tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    assert main(["plan", "--config", "mixtral-8x7b", "--html", str(page)]) == 0
    text = page.read_text(encoding="utf-8")
    drawn = list(figures(text).values())
    assert [figure["kind"] for figure in drawn] == ["bars"] * 3 + ["spans"] * 2
    reserved = drawn[0]
    assert reserved["bars"] == [f"stage {stage}" for stage in range(4)]
    totals = [sum(part["values"][stage] for part in reserved["parts"]) for stage in range(4)]
    assert totals == pytest.approx([55.05, 46.77, 39.24, 33.32], abs=0.01)
    assert reserved["limit"] == 80
    assert text.count('title="rank 63: ') == 3  # pp, sharding, ep
    assert "megapar plan: 46.7 B parameters on 64 h100-80g" in text


def test_a_search_writes_its_layouts_and_a_file_that_gives_the_fastest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["plan", "--config", "tiny", "--world-size", "2", "--device-kind", "cpu"]
    page, file = tmp_path / "search.html", tmp_path / "best.yaml"
    assert main([*flags, "--search", "--html", str(page), "--write", str(file)]) == 0
    fastest = capsys.readouterr().out.splitlines()[3].split()[0]
    layouts = figures(page.read_text(encoding="utf-8"))["Layouts"]
    (best,) = [group["points"] for group in layouts["groups"] if group["name"] == "the fastest"]
    assert f"{best[0][1]:.3f}" == fastest
    assert main([*flags, "--config", str(file)]) == 0
    assert f"  step           {fastest} s" in capsys.readouterr().out
    assert main([*flags, "--html", str(file / "page.html")]) == 1
    assert "cannot be written" in capsys.readouterr().err


def test_ranks_of_one_place_have_one_color() -> None:
    text = ranks_by_node(Grid(pp=2, mp=2, sharding=2), 4)
    stages = text.partition("<h3>pp 2</h3>")[2].partition("<h3>")[0]
    colors = [part.split('"')[0] for part in stages.split("background:")[1:]]
    assert len(colors) == 8
    assert colors[0] == colors[3] != colors[4] == colors[7]
    assert "<i" not in ranks_by_node(Grid(sharding=8192), 8)
