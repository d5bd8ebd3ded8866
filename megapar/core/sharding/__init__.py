"""Sharding of optimizer state, gradients and parameters over the (sharding, cp) axes."""
