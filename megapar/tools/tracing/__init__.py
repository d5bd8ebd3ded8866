"""Training steps on fake tensors, to count the bytes, kernels and host waits of any rank of any cluster."""
