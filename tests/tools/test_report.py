"""``megapar report``: a page of a real run, looked at in a real browser where there is one."""

from __future__ import annotations

import json
import re
import shutil
import struct
import subprocess
from pathlib import Path

import pytest

from megapar.errors import ConfigError
from megapar.tools.main import main
from megapar.tools.report import _plan, report
from tests.support.training import run

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
SECTIONS = (
    "Losses",
    "Speed",
    "Memory",
    "Communication",
    "Experts",
    "Ranks",
    "Timeline",
    "Configuration",
    "Environment",
)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of two ranks, profiled, with its page."""
    folder = tmp_path_factory.mktemp("run")
    flags = ("--metrics-jsonl", str(folder / "metrics.jsonl"), "--profile", "2:3", "--ep-degree", "2")
    run(2, "moe", *flags, "--train-iters", "12", "--eval-interval", "6", "--eval-iters", "1")
    assert main(["report", str(folder)]) == 0
    return folder


def test_a_run_leaves_what_the_page_needs(finished: Path) -> None:
    facts = json.loads((finished / "run.json").read_text())
    assert facts["world_size"] == 2
    assert facts["configuration"]["ep_degree"] == {
        "value": 2,
        "origin": "flag",
        "group": "parallel",
        "flag": "--ep-degree",
    }
    loads = [json.loads(line) for line in (finished / "metrics.experts.jsonl").read_text().splitlines()]
    assert [load["iteration"] for load in loads] == list(range(1, 13))
    names = {event.get("name") for event in json.loads((finished / "trace.json").read_text())["traceEvents"]}
    assert {"megapar: forward and backward", "megapar: reduce", "megapar: optimizer"} <= names


def test_the_page_has_every_section_and_loads_nothing(finished: Path) -> None:
    page = (finished / "report.html").read_text(encoding="utf-8")
    headings = re.findall(r"<h2>(.*?)</h2>", page)
    assert [heading.split()[0] for heading in headings] == list(SECTIONS)
    assert not re.search(r"(src|href)=|https?://|<script|@import|url\(", page)
    assert "plan: peak of stage 0" in page
    assert page.count("<svg") >= 10
    assert "forward and backward" in page


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine (.ci/run installs it where it can)")
def test_a_browser_shows_it(finished: Path, tmp_path: Path) -> None:
    picture = tmp_path / "report.png"
    flags = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync")
    flags += ("--disable-background-networking", "--disable-component-update", f"--user-data-dir={tmp_path}/profile")
    url = (finished / "report.html").as_uri()
    assert CHROMIUM is not None
    shot = [CHROMIUM, *flags, "--window-size=1300,2400", f"--screenshot={picture}", url]
    subprocess.run(shot, check=True, capture_output=True, timeout=120)
    width, height = struct.unpack(">II", picture.read_bytes()[16:24])
    assert (width, height) == (1300, 2400)
    assert picture.stat().st_size > 60_000, "an empty page is a small picture"
    shown = subprocess.run(
        [CHROMIUM, *flags, "--dump-dom", url], check=True, capture_output=True, text=True, timeout=120
    )
    assert shown.stdout.count("<polyline") >= 10


def test_the_plan_beside_a_run_is_of_its_device(finished: Path) -> None:
    facts = json.loads((finished / "run.json").read_text(encoding="utf-8"))
    for name, kind in (("NVIDIA H200", "h200-141g"), ("Ascend910B2", "910b")):
        plan = _plan({**facts, "device": {"type": "cuda", "name": name}})
        assert kind in plan.kind.name


def test_the_plan_beside_a_run_has_the_flags_of_several_files(finished: Path) -> None:
    facts = json.loads((finished / "run.json").read_text(encoding="utf-8"))
    for entry in facts["configuration"].values():
        entry["origin"] = entry["origin"].replace("flag", "file a.yaml")
    assert _plan(facts).config.grid.ep == 2


def test_a_run_without_facts_or_profile_still_has_its_curves(finished: Path, tmp_path: Path) -> None:
    shutil.copy(finished / "metrics.jsonl", tmp_path / "m.jsonl")
    with (tmp_path / "m.jsonl").open("a") as file:
        file.write('{"iteration": 13, "lo')  # killed while it wrote
    assert main(["report", str(tmp_path), "--output", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "Losses" in page
    assert "12 iterations to 12" in page


@pytest.mark.parametrize("make", [lambda path: path.mkdir(), lambda path: None, lambda path: path.write_text("{}")])
def test_a_folder_without_metrics_is_refused(tmp_path: Path, make, capsys: pytest.CaptureFixture[str]) -> None:  # type: ignore[no-untyped-def]
    make(tmp_path / "run")
    assert main(["report", str(tmp_path / "run")]) == 2
    assert "run-folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("metrics.jsonl", '[1]\n{"iteration": 1}\n'),
        ("metrics.jsonl", '{"iteration": "x", "loss": []}\n'),
        ("metrics.jsonl", "\xff\n"),
        ("run.json", '{"configuration": 3}'),
        ("run.json", '{"grid": {}}'),
        ("trace.json", '{"traceEvents": [3]}'),
        ("metrics.experts.jsonl", '{"layers": 3}\n'),
    ],
)
def test_a_strangers_folder_is_refused_and_ends_in_no_traceback(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"iteration": 1, "loss": 2.0, "consumed_tokens": 8}\n')
    (tmp_path / name).write_bytes(content.encode("latin-1"))
    with pytest.raises(ConfigError, match="run-folder"):
        report(tmp_path)
