"""Kernels that move rows: of buckets, of experts, of tokens in an order."""
