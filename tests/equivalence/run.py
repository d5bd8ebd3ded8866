"""Runs the real trainer for a few steps on this rank and keeps everything that must not depend on the layout."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, cast
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from megapar.arguments import parse
from megapar.checkpoints.export.export import collect_buffers
from megapar.core.comm.world import World
from megapar.core.device import kinds
from megapar.core.device.accelerators import pick
from megapar.core.device.base import Device
from megapar.core.sharding.cut import is_primary, master_box
from megapar.core.sharding.sharding import Sharding
from megapar.data.own_data import OwnData
from megapar.model.decoder.model import Decoder
from megapar.trainer import Trainer
from megapar.training.building.corpus import make_corpus, make_own_corpus
from megapar.training.building.epochs import with_epochs
from megapar.training.building.partition import make_layout
from megapar.training.building.parts import Parts
from megapar.training.loop.callbacks import TrainerCallback
from megapar.training.reports.record import Record
from megapar.training.step import bad_steps
from megapar.training.step.observer import StepObserver
from tests.support import away, late
from tests.support.lazy import LazyDevice

QUIET = 10**6  # steps between lines of the log: more than a run has
PER_STEP = ("losses", "norms", "dropped", "gradients", "logged")
OF_THE_LAYOUT = ("memory", "moe", "sent_bytes", "speed", "waits")  # what a layout costs; of moe all is in other numbers
LEAST_BEFORE_A_SPIKE = 2  # steps: a short run has spikes, too
# (micro-batch number over the whole run, router's number in the model) -> experts chosen, [tokens, k]
Routing = dict[tuple[int, int], Tensor]


@dataclass
class Trace:
    """What one run computed.

    losses, norms, dropped: per step. gradients: per step, of every parameter, before clipping.
    parameters: every master and buffer after the last step. routing: the experts that were chosen.
    decided_on_device: whether each step was over before the host knew its norm. logged: per step, by name.
    """

    losses: list[float]
    norms: list[float]
    dropped: list[int]
    gradients: list[dict[str, Tensor]]
    parameters: dict[str, Tensor]
    routing: Routing = field(default_factory=dict)
    decided_on_device: bool = False
    logged: list[dict[str, float]] = field(default_factory=list)

    def continued_by(self, later: Trace) -> Trace:
        """The steps before a run that continued this one from a checkpoint, and those of that run."""
        before = len(self.losses) - len(later.losses)
        steps = {name: [*getattr(self, name)[:before], *getattr(later, name)] for name in PER_STEP}
        return replace(later, **steps)


def logged(record: Record, world_size: int) -> dict[str, float]:
    """The numbers of a record that no layout changes; of those per second and device, what they are per step."""
    own = {name: value for name, value in record.scalars().items() if name.split("/")[0] not in OF_THE_LAYOUT}
    own |= {f"run/{name}": getattr(record, name) for name in ("iteration", "dropped_tokens")}
    own["speed/tokens"] = record.tokens_per_second * record.iteration_seconds
    for name in ("model_tflops_per_device", *(("mfu",) if record.mfu_peak == "flag" else ())):  # others are measured
        own[f"speed/{name}"] = getattr(record, name) * record.iteration_seconds * world_size
    for layer, load in enumerate(record.expert_load):
        own |= {f"load of layer {layer}/{name}": share for name, share in load.items() if name != "busiest_rank"}
    return own


def _with_products_of_small_weights(tables: Any) -> Any:
    """Return the tables of devices, on which also the gradients of small weights are added by their products."""
    rows, classes = tables
    return rows, {name: replace(one, least_product_elements=0) for name, one in classes.items()}


def trace(
    rank: int,
    world_size: int,
    rendezvous: str,
    kind: str,
    flags: Sequence[str],
    until: int,
    replay: Routing | None = None,
    backend: str = "gloo",
    parts: Parts | None = None,
    callback: TrainerCallback | None = None,
    data: OwnData | None = None,
) -> Trace | None:
    """Train up to step ``until``; the Trace on rank 0, None elsewhere. With ``--moe-rebalance-interval`` experts move.

    It is a whole run, of which nothing is printed: it checks, evaluates and saves as its flags say.

    rendezvous: path of a file to meet at. replay: choices that every router repeats. backend: "late" shows what reads
    or reuses a buffer in flight; "lazy" is that with the streams of a host that runs ahead of its device. "cuda": this
    machine's first GPU, which all ranks share.
    parts: the trainer's. callback: is called around the steps. data: in place of what the flags name.
    """
    local_rank = 0 if backend == "cuda" else rank
    place = {"RANK": str(rank), "LOCAL_RANK": str(local_rank), "WORLD_SIZE": str(world_size)}
    with patch.dict(os.environ, place), ExitStack() as stack:
        quiet = () if "--log-interval" in flags else ("--log-interval", str(QUIET))
        config = parse(kind, [*flags, *quiet, "--exit-interval", str(until)], dict(os.environ))
        corpus = make_corpus(config) if data is None else make_own_corpus(config, data)
        config = with_epochs(config, len(corpus.train))
        device = _device(backend)
        tables = _with_products_of_small_weights(kinds._tables())
        stack.enter_context(patch.object(kinds, "_tables", lambda: tables))
        stack.enter_context(patch("megapar.trainer.make_terminal", lambda *_, **__: None))
        stack.enter_context(patch.object(bad_steps, "LEAST", LEAST_BEFORE_A_SPIKE))
        if config.training.deterministic:
            device.repeat_results()
            stack.callback(torch.use_deterministic_algorithms, False)
        if isinstance(device, LazyDevice):
            stack.enter_context(device)
        world = World.start(config.grid, device, timedelta(seconds=60), f"file://{rendezvous}")
        if replay is not None:
            replay = {key: experts.to(device.torch_device) for key, experts in replay.items()}
        recorder, moving = Recorder(replay), away.Away()
        callbacks = (moving, _Settling(device), *((callback,) if callback is not None else ()))
        trainer = Trainer(config, world, corpus, observer=recorder, parts=parts, keep_records=True, callbacks=callbacks)
        trainer.start()
        recorder.trainer, recorder.whole = trainer, Whole(trainer)
        records = trainer.train().records
        updated = any(not record.skipped for record in records)
        assert moving.moved == (updated and trainer.places.interval > 0)
        parameters = _parameters(trainer, recorder.whole)
        trainer.job.sharding.wait()
        trainer.watch.close()  # its listener would look for the store's file, which is gone, for a minute
        assert backend not in ("late", "lazy") or late.in_flight() == []
        world.close()
    if rank:
        return None
    return Trace(
        losses=[record.loss for record in records],
        norms=[record.grad_norm for record in records],
        dropped=[record.dropped_tokens for record in records],
        gradients=recorder.gradients,
        parameters=parameters,
        routing={key: experts.cpu() for key, experts in recorder.routing.items()},
        decided_on_device=trainer.stepper.step_guard.decided_on_device,
        logged=[logged(record, world_size) for record in records],
    )


class _Settling(TrainerCallback):
    """Ends the steps of a lazy device; does nothing on another device."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def after_step(self, iteration: int) -> None:
        if isinstance(self._device, LazyDevice):
            self._device.settle()


class Recorder(StepObserver):
    """Records whole gradients and every router's choices of the steps of ``trainer``, or repeats recorded choices.

    trainer, whole: None until the steps to be recorded begin. gradients: per step, on rank 0. routing: by micro-batch
    and router.
    """

    def __init__(self, replay: Routing | None) -> None:
        self.trainer: Trainer | None = None
        self.whole: Whole | None = None
        self.gradients: list[dict[str, Tensor]] = []
        self.routing: Routing = {}
        self._replay = replay
        self._calls: Counter[tuple[int, int]] = Counter()
        self._micro_batch = 0

    def forward_begins(self, micro_batch: int) -> None:
        """Choices from here on belong to it."""
        self._micro_batch = micro_batch

    @contextmanager
    def _of(self, micro_batch: int) -> Iterator[None]:
        before, self._micro_batch = self._micro_batch, micro_batch
        try:
            yield
        finally:
            self._micro_batch = before

    def recomputation(self) -> AbstractContextManager[object]:
        """A unit that is recomputed belongs to its own micro-batch, not to the one that runs forward by then."""
        return self._of(self._micro_batch)

    def experts_chosen(self, layer: int, experts_Tk: Tensor) -> Tensor:
        """Record the choice, or return the recorded one. Evaluation has samples of its own, and chooses for them."""
        if self.trainer is None or not self.trainer.job.model.training:
            return experts_Tk
        key = (self._micro_batch, layer)
        if self._replay is None:
            self.routing[key] = experts_Tk
            return experts_Tk
        self._calls[key] += 1
        return _own(self._replay[key], self._calls[key] - 1, self.trainer)

    def gradients_reduced(self, sharding: Sharding) -> None:
        """Collect every whole gradient on rank 0."""
        assert self.whole is not None
        grads = [shard.grad for shard in sharding.master_shards if shard.grad is not None]
        self.gradients.append(self.whole.of(grads))


def _device(backend: str) -> Device:
    if backend == "gloo":
        return pick("cpu")
    if backend == "cuda":
        device = pick("cuda")
        device.prepare_process()
        return device
    late.register()
    device = LazyDevice() if backend == "lazy" else pick("cpu")
    device.backend = "late"
    return device


def _parameters(trainer: Trainer, whole: Whole) -> dict[str, Tensor]:
    job = trainer.job
    masters = [shard.values for shard in job.sharding.master_shards]
    buffers = collect_buffers(trainer.world, job.table, dict(job.model.named_buffers()), masters[0].dtype)
    return whole.of(masters) | {name: value.clone().cpu() for name, value in buffers}


class Whole:
    """Whole parameters of a trainer on rank 0, as ``collect_all`` has them, experts by number wherever they are.

    Here each rank sends all of its pieces at once.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._table = [spec for spec in trainer.job.table if spec.trainable]
        world, grid, full = trainer.world, trainer.world.grid, trainer.job.sharding.full
        self._boxes = {  # of each rank that this one sends for or receives from: what that one sends, by name
            rank: {
                spec.name: master_box(spec, grid, rank, full=full)
                for spec in self._table
                if is_primary(spec, grid, rank)
            }
            for rank in ([world.rank] if world.rank else range(grid.world_size))
        }

    def of(self, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
        """tensors: beside the master shards, masters or gradients. In the masters' dtype; empty on other ranks."""
        rank, dtype = self._trainer.world.rank, self._trainer.job.sharding.master_shards[0].dtype
        views = {view.spec.name: view for view in self._trainer.job.sharding.views(tensors)}
        pieces = [views[name].tensor.detach().cpu().to(dtype) for name in self._boxes[rank] if name in views]
        if rank:
            if sum(piece.numel() for piece in pieces):
                dist.send(torch.cat([piece.flatten() for piece in pieces]), 0)
            return {}
        found = {spec.name: torch.empty(spec.shape, dtype=dtype) for spec in self._table}
        for sender, boxes in self._boxes.items():
            if sender:
                sent = torch.empty(sum(box.numel for box in boxes.values()), dtype=dtype)
                if sent.numel():
                    dist.recv(sent, sender)
                cut = sent.split([box.numel for box in boxes.values()])
                pieces = [piece.view(box.sizes) for piece, box in zip(cut, boxes.values(), strict=True)]
            for (name, box), piece in zip(boxes.items(), pieces, strict=True):
                found[name][box.slices] = piece
        return away.by_number(self._trainer, found)


def _own(experts: Tensor, call: int, trainer: Trainer) -> Tensor:
    """This rank's positions of choices recorded for a whole micro-batch, of the router's ``call``-th slice of it."""
    whole = experts.unflatten(0, (trainer.config.training.micro_batch_size, -1))
    cp = trainer.world.axis("cp")
    whole = whole[:, make_layout(trainer.config).positions(whole.shape[1], cp.rank)]
    slicing, mp = cast(Decoder, trainer.job.model).slicing, trainer.world.axis("mp")
    parts = mp.size if trainer.config.parallel.sequence_parallel else 1
    order, length = slicing.order(whole.shape[1], parts), whole.shape[1] // parts
    slices = slicing.cut(whole.shape[1], parts)
    here = slices[call % len(slices)]
    rank = mp.rank if parts > 1 else 0
    own = order[rank * length : (rank + 1) * length][here.start // parts : here.stop // parts]
    return whole[:, own].flatten(0, 1)


def relative(a: Tensor, b: Tensor) -> float:
    """Norm of the difference over the norm of ``b``; where both are zero (a task without samples), 0."""
    difference, size = (float(torch.linalg.vector_norm(x.double())) for x in (a.double() - b.double(), b))
    if size == 0:
        return 0.0 if difference == 0 else math.inf
    return difference / size
