"""Signals, processes and their ends."""
