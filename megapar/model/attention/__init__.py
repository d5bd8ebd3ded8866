"""Descriptions of the kinds of self-attention. Standard library only; the classes are in ``model.layers``."""
