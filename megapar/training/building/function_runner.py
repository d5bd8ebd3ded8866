"""Choice of the caller of the layers' functions: ``--compile``, and a trial of the compiler on every rank."""

from __future__ import annotations

import warnings

from megapar.arguments import Config
from megapar.config.compilation import compilation
from megapar.core.comm.agreement import texts_of_all
from megapar.core.comm.world import World
from megapar.core.device.compiled import Compiled, FunctionRunner, failed_trial, plain
from megapar.core.device.kinds import device_class


def make_runner(config: Config, world: World) -> FunctionRunner:
    """Return the caller of the layers' functions. Every rank must call it.

    If the compiler fails on any rank, all ranks run the functions uncompiled, because replicated parameters need
    results that are equal to the last bit. Rank 0 then warns once.
    """
    device = world.device
    if not compilation(config, device_class(device.type).compiler).on:
        return plain
    failure = device.compiler_lacks() or failed_trial(device.torch_device)
    failures = texts_of_all(failure, world.axis("world"), device.torch_device)
    rank = next((rank for rank, text in enumerate(failures) if text), None)
    if rank is None:
        return Compiled()
    if world.rank == 0:
        reason = f"on rank {rank} {failures[rank]}"
        message = f"--compile: functions run uncompiled, because {reason}; the numbers are the same"
        warnings.warn(message, RuntimeWarning, stacklevel=2)
    return plain
