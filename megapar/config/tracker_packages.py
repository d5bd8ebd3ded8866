"""Experiment trackers: the flag that turns each one on, and the package that it needs, which megapar leaves out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any

from megapar.errors import Complaint
from megapar.schema.rule import spell

PACKAGES: Mapping[str, str] = MappingProxyType(
    {"wandb_project": "wandb", "mlflow_experiment": "mlflow", "swanlab_project": "swanlab"}
)
"""Flag of each tracker, and the name of its package, which is also that of its module."""


def check_trackers(values: Mapping[str, Any]) -> Iterator[Complaint]:
    """Yield a complaint for each tracker whose package is not installed. Finds packages without importing them."""
    for name, package in PACKAGES.items():
        if values.get(name) and find_spec(package) is None:
            message = f"{spell(name)} needs the package {package}, which is not installed."
            yield Complaint("package", message, f"Install it with: pip install {package}")
