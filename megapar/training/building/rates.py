"""The parameters that have rates of their own in a run, marked in the table. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megapar.arguments import Config
from megapar.model.parameter import ParameterSpec

DECOUPLED = ("embedding.word.weight", "lm_head.weight")  # those of --decoupled-lr, as in Megatron-LM


def with_rates(config: Config, table: Sequence[ParameterSpec]) -> tuple[ParameterSpec, ...]:
    """Return the table with marks at the parameters that --decoupled-lr is for."""
    if config.optimizer.decoupled_lr is None:
        return tuple(table)
    return tuple(replace(spec, decoupled=spec.name in DECOUPLED) for spec in table)
