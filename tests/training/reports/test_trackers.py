"""Experiment trackers with stand-ins for their packages, which are real in scripts/loggers_offline.sh."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megapar.arguments import parse
from megapar.config import files as packages
from megapar.errors import ConfigError
from megapar.training.reports.trackers import MlflowLogger, SwanLabLogger, WandbLogger
from tests.support.here import run_here
from tests.support.record import record

FLAGS = {"kind": "moe", "lr": 0.1}
ON = ("--wandb-project", "p", "--mlflow-experiment", "e", "--swanlab-project", "s")


class Calls:
    """Stands for a package: every call of it is written down, and returns the same object."""

    def __init__(self, name: str) -> None:
        self.seen: list[tuple[Any, ...]] = []
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*arguments: Any, **named: Any) -> Calls:
            self.seen.append((name, *arguments, *([named] if named else [])))
            return self

        return call

    def of(self, name: str) -> list[tuple[Any, ...]]:
        """The arguments of every call of a function."""
        return [call[1:] for call in self.seen if call[0] == name]


class Client(Calls):
    """MLflow's client. fails: the number of requests of metrics that fail, from now on."""

    fails = 0

    def get_experiment_by_name(self, name: str) -> None:
        self.seen.append(("get_experiment_by_name", name))

    def create_run(self, experiment: Any, run_name: str | None) -> Any:
        return SimpleNamespace(info=SimpleNamespace(run_id="r"))

    def log_batch(self, run: str, **named: Any) -> None:
        if self.fails and "metrics" in named:
            self.fails -= 1
            raise ConnectionError("no server")
        self.seen.append(("log_batch", run, named))


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return placed(monkeypatch, "wandb")


@pytest.fixture
def swanlab(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return placed(monkeypatch, "swanlab")


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch) -> Client:
    client = Client("client")

    def entity(*values: Any) -> tuple[Any, ...]:
        return values

    module = SimpleNamespace(MlflowClient=lambda tracking_uri: client)
    monkeypatch.setitem(sys.modules, "mlflow", module)
    monkeypatch.setitem(sys.modules, "mlflow.entities", SimpleNamespace(Metric=entity, Param=entity))
    return client


def placed(monkeypatch: pytest.MonkeyPatch, name: str) -> Calls:
    module = Calls(name)
    monkeypatch.setitem(sys.modules, name, module)
    return module


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "find_spec", lambda name: object())


def test_wandb(wandb: Calls, tmp_path: Path) -> None:
    logger = WandbLogger("p", "n", "team", str(tmp_path / "w"))
    logger.start(1, FLAGS)
    logger.log(record(7))
    logger.close()
    assert wandb.of("init") == [
        ({"config": FLAGS, "project": "p", "name": "n", "entity": "team", "dir": str(tmp_path / "w")},)
    ]
    assert wandb.of("log") == [({"iteration": 7, **record(7).scalars()},)]
    assert len(wandb.of("finish")) == 1
    assert (tmp_path / "w").is_dir()


def test_swanlab(swanlab: Calls) -> None:
    logger = SwanLabLogger("p", None, None)
    logger.start(1, FLAGS)
    logger.log(record(7))
    logger.close()
    assert swanlab.of("init") == [({"config": FLAGS, "project": "p", "experiment_name": None, "logdir": None},)]
    assert swanlab.of("log") == [(record(7).scalars(), {"step": 7})]
    assert len(swanlab.of("finish")) == 1


def test_mlflow_sends_again_what_failed_and_no_more_at_once_than_servers_take(mlflow: Client) -> None:
    logger = MlflowLogger("e", None, None)
    logger.start(1, {**FLAGS, **{f"flag_{number}": "x" * 1000 for number in range(150)}})
    for iteration in range(1, 101):
        logger.log(record(iteration))
    mlflow.fails = 1
    with pytest.raises(ConnectionError):
        logger.flush()
    logger.log(record(101))
    logger.close()
    requests = [named for _, named in mlflow.of("log_batch")]
    parameters = [one for named in requests for one in named.get("params", ())]
    metrics = [one for named in requests for one in named.get("metrics", ())]
    assert len(parameters) == 152
    assert max(len(value) for _, value in parameters) == 500
    assert max(len(named.get("params", ())) for named in requests) == 100
    assert max(len(named.get("metrics", ())) for named in requests) == 1000
    assert [step for name, _, _, step in metrics if name == "loss/total"] == list(range(1, 102))
    assert metrics[0][2] == 1767225601000  # the record's own time, in milliseconds
    assert mlflow.of("set_terminated") == [("r",)]


def test_a_run_logs_to_all_of_them(
    wandb: Calls, mlflow: Client, swanlab: Calls, installed: None, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run_here(tmp_path / "c", *ON, "--train-iters", "2", "--log-interval", "1")
    assert [entry["iteration"] for (entry,) in wandb.of("log")] == [1, 2]
    assert [step["step"] for _, step in swanlab.of("log")] == [1, 2]
    assert wandb.of("init")[0][0]["config"]["hidden_size"] == 32
    assert ("set_terminated", "r") in mlflow.seen
    assert "WARNING" not in capfd.readouterr().out


def test_a_missing_package_is_refused_with_the_command_that_installs_it() -> None:
    with pytest.raises(ConfigError) as refused:
        parse("moe", ["--data-path", "mock", *ON], {})
    complaints = [complaint for complaint in refused.value.complaints if complaint.rule == "package"]
    fixes = [complaint.fix for complaint in complaints]
    assert fixes == [f'Install it with: pip install "megapar[{name}]"' for name in ("wandb", "mlflow", "swanlab")]
    assert parse("moe", ["--data-path", "mock", *ON, "--rules-only"], {}).logging.wandb_project == "p"
