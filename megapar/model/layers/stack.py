"""The consecutive layers that a rank holds, run one after the other, some of them in recomputed units.

Shape letters: B batch, S sequence, H hidden; S is cut over mp under sequence parallelism, written S(/mp).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from megapar.core.recompute.checkpointing import Recompute
from megapar.core.recompute.replay import Replay
from megapar.model.layers.ampipe import IncomingSlices, Sliced
from megapar.model.layers.context import Context
from megapar.moe.stats import MoeStats


def run_layers(
    blocks: Iterable[nn.Module], x: Tensor | Sliced, context: Context, recompute: Recompute | None
) -> tuple[Tensor | Sliced, list[MoeStats]]:
    """x [B, S(/mp), H] through all blocks, and the statistics of those with experts, in order.

    Where layers pass slices on one by one, what comes out is still in slices.
    recompute: None keeps everything. Without gradients nothing is kept anyway.
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
            x, found = forward.run(unit, entering, replace(context, replay=replay), replay=replay)
        else:
            x, found = unit(x, context)
        stats += found
    return x, stats


def _run(
    layers: Sequence[nn.Module], entering: Tensor | Sliced | IncomingSlices, context: Context
) -> tuple[Tensor | Sliced, list[MoeStats]]:
    stats = []
    x = entering.take() if isinstance(entering, IncomingSlices) else entering
    for number, layer in enumerate(layers, 1):
        x, found = layer(x, replace(context, closes_unit=True) if number == len(layers) else context)
        if found is not None:
            stats.append(found)
    return x, stats
