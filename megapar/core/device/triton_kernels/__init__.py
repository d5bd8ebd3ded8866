"""Kernels in Triton, for what neither torch nor its compiler does in one pass. One file per kernel."""
