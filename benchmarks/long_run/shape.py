"""The model of the long runs: the quickstart's size in the shape of DeepSeek-V3."""

from __future__ import annotations

# Latent attention, sigmoid scores in groups with a bias, balance of single sequences, a shared expert beside routed
# ones, dense layers first, and multi-token prediction; untied, as published.
SHAPE = (
    *("--config", "configs/quickstart.yaml", "--untie-embeddings-and-output-weights"),
    *("--multi-latent-attention", "--num-query-groups", "4", "--q-lora-rank", "96", "--kv-lora-rank", "64"),
    *("--qk-head-dim", "32", "--qk-pos-emb-head-dim", "16", "--v-head-dim", "32"),
    *("--moe-router-score-function", "sigmoid", "--moe-router-num-groups", "4", "--moe-router-group-topk", "2"),
    *("--moe-router-topk-scaling-factor", "2.5", "--moe-aux-loss-coeff", "0", "--moe-seq-aux-loss-coeff", "1e-4"),
    *("--mtp-depth", "1", "--mtp-block", "layer", "--mtp-loss-weight", "0.3"),
)
EXPERTS = ("--ep-degree", "2")
TENSORS = ("--ep-degree", "1", "--mp-degree", "2", "--sequence-parallel")
