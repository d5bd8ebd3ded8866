"""The real trainer as any rank of any cluster, in one process without memory: fake process groups, fake tensors.

The code that runs is the code that trains; only values are missing. Where a step looks at one on the host, the parts
here answer for a balanced run: every data rank has as many tokens as this one, every expert as many rows as any other,
and no gradient overflows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from megapar.arguments import Config
from megapar.core.box import Box
from megapar.core.comm.axis import Axis
from megapar.core.comm.meter import WaitMeter
from megapar.core.comm.world import World
from megapar.core.device.base import Device
from megapar.core.device.pick import pick
from megapar.core.tensor_parallel.overlapped_linear import Overlap
from megapar.data.batches import Collate, MicroBatch, pinned
from megapar.data.corpus import Corpus
from megapar.data.own import own_positions
from megapar.data.sampling.samples import Sample
from megapar.model.parameter import ParameterSpec
from megapar.model.sizes import ModelSizes
from megapar.moe.layer import READ_SIZES, MoeLayer
from megapar.moe.token_dispatcher import READ, RowCounts, TokenDispatcher
from megapar.tools.tracing.fake import RememberingMode
from megapar.tools.tracing.replaced import replaced
from megapar.trainer import Trainer
from megapar.training.building.build import make_corpus, make_layout
from megapar.training.building.builder import Builder, Model
from megapar.training.step.denominators import Denominators
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
) -> Iterator[Trainer]:
    """The trainer of ``rank`` of the configuration's world, ready to step; everything in it is fake.

    Samples are real ones, of ``--data-path``. tracker: sees every operator while the trainer is built and steps.
    device: the CPU if it is not given. observer: of the trainer. exact: run every operator, also those whose result is
    known from an earlier one; slower, and proof that the shortcuts leave nothing out. No process group may exist
    before; none does after.
    """
    config = replace(config, checkpoint=replace(config.checkpoint, save=None))  # nothing is written
    builder = FakeBuilder(exact=exact)
    corpus = make_corpus(config)
    world = FakeWorld.pretend(config.grid, device or pick("cpu"), rank)
    mode = FakeTensorMode if exact else RememberingMode
    try:
        with ExitStack() as stack:
            stack.enter_context(mode(allow_non_fake_inputs=True))
            # A method of the caller's device object, of whatever class it is.
            stack.enter_context(replaced(world.device, "values", _zeros))
            if tracker is not None:
                stack.enter_context(tracker)
            trainer = Trainer(config, world, corpus, observer=observer, builder=builder)
            trainer.start()
            try:
                yield trainer
            finally:
                trainer.loader.close()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


class BalancedDenominators(Denominators):
    """Those of a step in which every data rank has as much as this one."""

    def __init__(self, batches: Sequence[MicroBatch], num_micro_batches: int, data: Axis, meter: WaitMeter) -> None:
        super().__init__(batches, num_micro_batches, Axis.single(data.name), meter)
        self._own = [sum(batch.counts[name] for batch in batches) for name in self._names]
        self._own.append(sum(batch.valid_tokens for batch in batches))
        self._ranks = data.size

    def _settled(self) -> list[int]:
        return [self._ranks * count for count in self._own]


class BalancedDispatcher(TokenDispatcher):
    """Answers on the host with the counts of a balanced load. They are numpy's: a tensor would be fake."""

    def announce(self, experts_Tk: Tensor, kept_Tk: Tensor | None, *, aside: bool = False) -> RowCounts:
        """Exchange counts as the real one; ``numbers`` are those of a balanced load: [2 (+ emp), ep, L]."""
        row_counts = super().announce(experts_Tk, kept_Tk, aside=aside)
        own = np.array(_even(experts_Tk.numel(), self.num_experts))
        counts = own.reshape(tuple(row_counts.counts.shape))
        arriving = np.broadcast_to(counts[self.ep.rank], counts.shape)
        rows = [counts, arriving, *([arriving] * self.emp.size if self.gathers else [])]
        return row_counts._replace(numbers=np.stack(rows))  # type: ignore[arg-type]

    def read(self, row_counts: RowCounts) -> Tensor:
        """The numbers of ``announce``."""
        self.comm.count_host_wait(READ)
        return row_counts.numbers

    def piece(self, counts: Tensor, number: int, pieces: int) -> Tensor:
        """Of counts on the host numbers, of those on the device fake tensors."""
        if isinstance(counts, Tensor):
            return super().piece(counts, number, pieces)
        with unset_fake_temporarily():
            return super().piece(torch.from_numpy(counts), number, pieces).numpy()


class BalancedMoeLayer(MoeLayer):
    """A layer whose experts all get as many rows as any other."""

    dispatcher_class = BalancedDispatcher

    def read_sizes(self, counts_E: Tensor, rows: int) -> tuple[int, ...]:
        """As ``BalancedDispatcher.announce`` counts them."""
        self.comm.count_host_wait(READ_SIZES)
        return _even(rows, len(counts_E))


class OneSampleOverlap(Overlap):
    """Products into memory that is there; where each sample has a product of its own, one stands for all."""

    def multiply(self, x: Tensor, right: Tensor, bias: Tensor | None, out: Tensor) -> None:
        """See ``Overlap.multiply``."""
        if not self.batched:
            first = (slice(1),) * (x.dim() - 2)
            x, out = x[first], out[first]
        super().multiply(x, right, bias, out)


class FakeWorld(World):
    """A world whose meshes are real: tables of ranks, whose values torch looks at."""

    def mesh(self, *names: str) -> DeviceMesh:
        """See ``World.mesh``."""
        with unset_fake_temporarily():
            return super().mesh(*names)


class FakeBuilder(Builder):
    """Builds a trainer of fake tensors whose host sees a balanced run. exact: see ``pretend``."""

    moe_layer = BalancedMoeLayer
    denominators = BalancedDenominators

    def __init__(self, *, exact: bool) -> None:
        self._exact = exact

    def model(self, *parts: Any, meta: bool, **options: Any) -> Model:
        """A model on the meta device needs no fake tensors."""
        with _disable_current_modes() if meta else nullcontext():
            return super().model(*parts, meta=meta, **options)

    def overlap(self, config: Config, world: World, sizes: ModelSizes) -> Overlap:
        """One product in place of equal ones, unless every operator is to run."""
        made = super().overlap(config, world, sizes)
        if self._exact:
            return made
        return OneSampleOverlap(**{field.name: getattr(made, field.name) for field in fields(made)})

    def initialize(self, tensor: Tensor, spec: ParameterSpec, box: Box, *, seed: int, init_std: float) -> None:
        """Nothing: drawing values that do not exist would take most of the time."""

    def fully_shard(self, *modules: Any, **options: Any) -> Any:
        """FSDP2 makes a tensor for every rank and parameter; of a model on the meta device they need not be fake."""
        with _disable_current_modes():
            return super().fully_shard(*modules, **options)

    def collate(self, config: Config, world: World, corpus: Corpus) -> Collate:
        """Samples are real, because the host reads them: they become fake on their way to the device."""
        own = own_positions(corpus.collate, make_layout(config), world.axis("cp").rank)
        collate = pinned(own, world.device.pin)

        def made(samples: Sequence[Sample]) -> MicroBatch:
            with unset_fake_temporarily():
                return collate(samples)

        return made


def _zeros(x: Tensor) -> list[float]:
    """Values of a vector that has none: no gradient overflows, and no rank votes."""
    return [0.0] * len(x)


def _even(rows: int, experts: int) -> tuple[int, ...]:
    """Rows of each expert under a balanced load."""
    share, rest = divmod(rows, experts)
    return tuple(share + (expert < rest) for expert in range(experts))
