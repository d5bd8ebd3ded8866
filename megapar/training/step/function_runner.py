"""Choice of how functions of layers are computed: ``--compile`` and Triton's kernels, after a trial on every rank."""

from __future__ import annotations

import warnings

from megapar.arguments import Config
from megapar.config.compilation import compilation
from megapar.core.comm.agreement import texts_of_all
from megapar.core.comm.world import World
from megapar.core.device import triton_operators
from megapar.core.device.compiled import Compiled, FunctionRunner, failed_trial, plain
from megapar.core.device.kinds import device_class
from megapar.core.device.triton_trial import triton_failure


def make_runner(config: Config, world: World) -> FunctionRunner:
    """Return the caller of the layers' functions. Every rank must call it.

    If the compiler fails on any rank, all ranks run the functions uncompiled, because replicated parameters need
    results that are equal to the last bit. Rank 0 then warns once.
    """
    device = world.device
    if not compilation(config, device_class(device.type).compiler).on:
        return plain
    failure = device.compiler_lacks() or failed_trial(device.torch_device)
    reason = _first(failure, world)
    if not reason:
        return Compiled()
    if world.rank == 0:
        message = f"--compile: functions run uncompiled, because {reason}; the numbers are the same"
        warnings.warn(message, RuntimeWarning, stacklevel=2)
    return plain


def try_triton(world: World) -> None:
    """Let GPUs use Triton's kernels if they work on all ranks, whose results must agree. Every rank must call it.

    Otherwise rank 0 warns once, and all use the forms without Triton.
    """
    device = world.device.torch_device
    if device.type != "cuda":
        return
    reason = _first(triton_failure(device), world)
    if not reason:
        triton_operators.use(device)
    elif world.rank == 0:
        message = f"Triton's kernels are not used, because {reason}; the numbers are the same except for rounding"
        warnings.warn(message, RuntimeWarning, stacklevel=2)


def runs_alike(runner: FunctionRunner, world: World) -> bool:
    """Return False if this rank runs a function uncompiled after a failure that the other ranks do not know of yet."""
    return world.grid.world_size == 1 or not (isinstance(runner, Compiled) and runner.unshared)


def share_given_up(runner: FunctionRunner, world: World) -> str:
    """Run uncompiled on all ranks what any rank runs so; return a sentence on the change, or "". Collective."""
    if world.grid.world_size == 1 or not isinstance(runner, Compiled):
        return ""
    texts = texts_of_all(" ".join(sorted(runner.unshared)), world.axis("world"), world.device.torch_device)
    ranks = [str(rank) for rank, text in enumerate(texts) if text]
    names = sorted({name for text in texts for name in text.split()})
    runner.give_up(names)
    if not names:
        return ""
    where = f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}"
    return f"compiling {', '.join(names)} failed on {where}; all ranks run uncompiled what one cannot compile"


def _first(failure: str, world: World) -> str:
    """Return the first failure of all ranks, with its rank; "" if there is none."""
    failures = texts_of_all(failure, world.axis("world"), world.device.torch_device)
    return next((f"on rank {rank} {text}" for rank, text in enumerate(failures) if text), "")
