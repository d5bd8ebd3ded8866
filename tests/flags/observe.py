"""A short run of the real trainer, seen from outside: everything in which a flag could show."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import io
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from megapar.arguments import Config, parse
from megapar.config.config import FLAGS
from megapar.core.comm.axis import Axis
from megapar.core.device.base import Device
from megapar.core.sharding import replicas
from megapar.errors import MegaparError
from megapar.planning.devices import device_kind
from megapar.planning.plan import Plan
from megapar.trainer import Trainer, train
from tests.support.ranks import run_ranks

# Of a record: what depends on how fast this machine is.
_TIMED = (
    *("iteration_seconds", "tokens_per_second", "model_tflops_per_device", "mfu", "mfu_peak", "peak_memory_bytes"),
    *("exposed_communication_seconds", "exposed_seconds", "rank_seconds", "sent_bytes", "time"),
)
_DEVICE = "a100-80g"


@dataclass
class Seen:
    """What one run showed. Nothing in it depends on time, on the machine or on the folder it ran in.

    refused: the rows by which it did not start. groups: ranks of every axis. plan: memory, traffic and time as planned.
    table: names, shapes and kinds of the model's parameters. held: names that rank 0 holds. steps: records of the
    iterations. weights: a digest of rank 0's parameters, buffers, masters and moments. order: launches of collectives,
    forwards of layers and gradients as they came on rank 0; host: calls of the compiler and the garbage
    collector, memory taken on the host, checks of replicas.
    sent: bytes of rank 0's collectives in their order. files: what was written. lines: the terminal's, without numbers.
    error: how the run ended where it failed.
    """

    refused: list[str] = field(default_factory=list)
    groups: Any = None
    plan: Any = None
    table: Any = None
    held: Any = None
    steps: Any = None
    weights: str = ""
    order: list[str] = field(default_factory=list)
    host: list[str] = field(default_factory=list)
    sent: list[Any] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    error: str = ""


NAMES = tuple(item.name for item in fields(Seen))


def observe(world_size: int, kind: str, flags: Sequence[str], folder: Path) -> Seen:
    """Train as the flags say in a folder of its own; what could be seen of it."""
    folder.mkdir(parents=True, exist_ok=True)
    before = _files(folder)
    seen: Seen = run_ranks(world_size, _observe, kind, list(flags), str(folder), group=False)[0]
    seen.files = sorted(_files(folder) - before)
    return seen


def _files(folder: Path) -> set[str]:
    """Names below the folder, without what is in them: times and hosts are part of some."""
    return {
        re.sub(r"events\.out\.tfevents.*", "events", str(path.relative_to(folder)))
        for path in folder.rglob("*")
        if path.is_file()
    }


def _observe(rank: int, world_size: int, rendezvous: str, kind: str, flags: list[str], folder: str) -> Seen:
    seen, said = Seen(), io.StringIO()
    place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    with ExitStack() as stack:
        stack.enter_context(patch.dict(os.environ, place))
        stack.callback(os.chdir, os.getcwd())
        os.chdir(folder)
        stack.enter_context(contextlib.redirect_stdout(said))
        try:
            config = parse(kind, flags, dict(os.environ))
        except MegaparError as error:
            seen.refused = sorted({complaint.rule for complaint in getattr(error, "complaints", ())})
            seen.error = str(error)
            return seen
        seen.groups = {name: config.grid.groups(name) for name in ("dp", "pp", "sharding", "cp", "mp", "ep", "emp")}
        seen.plan = _planned(config)
        for manager in (_launches(seen), _host_calls(seen), _trainer(seen)):
            stack.enter_context(manager)
        try:
            outcome = train(config, f"file://{rendezvous}", keep_records=True)
            seen.steps = [_untimed(record.to_dict()) for record in outcome.records]
        except MegaparError as error:
            seen.error = str(error)
    seen.lines = _lines(said.getvalue())
    return seen


def _planned(config: Config) -> Any:
    """Formulas do not cover every run: those that they refuse have no plan to differ in."""
    try:
        plan = Plan(config, device_kind(_DEVICE))
        return [[asdict(stage) for stage in plan.memory], plan.traffic, asdict(plan.speed), plan.fits]
    except MegaparError as error:
        return str(error)


def _untimed(record: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name not in _TIMED}


def _lines(text: str) -> list[str]:
    """Without numbers, of which a clock makes some, and without lines that only repeat what was asked for."""
    spellings = {flag.spelling for flag in FLAGS.values()}
    kept = (line for line in text.splitlines() if not spellings & set(line.split()))
    return [re.sub(r"\s+", " ", re.sub(r"[\d.,:]+", "#", line)) for line in kept]


@contextlib.contextmanager
def _launches(seen: Seen) -> Iterator[None]:
    """Every collective in its place, and what it sends."""
    note, count = Axis.note, Axis.count

    def noted(axis: Axis, kind: str) -> None:
        seen.order.append(f"{axis.communicator} {kind}")
        note(axis, kind)

    def counted(axis: Axis, kind: str, sent_bytes: float) -> None:
        seen.sent.append((axis.name, kind, round(sent_bytes)))
        count(axis, kind, sent_bytes)

    with patch.object(Axis, "note", noted), patch.object(Axis, "count", counted):
        yield


@contextlib.contextmanager
def _host_calls(seen: Seen) -> Iterator[None]:
    """The compiler is asked, and does nothing: what it would make takes minutes."""
    collect, pinned_zeros, check = gc.collect, Device.pinned_zeros, replicas.check

    def compiled(function: Callable[..., Any] | None = None, **options: Any) -> Any:
        seen.host.append("compile")
        return function if function is not None else (lambda inner: inner)

    def collected(*generation: int) -> int:
        seen.host.append("collect")
        return collect(*generation)

    def pinned(device: Device, numel: int, dtype: torch.dtype) -> torch.Tensor:
        seen.host.append(f"pinned {numel} {dtype}")
        return pinned_zeros(device, numel, dtype)

    def checked(*arguments: Any) -> bool:
        seen.host.append("replicas")
        return check(*arguments)

    with (
        patch.object(torch, "compile", compiled),
        patch.object(gc, "collect", collected),
        patch.object(Device, "pinned_zeros", pinned),
        patch.object(replicas, "check", checked),
    ):
        yield


@contextlib.contextmanager
def _trainer(seen: Seen) -> Iterator[None]:
    """What was built, how its layers and gradients come, and what it holds in the end."""
    run = Trainer.train

    def followed(trainer: Trainer) -> Any:
        job = trainer.job
        seen.table = [(spec.name, tuple(spec.shape), spec.trainable) for spec in job.table]
        seen.held = sorted(name for name, _ in job.model.named_parameters())
        for name, module in job.model.named_modules():
            if re.search(r"(^|\.)layers\.\d+(\.\w+)?$", name):
                module.register_forward_pre_hook(_noting(seen, f"forward {name}"))
        for name, parameter in job.model.named_parameters():
            parameter.register_post_accumulate_grad_hook(_noting(seen, f"gradient {name}"))
        outcome = run(trainer)
        seen.weights = _digest(trainer)
        return outcome

    with patch.object(Trainer, "train", followed):
        yield


def _noting(seen: Seen, text: str) -> Callable[..., None]:
    def note(*_: Any) -> None:
        seen.order.append(text)

    return note


def _digest(trainer: Trainer) -> str:
    job, digest = trainer.job, hashlib.sha256()
    optimizer = job.optimizer
    kept = [
        *(shard.master for shard in job.sharding.master_shards),
        *(tensor for name in optimizer.states for tensor in optimizer.state(name) if tensor is not None),
    ]
    for tensor in (*kept, *job.model.buffers()):
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        digest.update(local.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
