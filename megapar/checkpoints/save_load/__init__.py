"""Saving, loading and resuming on any parallel layout, without pickles."""
