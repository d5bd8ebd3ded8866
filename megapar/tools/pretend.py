"""The real trainer as any rank of any cluster, in one process without memory: fake process groups, fake tensors.

What runs is the code that trains; what it is denied are values. Where a step looks at one on the host, the answer of a
balanced run is assumed: every data rank has as many tokens as this one, every expert as many rows as any other, and no
gradient overflows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from megapar.arguments import Config
from megapar.core import overlap
from megapar.core.axis import Axis
from megapar.core.device.base import Device
from megapar.core.device.pick import pick
from megapar.core.meter import WaitMeter
from megapar.core.sharding import fsdp
from megapar.core.world import World
from megapar.data.batches import Collate, MicroBatch, pinned
from megapar.data.corpus import Corpus
from megapar.data.own import own_positions
from megapar.data.samples import Sample
from megapar.moe import pieces
from megapar.moe.expert_parallel import RowCounts, TokenDispatcher
from megapar.moe.layer import MoeLayer
from megapar.tools.fake import RememberingMode
from megapar.trainer import Trainer
from megapar.training import build, job, work
from megapar.training.denominators import Denominators


class BalancedDenominators(Denominators):
    """Those of a step in which every data rank has as much as this one."""

    def __init__(self, batches: Sequence[MicroBatch], num_micro_batches: int, data: Axis, meter: WaitMeter) -> None:
        super().__init__(batches, num_micro_batches, Axis.single(data.name), meter)
        self._own = [sum(batch.counts[name] for batch in batches) for name in self._names]
        self._own.append(sum(batch.valid_tokens for batch in batches))
        self._ranks = data.size

    def _settled(self) -> list[int]:
        return [self._ranks * count for count in self._own]


@contextmanager
def pretend(
    config: Config, rank: int, tracker: TorchDispatchMode | None = None, device: Device | None = None
) -> Iterator[Trainer]:
    """The trainer of ``rank`` of the configuration's world, ready to step; everything in it is fake.

    Samples are real ones, of ``--data-path``. tracker: sees every operator while the trainer is built and steps.
    device: the CPU if it is not given. No process group may exist beforehand; none does afterwards.
    """
    config = replace(config, checkpoint=replace(config.checkpoint, save=None))  # nothing is written, nobody's owner
    corpus = build.make_corpus(config)
    world = World.pretend(config.grid, device or pick("cpu"), rank)
    try:
        with ExitStack() as stack:
            stack.enter_context(RememberingMode(allow_non_fake_inputs=True))
            # Initial values are not looked at either, and drawing them would take most of the time.
            stack.enter_context(patch.object(job, "fill"))
            stack.enter_context(patch.object(build, "make_collate", _make_real))
            # Nor is memory on the meta device, of which FSDP2 makes a tensor for every rank and parameter.
            stack.enter_context(patch.object(job, "_make_model", _make_model))
            stack.enter_context(patch.object(fsdp, "fully_shard", _fully_shard))
            stack.enter_context(patch.object(overlap, "_multiply", _multiply_one))
            stack.enter_context(patch.object(TokenDispatcher, "announce", _announce_balanced))
            stack.enter_context(patch.object(TokenDispatcher, "read", _read))
            stack.enter_context(patch.object(MoeLayer, "read_sizes", _read_sizes))
            stack.enter_context(patch.object(pieces, "_cut", _cut_numbers))
            stack.enter_context(patch.object(World, "mesh", _real_mesh))
            stack.enter_context(patch.object(world.device, "values", _values))
            stack.enter_context(patch.object(work, "Denominators", BalancedDenominators))
            if tracker is not None:
                stack.enter_context(tracker)
            trainer = Trainer(config, world, corpus)
            try:
                yield trainer
            finally:
                trainer.loader.close()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _make_real(config: Config, world: World, corpus: Corpus) -> Collate:
    """Samples are real, and the host reads them: they become fake on their way to the device."""
    own = own_positions(corpus.collate, build.make_layout(config), world.axis("cp").rank)
    collate = pinned(own, world.device.pin)

    def made(samples: Sequence[Sample]) -> MicroBatch:
        with unset_fake_temporarily():
            return collate(samples)

    return made


def _values(x: Tensor) -> list[float]:
    return [0.0] * len(x)


def _read(_: TokenDispatcher, row_counts: RowCounts) -> Tensor:
    return row_counts.numbers


def _read_sizes(layer: MoeLayer, counts_E: Tensor, rows: int) -> tuple[int, ...]:
    """As ``_announce_balanced`` has them."""
    layer.traffic.host_waits += 1
    share, rest = divmod(rows, len(counts_E))
    return tuple(share + (expert < rest) for expert in range(len(counts_E)))


def _cut_numbers(counts: Any, piece: int, count: int) -> Any:
    """What the host reads of a piece's rows are numbers, as what it read of all rows; the device's own stay fake."""
    if isinstance(counts, Tensor):
        return _cut(counts, piece, count)
    with unset_fake_temporarily():
        return _cut(torch.from_numpy(counts), piece, count).numpy()


_announce, _mesh = TokenDispatcher.announce, World.mesh
_model, _multiply = job._make_model, overlap._multiply
_cut = pieces._cut


def _make_model(*arguments: Any, meta: bool) -> job.Model:
    """A model on the meta device is one already; any other is fake."""
    with _disable_current_modes() if meta else nullcontext():
        return _model(*arguments, meta=meta)


def _multiply_one(x: Tensor, right: Tensor, bias: Tensor | None, out: Tensor, how: overlap.Overlap) -> None:
    """Products into memory that is there; where each sample has its own, one is looked at, the others are the same."""
    if not how.batched:
        first = (slice(1),) * (x.dim() - 2)
        x, out = x[first], out[first]
    _multiply(x, right, bias, out, how)


def _fully_shard(*arguments: Any, **options: Any) -> Any:
    """What is sharded is a model on the meta device."""
    with _disable_current_modes():
        return fully_shard(*arguments, **options)


def _real_mesh(world: World, *names: str) -> DeviceMesh:
    """A mesh is a table of ranks, whose values are needed."""
    with unset_fake_temporarily():
        return _mesh(world, *names)


def _announce_balanced(
    dispatcher: TokenDispatcher, experts_Tk: Tensor, kept_Tk: Tensor | None, **options: Any
) -> RowCounts:
    """The counts of a balanced load in place of those that the host would read: [2 (+ emp), ep, L]."""
    row_counts = _announce(dispatcher, experts_Tk, kept_Tk, **options)
    share, rest = divmod(experts_Tk.numel(), dispatcher.num_experts)
    own = np.full(dispatcher.num_experts, share)
    own[:rest] += 1
    counts = own.reshape(tuple(row_counts.counts.shape))
    arriving = np.broadcast_to(counts[dispatcher.ep.rank], counts.shape)
    rows = [counts, arriving, *([arriving] * dispatcher.emp.size if dispatcher.gathers else [])]
    return row_counts._replace(numbers=np.stack(rows))  # type: ignore[arg-type]
