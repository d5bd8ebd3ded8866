"""The models of this benchmark: decoders whose every layer has experts, wide enough that products cover messages."""

from __future__ import annotations

from megapar.model.decoder.sizes import DecoderSizes
from megapar.moe.sizes import MoeSizes
from megapar.moe.slicing import Slicing

WAYS = {
    "serial": Slicing(),
    "ampipe 2": Slicing(2),
    "ampipe 4": Slicing(4),
    "cross-layer 2": Slicing(2, cross_layer=True),
    "cross-layer 4": Slicing(4, cross_layer=True),
    "pipe-experts": Slicing(expert_pieces=2),
    "ampipe 2, pipe-experts": Slicing(2, expert_pieces=2),
}


def make_sizes(device: str) -> DecoderSizes:
    """Return four layers of four experts (two per rank), top 2."""
    hidden, ffn, length = (512, 1024, 1024) if device == "cpu" else (4096, 8192, 4096)
    return DecoderSizes(
        num_layers=4,
        hidden_size=hidden,
        num_attention_heads=8,
        num_query_groups=4,
        head_dim=hidden // 8,
        ffn_hidden_size=ffn,
        vocab_size=1024,
        seq_length=length,
        max_position_embeddings=length,
        tie_embeddings=False,
        moe=MoeSizes(hidden, ffn, num_experts=4, topk=2),
    )
