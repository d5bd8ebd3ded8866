"""A metrics file over restarts: every iteration once, whatever a kill has left of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megapar.errors import FolderLostError
from megapar.files.metrics_file import EXPERTS
from megapar.training.reports.json_lines import JsonLinesLogger
from tests.support.record import record


def iterations(path: Path) -> list[int]:
    return [json.loads(line)["iteration"] for line in path.read_text().splitlines()]


def test_repeated_and_broken_lines_go_and_the_others_stay(tmp_path: Path) -> None:
    path, experts = tmp_path / "m.jsonl", tmp_path / f"m{EXPERTS}"
    whole = "".join(json.dumps({"iteration": number, "loss": 1.5}) + "\n" for number in (1, 2, 3, 4))
    path.write_text(whole + '{"iter')
    experts.write_text("".join(json.dumps({"iteration": number, "layers": [[1]]}) + "\n" for number in (1, 2, 3)))
    JsonLinesLogger(path, 3).close()
    assert iterations(path) == iterations(experts) == [1, 2]
    assert path.read_text() == "".join(whole.splitlines(keepends=True)[:2])
    assert sorted(tmp_path.iterdir()) == sorted([path, experts])
    JsonLinesLogger(path, 1).close()
    assert path.read_text() == ""
    assert not experts.exists()


def test_a_file_of_another_run_is_not_touched(tmp_path: Path) -> None:
    path, lost = tmp_path / "m.jsonl", [False]

    def check() -> None:
        if lost[0]:
            raise FolderLostError("another run")

    logger = JsonLinesLogger(path, 1, check)
    logger.log(record(1))
    logger.flush()
    logger.log(record(2))
    lost[0] = True
    for call in (logger.flush, lambda: JsonLinesLogger(path, 1, check), logger.close):
        with pytest.raises(FolderLostError):
            call()
    assert iterations(path) == [1]


def test_seconds_tokens_and_perplexity_are_in_every_line(tmp_path: Path) -> None:
    logger = JsonLinesLogger(tmp_path / "m.jsonl", 1)
    logger.log(record(1, eval_lm_loss=0.0))
    logger.close()
    line = json.loads((tmp_path / "m.jsonl").read_text())
    assert (line["iteration_seconds"], line["consumed_tokens"], line["eval_perplexity"]) == (0.5, 1024, 1.0)
    assert line["perplexity"] == pytest.approx(4.481689)


def test_a_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "there").write_text('{"iteration": 1}\n{"iteration": 2}\n')
    (tmp_path / "m.jsonl").symlink_to(tmp_path / "there")
    JsonLinesLogger(tmp_path / "m.jsonl", 2).close()
    assert (tmp_path / "m.jsonl").is_symlink()
    assert iterations(tmp_path / "there") == [1]
