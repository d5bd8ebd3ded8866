"""Pipeline parallelism: cutting layers into stages, schedules as data, and the runner (docs/pipeline.md)."""
