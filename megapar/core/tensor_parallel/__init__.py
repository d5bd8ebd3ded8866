"""Tensor parallelism: layers sharded over the axis ``mp``, whose collectives are hidden under their products."""
