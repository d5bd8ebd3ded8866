"""Messages of a run other than its iterations, printed by rank 0, and the monitor that collects those."""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from megapar.arguments import Config
from megapar.core.device.apex import apex_installed
from megapar.core.device.base import Device
from megapar.core.device.peak import peak_flops
from megapar.core.units import GIBIBYTE
from megapar.files.location import Location
from megapar.model.flops import flops_per_token
from megapar.model.sizes import ModelSizes
from megapar.training.building.build import experts_dispatch
from megapar.training.building.memory import expert_bound
from megapar.training.reports import run_facts as facts
from megapar.training.reports.chosen_loggers import make_loggers
from megapar.training.reports.logger import Logger
from megapar.training.reports.monitor import Monitor
from megapar.training.reports.terminal import PlainTerminal, ProgressTerminal
from megapar.training.step.dtypes import compute_dtype
from megapar.training.step.expert_places import ExpertPlaces
from megapar.training.step.job import Job
from megapar.training.step.objective import Objective


def make_terminal(config: Config, rank: int, iteration: int) -> PlainTerminal | None:
    """Return the terminal of rank 0, or None on other ranks. ``iteration`` is the last one done."""
    if rank != 0:
        return None
    iterations, interval = config.training.train_iters, config.logging.log_interval
    if sys.stdout.isatty():
        return ProgressTerminal(iterations, interval, iteration)
    return PlainTerminal(iterations, interval)


def make_monitor(
    config: Config,
    job: Job,
    objective: Objective,
    terminal: PlainTerminal | None,
    iteration: int,
    places: ExpertPlaces,
    own: Sequence[Logger],
    check_owner: Callable[[], None],
) -> Monitor:
    """Return the monitor of this rank. The rank with a terminal also measures the peak and writes ``run.json``.

    ``iteration``, ``own`` and ``check_owner`` are as in ``make_loggers``.
    """
    world, metrics = job.world, config.logging.metrics_file
    peak, source = math.nan, "unknown"
    if terminal is not None:  # only this rank's records are used, and measuring on all ranks at once would be lower
        peak, source = peak_flops(world.device, compute_dtype(config, world.device), config.runtime.device_tflops)
        if metrics:
            folder = Path(metrics).absolute().parent
            try:
                facts.write_facts(folder, config, world, peak, source, _num_parameters(job), iteration + 1)
            except OSError as error:
                terminal.print_message(f"WARNING: {folder / facts.NAME} cannot be written: {error}")
    return Monitor(
        world=world.axis("world"),
        data=world.axis("data"),
        pp=world.axis("pp"),
        cp=world.axis("cp"),
        device=world.device,
        objective=objective,
        places=places,
        loggers=make_loggers(config, terminal, iteration, own, check_owner),
        flops_per_token=flops_per_token(job.sizes, config.model.seq_length),
        peak=peak,
        peak_source=source,
    )


def _num_parameters(job: Job) -> int:
    return sum(spec.numel for spec in job.table if spec.trainable)


def greeting(config: Config, job: Job, monitor: Monitor) -> Iterator[str]:
    """Yield the lines about the model and the devices at the start of a run."""
    world = job.world
    buffers = f" (about {world.group_bytes / GIBIBYTE:.1f} GiB of buffers)" if world.group_bytes else ""
    yield f"{config.grid.describe()}, {world.num_groups} communicators{buffers}"
    dtype = str(compute_dtype(config, world.device)).removeprefix("torch.")
    if world.axis("ep").nodes is not None:
        yield f"dispatch of experts: {experts_dispatch(config, world.device).describe()}"
    if bound := expert_bound(config, compute_dtype(config, world.device).itemsize):
        yield bound
    if products := expert_products(config, job.sizes, world.device):
        yield products
    if apex := apex_installed():
        yield apex
    peak = f"{monitor.peak / 1e12:.3g} TFLOP/s ({monitor.peak_source})"
    model = f"{type(job.model).__name__}: {_num_parameters(job):,} parameters"
    yield f"{model}, {world.device.name}, {dtype}, peak {peak}"


def expert_products(config: Config, sizes: ModelSizes, device: Device) -> str:
    """Describe the products of experts: grouped GEMM, or one per expert. Returns "" without experts."""
    if not sizes.expert_widths:
        return ""
    if config.ampipe.use_pipe_experts:
        return "experts: one product per expert and piece of its rows (--use-pipe-experts)"
    dtype, emp = compute_dtype(config, device), config.parallel.expert_mp_degree
    widths = sorted({sizes.hidden_size, *(width // emp for width in sizes.expert_widths)})
    lacks = device.grouped_lacks(dtype, widths)
    if not lacks:
        return "experts: one grouped GEMM for all experts of a rank"
    return f"experts: one product per expert, with row counts that the host knows or reads once per layer: {lacks}"


def nothing_left(iteration: int, train_iters: int) -> str:
    """Return the message of a run whose checkpoint has already reached --train-iters."""
    return f"no step is left: iteration {iteration} is done, --train-iters is {train_iters}"


def evaluation(means: Mapping[str, float], read: int, samples: int) -> str:
    """Return the message of an evaluation without a step, which has read so many of the held-out samples.

    ``means`` contains the terms and ``loss``.
    """
    terms = ", ".join(f"{name} {mean:.4f}" for name, mean in means.items() if name != "loss")
    return f"held-out loss {means['loss']:.4f} ({terms}), {read:,} of {samples:,} samples"


def how_to_continue(config: Config) -> str:
    """Return the command that continues a run that was stopped before its end."""
    checkpoint = config.checkpoint
    if checkpoint.load == checkpoint.save:
        return "to continue, run the same command again"
    return f"to continue, run the same command with --load {shlex.quote(str(checkpoint.save))}"


def farewell(
    config: Config, iteration: int, stop: str, checkpoint: Location | None, exported: Path | None
) -> Iterator[str]:
    """Yield why a run stopped, its outputs with their folders, and how to continue if it stopped before its end.

    Args:
        iteration: Last iteration done.
        stop: Reason of a stop before the end. "" without one.
        checkpoint: The newest checkpoint, if any.
        exported: Folder of the exported Hugging Face model, if any.
    """
    if stop:
        saved = "saved" if checkpoint else "nothing is saved without --save"
        yield f"stopped at iteration {iteration}: {stop}; {saved}"
    for output, folder in (
        ("metrics", config.logging.metrics_file),
        ("checkpoint", checkpoint),
        ("TensorBoard files", config.logging.tensorboard_dir),
        ("Hugging Face model", exported),
    ):
        if folder:
            yield f"{output}: {folder}"
    if checkpoint and iteration < config.training.train_iters:
        yield how_to_continue(config)
