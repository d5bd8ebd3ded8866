"""``megapar report``: a page of a real run, looked at in a real browser where there is one."""

from __future__ import annotations

import hashlib
import json
import os
import re
import resource
import shutil
import signal
import struct
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from megapar.arguments import parse
from megapar.core.comm.world import World
from megapar.core.device.accelerators import pick
from megapar.errors import ConfigError
from megapar.planning.devices import device_kind
from megapar.planning.speed import Speed
from megapar.tools.main import main
from megapar.tools.report import report
from megapar.tools.run_page import run_folder
from megapar.tools.run_page.curve_sections import LOSSES, panels
from megapar.tools.run_page.document import SCRIPTS, own_file
from megapar.tools.run_page.plan_comparison import plan_of, planned_parts
from megapar.tools.run_page.tables import phases, side_by_side, summary
from megapar.tools.run_page.watch import RELOAD_SECONDS
from megapar.training.loop.callbacks import Profile
from megapar.training.reports.monitor import _percentiles
from megapar.training.reports.run_facts import NAME, _earlier_starts, write_facts
from tests.support.stores import copied, in_objects
from tests.support.training import run

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
SECTIONS = "Losses Speed Memory Communication Experts Ranks Timeline Configuration Environment"
# Apache ECharts 6.1.0, dist/echarts.min.js of the npm package.
ECHARTS = "b66b25aeb4df84e33199dc21694014d336d222cbd9deb0e5a7c14bd6aa0d0fd0"
MOST_BYTES = 1_500_000


def without_own_scripts(page: str) -> str:
    """A page without the scripts that belong to the package, and with the data of its figures as text."""
    for name in SCRIPTS:
        script = f"<script>{own_file(name)}</script>"
        assert page.count(script) == 1
        page = page.replace(script, "")
    opening = '<script type="application/json" id="data">'
    assert page.count(opening) == 1
    return page.replace(opening, "")


def figures(page: str) -> dict[str, dict]:  # type: ignore[type-arg]
    """Caption -> data of a page's figures."""
    found = re.search(r'id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    captions = re.findall(r"<figcaption>(.*?)<span>", page)
    return dict(zip(captions, json.loads(found.group(1))["figures"], strict=True))


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
    assert all(1 <= layer["busiest_rank"] <= layer["max"] for load in loads for layer in load["layers"])
    every = {load["iteration"]: load["loads"] for load in loads if "loads" in load}
    assert list(every) == [6, 12]  # where the loads are on the host for an evaluation's line
    for iteration, (layer,) in every.items():
        (shown,) = loads[iteration - 1]["layers"]
        assert len(layer) == 4
        assert sum(layer) == pytest.approx(4, abs=0.02)
        assert (min(layer), max(layer)) == (round(shown["min"], 2), round(shown["max"], 2))
    assert [(start["iteration"], start["world_size"]) for start in facts["starts"]] == [(1, 2)]
    assert (facts["starts"][0]["end"]["iteration"], facts["starts"][0]["end"]["stopped"]) == (12, "")
    names = {event.get("name") for event in json.loads((finished / "trace.json").read_text())["traceEvents"]}
    assert {"megapar: forward and backward", "megapar: reduce", "megapar: optimizer"} <= names


def test_percentiles_of_a_layer_are_relative_to_a_balanced_load() -> None:
    assert _percentiles([1.0, 5.0, 0.0, 2.0]) == {"min": 0.0, "p50": 0.5, "p90": 2.5, "max": 2.5}


def test_the_page_has_every_section_and_loads_nothing(finished: Path) -> None:
    page = (finished / "report.html").read_text(encoding="utf-8")
    headings = re.findall(r"<h2>(.*?)</h2>", page)
    assert [heading.split()[0] for heading in headings] == SECTIONS.split()
    links = re.findall(r'<a href="#(.*?)">', page)
    assert set(links) <= set(re.findall(r"<figure id=([\w-]+)", page))
    page = page.replace('<a href="#', "")
    assert not re.search(r"(src|href)=|https?://|<script|@import|url\(", without_own_scripts(page))
    assert len(page.encode()) < MOST_BYTES
    drawn = figures(page)
    assert len(drawn) >= 10
    assert [level["name"] for level in drawn["Peak memory so far"]["levels"]] == ["plan"]
    assert drawn["Where the time of a step went"]["bars"] == ["measured", "plan"]
    timeline = next(figure for figure in drawn.values() if figure["kind"] == "spans")
    assert timeline["lanes"] == ["step", "messages, gloo"]
    assert {"forward and backward", "reduce", "optimizer", "between the phases"} <= set(timeline["names"])
    assert all("mean" not in curve for figure in drawn.values() for curve in figure.get("curves", ()))


def test_the_library_is_the_published_one() -> None:
    assert hashlib.sha256(own_file("echarts.min.js").encode()).hexdigest() == ECHARTS


def test_names_are_text_and_no_script_of_them_runs(finished: Path, tmp_path: Path) -> None:
    evil = "</script><script>document.title='run'</script><img src=x onerror=alert(1)>"
    folder = tmp_path / "a<script>b"
    shutil.copytree(finished, folder)
    facts = json.loads((folder / "run.json").read_text())
    facts["environment"]["NCCL_NAME"] = evil
    (folder / "run.json").write_text(json.dumps(facts))
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for record in records:
        record["exposed_seconds"][evil] = 1.0
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    for page in (report(folder), report(folder, finished)):
        rest = without_own_scripts(page)
        assert "<script" not in rest
        assert "<img" not in rest
        assert "onerror" in rest  # as text
        policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
        assert policy is not None
        assert policy.group(1).startswith("default-src 'none'; script-src 'sha256-")
        assert policy.group(1).count("sha256-") == len(SCRIPTS)


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine (.ci/run installs it where it can)")
@pytest.mark.parametrize("several", [False, pytest.param(True, marks=pytest.mark.table)])
def test_a_browser_shows_it(finished: Path, tmp_path: Path, several: bool) -> None:
    picture = tmp_path / "report.png"
    flags = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync")
    flags += ("--disable-background-networking", "--disable-component-update", f"--user-data-dir={tmp_path}/profile")
    shutil.copytree(finished, tmp_path / "a<b>run")
    page = tmp_path / "page.html"
    page.write_text(report(finished, tmp_path / "a<b>run") if several else report(finished), encoding="utf-8")
    url = page.as_uri()
    assert CHROMIUM is not None
    shot = [CHROMIUM, *flags, "--window-size=1300,2400", f"--screenshot={picture}", url]
    subprocess.run(shot, check=True, capture_output=True, timeout=120)
    width, height = struct.unpack(">II", picture.read_bytes()[16:24])
    assert (width, height) == (1300, 2400)
    assert picture.stat().st_size > 60_000, "an empty page is a small picture"
    shown = subprocess.run(
        [CHROMIUM, *flags, "--dump-dom", url], check=True, capture_output=True, text=True, timeout=120
    )
    assert shown.stdout.count("<svg") == len(figures(page.read_text(encoding="utf-8")))
    assert shown.stdout.count("<path") >= 100


@pytest.fixture
def facts(finished: Path) -> dict[str, Any]:
    """The facts of the run, to be changed."""
    found: dict[str, Any] = json.loads((finished / "run.json").read_text(encoding="utf-8"))
    return found


def test_the_plan_beside_a_run_is_of_its_device(facts: dict[str, Any]) -> None:
    for name, kind in (("NVIDIA H200", "h200-141g"), ("Ascend910B2", "910b")):
        plan = plan_of({**facts, "device": {"type": "cuda", "name": name}})
        assert plan is not None
        assert kind in plan.kind.name


def test_the_plan_beside_a_run_has_the_flags_of_several_files(facts: dict[str, Any]) -> None:
    for entry in facts["configuration"].values():
        entry["origin"] = entry["origin"].replace("flag", "file a.yaml")
    plan = plan_of(facts)
    assert plan is not None
    assert plan.config.grid.ep == 2


def test_the_plan_beside_a_resumed_run_is_that_of_the_first_start(facts: dict[str, Any]) -> None:
    kept = {"load": "x", "override_opt_param_scheduler": True, "finetune": True, "ckpt_step": 3, "no_load_rng": True}
    for name, value in {**kept, "override_data": ["seed"], "no_load_optim": True}.items():
        facts["configuration"][name] = {"value": value, "origin": "flag", "group": "checkpoint", "flag": "--" + name}
    assert plan_of(facts) is not None


def test_a_page_says_why_it_has_no_plan(finished: Path, facts: dict[str, Any], tmp_path: Path) -> None:
    shutil.copytree(finished, tmp_path / "run")
    facts["configuration"]["num_layers"] = {"value": 0, "origin": "flag", "group": "model", "flag": "--num-layers"}
    unknown = {**facts, "device": {"type": "cuda", "name": "A thing"}}
    for record, reason in (
        (facts, "--num-layers must be at least 1; got 0."),
        (unknown, "the planner does not know the device A thing."),
    ):
        (tmp_path / "run" / "run.json").write_text(json.dumps(record), encoding="utf-8")
        assert f"No plan: {reason}" in report(tmp_path / "run")


def test_a_run_without_facts_or_profile_still_has_its_curves(finished: Path, tmp_path: Path) -> None:
    shutil.copy(finished / "metrics.jsonl", tmp_path / "m.jsonl")
    with (tmp_path / "m.jsonl").open("ab") as file:
        file.write(b'{"iteration": 14, "\xff": 0}\n{"iteration": 13, "lo')  # killed while it wrote
    assert main(["report", str(tmp_path), "--output", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "Losses" in page
    assert "<b>12</b><span>iterations" in page


def test_a_page_that_cannot_be_written_ends_in_no_traceback(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "missing" / "page.html"
    assert main(["report", str(finished), "--output", str(output)]) == 1
    assert f"{output} cannot be written: No such file or directory" in capsys.readouterr().err


def test_a_path_that_is_not_unicode_has_a_page_and_no_page_is_cut_off(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / os.fsdecode(b"run-\xff")
    shutil.copytree(finished, folder)
    assert main(["report", str(folder)]) == 0
    page = folder / "report.html"
    assert "run-?" in page.read_text(encoding="utf-8")
    whole = page.read_bytes()
    monkeypatch.setattr("megapar.tools.report.report", lambda *folders: "x" * 10**7)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10**6, limits[1]))
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        assert main(["report", str(folder)]) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert page.read_bytes() == whole


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
        ("run.json", '{"starts": [{"iteration": 1}]}'),
        ("metrics.experts.jsonl", '{"layers": 3}\n'),
    ],
)
def test_a_strangers_folder_is_refused_and_ends_in_no_traceback(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"iteration": 1, "loss": 2.0, "consumed_tokens": 8}\n')
    (tmp_path / name).write_bytes(content.encode("latin-1"))
    with pytest.raises(ConfigError, match="run-folder"):
        report(tmp_path)


def test_resumes_are_kept_and_layout_changes_told_apart(tmp_path: Path) -> None:
    sizes = {"dp": 1, "sharding": 2}
    starts = [
        {"iteration": first, "time": "2026-01-01T00:00:00+00:00", "world_size": 2, "grid": grid}
        for first, grid in ((1, sizes), (5, sizes), (9, {"dp": 2, "sharding": 1}))
    ]
    path = tmp_path / "run.json"
    path.write_text(json.dumps({"starts": starts}))
    assert _earlier_starts(path, 9) == starts[:2]  # the third one began where this one begins again
    assert _earlier_starts(path, 1) == []
    assert _earlier_starts(tmp_path / "none.json", 5) == []
    run = run_folder.RunFolder("run", [], {"starts": starts}, [], {})
    assert [(start.iteration, start.changed) for start in run.restarts] == [(5, False), (9, True)]
    assert run.restarts[1].layout == "2 ranks: dp 2"
    given = {"data_phases": "0: a=1; 24 samples: a=1,b=2; 9 iterations: b=1", "seq_length": 16, "global_batch_size": 4}
    configuration = {name: {"value": value} for name, value in given.items()}
    planned = run_folder.RunFolder("run", [], {"starts": starts, "configuration": configuration}, [], {})
    assert planned.marks == [(5, "resume"), (9, "layout"), (7, "phase"), (10, "phase")]
    assert "begins: iteration 7, 10." in phases(planned)
    assert phases(run) == ""


def test_facts_that_do_not_fit_on_the_disk_leave_those_of_the_starts_before(tmp_path: Path) -> None:
    config, world = parse("moe", ["--data-path", "mock"], {}), SimpleNamespace(device=pick("cpu"))

    def write(first: int) -> None:
        write_facts(tmp_path, config, cast(World, world), 1e12, "measured", 1000, first)

    write(1)
    before = (tmp_path / NAME).read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) // 2, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            write(5)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in tmp_path.iterdir()] == [NAME]
    assert (tmp_path / NAME).read_bytes() == before
    assert len(_earlier_starts(tmp_path / NAME, 5)) == 1


def test_a_profile_that_cannot_be_written_does_not_end_the_run(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    profile = Profile("1:1", tmp_path / "file" / "run", pick("cpu"), lambda: None)
    profile.before_step(1)
    with pytest.warns(RuntimeWarning, match=r"file/run/trace\.json cannot be written"):
        profile.after_step(1)
    profile.close()


def test_a_page_of_several_runs_has_a_curve_of_each_and_the_flags_that_differ(finished: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(finished, other)
    facts = json.loads((other / "run.json").read_text())
    facts["configuration"]["lr"] |= {"value": 0.5}
    (other / "run.json").write_text(json.dumps(facts))
    page = report(finished, other)
    loss = figures(page)["Loss: training"]
    assert [curve["name"] for curve in loss["curves"]] == [finished.name, "other"]
    assert len({curve["color"] for curve in loss["curves"]}) == 2
    table = page.partition("Flags that differ")[2].partition("</table>")[0]
    assert re.findall(r"<tr><th>(--.*?)</th>", table) == ["--lr"]
    assert len(page.encode()) < MOST_BYTES


def rows(table: str) -> dict[str, list[str]]:
    """Name -> cells of the rows of a table of runs; the best are in stars."""
    table = re.sub(r'<td class="best"[^>]*>(.*?)</td>', r"<td>*\1*</td>", table)
    found = re.findall(r"<tr><th>([^<]*)</th>(<td>.*?)</tr>", table)
    return {name: re.findall(r"<td>(.*?)</td>", cells) for name, cells in found}


def test_rows_that_do_not_matter_are_folded_and_the_best_values_marked() -> None:
    def made(name: str, loss: float, seconds: float, **flags: object) -> run_folder.RunFolder:
        record = {"iteration": 9, "consumed_tokens": 900, "loss": loss, "iteration_seconds": seconds}
        configuration = {flag: {"flag": f"--{flag}", "value": value} for flag, value in flags.items()}
        facts = {"parameters": 8, "world_size": 2, "device": {"name": "cpu"}, "configuration": configuration}
        return run_folder.RunFolder(name, [record], facts, [], {})

    runs = [
        made("a", 2.0, 1.0, lr=0.1, save="x/a", seed=1),
        made("b", 1.5, 1.01, lr=0.2, save="x/b", seed=1),
        made("c", 1.5001, 1.0, lr=0.1, save="x/c", seed=1),
    ]
    figures_of, _, flags = side_by_side(runs).partition("<h2>Flags that differ</h2>")
    shown, _, folded = figures_of.partition("<details")
    assert rows(shown) == {"loss": ["2.0000", "*1.5000*", "*1.5001*"]}
    assert rows(folded).keys() == {"iterations", "tokens", "time per step", "parameters", "ranks", "device"}
    assert "*" not in str(rows(folded))
    shown, _, folded = flags.partition("<details")
    assert rows(shown) == {"--lr": ["0.1", "0.2", "0.1"]}
    assert rows(folded) == {"--save": ["x/a", "x/b", "x/c"]}
    assert "Flags that differ" not in side_by_side([runs[0], runs[0]])


@pytest.mark.parametrize(("peak", "shown"), [("table", True), ("flag", True), ("measured", False)])
def test_the_share_of_a_guessed_peak_is_no_main_figure(peak: str, shown: bool) -> None:
    record = {"iteration": 1, "consumed_tokens": 8, "loss": 2.0, "mfu": 0.4, "mfu_peak": peak}
    assert ("MFU" in summary(run_folder.RunFolder("a", [record], {}, [], {}))) is shown


def test_a_value_that_a_run_lacks_is_shown_as_missing() -> None:
    runs = [run_folder.RunFolder("a", [{"iteration": 1, "consumed_tokens": 8, "loss": 2.0}], {}, [], {})]
    runs += [run_folder.RunFolder("b", [{**runs[0].records[0], "iteration_seconds": 1.0}], {}, [], {})]
    assert rows(side_by_side(runs).partition("<details")[0]) == {"time per step": ["", "1 s"]}


def test_runs_of_one_plan_share_its_bars(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished, tmp_path / "other")
    page = report(finished, tmp_path / "other")
    for title in ("Where the time of a step went", "Memory of a rank"):
        assert figures(page)[title]["bars"] == [f"measured, {finished.name}", "measured, other", "plan"]
    assert re.findall(r"<h1>(.*?)</h1>", page) == [f"megapar: {finished.name}, other"]


def test_a_watched_page_reloads_itself_until_the_run_has_ended(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    facts = json.loads((run / "run.json").read_text())
    end = facts["starts"][0].pop("end")
    (run / "run.json").write_text(json.dumps(facts))
    pages = []

    def sleep(seconds: float) -> None:
        pages.append((run / "report.html").read_text())
        facts["starts"][0]["end"] = end
        (run / "run.json").write_text(json.dumps(facts))

    monkeypatch.setattr("megapar.tools.run_page.watch.time.sleep", sleep)
    assert main(["report", str(run), "--watch"]) == 0
    assert [f'<meta http-equiv="refresh" content="{RELOAD_SECONDS}">' in page for page in pages] == [True]
    assert 'http-equiv="refresh"' not in (run / "report.html").read_text()
    assert capsys.readouterr().out.splitlines()[-1] == f"wrote {run}/report.html"
    monkeypatch.setattr("megapar.tools.run_page.watch.time.sleep", lambda seconds: pytest.fail("it has ended"))
    assert main(["report", str(run), "--watch"]) == 0


def test_losses_and_accuracies_of_tasks_are_in_figures_of_their_own() -> None:
    tasks = {"distance": 2.0, "distance_accuracy": 0.5, "order": 1.0}
    records = [{"iteration": iteration, "loss": 1.0, "tasks": tasks} for iteration in (1, 2)]
    drawn = {figure.title: figure for figure in panels([run_folder.RunFolder("run", records, {}, [], {})], LOSSES)}
    assert [curve["name"] for curve in drawn["Losses of tasks"].body["curves"]] == ["distance", "order"]
    assert [curve["points"] for curve in drawn["Accuracy of tasks"].body["curves"]] == [[(1, 50.0), (2, 50.0)]]


def test_a_run_in_an_object_store_has_its_page_there(finished: Path) -> None:
    run = in_objects()
    copied(finished, run)
    assert main(["report", str(run)]) == 0
    page = (run / "report.html").content(MOST_BYTES).decode()
    assert "megapar: store" in page
    assert figures(page) == figures((finished / "report.html").read_text())


def test_runs_of_one_name_are_told_apart() -> None:
    folders = [Path("/x/a/run"), Path("/x/b/run"), Path("/x/b/other")]
    assert run_folder.run_names(folders) == ["a/run", "b/run", "b/other"]
    assert run_folder.run_names([Path("/r/a/checkpoints")]) == ["a"]
    assert run_folder.run_names([Path("/r/a"), Path("/r/a/checkpoints")]) == ["a", "checkpoints"]


def test_the_only_run_below_a_folder_is_taken(finished: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "checkpoints").symlink_to(finished)
    assert run_folder.read_run(tmp_path / "mine", "mine").records == run_folder.read_run(finished, "mine").records
    (tmp_path / "mine" / "other").symlink_to(finished)
    with pytest.raises(ConfigError, match="Did you mean"):
        run_folder.read_run(tmp_path / "mine", "mine")


def test_the_parts_of_a_planned_step_are_the_step(facts: dict[str, Any]) -> None:
    plan = plan_of(facts)
    assert plan is not None
    assert plan.kind == device_kind("cpu")
    speed = plan.speed
    assert isinstance(speed, Speed)
    parts = planned_parts(speed)
    assert min(parts.values()) >= 0
    assert sum(parts.values()) == pytest.approx(speed.step_seconds)


def test_a_long_run_on_many_axes_makes_a_page_that_is_not_too_large(finished: Path, tmp_path: Path) -> None:
    lines = (finished / "metrics.jsonl").read_text().splitlines()
    record = json.loads(lines[-1])
    axes = ("mp", "cp", "ep", "pp", "shard", "replica", "expert_shard", "data")
    kinds = [f"{axis}/{kind}" for axis in axes for kind in ("all_gather", "reduce_scatter")]
    with (tmp_path / "metrics.jsonl").open("w") as file:
        for iteration in range(1, 1001):
            record |= {"iteration": iteration, "loss": 2.0 + iteration % 7 / 7, "grad_norm": 1.0 + iteration % 11 / 13}
            record |= {"exposed_seconds": dict.fromkeys(kinds, iteration * 7919 % 1000 / 9973)}
            file.write(f"{json.dumps(record)}\n")
    loads = {"min": 0.123, "p50": 1.0, "p90": 1.5, "max": 2.345, "busiest_rank": 1.234}
    with (tmp_path / "metrics.experts.jsonl").open("w") as file:
        for iteration in range(1, 1001, 10):
            every = [[0.01 * (iteration * expert * 7919 % 300) for expert in range(384)]] * 61
            file.write(f"{json.dumps({'iteration': iteration, 'layers': [loads] * 61, 'loads': every})}\n")
    shutil.copy(finished / "run.json", tmp_path)
    shutil.copy(finished / "trace.json", tmp_path)
    page = report(tmp_path)
    assert len(page.encode()) < MOST_BYTES
    assert "mean" in figures(page)["Loss"]["curves"][0]
