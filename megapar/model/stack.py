"""Forward through the consecutive layers of a rank, with activation checkpointing of recomputed units.

Shape letters: B batch, S sequence, H hidden; S is split over mp under sequence parallelism, written S(/mp).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megapar.core.recompute.checkpointing import Recompute
from megapar.core.recompute.replay import Replay
from megapar.model.ampipe import IncomingSlices, Sliced
from megapar.model.layers.context import Context
from megapar.moe.stats import MoeStats


def run_layers(
    blocks: Iterable[nn.Module], x: Tensor | Sliced, context: Context, recompute: Recompute | None
) -> tuple[Tensor | Sliced, list[MoeStats]]:
    """Run x [B, S(/mp), H] through all blocks. Return the output and the routing statistics of those with experts.

    The output is still sliced if layers pass slices on. Without gradients, activation checkpointing has no effect.
    """
    layers = list(blocks)
    if recompute is None or not torch.is_grad_enabled():
        return _run(layers, x, context)
    stats: list[MoeStats] = []
    forward = recompute.begin()
    for span in recompute.choice.spans(len(layers)):
        unit = partial(_run, layers[span.start : span.stop])
        if span.recomputed:
            replay = Replay()
            entering = IncomingSlices(x, replay) if isinstance(x, Sliced) else x
            x, unit_stats = forward.run(unit, entering, replace(context, replay=replay), replay=replay)
        else:
            x, unit_stats = unit(x, context)
        stats += unit_stats
    return x, stats


def _run(
    layers: Sequence[nn.Module], entering: Tensor | Sliced | IncomingSlices, context: Context
) -> tuple[Tensor | Sliced, list[MoeStats]]:
    stats = []
    x: Any = entering.take() if isinstance(entering, IncomingSlices) else entering  # between layers also PendingSum
    between = replace(context, followed=True) if len(layers) > 1 else context
    for number, layer in enumerate(layers, 1):
        x, layer_stats = layer(x, replace(context, closes_unit=True) if number == len(layers) else between)
        if layer_stats is not None:
            stats.append(layer_stats)
    return x, stats
