"""TensorBoard: a run's curves, its experts in few cards, and its configuration."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megapar.training.reports.logger import Logger
from megapar.training.reports.record import Record

LOSS = "loss/total"
LOADS = "moe/load_of_layers"
LAYOUT: dict[str, dict[str, list[Any]]] = {
    "Loss": {"training and held out": ["Multiline", [r"loss/(total|evaluation)$"]]},
    "Experts": {"load relative to a balanced load": ["Multiline", [r"moe/load_(min|p50|p90|max)$"]]},
    "Time": {"seconds per step": ["Multiline", [r"speed/(step|exposed)_seconds$"]]},
}
"""Cards of the tab "Custom scalars", each with the curves that it shows together."""


class TensorBoardLogger(Logger):
    """Writes every number of a record, the flags as hyper-parameters, and histograms of the experts' load.

    TensorBoard sorts its cards by name, and the names of ``Record.scalars`` are chosen so that the loss is first.
    Layers of experts share cards: four curves over all layers, and a histogram of each layer's most loaded expert.

    Args:
        folder: Folder of the event files.
        first_iteration: The first iteration to log. TensorBoard hides what earlier starts logged from there on.
        config: Value of every flag by name.
    """

    def __init__(self, folder: Path, first_iteration: int, config: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        self._writer: Any = SummaryWriter(str(folder), purge_step=first_iteration)
        self._last: Record | None = None
        self._writer.add_custom_scalars(LAYOUT)
        self._writer.add_text("configuration", _table(config), first_iteration)
        events: Any = self._writer.file_writer
        for summary in hparams({name: _plain(value) for name, value in config.items()}, {LOSS: 0.0}):
            events.add_summary(summary)

    def log(self, record: Record) -> None:
        """Add a point to every curve."""
        for name, value in record.scalars().items():
            self._writer.add_scalar(name, value, record.iteration)
        self._last = record

    def flush(self) -> None:
        """Add a histogram of the experts' load, and flush to the event file."""
        last, self._last = self._last, None
        if last is not None and last.expert_load:
            import numpy as np

            loads = np.asarray([percentiles["max"] for percentiles in last.expert_load])
            self._writer.add_histogram(LOADS, loads, last.iteration)
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()


def _plain(value: Any) -> bool | int | float | str:
    """Return a value as TensorBoard's hyper-parameters can hold it."""
    return value if isinstance(value, (bool, int, float, str)) else str(value)


def _table(config: Mapping[str, Any]) -> str:
    """Return the configuration as a table in Markdown."""
    rows = (f"| {name} | {str(value).replace('|', chr(92) + '|')} |" for name, value in config.items())
    return "\n".join(("| flag | value |", "|---|---|", *rows))
