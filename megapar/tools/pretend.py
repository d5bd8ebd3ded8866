"""The real trainer as any rank of any cluster, in one process without memory: fake process groups, fake tensors.

What runs is the code that trains; what it is denied are values. Where a step looks at one on the host, the answer of a
balanced run is assumed: every data rank has as many tokens as this one, and no gradient overflows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest.mock import patch

import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from megapar.arguments import Config
from megapar.core.device.pick import pick
from megapar.core.world import World
from megapar.data.batches import MicroBatch
from megapar.trainer import Trainer
from megapar.training import build


class PretendedTrainer(Trainer):
    """A trainer that never asks a tensor for its values."""

    def _count(self, batches: Sequence[MicroBatch]) -> tuple[dict[str, int], int]:
        ranks = self.data.size
        items = {name: ranks * sum(batch.counts[name] for batch in batches) for name in sorted(batches[0].counts)}
        return items, ranks * sum(batch.tokens for batch in batches)

    def _check_overflow(self, norm: Tensor) -> tuple[float, bool]:
        return (1.0 if self.loss_scale is None else self.loss_scale.value), False


@contextmanager
def pretend(config: Config, rank: int) -> Iterator[PretendedTrainer]:
    """The trainer of ``rank`` of the configuration's world, ready to step; everything in it is fake.

    Samples are real ones, of ``--data-path``. No process group may exist beforehand; none does afterwards.
    """
    corpus = build.make_corpus(config)
    world = World.pretend(config.grid, pick("cpu"), rank)
    try:
        # Initial values are not looked at either, and drawing them would take most of the time.
        with FakeTensorMode(allow_non_fake_inputs=True), patch.object(build, "fill"):
            trainer = PretendedTrainer(config, world, corpus)
            try:
                yield trainer
            finally:
                trainer.loader.close()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
