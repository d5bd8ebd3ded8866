"""Conversion between checkpoints and Hugging Face folders."""
