"""megapar: hybrid-parallel pre-training of ERNIE and mixture-of-experts transformers.

The names of ``__all__`` are the public interface (docs/python.md). Each is imported when it is first used, so that
``import megapar`` and ``parse`` do not import torch.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

if sys.version_info < (3, 10):  # noqa: UP036, before any file that only a later Python can read
    sys.exit(f"megapar needs Python 3.10 or later, and {sys.executable} is {sys.version.split()[0]}: use another one")

__version__ = "0.2.0"

_PLACES = {
    "parse": "megapar.arguments",
    "Config": "megapar.arguments",
    "train": "megapar.trainer",
    "main": "megapar.trainer",
    "Outcome": "megapar.trainer",
    "Record": "megapar.training.reports.record",
    "Logger": "megapar.training.reports.logger",
    "TrainerCallback": "megapar.training.loop.callbacks",
    "OwnData": "megapar.data.own_data",
    "TokenDataset": "megapar.data.own_data",
    "MegaparError": "megapar.errors",
    "ConfigError": "megapar.errors",
    "DataError": "megapar.errors",
    "CheckpointError": "megapar.errors",
    "DistributedError": "megapar.errors",
    "TrainingError": "megapar.errors",
}

__all__ = [
    "CheckpointError",
    "Config",
    "ConfigError",
    "DataError",
    "DistributedError",
    "Logger",
    "MegaparError",
    "Outcome",
    "OwnData",
    "Record",
    "TokenDataset",
    "TrainerCallback",
    "TrainingError",
    "__version__",
    "main",
    "parse",
    "train",
]


def __getattr__(name: str) -> Any:
    """Import a public name from its module."""
    if name not in _PLACES:
        raise AttributeError(f"module 'megapar' has no attribute {name!r}")
    return getattr(import_module(_PLACES[name]), name)
