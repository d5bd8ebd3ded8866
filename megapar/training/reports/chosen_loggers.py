"""The loggers of a run: those that the flags turn on, and those that the caller passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from megapar.arguments import FLAGS, Config
from megapar.config.run import LoggingOptions
from megapar.files.uri import without_secrets
from megapar.training.reports.file_loggers import JsonLinesLogger, TensorBoardLogger
from megapar.training.reports.guarded_logger import GuardedLogger, RetriedLogger
from megapar.training.reports.logger import Logger
from megapar.training.reports.terminal import PlainTerminal
from megapar.training.reports.trackers import MlflowLogger, SwanLabLogger, WandbLogger


def make_loggers(
    config: Config,
    terminal: PlainTerminal | None,
    iteration: int,
    user_loggers: Sequence[Logger],
    check_owner: Callable[[], None],
) -> list[Logger]:
    """Return the started loggers, on the rank with a terminal; none on the others.

    Args:
        iteration: The last iteration done.
        check_owner: Raises FolderLostError if another run owns the folder of ``--save`` by now.
    """
    if terminal is None:
        return []
    logging, first, warn = config.logging, iteration + 1, terminal.print_message
    flags = hyper_parameters(config)
    loggers: list[Logger] = [terminal]
    if logging.metrics_file is not None:
        metrics = Path(logging.metrics_file)
        loggers.append(RetriedLogger(str(metrics), lambda at: JsonLinesLogger(metrics, at, check_owner), first, warn))
    if logging.tensorboard_dir:
        board = Path(logging.tensorboard_dir)
        loggers.append(RetriedLogger(str(board), lambda at: TensorBoardLogger(board, at, flags), first, warn))
    guarded = [GuardedLogger(name, tracker, warn, queued=True) for name, tracker in _trackers(logging)]
    guarded += [GuardedLogger(f"logger {type(logger).__name__}", logger, warn) for logger in user_loggers]
    for logger in guarded:
        logger.start(first, flags)
    return [*loggers, *guarded]


def _trackers(logging: LoggingOptions) -> Iterator[tuple[str, Logger]]:
    if logging.wandb_project is not None:
        options = logging.wandb_project, logging.wandb_exp_name, logging.wandb_entity, logging.wandb_save_dir
        yield "Weights & Biases", WandbLogger(*options)
    if logging.mlflow_experiment is not None:
        yield "MLflow", MlflowLogger(logging.mlflow_experiment, logging.mlflow_run_name, logging.mlflow_tracking_uri)
    if logging.swanlab_project is not None:
        yield "SwanLab", SwanLabLogger(logging.swanlab_project, logging.swanlab_exp_name, logging.swanlab_save_dir)


def hyper_parameters(config: Config) -> dict[str, Any]:
    """Return the trainer and the value of each of its flags, with lists for tuples, and without secrets of URIs."""
    flags: dict[str, Any] = {"kind": config.kind}
    for name, value in config.values().items():
        if config.kind in FLAGS[name].models and not FLAGS[name].meta:
            flags[name] = without_secrets(value)
    return flags
