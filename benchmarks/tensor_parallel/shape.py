"""The model of this benchmark: an ERNIE 4.5 decoder of 4 layers, the width of the 0.3B model."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """Sizes by the names of megapar's flags."""

    num_layers: int = 4
    hidden_size: int = 1024
    num_attention_heads: int = 16
    num_query_groups: int = 4
    head_dim: int = 64
    ffn_hidden_size: int = 3072
    vocab_size: int = 8192
    seq_length: int = 512

    def flags(self) -> list[str]:
        """Return the flags of pretrain_moe.py: dense, untied, one sample per step."""
        sizes = [token for name, value in vars(self).items() for token in (f"--{name.replace('_', '-')}", str(value))]
        return [*sizes, "--num-experts", "0", "--untie-embeddings-and-output-weights"]


SHAPES = {
    "cpu": Shape(),
    "cuda": Shape(
        hidden_size=4096,
        num_attention_heads=32,
        num_query_groups=8,
        head_dim=128,
        ffn_hidden_size=14336,
        vocab_size=32768,
        seq_length=4096,
    ),
}
