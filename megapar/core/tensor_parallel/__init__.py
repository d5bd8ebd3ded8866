"""Layers sharded over the axis ``mp``, with their collectives in flight under their products."""
