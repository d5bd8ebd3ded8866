"""Runs the real trainer for a few steps on this rank and keeps everything that must not depend on the layout."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from megapar.arguments import parse
from megapar.core.axis import Axis
from megapar.core.device.base import Device
from megapar.core.device.pick import pick
from megapar.core.recompute import Forward
from megapar.core.sharding.cut import is_primary, master_box
from megapar.core.sharding.part import Part
from megapar.core.world import World
from megapar.moe.router import Router
from megapar.trainer import Trainer
from megapar.training import build, gradients
from megapar.training.collect import collect_buffers
from tests.support import late
from tests.support.lazy import LazyDevice

# (micro-batch number over the whole run, router's number in the model) -> experts chosen, [tokens, k]
Routing = dict[tuple[int, int], Tensor]


@dataclass
class Trace:
    """What one run computed.

    losses, lm_losses, aux_losses, norms, dropped: per step. gradients: per step, of every parameter, before clipping.
    parameters: every master and buffer after the last step. routing: the experts that were chosen. judged_late: whether
    each step was over before the host knew its norm.
    """

    losses: list[float]
    lm_losses: list[float]
    aux_losses: list[float]
    norms: list[float]
    dropped: list[int]
    gradients: list[dict[str, Tensor]]
    parameters: dict[str, Tensor]
    routing: Routing = field(default_factory=dict)
    judged_late: bool = False


def trace(
    rank: int,
    world_size: int,
    rendezvous: str,
    kind: str,
    flags: Sequence[str],
    steps: int,
    replay: Routing | None = None,
    backend: str = "gloo",
) -> Trace | None:
    """Train ``steps`` steps; the Trace on rank 0, None elsewhere.

    rendezvous: path of a file to meet at. replay: choices that every router repeats. backend: "late" shows what reads
    or reuses a buffer in flight; "lazy" is that with the streams of a host that runs ahead of its device.
    """
    place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    with patch.dict(os.environ, place), ExitStack() as stack:
        # One log line would be printed per flush; an interval beyond the end keeps the terminal quiet.
        config = parse(kind, [*flags, "--log-interval", str(steps + 1)], dict(os.environ))
        corpus = build.make_corpus(config)
        device = _device(backend)
        if isinstance(device, LazyDevice):
            stack.enter_context(device)
        world = World.start(config.grid, device, timedelta(seconds=60), f"file://{rendezvous}")
        trainer = Trainer(config, world, corpus)
        routing = _follow_routing(stack, trainer, replay)
        gradients = _keep_gradients(stack, trainer)
        for _ in range(steps):
            trainer.monitor.add(trainer.step())
            trainer._adapt()
            if isinstance(device, LazyDevice):
                device.settle()
        trainer.stepper.settle()
        records = trainer.monitor.flush()
        parameters = _parameters(trainer)
        trainer.loader.close()
        trainer.job.sharding.wait()
        assert backend == "gloo" or late.in_flight() == []
        world.close()
    if rank:
        return None
    return Trace(
        losses=[record.loss for record in records],
        lm_losses=[record.lm_loss for record in records],
        aux_losses=[record.aux_loss or 0.0 for record in records],
        norms=[record.grad_norm for record in records],
        dropped=[record.dropped_tokens for record in records],
        gradients=gradients,
        parameters=parameters,
        routing=routing,
        judged_late=trainer.stepper.judge.late,
    )


def _device(backend: str) -> Device:
    if backend == "gloo":
        return pick("cpu")
    late.register()
    device = LazyDevice() if backend == "lazy" else pick("cpu")
    device.backend = "late"
    return device


def _parameters(trainer: Trainer) -> dict[str, Tensor]:
    job = trainer.job
    masters = [part.master for part in job.sharding.parts]
    buffers = collect_buffers(trainer.world, job.table, dict(job.model.named_buffers()), masters[0].dtype)
    return _whole(trainer, masters) | {name: value.clone() for name, value in buffers}


def _whole(trainer: Trainer, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
    """Whole parameters on rank 0, as ``collect_all`` has them; here each rank sends all of its pieces at once.

    tensors: beside the parts, masters or gradients.
    """
    world, grid = trainer.world, trainer.world.grid
    views = {view.spec.name: view for view in trainer.job.sharding.views(tensors)}
    table = [spec for spec in trainer.job.table if spec.trainable]
    owned = [[spec for spec in table if is_primary(spec, grid, rank)] for rank in range(grid.world_size)]
    mine = {spec.name: views[spec.name].tensor.detach() for spec in owned[world.rank] if spec.name in views}
    if world.rank:
        if sum(piece.numel() for piece in mine.values()):
            dist.send(torch.cat([piece.flatten() for piece in mine.values()]), 0)
        return {}
    dtype = next(iter(views.values())).tensor.dtype
    found = {spec.name: torch.empty(spec.shape, dtype=dtype) for spec in table}
    for rank, specs in enumerate(owned):
        boxes = {spec.name: master_box(spec, grid, rank, full=trainer.job.sharding.full) for spec in specs}
        pieces = list(mine.values())
        if rank:
            sent = torch.empty(sum(box.numel for box in boxes.values()), dtype=dtype)
            if sent.numel():
                dist.recv(sent, rank)
            cut = sent.split([box.numel for box in boxes.values()])
            pieces = [piece.view(box.sizes) for piece, box in zip(cut, boxes.values(), strict=True)]
        for (name, box), piece in zip(boxes.items(), pieces, strict=True):
            found[name][box.slices] = piece
    return found


def _keep_gradients(stack: ExitStack, trainer: Trainer) -> list[dict[str, Tensor]]:
    """Collect every whole gradient on rank 0 each time the step has finished its reductions and takes the norm."""
    kept: list[dict[str, Tensor]] = []
    norm = gradients.global_norm

    def keep_and_norm(parts: Sequence[Part], world: Axis, besides: Sequence[int]) -> tuple[Tensor, Tensor]:
        grads = [part.grad for part in parts if part.grad is not None]
        kept.append(_whole(trainer, grads))
        return norm(parts, world, besides)

    stack.enter_context(patch.object(gradients, "global_norm", keep_and_norm))
    return kept


def _follow_routing(stack: ExitStack, trainer: Trainer, replay: Routing | None) -> Routing:
    """Record every router's choices, or repeat recorded ones, by micro-batch and router."""
    chosen: Routing = {}
    calls: Counter[tuple[int, int]] = Counter()
    current = [0]
    seed = gradients.seed_micro_batch
    # A stage of a pipeline has some of the layers; their numbers are global.
    numbers = {
        id(module): int(name.split(".")[1])
        for name, module in trainer.job.model.named_modules()
        if isinstance(module, Router)
    }
    choose, run = Router.choose, Forward.run

    def run_and_note(forward: Forward, unit: Callable[..., Any], *inputs: Any, **more: Any) -> Any:
        """A unit that is computed again belongs to its own micro-batch, not to the one that runs forward then."""
        number = current[0]

        def numbered(*args: Any) -> Any:
            before, current[0] = current[0], number
            try:
                return unit(*args)
            finally:
                current[0] = before

        return run(forward, numbered, *inputs, **more)

    def seed_and_note(base: int, number: int) -> None:
        current[0] = number
        seed(base, number)

    def choose_and_note(router: Router, probs: Tensor) -> Tensor:
        key = (current[0], numbers[id(router)])
        if replay is not None:
            calls[key] += 1
            return _own(replay[key], calls[key] - 1, trainer)
        chosen[key] = choose(router, probs)
        return chosen[key]

    stack.enter_context(patch.object(gradients, "seed_micro_batch", seed_and_note))
    stack.enter_context(patch.object(Router, "choose", choose_and_note))
    stack.enter_context(patch.object(Forward, "run", run_and_note))
    return chosen


def _own(experts: Tensor, call: int, trainer: Trainer) -> Tensor:
    """This rank's positions of choices recorded for a whole micro-batch, of the router's ``call``-th slice of it."""
    whole = experts.unflatten(0, (trainer.config.training.micro_batch_size, -1))
    cp = trainer.world.axis("cp")
    whole = whole[:, build.make_layout(trainer.config).positions(whole.shape[1], cp.rank)]
    slicing, mp = build.make_slicing(trainer.config), trainer.world.axis("mp")
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
