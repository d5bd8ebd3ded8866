"""``megapar plan --search``: the best legal layouts of a model on a cluster, and why their neighbours are not better.

Each candidate passes the command line's parser and the rules, like a run. The memory formulas filter the legal ones,
and those that fit are timed. Candidates vary mp, pp, cp and its algorithm, ep, chunks per stage, the micro-batch and
recompute; sharding uses the remaining ranks. cp is tried only if each rank keeps a long part of a sequence, and with
micro-batches of one: two ranks with a sequence each would not need to communicate.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from megapar.arguments import Config
from megapar.core.context_parallel.positions import GATHERED, RING, ULYSSES
from megapar.core.device.kinds import DeviceKind
from megapar.core.units import GIBIBYTE
from megapar.errors import ConfigError
from megapar.planning.assume import Assumed
from megapar.planning.change import LAYOUT, attempt, flags_of
from megapar.planning.plan import Plan
from megapar.schema.rule import divisors

RECOMPUTE: Mapping[str, dict[str, Any]] = {
    "none": {},
    "selective": {"recompute_granularity": "selective"},
    "full": {"recompute_interval": 1},
}
MICRO_BATCHES = (1, 2, 4, 8)
CHUNKS = (1, 2, 4)
ALGORITHMS = (RING, ULYSSES, GATHERED)
SHORTEST_PIECE = 4096  # positions of a sequence on a rank of cp
RECOMPUTE_FLAGS = (
    *("recompute_granularity", "recompute_interval", "recompute_method", "recompute_num_layers"),
    *("recompute_offload", "recompute_partition", "adaptive_recompute_device_size"),
)
SEARCHED = (
    *(*LAYOUT, *RECOMPUTE_FLAGS, "context_parallel_algo", "micro_batch_size", "vpp_degree", "pp_schedule"),
    *("use_nanopipe", "pp_seg_method"),
)


@dataclass(frozen=True)
class Candidate:
    """One layout.

    Attributes:
        mp: Tensor parallel degree.
        pp: Pipeline parallel degree.
        ep: Expert parallel degree.
        vpp: Chunks per stage.
        micro_batch: Sequences per micro-batch.
        recompute: A key of RECOMPUTE.
        cp: Context parallel degree.
        algorithm: Algorithm of context parallelism.
    """

    mp: int
    pp: int
    ep: int
    vpp: int
    micro_batch: int
    recompute: str
    cp: int = 1
    algorithm: str = RING

    def flags(self) -> dict[str, Any]:
        """Return the flags of the layout, by field name."""
        flags: dict[str, Any] = {"mp_degree": self.mp, "pp_degree": self.pp, "micro_batch_size": self.micro_batch}
        if self.mp > 1:
            flags["sequence_parallel"] = True
        if self.cp > 1:
            flags |= {"cp_degree": self.cp, "context_parallel_algo": self.algorithm}
        if self.ep > 1:
            flags["ep_degree"] = self.ep
        if self.vpp > 1:
            flags |= {"vpp_degree": self.vpp, "pp_schedule": "interleaved"}
        return flags | RECOMPUTE[self.recompute]

    def __str__(self) -> str:
        parts = [f"mp {self.mp}", f"pp {self.pp}"]
        parts += [f"cp {self.cp} ({self.algorithm.removesuffix('_cp_algo')})"] if self.cp > 1 else []
        parts += [f"ep {self.ep}", f"vpp {self.vpp}", f"mbs {self.micro_batch}", f"recompute {self.recompute}"]
        return ", ".join(parts)


@dataclass
class Result:
    """Result of a candidate.

    Attributes:
        candidate: The layout.
        plan: Its plan; None if the rules refuse it.
        why: Reason against it; "" if it fits.
    """

    candidate: Candidate
    plan: Plan | None
    why: str = ""


@dataclass
class Search:
    """State of a search.

    Attributes:
        results: Results of all candidates so far.
    """

    results: dict[Candidate, Result] = field(default_factory=dict)

    @property
    def best(self) -> list[Result]:
        """Results that fit, fastest first; of equally fast ones, the one with less memory first."""
        fitting = [(each.plan, each) for each in self.results.values() if not each.why and each.plan is not None]
        fitting.sort(key=lambda pair: (pair[0].speed.step_seconds, pair[0].fullest.reserved))
        return [result for _, result in fitting]


def search(config: Config, kind: DeviceKind, assumed: Assumed, world_size: int) -> Search:
    """Search the layouts of ``world_size`` ranks for the model and the global batch of ``config``."""
    state = Search()
    base = flags_of(config, (*SEARCHED, "sequence_parallel"))
    base["global_batch_size"] = config.training.global_batch_size
    for group in _shapes(config, kind, world_size):
        least: dict[tuple[int, str], bool] = {}
        for candidate in group:
            # If a candidate does not fit, a larger micro-batch or less recompute does not fit either.
            key = candidate.micro_batch, candidate.recompute
            if any(not fits and _needs_more(key, other) for other, fits in least.items()):
                continue
            result = _evaluate(config, base, candidate, kind, assumed, world_size)
            state.results[candidate] = result
            if result.plan is not None:
                least[key] = not result.why
    return state


def neighbours(state: Search, config: Config, kind: DeviceKind, assumed: Assumed, world_size: int) -> list[Result]:
    """Return the layouts one step away from the best one, each with the reason against it.

    A step may leave the searched space (more chunks). If it finds a better layout, that one becomes the best.
    """
    if not state.best:
        return []
    base = flags_of(config, (*SEARCHED, "sequence_parallel"))
    base["global_batch_size"] = config.training.global_batch_size
    best = state.best[0]
    while True:
        for candidate in _steps(best.candidate):
            if candidate not in state.results:
                state.results[candidate] = _evaluate(config, base, candidate, kind, assumed, world_size)
        if state.best[0].candidate == best.candidate:
            break
        best = state.best[0]
    assert best.plan is not None
    results = []
    for candidate in _steps(best.candidate):
        result = state.results[candidate]
        if not result.why and result.plan is not None:
            slower = result.plan.speed.step_seconds / best.plan.speed.step_seconds - 1
            result = Result(candidate, result.plan, f"{slower:.1%} slower: {_slower(result.plan, best.plan)}")
        results.append(result)
    return results


def describe(state: Search, near: list[Result], kind: DeviceKind, count: int = 10) -> str:
    """Format two tables: the best layouts, and the neighbours of the first."""
    legal = [result for result in state.results.values() if result.plan is not None]
    lines = [f"{len(state.results)} layouts tried, {len(legal)} legal, {len(state.best)} fit into {kind.name}", ""]
    if not state.best:
        closest = min((r.plan for r in legal if r.plan is not None), key=lambda p: p.fullest.reserved, default=None)
        if closest is None:
            first = next(iter(state.results.values()))
            return "\n".join([*lines, f"no layout is legal: {first.why}", ""])
        return "\n".join([*lines, f"no layout fits; the closest: {closest.advice()}", ""])
    lines.append(f"{'step s':>9} {'MFU':>6} {'bubble':>7} {'GiB':>6}  layout")
    for result in state.best[:count]:
        assert result.plan is not None
        speed, memory = result.plan.speed, result.plan.fullest.reserved / GIBIBYTE
        lines.append(
            f"{speed.step_seconds:9.3f} {speed.mfu:6.1%} {speed.bubble_share:7.1%} {memory:6.1f}  {result.candidate}"
        )
    lines += ["", "neighbours of the first, and why they are not better"]
    lines += [f"  {result.candidate}: {result.why}" for result in near]
    return "\n".join([*lines, ""])


def to_dict(state: Search, near: list[Result], count: int = 10) -> dict[str, Any]:
    """Return the object that ``--json`` prints: the best plans with their flags, and the neighbours."""
    best = [
        {"flags": result.candidate.flags(), **result.plan.to_dict()}
        for result in state.best[:count]
        if result.plan is not None
    ]
    return {"looked_at": len(state.results), "best": best, "neighbours": {str(r.candidate): r.why for r in near}}


def _shapes(config: Config, kind: DeviceKind, world_size: int) -> Iterator[list[Candidate]]:
    """Yield groups of candidates that differ only in micro-batch and recompute, least memory first."""
    sizes, batch = config.model, config.training.global_batch_size
    experts = config.model.routed_experts
    for mp, pp, cp, algorithm, data in _splits(config, kind, world_size):
        if batch % data:
            continue
        for ep in [d for d in divisors(experts) if data * cp * mp % d == 0] if experts else [1]:
            for vpp in CHUNKS if pp > 1 else CHUNKS[:1]:
                if pp * vpp > sizes.num_layers:
                    continue
                group = [
                    Candidate(mp, pp, ep, vpp, micro, recompute, cp, algorithm)
                    for recompute in ("full", "selective", "none")
                    for micro in (MICRO_BATCHES if cp == 1 else MICRO_BATCHES[:1])
                    if batch // data % micro == 0 and batch // data // micro >= pp
                ]
                if group:
                    yield group


def _splits(config: Config, kind: DeviceKind, world_size: int) -> Iterator[tuple[int, int, int, str, int]]:
    """Yield (mp, pp, cp, its algorithm, remaining data parallel ranks) for degrees that the model allows."""
    sizes, degrees = config.model, divisors(world_size)
    for mp, pp, (cp, algorithm) in product(
        [d for d in degrees if d <= kind.node], [d for d in degrees if d <= sizes.num_layers], _shared(config, degrees)
    ):
        if world_size % (mp * pp * cp) == 0 and sizes.num_attention_heads % mp == 0:
            yield mp, pp, cp, algorithm, world_size // (mp * pp * cp)


def why_none(config: Config, kind: DeviceKind, world_size: int) -> str:
    """Explain why ``search`` has no candidates: the global batch is too small or not divisible."""
    batch = config.training.global_batch_size
    least = min(pp * data for _, pp, _, _, data in _splits(config, kind, world_size))
    return (
        f"no layout of {world_size:,} ranks can share a global batch of {batch:,}: with the highest mp and cp that the "
        f"model allows, one sample for each stage of each data parallel rank is {least:,} samples. Set "
        f"--global-batch-size to a multiple of {least:,}, or use fewer ranks.\n"
    )


def _shared(config: Config, degrees: Sequence[int]) -> list[tuple[int, str]]:
    """Return the degrees of cp, each with its algorithm."""
    longest = config.model.seq_length // SHORTEST_PIECE
    more = [degree for degree in degrees if 1 < degree <= longest and config.model.seq_length % degree == 0]
    return [(1, RING), *product(more, ALGORITHMS)]


def _needs_more(key: tuple[int, str], other: tuple[int, str]) -> bool:
    order = ("full", "selective", "none")
    return key[0] >= other[0] and order.index(key[1]) >= order.index(other[1])


def _evaluate(
    config: Config,
    base: Mapping[str, Any],
    candidate: Candidate,
    kind: DeviceKind,
    assumed: Assumed,
    world_size: int,
) -> Result:
    resolved = attempt(config, {**base, **candidate.flags()}, world_size)
    if isinstance(resolved, list):
        return Result(candidate, None, str(resolved[0]))
    try:
        plan = Plan(resolved, kind, assumed)
    except ConfigError as error:
        return Result(candidate, None, str(error.complaints[0]))
    if not plan.fits:
        over = (plan.fullest.reserved - kind.memory_bytes) / GIBIBYTE
        return Result(candidate, plan, f"needs {over:.1f} GiB more than a device has, on stage {plan.fullest.stage}")
    return Result(candidate, plan)


def _steps(candidate: Candidate) -> Iterator[Candidate]:
    """Yield neighbours: one degree or the micro-batch doubled or halved, another algorithm of cp or recompute."""
    for name in ("mp", "pp", "cp", "ep", "vpp", "micro_batch"):
        value = getattr(candidate, name)
        for changed in (value // 2, value * 2):
            if changed:
                yield replace(candidate, **{name: changed})
    for algorithm in ALGORITHMS if candidate.cp > 1 else ():
        if algorithm != candidate.algorithm:
            yield replace(candidate, algorithm=algorithm)
    for recompute in RECOMPUTE:
        if recompute != candidate.recompute:
            yield replace(candidate, recompute=recompute)


def _slower(plan: Plan, best: Plan) -> str:
    """Describe the part of the time that grew most."""
    bubble = plan.speed.bubble_share - best.speed.bubble_share
    exposed = (
        plan.speed.exposed_seconds / plan.speed.step_seconds - best.speed.exposed_seconds / best.speed.step_seconds
    )
    if bubble > max(exposed, 0.005):
        return f"the bubble is {plan.speed.bubble_share:.1%}"
    if exposed > 0.005:
        return f"{plan.speed.exposed_seconds:.3f} s of communication are exposed"
    return "its matrix products are smaller, or it recomputes more"
