"""Steps on fake tensors: the bytes, kernels and host waits of any rank of any cluster."""
