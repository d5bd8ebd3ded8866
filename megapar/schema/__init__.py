"""Data types for flags and rules. All floors above may import them, including the descriptions of models."""
