"""``--ampipe-degree auto``: choose the fastest degree that leaves the results unchanged, by timing discarded steps."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist

from megapar.arguments import Config
from megapar.compatibility import RULES, SETTLED
from megapar.core.comm.autograd import all_reduce_
from megapar.core.comm.axis import Axis
from megapar.data.batches import Loader, MicroBatch
from megapar.model.decoder.model import Decoder
from megapar.moe.slicing import Slicing

if TYPE_CHECKING:
    from megapar.training.step.job import Job
    from megapar.training.step.objective import Objective
    from megapar.training.step.progress import Progress

AUTO = 0
DEGREES = (1, 2, 4)
REPEATS = 3
# Minimum gain over degree 1. Smaller differences are noise.
LEAST_TIME_SAVED = 0.02

Choose = Callable[[Mapping[int, float]], tuple[int, str]]  # as ``choose``


def make_slicing(config: Config, degree: int | None = None) -> Slicing:
    """Return how AMPipe slices layers, and how experts' rows are split. ``degree`` overrides --ampipe-degree.

    With --ampipe-degree auto a model starts without slices.
    """
    ampipe = config.ampipe
    degree = max(1, ampipe.ampipe_degree if degree is None else degree)
    return Slicing(
        degree=degree,
        balanced=ampipe.ampipe_slicing == "balanced",
        capacity=ampipe.ampipe_capacity,
        cross_layer=ampipe.ampipe_cross_layer and degree > 1,
        overlap_mp=ampipe.ampipe_tp_sp_comm_overlap,
        # The flag counts the pieces of all slices together, so each slice has its share of them.
        expert_pieces=ampipe.pipe_experts_multi_data // degree if ampipe.use_pipe_experts else 0,
        chained=ampipe.pipe_experts_multi_stream,
    )


def legal_degrees(config: Config) -> tuple[tuple[int, ...], str]:
    """Return (degrees with the same results as degree 1, the reason if there is only one, else "")."""
    values = config.values() | {"kind": config.kind}
    for rule in RULES:
        if rule.kind == SETTLED and rule.broken(values):
            return (1,), rule.message
    parallel, ampipe = config.parallel, config.ampipe
    shortest = min(config.model.seq_length, *(span.seq_length for span in config.phases.spans))
    room = shortest // (parallel.mp_degree if parallel.sequence_parallel else 1)
    pieces = ampipe.pipe_experts_multi_data if ampipe.use_pipe_experts else 0
    degrees = tuple(d for d in DEGREES if d <= room and (d == 1 or not pieces or (pieces % d == 0 and pieces > d)))
    return degrees, "" if len(degrees) > 1 else "the sequence length or --pipe-experts-multi-data allows only it"


def slice_model(
    config: Config, job: Job, objective: Objective, loader: Loader, progress: Progress, chosen: Choose
) -> str:
    """Slice the model by the checkpoint's degree, or the one that ``chosen`` takes by the seconds of each.

    Returns a line for the log, or "" if --ampipe-degree sets a degree.
    """
    if config.ampipe.ampipe_degree != AUTO:
        return ""
    model = cast(Decoder, job.model)  # no other model has the flag
    legal, why = legal_degrees(config)
    if progress.ampipe_degree in legal:
        why = "from the checkpoint"
    elif len(legal) == 1:
        progress.ampipe_degree = legal[0]
    else:
        batch = loader.step(progress.consumed_samples, 1)[0]

        def run(degree: int) -> float:
            model.slice_by(make_slicing(config, degree))
            return _seconds(job, objective, batch)

        seconds = measure(legal, run, job.world.axis("world"), job.world.device.torch_device)
        progress.ampipe_degree, why = chosen(seconds)
        job.world.meter.take()
    model.slice_by(make_slicing(config, progress.ampipe_degree))
    return f"--ampipe-degree auto: {progress.ampipe_degree} ({why})"


def _seconds(job: Job, objective: Objective, batch: MicroBatch) -> float:
    """Return the seconds of a forward and backward. Discards the gradients."""
    device = job.world.device
    tensors = batch.to(device.torch_device).tensors
    job.sharding.begin_step()
    job.sharding.begin_micro_batch(last=True)
    device.synchronize()
    start = time.perf_counter()
    terms = job.model(tensors, batch.valid_tokens)
    objective.of(terms, batch.counts, 1).backward()
    job.sharding.finish()
    device.synchronize()
    seconds = time.perf_counter() - start
    job.comm.check_settled()
    job.sharding.begin_step()
    return seconds


def measure(degrees: Sequence[int], run: Callable[[int], float], world: Axis, device: torch.device) -> dict[int, float]:
    """Return degree -> median seconds of a micro-batch on the slowest rank, the same result on every rank.

    ``run`` returns the seconds of one micro-batch's forward and backward at a degree. The degrees take turns, and the
    first round is warmup.
    """
    rounds = [[run(degree) for degree in degrees] for _ in range(1 + REPEATS)][1:]
    medians = [statistics.median(turns) for turns in zip(*rounds, strict=True)]
    slowest = torch.tensor(medians, dtype=torch.float32, device=device)
    if world.size > 1:
        all_reduce_(slowest, world, dist.ReduceOp.MAX)
    return dict(zip(degrees, slowest.tolist(), strict=True))


def choose(seconds: Mapping[int, float]) -> tuple[int, str]:
    """Return (degree, reason): the fastest degree if it beats degree 1 by ``LEAST_TIME_SAVED``, else 1."""
    best = min(seconds, key=lambda degree: seconds[degree])
    times = ", ".join(f"{degree}: {value * 1000:.1f} ms" for degree, value in seconds.items())
    if seconds[best] > (1 - LEAST_TIME_SAVED) * seconds[1]:
        best = 1
    return best, f"measured per micro-batch {times}"
