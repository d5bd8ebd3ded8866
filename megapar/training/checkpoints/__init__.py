"""Saving, loading, resuming and exporting a run."""
