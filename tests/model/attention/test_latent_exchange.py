"""What is sent is what costs fewer bytes."""

from __future__ import annotations

import pytest

from megapar.model.attention.latent_exchange import KEYS_AND_VALUES, LATENT, cheaper_exchange


@pytest.mark.parametrize(
    ("latent", "heads", "cp", "by_heads", "exchange"),
    [
        (576, 128 * 320, 8, False, LATENT),  # DeepSeek-V3
        (576, 128 * 320, 8, True, LATENT),
        (576, 16 * 320, 8, True, KEYS_AND_VALUES),  # mp 8: two of its heads for each rank of cp
        (576, 16 * 320, 8, False, LATENT),
        (576, 320, 2, False, KEYS_AND_VALUES),
        (320, 320, 2, False, LATENT),
        (10, 30, 2, True, LATENT),  # 2 x (16 + 32 bits) of 10 against 2 x 16 of 30
        (10, 29, 2, True, KEYS_AND_VALUES),
    ],
)
def test_fewer_bytes(latent, heads, cp, by_heads, exchange):
    assert cheaper_exchange(latent, heads, cp, by_heads=by_heads) == exchange
