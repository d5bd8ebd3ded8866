"""The optimizer of master shards, its offload to the host, the gradient norm and clipping, and fp16 loss scaling."""
