"""The rows that MindSpeed published for Ampipe, as flags, on a model that two cores can train."""

from __future__ import annotations

BASE = (
    *("--num-layers", "2", "--hidden-size", "512", "--num-attention-heads", "8", "--ffn-hidden-size", "2048"),
    *("--seq-length", "1024", "--vocab-size", "1024", "--activation", "gelu", "--normalization", "layernorm"),
    *("--num-experts", "4", "--moe-router-topk", "2", "--moe-model-type", "deepspeed_moe"),
    *("--moe-capacity-factor", "1.1", "--mp-degree", "2", "--sequence-parallel", "--ep-degree", "2"),
    *("--recompute-method", "block", "--recompute-num-layers", "2", "--micro-batch-size", "1"),
    *("--data-path", "mock", "--dtype", "fp32", "--lr", "1e-6", "--train-iters", "1000", "--eval-interval", "0"),
    *("--log-interval", "1000", "--replica-check-interval", "0"),
)
PIECES = ("--use-pipe-experts", "--pipe-experts-multi-stream")
SLICES = ("--ampipe-degree", "2", "--ampipe-tp-sp-comm-overlap")

# The published ones, and what each part of the third gives by itself.
ROWS = {
    "base": (),
    "pipe-experts": (*PIECES, "--pipe-experts-multi-data", "2"),
    "ampipe 2": ("--ampipe-degree", "2"),
    "ampipe 2, overlap": SLICES,
    "ampipe 2, overlap, pipe-experts": (*SLICES, *PIECES, "--pipe-experts-multi-data", "4"),
}
# TFLOP/s of an NPU: 16 of them, 131,072 tokens, 2 layers, hidden 12,288, ep 2, tp 8, cp 2, full recompute.
PUBLISHED = {
    "base": 120.56,
    "pipe-experts": 124.85,
    "ampipe 2, overlap": 127.29,
    "ampipe 2, overlap, pipe-experts": 126.87,
}


def flags(name: str) -> list[str]:
    """Return the command line of a row."""
    return [*BASE, *ROWS[name]]
