"""Bytes per rank of parameters, gradients and optimizer state, counted in the trainer that runs as each rank."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.sharding.shape import BALANCE, TRAINING
from benchmarks.support.table import print_table
from megapar.arguments import parse
from megapar.core.sharding.cut import local_box
from megapar.model.spec import table_of
from megapar.tools.tracing.pretend import pretend
from megapar.trainer import Trainer

DEGREES = (1, 2, 4, 8)
KINDS = ("parameters", "gradients", "state")


def measure() -> dict[str, object]:
    """Print a table per model; per model, stage and degree the largest rank's bytes, and max/mean."""
    found: dict[str, object] = {}
    for name, (kind, flags, ep) in BALANCE.items():
        rows = []
        for degree in DEGREES:
            own = (*flags, *(("--ep-degree", str(ep)) if degree > ep > 1 else ()))
            peers = whole_tensors(kind, own, degree)
            for stage in (1, 2, 3):
                ranks = [held(kind, own, degree, stage, rank) for rank in range(degree)]
                spread = {what: _spread([rank[what] for rank in ranks]) for what in KINDS}
                found[f"{name}, stage {stage}, degree {degree}"] = {
                    "bytes": {what: max(rank[what] for rank in ranks) for what in KINDS},
                    "max_to_mean": spread,
                    "whole_tensors_max_to_mean": peers,
                }
                sizes = [f"{max(rank[what] for rank in ranks) / 2**20:,.1f}" for what in KINDS]
                rows.append((str(degree), str(stage), *sizes, f"{max(spread.values()):.4f}", f"{peers:.2f}"))
        print(f"{name}: MiB on the fullest rank (bf16 parameters, fp32 gradients and state)\n")
        print_table(("degree", "stage", *KINDS, "max/mean", "whole tensors"), rows)
    return found


def held(kind: str, flags: Sequence[str], degree: int, stage: int, rank: int) -> dict[str, int]:
    """Return the bytes on one rank. Gradients are those that are kept between micro-batches."""
    place = {"WORLD_SIZE": str(degree), "RANK": str(rank)}
    more = ["--sharding-stage", str(stage), "--dtype", "bf16", "--device", "cpu", "--world-size", str(degree)]
    with pretend(parse(kind, [*flags, *_training(flags), *more], place), rank) as trainer:
        return _count(trainer, stage, cut=stage == 3 and degree > 1)


def _training(flags: Sequence[str]) -> list[str]:
    """Return the flags of data and training. A file sets the length of its run itself."""
    return ["--data-path", "mock", "--micro-batch-size", "1"] if "--config" in flags else list(TRAINING)


def _count(trainer: Trainer, stage: int, *, cut: bool) -> dict[str, int]:
    """Return the bytes of a rank. If parameters are ``cut``, as at stage 3 of several ranks, they are the masters."""
    shards = trainer.job.sharding.master_shards
    masters = sum(shard.master.nbytes for shard in shards)
    parameters = sum(
        p.to_local().nbytes if cut and hasattr(p, "to_local") else p.nbytes for p in trainer.job.model.parameters()
    )
    whole = sum(4 * p.numel() for p in trainer.job.model.parameters())
    return {
        "parameters": parameters,
        "gradients": whole if stage == 1 else masters,  # fp32, beside the masters
        "state": (2 if cut else 3) * masters,  # moments, and masters where they are not the parameters
    }


def whole_tensors(kind: str, flags: Sequence[str], degree: int) -> float:
    """Return max/mean of bytes per rank if each tensor has one owner, as in Paddle's static sharding.

    The next rank begins when the bytes so far exceed its equal share.
    """
    line = [*flags, *_training(flags), "--device", "cpu", "--world-size", str(degree)]
    config = parse(kind, line, {"WORLD_SIZE": str(degree)})
    sizes = [local_box(row, config.grid, 0).numel for row in table_of(config.model) if row.trainable]
    owned, owner, total = [0] * degree, 0, 0
    for size in sizes:
        owned[owner] += size
        total += size
        if total > sum(sizes) * (owner + 1) / degree and owner + 1 < degree:
            owner += 1
    return _spread(owned)


def _spread(values: Sequence[int]) -> float:
    return max(values) * len(values) / sum(values)
