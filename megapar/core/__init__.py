"""Parallelism: takes numbers, groups and devices; never the configuration."""
