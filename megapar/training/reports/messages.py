"""What people read of a run besides its iterations; one rank speaks."""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from megapar.arguments import Config
from megapar.core.device.apex import apex_installed
from megapar.core.device.base import Device
from megapar.core.device.peak import peak_flops
from megapar.core.units import GIBIBYTE
from megapar.model.flops import flops_per_token
from megapar.model.sizes import ModelSizes
from megapar.training.building.build import compute_dtype
from megapar.training.building.job import Job
from megapar.training.building.memory import expert_bound
from megapar.training.reports import run_facts as facts
from megapar.training.reports.loggers import JsonLinesLogger, PlainTerminal, ProgressTerminal, TensorBoardLogger
from megapar.training.reports.monitor import Monitor
from megapar.training.reports.patient_logger import PatientLogger
from megapar.training.reports.record import Logger
from megapar.training.step.objective import Objective


def make_terminal(config: Config, rank: int, iteration: int) -> PlainTerminal | None:
    """Where rank 0 speaks; other ranks have none. iteration: the last one done."""
    if rank != 0:
        return None
    iterations, interval = config.training.train_iters, config.logging.log_interval
    if sys.stdout.isatty():
        return ProgressTerminal(iterations, interval, iteration)
    return PlainTerminal(iterations, interval)


def make_loggers(config: Config, terminal: PlainTerminal | None, iteration: int) -> list[Logger]:
    """Everything that is told of iterations, on the rank that has a terminal."""
    if terminal is None:
        return []
    logging, first = config.logging, iteration + 1
    loggers: list[Logger] = [terminal]
    if logging.metrics_jsonl:
        metrics = Path(logging.metrics_jsonl)
        loggers.append(PatientLogger(str(metrics), lambda at: JsonLinesLogger(metrics, at), first, terminal.say))
    if logging.tensorboard_dir:
        board = Path(logging.tensorboard_dir)
        loggers.append(PatientLogger(str(board), lambda at: TensorBoardLogger(board, at), first, terminal.say))
    return loggers


def make_monitor(
    config: Config, job: Job, objective: Objective, terminal: PlainTerminal | None, iteration: int
) -> Monitor:
    """What collects the steps of this rank. Who has a terminal also writes down what the run is."""
    world, metrics = job.world, config.logging.metrics_jsonl
    peak, source = math.nan, "unknown"
    if terminal is not None:  # nobody reads the other ranks' records, and all together would measure less
        peak, source = peak_flops(world.device, compute_dtype(config, world.device))
        if metrics:
            folder = Path(metrics).absolute().parent
            try:
                facts.write_facts(folder, config, world, peak, source, _num_parameters(job))
            except OSError as error:
                terminal.say(f"WARNING: {folder / facts.NAME} cannot be written: {error}")
    return Monitor(
        world=world.axis("world"),
        data=world.axis("data"),
        pp=world.axis("pp"),
        cp=world.axis("cp"),
        device=world.device,
        objective=objective,
        loggers=make_loggers(config, terminal, iteration),
        flops_per_token=flops_per_token(job.sizes, config.model.seq_length),
        peak=peak,
        peak_source=source,
    )


def _num_parameters(job: Job) -> int:
    return sum(spec.numel for spec in job.table if spec.trainable)


def greeting(config: Config, job: Job, monitor: Monitor) -> Iterator[str]:
    """What is about to be trained, and on what."""
    world = job.world
    room = f" (about {world.group_bytes / GIBIBYTE:.1f} GiB of buffers)" if world.group_bytes else ""
    yield f"{config.grid.describe()}, {world.num_groups} communicators{room}"
    dtype = str(compute_dtype(config, world.device)).removeprefix("torch.")
    if bound := expert_bound(config, compute_dtype(config, world.device).itemsize):
        yield bound
    if products := expert_products(config, job.sizes, world.device):
        yield products
    if said := apex_installed():
        yield said
    peak = f"{monitor.peak / 1e12:.3g} TFLOP/s ({monitor.peak_source})"
    model = f"{type(job.model).__name__}: {_num_parameters(job):,} parameters"
    yield f"{model}, {world.device.name}, {dtype}, peak {peak}"


def expert_products(config: Config, sizes: ModelSizes, device: Device) -> str:
    """In which form experts multiply their rows; "" where there are none."""
    if not sizes.expert_widths:
        return ""
    if config.ampipe.use_pipe_experts:
        return "experts: a product for each one's piece of rows (--use-pipe-experts)"
    dtype, emp = compute_dtype(config, device), config.parallel.expert_mp_degree
    widths = sorted({sizes.hidden_size, *(width // emp for width in sizes.expert_widths)})
    lacks = device.grouped_lacks(dtype, widths)
    if not lacks:
        return "experts: one grouped product for all of a rank's"
    return f"experts: a product for each, whose rows the host knows or reads once per layer: {lacks}"


def nothing_left(iteration: int, train_iters: int) -> str:
    """Of a run that has no step to do: what it resumed from is as far as it was asked to go."""
    return f"no step is left: iteration {iteration} is done, --train-iters is {train_iters}"


def evaluation(means: Mapping[str, float]) -> str:
    """An evaluation that follows no step. means: of the terms, and their ``loss``."""
    terms = ", ".join(f"{name} {mean:.4f}" for name, mean in means.items() if name != "loss")
    return f"held-out loss {means['loss']:.4f} ({terms})"


def how_to_continue(config: Config) -> str:
    """Of a run that has saved and was stopped before its end."""
    checkpoint = config.checkpoint
    if checkpoint.load == checkpoint.save:
        return "the same command goes on from there"
    return f"to go on: the same command with --load {shlex.quote(str(checkpoint.save))}"


def farewell(config: Config, checkpoint: Path | None, exported: Path | None) -> Iterator[str]:
    """What the run leaves behind, and where."""
    for what, where in (
        ("checkpoint", checkpoint),
        ("TensorBoard files", config.logging.tensorboard_dir),
        ("Hugging Face model", exported),
    ):
        if where:
            yield f"{what}: {where}"
