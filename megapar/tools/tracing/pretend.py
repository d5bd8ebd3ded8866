"""Trainer of any rank of any cluster in one process, without memory: fake process groups and fake tensors.

The code that runs is the code that trains; only the values are missing. If a step reads a value on the host, the
classes here answer as in a balanced run: every data rank has as many tokens as this one, all experts have the same
number of rows, and no gradient overflows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import fields, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from megapar.arguments import Config
from megapar.core.comm.axis import Axis
from megapar.core.comm.world import World
from megapar.core.device.accelerators import pick
from megapar.core.device.base import Device
from megapar.core.device.compiled import FunctionRunner, plain
from megapar.core.tensor_parallel.fp8 import Factor
from megapar.core.tensor_parallel.overlapped_linear import Overlap
from megapar.data.batches import Collate, MicroBatch, pinned
from megapar.data.corpus import Corpus
from megapar.data.reduced_batch import context_parallel_collate
from megapar.data.sampling.samples import Sample
from megapar.moe.dispatch_bytes import DispatchBytes
from megapar.moe.dispatcher import READ, RowCounts
from megapar.moe.expert_order import OrderedRows
from megapar.moe.experts import READ_SIZES, Experts
from megapar.moe.layer import MoeParts
from megapar.moe.node_dispatcher import NodeDispatcher, OutgoingRows
from megapar.moe.token_dispatcher import TokenDispatcher
from megapar.tools.tracing.fake import RememberingMode, replaced
from megapar.trainer import Trainer
from megapar.training.building.corpus import make_collate, make_corpus
from megapar.training.building.partition import make_layout
from megapar.training.building.parts import Parts, make_model, make_overlap
from megapar.training.step.batches import Denominators
from megapar.training.step.job import Model
from megapar.training.step.observer import StepObserver


@contextmanager
def pretend(
    config: Config,
    rank: int,
    tracker: TorchDispatchMode | None = None,
    device: Device | None = None,
    observer: StepObserver | None = None,
    *,
    exact: bool = False,
    run: FunctionRunner = plain,
    padded: bool = True,
) -> Iterator[Trainer]:
    """Yield the trainer of ``rank``, ready to step, with fake tensors. Samples are real, from ``--data-path``.

    No process group may exist before; none exists afterwards.

    Args:
        tracker: Mode that sees every operator while the trainer is built and steps.
        exact: Run every operator, including those whose result is cached. Slower; verifies the cache.
        run: Caller of the layers' functions.
        padded: Compute padding, too, as if all positions were text. Otherwise each micro-batch of ERNIE has another
            number of rows, as in a run, and the results of few operators can be remembered.
    """
    config = replace(config, checkpoint=replace(config.checkpoint, save=None))  # nothing is written
    parts = _fake_parts(exact=exact, run=run, padded=padded)
    corpus = make_corpus(config)
    world = FakeWorld.pretend(config.grid, device or pick("cpu"), rank)
    mode = FakeTensorMode if exact else RememberingMode
    try:
        with ExitStack() as stack:
            stack.enter_context(mode(allow_non_fake_inputs=True))
            # A method of the caller's device object, of any class. Zeros: no gradient overflows, and no rank votes.
            stack.enter_context(replaced(world.device, "values", lambda x: [0.0] * len(x)))
            if tracker is not None:
                stack.enter_context(tracker)
            trainer = Trainer(config, world, corpus, observer=observer, parts=parts)
            trainer.start()
            try:
                yield trainer
            finally:
                trainer.loader.close()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


class BalancedDenominators(Denominators):
    """Denominators of a step in which every data rank has the same counts as this one."""

    def __init__(self, batches: Sequence[MicroBatch], num_micro_batches: int, data: Axis) -> None:
        super().__init__(batches, num_micro_batches, Axis.single(data.name))
        self._own = [sum(batch.counts[name] for batch in batches) for name in self._names]
        self._own.append(sum(batch.valid_tokens for batch in batches))
        self._ranks = data.size

    def _settled(self) -> list[float]:
        return [self._ranks * count for count in self._own]


class BalancedDispatcher(TokenDispatcher):
    """Token dispatcher whose host reads counts of a balanced load, as numpy arrays, since a tensor would be fake."""

    def read(self, ordered: OrderedRows, counts: RowCounts, pieces: int) -> Tensor:
        """Return the counts of a balanced load: [1 + S, ep, L]."""
        self.comm.count_host_wait(READ)
        sent = np.array(_even(ordered.order.row.numel(), self.num_experts)).reshape(self.ep.size, -1)
        arriving = np.broadcast_to(sent[self.ep.rank], sent.shape)
        return np.stack([sent, *[arriving] * len(counts.arriving)])  # type: ignore[return-value]

    def piece(self, counts: Tensor, number: int, pieces: int) -> Tensor:
        """Return numbers for counts on the host, fake tensors for counts on the device."""
        if isinstance(counts, Tensor):
            return super().piece(counts, number, pieces)
        with unset_fake_temporarily():
            return super().piece(torch.from_numpy(counts), number, pieces).numpy()


class BalancedNodeDispatcher(NodeDispatcher):
    """Dispatcher by node whose host reads tables of a balanced load: experts of a token are as if drawn at random."""

    def read(self, ordered: OutgoingRows, counts: RowCounts, pieces: int) -> Tensor:
        """Return the tables of a balanced load: [ep, S, W]."""
        self.comm.count_host_wait(READ)
        shape, (tokens, topk) = self.shape(pieces), ordered.choices.shape
        load = DispatchBytes(0, topk, self.num_experts, self.ep.size, self.nodes.within.size, 0, 0)

        def rows(destinations: int, pairs: int) -> list[int]:
            # The experts of a piece on one destination; each of its pairs has a row if that is a single one.
            experts = self.num_experts // destinations if not pieces else shape.group // destinations
            reached = round(tokens * load.reached(experts) / (pieces or 1))
            return [min(pairs, reached)] * (shape.messages * destinations)

        pairs = _even(tokens * topk, shape.widths[2])
        to_nodes = rows(shape.nodes, sum(pairs) // (shape.messages * shape.nodes))
        to_ranks = rows(shape.group, sum(pairs) // (shape.messages * shape.group))
        table = np.array([*to_nodes, *to_ranks, *pairs])
        return np.broadcast_to(table, (*counts.arriving.shape[:2], len(table)))  # type: ignore[return-value]


class BalancedExperts(Experts):
    """Experts that all receive the same number of rows."""

    def read_sizes(self, counts_E: Tensor, rows: int) -> tuple[int, ...]:
        """Return the sizes that ``BalancedDispatcher.read`` returns."""
        self._comm.count_host_wait(READ_SIZES)
        return _even(rows, len(counts_E))


class OneSampleOverlap(Overlap):
    """Overlap that runs only the first of several equal products, where each sample has a separate product."""

    def multiply(self, x: Tensor, right: Factor, bias: Tensor | None, out: Tensor) -> None:
        """See ``Overlap.multiply``."""
        if not self.batched:
            first = (slice(1),) * (x.dim() - 2)
            x, out = x[first], out[first]
        super().multiply(x, right, bias, out)


class FakeWorld(World):
    """World with real device meshes, because torch reads the values of their rank tables."""

    def mesh(self, *names: str) -> DeviceMesh:
        """See ``World.mesh``."""
        with unset_fake_temporarily():
            return super().mesh(*names)


def _fake_parts(*, exact: bool, run: FunctionRunner, padded: bool) -> Parts:
    """Return the parts of a trainer with fake tensors whose host sees a balanced run. The arguments are ``pretend``'s.

    Initialization does nothing: values that do not exist would take most of the time. No compiler runs on fake tensors.
    """
    return Parts(
        model=_make_model,
        moe=MoeParts(experts=BalancedExperts, dispatcher=BalancedDispatcher, node_dispatcher=BalancedNodeDispatcher),
        overlap=make_overlap if exact else _one_sample_overlap,
        runner=lambda config, world: run,
        initialize=lambda *_, **__: None,
        fully_shard=_fully_shard,
        collate=partial(_real_collate, padded),
        denominators=BalancedDenominators,
    )


def _make_model(*arguments: Any, meta: bool) -> Model:
    """Build the model; outside the fake mode if it is on the meta device, where fake tensors are not needed."""
    with _disable_current_modes() if meta else nullcontext():
        return make_model(*arguments, meta=meta)


def _one_sample_overlap(config: Config, world: World) -> Overlap:
    """Return an overlap with one product in place of equal ones."""
    made = make_overlap(config, world)
    return OneSampleOverlap(**{field.name: getattr(made, field.name) for field in fields(made)})


def _fully_shard(*modules: Any, **options: Any) -> Any:
    """Shard outside the fake mode: FSDP2's tensors per rank and parameter need not be fake on the meta device."""
    with _disable_current_modes():
        return fully_shard(*modules, **options)


def _real_collate(padded: bool, config: Config, world: World, corpus: Corpus) -> Collate:
    """Return a collate function of real samples, because the host reads them. They become fake on the device."""
    if padded:
        own = context_parallel_collate(corpus.collate, make_layout(config), world.axis("cp").rank)
        collate = pinned(own, world.device.pin)
    else:
        collate = make_collate(config, world, corpus)

    def made(samples: Sequence[Sample]) -> MicroBatch:
        with unset_fake_temporarily():
            return collate(samples)

    return made


def _even(rows: int, experts: int) -> tuple[int, ...]:
    """Return the rows of each expert under a balanced load."""
    share, rest = divmod(rows, experts)
    return tuple(share + (expert < rest) for expert in range(experts))
