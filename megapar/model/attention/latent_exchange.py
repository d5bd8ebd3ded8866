"""The choice of what ranks of cp send for multi-latent attention: latents, or keys and values."""

from __future__ import annotations

LATENT, KEYS_AND_VALUES, AUTO = "latent", "kv", "auto"
EXCHANGES = (LATENT, KEYS_AND_VALUES, AUTO)


def cheaper_exchange(latent: int, heads: int, cp: int, *, by_heads: bool) -> str:
    """Return the exchange that sends fewer bytes, forward and backward; latents if they are equal.

    Blocks are sent in the dtype of the run, and their gradients in fp32, either way. By heads, latents go to all ranks
    and their gradients return in fp32, which counts as two numbers of a 16-bit run, while keys and values of a head go
    to one rank.

    Args:
        latent: Features of a latent and its rotary key.
        heads: Features of the keys and values of a position on this rank of mp.
        cp: Ranks that share a sequence.
        by_heads: Ranks trade heads (Ulysses) instead of blocks of positions.
    """
    if by_heads:
        return LATENT if (1 + 2) * latent * cp <= 2 * heads else KEYS_AND_VALUES
    return LATENT if latent <= heads else KEYS_AND_VALUES
