"""AdamW on master shards, its offload to the host, and fp16 loss scaling."""
