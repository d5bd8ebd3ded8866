"""Readers of text: built-in, text, JSONL and parquet files."""
