"""Mixture of experts: router, dispatch, experts, layer."""
