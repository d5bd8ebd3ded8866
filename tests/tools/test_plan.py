"""``megapar plan --show-schedule``: the drawing, the bubble, and refusals."""

from __future__ import annotations

import json
import os
import shlex
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from megapar.arguments import parse
from megapar.core.units import billions
from megapar.planning.devices import device_kind
from megapar.planning.plan import Plan
from megapar.planning.text import describe, layer_timeline
from megapar.tools.main import main

FOUR = ("--world-size", "4", "--pp-degree", "4", "--num-layers", "8")


def plan(*flags: str) -> int:
    return main(["plan", "--show-schedule", *flags])


def test_it_draws_text_and_picture_for_a_cluster_that_is_not_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    svg = tmp_path / "schedule.svg"
    assert plan("--svg", str(svg), "pretrain_moe.py", *FOUR, "--gradient-merge-acc-step", "8") == 0
    said = capsys.readouterr().out
    assert "stage 3 |  .  .  . F0 B0  = F1 B1" in said
    assert "bubble: 27.3% (formula: 27.3%)" in said
    assert "stage 3: layers 6 to 7, head" in said
    assert svg.read_text().startswith("<svg")


def test_a_picture_that_cannot_be_written_ends_in_no_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    svg = tmp_path / "file" / "schedule.svg"
    assert plan("--svg", str(svg), "pretrain_moe.py", *FOUR, "--gradient-merge-acc-step", "8") == 1
    assert f"{svg} cannot be written: File exists" in capsys.readouterr().err


def test_a_picture_for_a_pipe_is_sent_through_it(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with ThreadPoolExecutor(1) as reader:
        read = reader.submit(pipe.read_text)
        assert plan("--svg", str(pipe), "pretrain_moe.py", *FOUR, "--gradient-merge-acc-step", "8") == 0
        assert read.result(timeout=60).startswith("<svg")
    assert pipe.is_fifo()
    assert list(tmp_path.iterdir()) == [pipe]


def test_a_single_stage_has_no_picture_and_a_folder_is_made(tmp_path: Path) -> None:
    assert plan("--config", "tiny", "--svg", str(tmp_path / "x.svg")) == 0
    assert list(tmp_path.iterdir()) == []
    assert (
        plan("--svg", str(tmp_path / "new" / "x.svg"), "pretrain_moe.py", *FOUR, "--gradient-merge-acc-step", "8") == 0
    )
    assert (tmp_path / "new" / "x.svg").read_text().startswith("<svg")


@pytest.mark.parametrize(
    "line",
    [
        "--search --show-schedule",
        "--show-schedule --timeline",
        "--show-schedule --json",
        "--search --trace",
        "--chunk-costs",
        "--trace-rank 5",
    ],
)
def test_an_option_without_effect_is_refused(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--config", "tiny", *line.split()]) == 2
    said = capsys.readouterr().err
    assert "[plan-unused]" in said
    assert line.split()[-2 if line.endswith("5") else -1] in said or "--search" in said


@pytest.mark.parametrize("tokens", ["inf", "nan", "0", "-5", "many"])
def test_a_budget_of_tokens_is_a_number_above_0(tokens: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["plan", "--config", "tiny", "--token-budget", tokens])
    assert ended.value.code == 2
    assert "is not a number of tokens" in capsys.readouterr().err


def test_costs_of_chunks_move_the_bubble(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("pretrain_ernie.py", *FOUR, "--gradient-merge-acc-step", "8")
    assert plan("--chunk-costs", *flags) == 0
    assert plan("--chunk-costs", *flags, "--pp-seg-method", "0,1,2,3") == 0
    shares = [line for line in capsys.readouterr().out.splitlines() if line.startswith("bubble")]
    assert len(set(shares)) == 2
    assert all("formula" not in line for line in shares)


def test_what_a_line_asks_of_its_files_is_left_out() -> None:
    assert main(["plan", "pretrain_moe.py", *FOUR[:2], "--validate-only"]) == 0


@pytest.mark.parametrize("words", ["fp8-mlp dualpipe", "'fp8-mlp dualpipe'", "fp8-mlp --assume dualpipe"])
def test_techniques_are_written_as_a_file_s_or_one_after_another(
    words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = shlex.split(
        f"--json --device-kind h100-80g --assume {words} --gradient-merge-acc-step 4 --pp-degree 4 --world-size 4"
    )
    assert main(["plan", *line]) in (0, 3)
    assert json.loads(capsys.readouterr().out)["assumed"] == ["fp8-mlp", "dualpipe"]


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (2048, "2,048"),
        (1.5e6, "1.5 M"),
        (671.026e9, "671 B"),
        (1.026e12, "1026 B"),
        (9.99996e12, "10 T"),
        (1.48e13, "14.8 T"),
    ],
)
def test_counts_are_short(count: float, text: str) -> None:
    assert billions(int(count)) == text


def test_one_stage_has_nothing_to_draw(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("pretrain_moe.py") == 0
    assert "no bubble" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "rule"),
    [
        ((*FOUR, "--gradient-merge-acc-step", "3"), "micro-batches-enough"),
        ((*FOUR, "--gradient-merge-acc-step", "6", "--use-nanopipe"), "micro-batches-stages"),
        ((*FOUR, "--gradient-merge-acc-step", "4", "--vpp-degree", "2"), "schedule-without-chunks"),
        ((*FOUR[:4], "--num-layers", "3", "--gradient-merge-acc-step", "4"), "stages-layers"),
        ((*FOUR, "--gradient-merge-acc-step", "4", "--pp-seg-method", "layer:Conv"), "pp-seg-method"),
        (
            (*FOUR[:4], "--num-layers", "6", "--gradient-merge-acc-step", "4", "--pp-seg-method", "layer:Block"),
            "pp-seg",
        ),
    ],
)
def test_what_cannot_run_is_refused(flags: tuple[str, ...], rule: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("pretrain_moe.py", *flags) == 2
    assert rule in capsys.readouterr().err


@pytest.fixture(scope="module")
def mixtral() -> Plan:
    config = parse("moe", ["--config", "mixtral-8x7b", "--rules-only", "--world-size", "64"], {}, planning=True)
    return Plan(config, device_kind("h100-80g"))


def test_the_verdict_is_at_the_top(mixtral: Plan) -> None:
    lines = describe(mixtral).splitlines()
    words = ["megapar plan:", "fits", "step", "MFU", "tokens/s", "whole run"]
    assert [line.strip().startswith(word) for line, word in zip(lines, words, strict=False)] == [True] * len(words)
    hours = float(lines[5].split(", ")[1].removesuffix(" device-hours").replace(",", ""))
    assert hours == pytest.approx(64 * 24 * mixtral.days, abs=0.5)


@pytest.mark.parametrize("width", [80, 120])
def test_tables_and_drawing_fit_the_terminal(mixtral: Plan, width: int) -> None:
    page = describe(mixtral, width=width) + layer_timeline(mixtral.run).describe(width)
    tables = [line for line in page.splitlines() if " x sharding " not in line]
    assert max(map(len, tables)) <= width
    reserved = [f"{memory.reserved / 2**30:.2f}" for memory in mixtral.memory]
    rows = [line.split() for line in tables if line.startswith("  stage ")]
    assert [value in row for value, row in zip(reserved, rows, strict=True)] == [True] * 4


def test_the_ranks_of_groups_are_listed_if_asked_for(mixtral: Plan) -> None:
    groups = "pp 4: 16 groups: 0 16 32 48 |"
    assert groups not in describe(mixtral)
    assert groups in describe(mixtral, groups=True)


@pytest.mark.parametrize(
    "flags", [["--write", "a.yaml"], ["--show-schedule", "--html", "a.html"], ["--json", "--ranks"], ["--svg", "a.svg"]]
)
def test_options_without_an_effect_are_refused(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--config", "tiny", *flags]) == 2
    assert "no effect here" in capsys.readouterr().err
    assert not list(Path.cwd().glob("a.*"))


def test_ranks_are_drawn_in_their_nodes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = ("--config", "tiny", "--global-batch-size", "32", "--world-size", "8", "--ranks-per-node", "2")
    assert main(["plan", *line, "--mp-degree", "1", "--pp-degree", "1", "--html", str(tmp_path / "p.html")]) == 0
    assert "nodes of 2 ranks" in (tmp_path / "p.html").read_text()


def test_the_pages_show_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--config", "mixtral-8x7b", "--world-size", "64", "--device-kind", "h100-80g"]) == 0
    verdict = capsys.readouterr().out.partition("\n\n")[0]
    assert len(verdict.splitlines()) == 6
    for page in ("README.md", "docs/plan.md"):
        assert verdict in (Path(__file__).parents[2] / page).read_text(encoding="utf-8"), page
