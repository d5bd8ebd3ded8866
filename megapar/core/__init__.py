"""Parallelism: communication, sharding, pipelines, recomputation, devices. Independent of the configuration."""
