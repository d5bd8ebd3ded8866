"""Mixture of experts: router, token dispatcher, experts, layer (docs/ampipe.md for overlap)."""
