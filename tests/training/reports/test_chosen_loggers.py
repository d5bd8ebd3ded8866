"""The loggers of a run: metrics beside checkpoints by default, the caller's own, one rank that logs."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from megapar.arguments import parse
from megapar.config.report import effective
from megapar.core.comm.world import World
from megapar.core.device.base import Device
from megapar.errors import FolderLostError
from megapar.trainer import train
from megapar.training.reports import opening
from megapar.training.reports.chosen_loggers import hyper_parameters, make_loggers
from megapar.training.reports.logger import Logger
from megapar.training.reports.record import Record
from megapar.training.reports.run_facts import write_facts
from tests.support.here import BASE, run_here
from tests.support.ranks import run_ranks
from tests.support.training import COMMON, SMALL, last_wins

SHORT = ("--train-iters", "2", "--log-interval", "1")


class Notes(Logger):
    """Writes down what it gets. fails: raises at every record."""

    def __init__(self, *, fails: bool = False) -> None:
        self.seen: list[Any] = []
        self._fails = fails

    def start(self, first_iteration: int, config: Mapping[str, Any]) -> None:
        self.seen.append((first_iteration, config["hidden_size"]))

    def log(self, record: Record) -> None:
        if self._fails:
            raise ValueError("mine")
        self.seen.append(record.iteration)

    def close(self) -> None:
        self.seen.append("closed")


def iterations(path: Path) -> list[int]:
    return [json.loads(line)["iteration"] for line in path.read_text().splitlines()]


def flags(*more: str) -> list[str]:
    return last_wins((*SMALL["moe"], *COMMON), (*SHORT, *more))


def test_metrics_are_beside_the_checkpoints_and_are_cut_to_the_resumed_iteration(tmp_path: Path) -> None:
    root = tmp_path / "c"
    run_here(root, "--train-iters", "5", "--save-interval", "2")
    assert iterations(root / "metrics.jsonl") == [1, 2, 3, 4, 5]
    assert (root / "run.json").is_file()
    run_here(root, "--load", str(root), "--ckpt-step", "2", "--train-iters", "3")
    assert iterations(root / "metrics.jsonl") == iterations(root / "metrics.experts.jsonl") == [1, 2, 3]
    run_here(tmp_path / "d", *SHORT, "--metrics-jsonl", "off")
    assert not list((tmp_path / "d").glob("*.jsonl"))


def test_no_logger_of_a_run_that_lost_its_folder_writes_there(tmp_path: Path) -> None:
    said: list[str] = []
    terminal: Any = Notes()
    terminal.print_message = said.append

    def lost() -> None:
        raise FolderLostError("another run owns it")

    config = parse("moe", [*flags(), "--save", str(tmp_path / "c")], {})
    loggers = make_loggers(config, terminal, 0, (), lost)
    assert len(loggers) == 2
    assert "FolderLostError: another run owns it" in said[0]
    assert not (tmp_path / "c").exists()


def test_own_loggers_hear_all_and_their_failures_end_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    sound, broken = Notes(), Notes(fails=True)
    assert train(parse("moe", flags(), {}), loggers=[broken, sound]).iteration == 2
    assert sound.seen == [(1, 32), 1, 2, "closed"]
    assert broken.seen == [(1, 32), "closed"]
    printed = capfd.readouterr().out
    assert printed.count("WARNING: logger Notes: ValueError: mine. Training continues") == 1
    assert "WARNING: logger Notes: 2 calls failed" in printed


def _of_rank(rank: int, world_size: int, rendezvous: str) -> list[Any]:
    notes = Notes()
    train(parse("moe", flags("--sharding-degree", "2"), dict(os.environ)), f"file://{rendezvous}", loggers=[notes])
    return notes.seen


def test_only_one_rank_logs() -> None:
    assert run_ranks(2, _of_rank, group=False) == [[(1, 32), 1, 2, "closed"], []]


def test_hyper_parameters_are_all_flags_of_the_trainer_as_json() -> None:
    config = parse("moe", [*flags(), *BASE[:2]], {})
    values = hyper_parameters(config)
    assert values["kind"] == "moe"
    assert values["data_path"] == ["mock"]
    assert "mlm_probability" not in values
    assert json.loads(json.dumps(values)) == values


def test_secrets_of_uris_are_in_no_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megapar.config.files.find_spec", lambda name: object())
    flags = ["--data-path", "mock", "--mlflow-experiment", "x", "--mlflow-tracking-uri", "http://me:secret@host/a"]
    config = parse("moe", flags, {})
    assert config.logging.mlflow_tracking_uri == "http://me:secret@host/a"
    write_facts(tmp_path, config, World.pretend(config.grid, Device(), 0), 1.0, "flag", 1, 0)
    said = [effective(config), str(hyper_parameters(config)), (tmp_path / "run.json").read_text()]
    said += list(opening._flags(config))
    assert "http://***@host/a" in said[0]
    assert [text for text in said if "secret" in text] == []
