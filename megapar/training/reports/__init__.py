"""Logs, metrics and records of a run."""
