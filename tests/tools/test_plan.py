"""``megapar plan --show-schedule``: the drawing, the bubble, and refusals."""

from __future__ import annotations

from pathlib import Path

import pytest

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
    svg = tmp_path / "missing" / "schedule.svg"
    assert plan("--svg", str(svg), "pretrain_moe.py", *FOUR, "--gradient-merge-acc-step", "8") == 1
    assert f"--svg {svg} cannot be written: No such file or directory" in capsys.readouterr().err


def test_costs_of_chunks_move_the_bubble(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("pretrain_ernie.py", *FOUR, "--gradient-merge-acc-step", "8")
    assert plan("--chunk-costs", *flags) == 0
    assert plan("--chunk-costs", *flags, "--pp-seg-method", "0,1,2,3") == 0
    shares = [line for line in capsys.readouterr().out.splitlines() if line.startswith("bubble")]
    assert len(set(shares)) == 2
    assert all("formula" not in line for line in shares)


def test_what_a_line_asks_of_its_files_is_left_out() -> None:
    assert main(["plan", "pretrain_moe.py", *FOUR[:2], "--validate-only"]) == 0


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
