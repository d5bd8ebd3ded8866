"""Model FLOPs: FLOPs that the mathematics of a training step requires, as counted for published utilization figures.

Each model lists its matrix products in its ``costs``; ``ModelCost`` defines which of them count.
"""

from __future__ import annotations

from functools import lru_cache

from megapar.model.sizes import ModelSizes
from megapar.model.spec import spec_of


# A search plans hundreds of layouts of one model and batch.
@lru_cache(maxsize=4)
def step_flops(sizes: ModelSizes, sequences: int, seq_length: int, predicted: int | None = None) -> int:
    """Return the FLOPs of forward and backward.

    predicted: Masked positions of all sequences, for ERNIE, whose vocabulary head runs only there; None for 15 %. A
    decoder's head runs at all positions.
    """
    return spec_of(sizes).costs.step_flops(sizes, sequences, seq_length, predicted)


@lru_cache(maxsize=4)
def layer_flops(sizes: ModelSizes) -> tuple[int, ...]:
    """Return the forward FLOPs of one sequence: embedding, each layer, head (at 15 % masked positions for ERNIE)."""
    return tuple(spec_of(sizes).costs.forward_flops(sizes, sizes.seq_length))


def flops_per_token(sizes: ModelSizes, seq_length: int) -> float:
    """Return the FLOPs of forward and backward per token of a sequence of ``seq_length`` tokens."""
    return step_flops(sizes, 100, seq_length) / (100 * seq_length)
