"""Rows on the sizes that every model has, and on the limits of the Hugging Face format."""

from __future__ import annotations

from megapar.rules import exports
from megapar.schema.rule import Rule, near_divisors, near_multiples

SOURCE = "models"

RULES: tuple[Rule, ...] = (
    Rule(
        id="hidden-heads",
        reads=("hidden_size", "num_attention_heads", "requested"),
        when=lambda f: f.requested.get("head_dim") is None,
        requires=lambda f: f.hidden_size % f.num_attention_heads == 0,
        message="--num-attention-heads must divide --hidden-size if --head-dim is not given",
        fix=lambda f: (
            f"Choose --num-attention-heads {near_divisors(f.hidden_size, f.num_attention_heads)}, or --hidden-size "
            f"{near_multiples(f.num_attention_heads, f.hidden_size)}."
        ),
        source=SOURCE,
        passing="--hidden-size 256 --num-attention-heads 8",
        failing="--hidden-size 256 --num-attention-heads 6",
    ),
    Rule(
        id="positions",
        reads=("seq_length", "max_position_embeddings"),
        requires=lambda f: f.seq_length <= f.max_position_embeddings,
        message="--seq-length must be at most --max-position-embeddings, which a published model's config.json may set",
        fix=lambda f: f"Choose --max-position-embeddings {f.seq_length}, or --seq-length {f.max_position_embeddings}.",
        source=SOURCE,
        passing="--seq-length 256 --max-position-embeddings 512",
        failing="--seq-length 256 --max-position-embeddings 128",
    ),
    *exports.RULES,
)
