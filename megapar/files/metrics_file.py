"""Names of the files with a run's metrics."""

from __future__ import annotations

METRICS = "metrics.jsonl"
"""The default metrics file, in the folder of ``--save``."""

EXPERTS = ".experts.jsonl"
"""Replaces the suffix of the metrics file for the experts' load."""
