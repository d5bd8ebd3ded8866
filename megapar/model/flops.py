"""Model FLOPs: what the mathematics of a training step asks for, as published utilization figures count it.

Each model says in its ``costs`` what its matrix products are (``ModelCost`` says what counts). Standard library only.
"""

from __future__ import annotations

from functools import lru_cache

from megapar.model.sizes import ModelSizes
from megapar.model.spec import spec_of


# A search plans hundreds of layouts of one model and batch.
@lru_cache(maxsize=4)
def step_flops(sizes: ModelSizes, sequences: int, seq_length: int, predicted: int | None = None) -> int:
    """FLOPs of forward and backward over ``sequences`` sequences of ``seq_length`` tokens.

    predicted: masked positions in all of them, for ERNIE, whose vocabulary head runs only there (default: 15 %).
    A decoder's head runs everywhere.
    """
    return spec_of(sizes).costs.step_flops(sizes, sequences, seq_length, predicted)


@lru_cache(maxsize=4)
def layer_flops(sizes: ModelSizes) -> tuple[int, ...]:
    """Forward FLOPs of one sequence: of the embedding, of each layer, of the head (masked words: 15 %)."""
    return tuple(spec_of(sizes).costs.forward_flops(sizes, sizes.seq_length))


def flops_per_token(sizes: ModelSizes, seq_length: int) -> float:
    """FLOPs of forward and backward per token of a sequence of ``seq_length``."""
    return step_flops(sizes, 100, seq_length) / (100 * seq_length)
