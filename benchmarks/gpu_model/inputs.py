"""Inputs of the model: every figure with its unit, source and date, from ``inputs.yaml`` or from a measured day."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

TABLE = Path(__file__).with_name("inputs.yaml")
# Ways to read the figures: all at their slow end, in the middle, all at their fast end.
SLOW, MIDDLE, FAST = WAYS = ("slow", "middle", "fast")
UNITS = {"TB/s": 1e12, "TFLOP/s": 1e12, "GB/s": 1e9, "us": 1e-6, "fraction": 1.0}
ATTENTION_LENGTH = 8192
QUEUED = 1.2


@dataclass(frozen=True)
class Figure:
    """One input.

    Attributes:
        values: Slow, middle and fast value in ``unit``.
        unit: A key of ``UNITS``.
        what: Meaning.
        source: Source.
        date: Date of the figure.
    """

    values: tuple[float, float, float]
    unit: str
    what: str
    source: str
    date: str

    def si(self, way: str) -> float:
        """Return the value in bytes, FLOPs and seconds."""
        return self.values[WAYS.index(way)] * UNITS[self.unit]

    def measured(self, value: float, source: str, date: str) -> Figure:
        """Return the figure with a measured value, which has no range."""
        return replace(self, values=(value / UNITS[self.unit],) * 3, source=source, date=date)


Inputs = Mapping[str, Figure]


def read() -> dict[str, Figure]:
    """Return the figures of ``inputs.yaml``."""
    rows = yaml.safe_load(TABLE.read_text(encoding="utf-8"))
    return {
        name: Figure(**{**row, "values": tuple(row["values"]), "date": str(row["date"])}) for name, row in rows.items()
    }


def with_findings(inputs: Inputs, path: Path) -> dict[str, Figure]:
    """Return the inputs with the measurements of a GPU day in place of theirs.

    Lines of the CPU and of small days measure nothing here. A later line replaces an earlier one.
    """
    found = dict(inputs)
    for text in path.read_text(encoding="utf-8").splitlines():
        line = json.loads(text)
        if line["part"] != "micro" or line["device"] != "cuda" or line["small"]:
            continue
        source = f"measured: {line['what']}, commit {line['commit']}"
        for name, value in _figures(line):
            found[name] = found[name].measured(value, source, line["date"][:10])
    return found


def _figures(line: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the inputs that a finding of scripts/gpu_day/micro.py measures: (name, value in SI units)."""
    if "host_seconds" in line:
        yield "launch", line["host_seconds"]
        if line["seconds"] > QUEUED * line["host_seconds"]:  # otherwise the device waited for the host
            yield "gap", line["seconds"]
    if "large_tflops" in line:
        yield "gemm", 1e12 * line["large_tflops"]
    rate = line.get(f"torch_chooses_{ATTENTION_LENGTH}")
    if isinstance(rate, Mapping):
        yield "attention", 1e12 * rate["tflops"]
    if "clone_of_h_0" in line:
        yield "bandwidth", line["bytes_of_h_0"] / line["clone_of_h_0"]
        yield "gather_bandwidth", line["bytes_of_h_0"] / line["gather_into_h_0"]
