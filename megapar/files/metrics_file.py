"""Names of the files with a run's metrics.

Tested in ``tests/training/reports/test_json_lines.py``.
"""

from __future__ import annotations

METRICS = "metrics.jsonl"
"""The default metrics file, in the folder of ``--save``."""

EXPERTS = ".experts.jsonl"
"""Replaces the suffix of the metrics file for the experts' load."""
