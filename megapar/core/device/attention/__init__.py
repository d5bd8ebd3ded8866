"""Attention on every device: whole samples, slices, blocks with log-sum-exps, documents, and the table of kernels."""
