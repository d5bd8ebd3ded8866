"""Layers that the models share, cut over tensor, sequence and context parallel ranks."""
