"""Random legal runs on random devices, the same for the same seed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random

from megapar.arguments import parse
from megapar.core.device.kinds import kinds
from megapar.errors import ConfigError
from megapar.planning.plan import Plan
from megapar.planning.planned_run import PlannedRun

CONFIGS = Path(__file__).parents[2] / "configs"
MOE = ("qwen3-30b-a3b", "mixtral-8x7b", "moonlight-16b-a3b", "deepseek-v3", "ernie-4.5-21b-a3b", "olmoe-1b-7b", "tiny")
DENSE = ("llama-3-8b", "qwen3-8b", "ernie-4.5-0.3b")
ALGORITHMS = ("megatron_cp_algo", "ulysses_cp_algo", "allgather_cp_algo")


def drawn_runs(seed: int, count: int) -> Iterator[PlannedRun]:
    """Yield so many runs. What the rules or the plan refuse is drawn again."""
    random, found = Random(seed), 0
    while found < count:
        name = random.choice(MOE * 3 + DENSE)
        kind = kinds()[random.choice(sorted(kinds()))]
        flags = [*_layout(random), *(_experts(random) if name in MOE else ()), *_options(random)]
        try:
            line = ["--config", str(CONFIGS / f"{name}.yaml"), "--rules-only", "--dtype", "auto", *flags]
            run = Plan(parse("moe", line, {}, planning=True), kind).run
        except ConfigError:
            continue
        yield run
        found += 1


def _layout(random: Random) -> list[str]:
    mp, cp, pp = (random.choice(values) for values in ((1, 1, 2, 4, 8), (1, 1, 1, 2, 4), (1, 1, 2, 4)))
    world = mp * cp * pp * random.choice((1, 2, 4, 8, 16, 32))
    flags = ["--world-size", str(world), "--mp-degree", str(mp), "--cp-degree", str(cp), "--pp-degree", str(pp)]
    flags += ["--global-batch-size", str(world * 8), "--sharding-stage", random.choice("113")]
    flags += [f"--sequence-parallel={str(mp > 1 and random.random() < 0.7).lower()}"]
    flags += ["--context-parallel-algo", random.choice(ALGORITHMS)] if cp > 1 else []
    schedules = (("1f1b", 1), ("gpipe", 1), ("interleaved", 2), ("zero_bubble", 1), ("zero_bubble", 2))
    schedule, chunks = random.choice(schedules) if pp > 1 else ("1f1b", 1)
    return flags + (["--pp-schedule", schedule, "--vpp-degree", str(chunks)] if pp > 1 else [])


def _experts(random: Random) -> list[str]:
    flags = ["--ep-degree", random.choice(("2", "4", "8", "8", "16", "16", "32"))]
    degree = random.choice((1, 2, 2, 4, 4, 16))
    flags += ["--ampipe-degree", str(degree)]
    if degree > 1:
        flags += ["--ampipe-cross-layer"] if random.random() < 0.5 else []
        flags += ["--ampipe-tp-sp-comm-overlap"] if random.random() < 0.5 else []
    if random.random() < 0.3:
        flags += ["--use-pipe-experts", "--pipe-experts-multi-data", str(degree * random.choice((1, 2)))]
    return flags


def _options(random: Random) -> list[str]:
    flags = list(random.choice(((), (), ("--recompute-interval", "1"), ("--recompute-granularity", "selective"))))
    if "--recompute-interval" in flags:
        flags += random.choice(([], ["--recompute-offload"], ["--recompute-partition"]))
    flags += ["--tp-comm-overlap", random.choice(("on", "off"))] if random.random() < 0.5 else []
    flags += ["--overlap-grad-reduce", random.choice(("on", "off"))] if random.random() < 0.5 else []
    return [*flags, *random.choice(([], [], [], ["--optimizer-offload"]))]
