"""Steps and evaluations of a model whose layers are spread over the ranks of ``pp``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megapar.core.comm.accounts import WaitMeter
from megapar.core.device.dtypes import at_least_fp32
from megapar.core.device.kinds import device_class
from megapar.core.pipeline.lookahead import schedule_ahead
from megapar.core.pipeline.runner import Queues, Runner, run_forward
from megapar.core.pipeline.stages import Chunk, Stages
from megapar.core.sharding.zero import ZeroSharding
from megapar.core.tensor_parallel.weight_gradients import WeightGradients
from megapar.data.batches import MicroBatch
from megapar.health.corruption.step_digest import StepDigest
from megapar.model.decoder.model import Decoder
from megapar.model.ernie.model import Ernie
from megapar.model.layers.loss import Terms
from megapar.training.step.objective import Objective


@dataclass(eq=False)
class PipelinedModel:
    """Runs micro-batches through this rank's chunks in the order of the pipeline schedule.

    Attributes:
        shardings: Chunk index -> sharding, for each chunk of this rank.
        reduce_every_micro_batch: Reduce gradients after every micro-batch's backward instead of once per step.
        weight_gradients: Deferred weight gradients, for schedules that split the backward.
        step_digest: Records digests of the stages' outputs. None records nothing.
    """

    model: Decoder | Ernie
    stages: Stages
    queues: Queues
    schedule: str
    objective: Objective
    shardings: Mapping[int, ZeroSharding]
    device: torch.device
    reduce_every_micro_batch: bool
    weight_gradients: WeightGradients | None
    meter: WaitMeter
    step_digest: StepDigest | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        """Tie the embedding of a rank that has both ends of the pipeline."""
        chunks = self.stages.on(self.queues.rank)
        both = any(chunk.first for chunk in chunks) and any(chunk.last for chunk in chunks)
        tied = self.model.tied_weight if both else None
        self._tie = None if tied is None else LocalTie(tied)

    def step(
        self,
        batches: Sequence[MicroBatch],
        loss_of: Callable[[Terms], Tensor],
        seed: Callable[[int], None],
        add: Callable[[Terms], None],
    ) -> None:
        """Run forward and backward of all micro-batches.

        Args:
            seed: Called with the index of the micro-batch before each forward.
            add: Called with the terms of every micro-batch and chunk, in the form of the whole model's terms: zero for
                those that other chunks compute.
        """
        chunks_per_rank = len(self.stages.chunks) // self.stages.num_ranks
        ahead = device_class(self.device.type).receives_ahead
        schedule = schedule_ahead(self.schedule, self.stages.num_ranks, chunks_per_rank, len(batches), ahead)
        batches = [batch.to(self.device, non_blocking=True) for batch in batches]
        last = {index: schedule.backward_order(index)[-1] for index in self.shardings}
        if not self.reduce_every_micro_batch:
            for sharding in self.shardings.values():
                sharding.begin_micro_batch(last=True, gradients=len(batches))

        def differentiated(terms: Terms) -> Tensor | None:
            loss = loss_of(terms)
            return loss if loss.requires_grad else None

        def prepare(chunk: int, micro_batch: int) -> None:
            if self.reduce_every_micro_batch:
                self.shardings[chunk].begin_micro_batch(last=micro_batch == last[chunk])

        work = _ChunkComputation(self, batches, seed, add, differentiated, prepare)
        Runner(schedule, self.queues, work, self.weight_gradients, self.meter).run()

    def evaluate(self, tensors: dict[str, Tensor], valid_tokens: int) -> Terms:
        """Run one micro-batch forward without gradients. Returns its terms, zero on ranks without the head."""
        terms: list[Terms] = []
        batch = MicroBatch(tensors, {}, valid_tokens, 0)
        work = _ChunkComputation(self, [batch], lambda *_: None, terms.append, lambda _: None, lambda *_: None)
        run_forward(self.stages, self.queues, work)
        return terms[-1]

    def run_chunk(self, chunk: Chunk, batch: MicroBatch, x: Tensor | None) -> tuple[Tensor | None, Terms]:
        """Run a chunk forward. Returns the activations for the next chunk and the terms of this chunk."""
        tied = self._tie.leaf() if self._tie is not None and chunk.last and torch.is_grad_enabled() else None
        return self.model.run_chunk(chunk, x, batch.tensors, batch.valid_tokens, tied)

    def whole(self, chunk: Chunk, terms: Terms) -> Terms:
        """Expand the terms of a chunk to those of the whole model, with zeros for what other chunks compute."""
        zero = torch.zeros_like(terms.aux.detach())
        # The order is the same on every rank, because the terms are summed over the stages.
        sums = {name: terms.sums.get(name, zero) for name in self.objective.weights}
        load = terms.load
        if routed := self.model.sizes.routed_layers:
            # The layers of a chunk are consecutive, so a slice selects their rows. A list of rows would be copied to
            # the device, and the host would wait for the copy before it sends the chunk's output. After the last
            # layers comes the block of multi-token prediction.
            after = self.model.sizes.num_layers if chunk.last else None
            rows = [row for row, layer in enumerate(routed) if layer in chunk.layers or layer == after]
            load = torch.zeros(len(routed), self.model.sizes.routed_experts, dtype=torch.int64, device=self.device)
            if rows:
                load[rows[0] : rows[-1] + 1] = terms.load
        return terms._replace(sums=sums, load=load)

    def empty(self, batch: MicroBatch, chunk: int) -> Tensor:
        """Allocate the buffer for the activations that a chunk receives: [B, S(/mp), H]."""
        model, (samples, length) = self.model, batch.tensors["tokens"].shape
        if model.sequence_parallel:
            length //= model.mp.size
        width = model.width_into(self.stages.chunks[chunk])
        return torch.empty(samples, length, width, dtype=model.dtype, device=self.device)


@dataclass(frozen=True, eq=False)
class _ChunkComputation:
    """The computation that the schedule's runner drives: the chunks of a model on the micro-batches of one step."""

    pipelined: PipelinedModel
    batches: Sequence[MicroBatch]
    seed: Callable[[int], None]
    add: Callable[[Terms], None]
    loss_of: Callable[[Terms], Tensor | None]
    before_backward: Callable[[int, int], None]

    def empty(self, micro_batch: int, chunk: int) -> Tensor:
        """Allocate the buffer for the output of the chunk before ``chunk``."""
        return self.pipelined.empty(self.batches[micro_batch], chunk)

    def forward(self, chunk: int, micro_batch: int, x: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """Run one chunk of one micro-batch. Returns its activations and its loss, each None if it has none."""
        part = self.pipelined.stages.chunks[chunk]
        self.seed(micro_batch)
        y, terms = self.pipelined.run_chunk(part, self.batches[micro_batch], x)
        self.add(self.pipelined.whole(part, terms))
        if self.pipelined.step_digest is not None:
            unit = f"layers.{part.layers[-1]}" if part.layers else ""
            self.pipelined.step_digest.output(unit, y, f"the output of stage {chunk}")
        return y, self.loss_of(terms)


class LocalTie:
    """Tied embedding weight of a rank that has both the first and the last chunk (ZBV).

    The head computes with a separate leaf, so that its gradients do not mix with those of another micro-batch. They are
    added to the embedding's gradients, whose backward always follows.
    """

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight
        self._pending: list[Tensor] = []
        weight.register_hook(self._join)

    def leaf(self) -> Tensor:
        """Return the leaf that the head computes one micro-batch with."""
        leaf = self._weight.detach().requires_grad_()
        leaf.register_post_accumulate_grad_hook(self._keep)
        return leaf

    def _keep(self, leaf: Tensor) -> None:
        assert leaf.grad is not None
        self._pending.append(leaf.grad)
        leaf.grad = None

    def _join(self, grad: Tensor) -> Tensor:
        exact = at_least_fp32(grad.dtype)
        total = grad.to(exact)
        while self._pending:
            total = total + self._pending.pop().to(exact)
        return total.to(grad.dtype)
