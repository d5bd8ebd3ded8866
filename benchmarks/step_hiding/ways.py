"""The run of this benchmark as flags: every layer has experts, and a step is two micro-batches of two samples."""

from __future__ import annotations

BASE = (
    *("--num-layers", "4", "--hidden-size", "256", "--num-attention-heads", "4", "--ffn-hidden-size", "1024"),
    *("--seq-length", "1024", "--vocab-size", "1024", "--num-experts", "4", "--moe-router-topk", "2"),
    *("--moe-model-type", "deepspeed_moe", "--moe-capacity-factor", "1.25", "--ep-degree", "2"),
    *("--micro-batch-size", "2", "--gradient-merge-acc-step", "2", "--data-path", "mock", "--dtype", "fp32"),
    *("--train-iters", "1000", "--eval-interval", "0", "--log-interval", "1000", "--replica-check-interval", "0"),
    *("--lr", "1e-6"),
)
SERIAL = "serial"
WAYS = {
    SERIAL: (),
    "ampipe 2": ("--ampipe-degree", "2"),
    "ampipe 4": ("--ampipe-degree", "4"),
    "cross-layer 2": ("--ampipe-degree", "2", "--ampipe-cross-layer"),
    "cross-layer 2, pieces": (
        *("--ampipe-degree", "2", "--ampipe-cross-layer"),
        *("--use-pipe-experts", "--pipe-experts-multi-data", "2"),
    ),
    "cross-layer 4": ("--ampipe-degree", "4", "--ampipe-cross-layer"),
}


def flags(way: str) -> list[str]:
    """Return the command line of a way."""
    return [*BASE, *WAYS[way]]
