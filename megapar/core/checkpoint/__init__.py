"""Checkpoints that any parallel layout can write and any other can read, without pickles."""
