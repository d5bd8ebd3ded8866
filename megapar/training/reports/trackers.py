"""Experiment trackers: Weights & Biases, MLflow and SwanLab. Each package is imported when its logger starts.

Keys, servers and offline modes are set by the trackers' own environment variables (docs/logging.md).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

from megapar.training.reports.logger import Logger
from megapar.training.reports.record import Record

T = TypeVar("T")

STEP = "iteration"
_MOST_PARAMETERS = 100  # MLflow's maximum per request
_MOST_METRICS = 1000  # likewise
_LONGEST_PARAMETER = 500  # characters; older servers refuse more


class WandbLogger(Logger):
    """Logs to Weights & Biases.

    A run that is resumed under the same ``WANDB_RUN_ID``, with ``WANDB_RESUME=allow``, repeats iterations, which that
    service refuses as steps. So the iteration is a metric, over which the others are drawn.

    Args:
        name: Name of the run; None for a random one.
        entity: User or team; None for the default of the account.
        folder: Folder for local files; None for the working directory.
    """

    def __init__(self, project: str, name: str | None, entity: str | None, folder: str | None) -> None:
        self._options = {"project": project, "name": name, "entity": entity, "dir": folder}
        self._folder = folder
        self._run: Any = None

    def start(self, first_iteration: int, config: Mapping[str, Any]) -> None:
        """Create the run, with the flags as its configuration."""
        _make(self._folder)
        self._run = import_module("wandb").init(config=dict(config), **self._options)
        self._run.define_metric(STEP)
        self._run.define_metric("*", step_metric=STEP)

    def log(self, record: Record) -> None:
        """Log one iteration."""
        self._run.log({STEP: record.iteration, **record.scalars()})

    def close(self) -> None:
        """Upload what is left, and end the run."""
        self._run.finish()


class MlflowLogger(Logger):
    """Logs to MLflow: flags as parameters, records as metrics, in requests of as many as a server accepts.

    Args:
        name: Name of the run; None for a random one.
        uri: Address of the server or database; None for that of ``MLFLOW_TRACKING_URI``.
    """

    def __init__(self, experiment: str, name: str | None, uri: str | None) -> None:
        self._experiment = experiment
        self._name = name
        self._uri = uri
        self._client: Any = None
        self._run = ""
        self._metrics: list[Any] = []

    def start(self, first_iteration: int, config: Mapping[str, Any]) -> None:
        """Create the run, with the flags as its parameters."""
        self._client = import_module("mlflow").MlflowClient(tracking_uri=self._uri)
        found = self._client.get_experiment_by_name(self._experiment)
        number = self._client.create_experiment(self._experiment) if found is None else found.experiment_id
        self._run = self._client.create_run(number, run_name=self._name).info.run_id
        parameter = import_module("mlflow.entities").Param
        parameters = [parameter(name, str(value)[:_LONGEST_PARAMETER]) for name, value in config.items()]
        for part in _parts(parameters, _MOST_PARAMETERS):
            self._client.log_batch(self._run, params=part)

    def log(self, record: Record) -> None:
        """Keep the metrics of one iteration until the next flush."""
        metric = import_module("mlflow.entities").Metric
        milliseconds = round(1000 * datetime.fromisoformat(record.time).timestamp())
        scalars = record.scalars().items()
        self._metrics += [metric(name, float(value), milliseconds, record.iteration) for name, value in scalars]

    def flush(self) -> None:
        """Send the metrics. After a failure, they are sent again with the next ones."""
        for part in _parts(list(self._metrics), _MOST_METRICS):
            self._client.log_batch(self._run, metrics=part)
            del self._metrics[: len(part)]

    def close(self) -> None:
        """Send what is left, and end the run."""
        self.flush()
        self._client.set_terminated(self._run)


class SwanLabLogger(Logger):
    """Logs to SwanLab.

    Args:
        name: Name of the experiment; None for a random one.
        folder: Folder for local files; None for ``swanlog`` in the working directory.
    """

    def __init__(self, project: str, name: str | None, folder: str | None) -> None:
        self._options = {"project": project, "experiment_name": name, "logdir": folder}
        self._folder = folder
        self._module: Any = None

    def start(self, first_iteration: int, config: Mapping[str, Any]) -> None:
        """Create the experiment, with the flags as its configuration."""
        _make(self._folder)
        self._module = import_module("swanlab")
        self._module.init(config=dict(config), **self._options)

    def log(self, record: Record) -> None:
        """Log one iteration."""
        self._module.log(record.scalars(), step=record.iteration)

    def close(self) -> None:
        """Upload what is left, and end the experiment."""
        self._module.finish()


def _make(folder: str | None) -> None:
    if folder is not None:
        Path(folder).mkdir(parents=True, exist_ok=True)


def _parts(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]
