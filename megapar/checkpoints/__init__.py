"""Checkpoints: their files (format), whose they are (ownership), saving and loading, and other formats (export)."""
