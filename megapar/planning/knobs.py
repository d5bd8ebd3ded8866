"""The knobs of a search, and the other values of each knob that a candidate could have.

A knob is one decision, made by one flag or by flags that make sense only together (a schedule and its chunks). The
values are those that the sizes of the model and the number of ranks allow; the rules have the last word.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import permutations, product
from math import prod
from typing import Any

from megapar.config.config import FLAGS
from megapar.core.context_parallel.positions import GATHERED, RING, ULYSSES
from megapar.core.pipeline.schedule import GPIPE, INTERLEAVED, ZERO_BUBBLE
from megapar.model.sizes import ModelSizes
from megapar.schema.role import OUTSIDE, TRIED
from megapar.schema.rule import divisors

ALGORITHMS = (RING, ULYSSES, GATHERED)
SLICES = range(2, 9)
PIECES = range(1, 9)
PAIRED_SLICES = (2, 4)  # that are tried with every slicing, within layers and across them
PAIRED_PIECES = (1, 2, 4)  # that are tried with collectives in order and not
INTERVALS = (1, 2, 4)
MOST_BLOCKS = 6  # numbers of recomputed layers that are tried
SHORTEST_PIECE = 1024  # positions of a sequence on a rank of cp, in the first grid of degrees
RANK_ORDERS = tuple(("dp", *inner, "mp") for inner in permutations(("pp", "sharding", "cp")))

Values = Mapping[str, Any]
NO_RECOMPUTE: Values = {
    **{"recompute_interval": 0, "recompute_granularity": "full", "recompute_method": None},
    "recompute_num_layers": None,
}


def _flags_with(role: str) -> tuple[str, ...]:
    return tuple(name for name, flag in FLAGS.items() if flag.role.kind == role)


TRIED_FLAGS = _flags_with(TRIED)  # flags that a search tries (``schema/role.py``)

WITHOUT_EFFECT = _flags_with(OUTSIDE)  # flags that change neither time nor memory of a step in the plan

DROPPED = (
    *(name for name in TRIED_FLAGS if name not in ("sharding_segment_strategy", "segment_broadcast_mb")),
    *("use_nanopipe", "gradient_merge_acc_step", "adaptive_recompute_device_size"),
)
"""Flags whose values in files a search drops. Segments stay: any size, even the default, selects a strategy."""

# Flags that have no effect, and are refused, together with a value of another one: (other flag, that value, flags).
_OVER_MP = "sequence_parallel tp_comm_overlap expert_mp_degree recompute_partition ampipe_tp_sp_comm_overlap"
_OF_SLICES = "ampipe_slicing ampipe_cross_layer ampipe_tp_sp_comm_overlap"
_IDLE_BESIDE: tuple[tuple[str, Any, str], ...] = (
    ("mp_degree", 1, _OVER_MP),
    ("sequence_parallel", False, "expert_mp_degree pipe_experts_multi_stream"),
    ("pp_degree", 1, "pp_schedule vpp_degree pp_seg_method"),
    ("cp_degree", 1, "context_parallel_algo mla_cp_exchange"),
    ("ep_degree", 1, f"ampipe_degree {_OF_SLICES} moe_dispatch"),
    ("ampipe_degree", 1, _OF_SLICES),
    ("use_pipe_experts", False, "pipe_experts_multi_data pipe_experts_multi_stream"),
)


@dataclass(frozen=True)
class Candidate:
    """Values of knobs: (field name, value) of those that differ from their defaults, by name."""

    values: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Candidate:
        """Return the candidate with these values, without those that have no effect with the others."""
        kept = {name: value for name, value in values.items() if value != default(name)}
        for other, value, flags in _IDLE_BESIDE:
            if kept.get(other, default(other)) == value:
                for name in flags.split():
                    kept.pop(name, None)
        if "recompute_interval" not in kept and "recompute_method" not in kept:
            for name in ("recompute_offload", "recompute_partition"):
                kept.pop(name, None)
        return cls(tuple(sorted(kept.items())))

    def get(self, name: str) -> Any:
        """Return the value of a knob."""
        return dict(self.values).get(name, default(name))

    def flags(self) -> dict[str, Any]:
        """Return the values that differ from their defaults, by field name."""
        return dict(self.values)

    def but(self, changes: Mapping[str, Any]) -> Candidate:
        """Return the candidate with other values of some knobs."""
        return Candidate.of({**dict(self.values), **changes})

    def differences(self, other: Candidate) -> dict[str, Any]:
        """Return the values of this candidate, defaults included, that the other one has not."""
        names = [name for name, _ in (*self.values, *other.values)]
        return {name: self.get(name) for name in dict.fromkeys(names) if self.get(name) != other.get(name)}


def default(name: str) -> Any:
    """Return the default of a knob, which is the same for both trainers."""
    return FLAGS[name].defaults["moe"]


@dataclass(frozen=True)
class Scope:
    """Facts that bound the values of knobs.

    Attributes:
        kind: ``moe`` or ``ernie``.
        batch: Samples of the global batch.
        latent: The model has multi-latent attention.
    """

    kind: str
    sizes: ModelSizes
    world_size: int
    node: int
    batch: int
    latent: bool

    @cached_property
    def degrees(self) -> tuple[int, ...]:
        """Divisors of the number of ranks."""
        return divisors(self.world_size)

    @cached_property
    def contexts(self) -> tuple[int, ...]:
        """Degrees of context parallelism that leave each rank a piece of a sequence."""
        length = self.sizes.seq_length
        return tuple(d for d in self.degrees if d == 1 or (length % d == 0 and length // d >= SHORTEST_PIECE))

    @cached_property
    def expert_degrees(self) -> tuple[int, ...]:
        """Degrees of expert parallelism."""
        return divisors(self.sizes.routed_experts) if self.sizes.routed_experts else (1,)

    def data(self, candidate: Candidate) -> int:
        """Return the number of ranks that read different data."""
        used: int = candidate.get("mp_degree") * candidate.get("pp_degree") * candidate.get("cp_degree")
        return self.world_size // used


@dataclass(frozen=True)
class Knob:
    """One decision of a layout; ``values`` returns those that it can have with a candidate's."""

    flags: tuple[str, ...]
    values: Callable[[Candidate, Scope], Iterable[Values]]

    def others(self, candidate: Candidate, scope: Scope) -> Iterator[Candidate]:
        """Yield the candidates with another value of this knob."""
        if not all(name in FLAGS and scope.kind in FLAGS[name].models for name in self.flags):
            return
        seen = {candidate}
        for values in self.values(candidate, scope):
            other = candidate.but(values)
            if other not in seen:
                seen.add(other)
                yield other


def _one(name: str, *values: Any) -> Knob:
    """Return the knob of one flag with fixed values."""
    return Knob((name,), lambda candidate, scope: [{name: value} for value in values])


def _splits(scope: Scope, *degrees: int) -> bool:
    return scope.world_size % prod(degrees) == 0


def _tensor(candidate: Candidate, scope: Scope) -> Iterator[Values]:
    pp, cp = candidate.get("pp_degree"), candidate.get("cp_degree")
    for mp in scope.degrees:
        if _splits(scope, mp, pp, cp):
            yield {"mp_degree": mp, "sequence_parallel": mp > 1}
            if mp > 1:
                yield {"mp_degree": mp, "sequence_parallel": False}


def _sequence(candidate: Candidate, scope: Scope) -> Iterator[Values]:
    if candidate.get("mp_degree") > 1:
        yield from ({"sequence_parallel": value} for value in (True, False))


def _pipeline(candidate: Candidate, scope: Scope) -> Iterator[Values]:
    mp, cp = candidate.get("mp_degree"), candidate.get("cp_degree")
    for pp in scope.degrees:
        if pp <= scope.sizes.num_layers and _splits(scope, mp, pp, cp):
            yield {"pp_degree": pp}


def _schedule(candidate: Candidate, scope: Scope) -> Iterator[Values]:
    pp = candidate.get("pp_degree")
    if pp == 1:
        return
    most = scope.sizes.num_layers // pp
    yield from ({"pp_schedule": name, "vpp_degree": 1} for name in ("1f1b", GPIPE))
    yield from ({"pp_schedule": INTERLEAVED, "vpp_degree": chunks} for chunks in range(2, most + 1))
    yield from ({"pp_schedule": ZERO_BUBBLE, "vpp_degree": chunks} for chunks in (1, 2) if chunks <= most)


def _context(candidate: Candidate, scope: Scope) -> Iterator[Values]:
    mp, pp = candidate.get("mp_degree"), candidate.get("pp_degree")
    for cp in scope.degrees:
        if _splits(scope, mp, pp, cp) and scope.sizes.seq_length % cp == 0:
            for algorithm in ALGORITHMS if cp > 1 else ALGORITHMS[:1]:
                yield {"cp_degree": cp, "context_parallel_algo": algorithm}


def _exchange(candidate: Candidate, scope: Scope) -> Iterator[Values]:
    if scope.latent and candidate.get("cp_degree") > 1:
        yield from ({"mla_cp_exchange": value} for value in ("auto", "latent", "kv"))


def _experts(candidate: Candidate, scope: Scope) -> Iterator[Values]:
    yield from ({"ep_degree": ep} for ep in scope.expert_degrees if ep <= scope.world_size)


def _expert_tensor(candidate: Candidate, scope: Scope) -> Iterator[Values]:
    if scope.sizes.routed_experts and candidate.get("mp_degree") > 1:
        yield from ({"expert_mp_degree": value} for value in (None, 1))


def _replicas(candidate: Candidate, scope: Scope) -> Iterator[Values]:
    yield {"dp_degree": -1, "hybrid_dp": False}
    yield from ({"dp_degree": dp, "hybrid_dp": True} for dp in divisors(scope.data(candidate))[1:])


def _micro_batch(candidate: Candidate, scope: Scope) -> Iterator[Values]:
    share, rest = divmod(scope.batch, scope.data(candidate))
    if not rest:
        yield from ({"micro_batch_size": size} for size in divisors(share))


def _recompute(candidate: Candidate, scope: Scope) -> Iterator[Values]:
    """Yield the forms of recompute, least memory first."""
    layers = scope.sizes.num_layers // (candidate.get("pp_degree") * candidate.get("vpp_degree"))
    yield from ({**NO_RECOMPUTE, "recompute_interval": count} for count in INTERVALS if count <= max(1, layers))
    now = candidate.get("recompute_num_layers") or 0
    counts = {*range(1, layers, max(1, layers // MOST_BLOCKS)), now - 1, now + 1}
    for count in sorted(counts, reverse=True):
        if 0 < count < layers:
            yield {**NO_RECOMPUTE, "recompute_method": "block", "recompute_num_layers": count}
    yield {**NO_RECOMPUTE, "recompute_granularity": "selective"}
    yield NO_RECOMPUTE


def _slices(candidate: Candidate, scope: Scope) -> Iterator[Values]:
    if candidate.get("ep_degree") == 1:
        return
    yield from ({"ampipe_degree": degree} for degree in (1, *SLICES))
    if candidate.get("use_pipe_experts"):  # which a rule switches off where slices do not divide its pieces
        yield from ({"ampipe_degree": degree, "use_pipe_experts": False} for degree in SLICES)
    now = candidate.get("ampipe_degree")
    degrees = (*PAIRED_SLICES, now) if now > 1 else PAIRED_SLICES
    for degree, slicing, cross in product(degrees, ("equal", "balanced"), (False, True)):
        yield {"ampipe_degree": degree, "ampipe_slicing": slicing, "ampipe_cross_layer": cross}


def _pieces(candidate: Candidate, scope: Scope) -> Iterator[Values]:
    if not scope.sizes.routed_experts:
        return
    yield {"use_pipe_experts": False}
    yield from ({"use_pipe_experts": True, "pipe_experts_multi_data": count} for count in PIECES)
    now = candidate.get("pipe_experts_multi_data")
    for count, ordered in product((*PAIRED_PIECES, now), (False, True)):
        yield {"use_pipe_experts": True, "pipe_experts_multi_data": count, "pipe_experts_multi_stream": ordered}


def _segments(candidate: Candidate, scope: Scope) -> Iterator[Values]:
    name, size = "sharding_segment_strategy", "segment_broadcast_mb"
    yield {name: None, size: 32.0}
    yield from ({name: "segment_broadcast_MB", size: value} for value in (8.0, 32.0, 128.0, 512.0))


def _stage(candidate: Candidate, scope: Scope) -> Iterator[Values]:
    yield from ({"sharding_stage": stage, "gradient_merge_mode": None} for stage in (1, 2, 3))
    yield from ({"sharding_stage": stage, "gradient_merge_mode": "step"} for stage in (2, 3))


DEGREES: tuple[Knob, ...] = (
    Knob(("mp_degree", "sequence_parallel"), _tensor),
    Knob(("pp_degree",), _pipeline),
    Knob(("cp_degree", "context_parallel_algo"), _context),
    Knob(("ep_degree",), _experts),
    Knob(("expert_mp_degree",), _expert_tensor),
)
MICRO_BATCH = Knob(("micro_batch_size",), _micro_batch)
RECOMPUTE = Knob(tuple(NO_RECOMPUTE), _recompute)
SCHEDULE = Knob(("pp_schedule", "vpp_degree"), _schedule)
STAGE = Knob(("sharding_stage", "gradient_merge_mode"), _stage)
PAIRED: tuple[Knob, ...] = (MICRO_BATCH, RECOMPUTE, SCHEDULE, STAGE)
"""Knobs that a search also changes together with a degree."""
KNOBS: tuple[Knob, ...] = (
    *(MICRO_BATCH, RECOMPUTE, SCHEDULE, *DEGREES),
    Knob(("ampipe_degree", "ampipe_slicing", "ampipe_cross_layer"), _slices),
    _one("ampipe_tp_sp_comm_overlap", False, True),
    Knob(("use_pipe_experts", "pipe_experts_multi_data", "pipe_experts_multi_stream"), _pieces),
    _one("moe_dispatch", "auto", "plain", "node"),
    _one("tp_comm_overlap", "auto", "on", "off", "fused"),
    Knob(("sequence_parallel",), _sequence),
    Knob(("mla_cp_exchange",), _exchange),
    _one("pp_seg_method", "uniform", "balanced"),
    STAGE,
    Knob(("dp_degree", "hybrid_dp"), _replicas),
    _one("rank_order", *RANK_ORDERS),
    _one("overlap_grad_reduce", "auto", "off"),
    _one("overlap_param_gather", "auto", "off"),
    _one("sharding_prefetch_segments", 0, 1, 2, 4),
    Knob(("sharding_segment_strategy", "segment_broadcast_mb"), _segments),
    _one("recompute_offload", False, True),
    _one("recompute_partition", False, True),
    _one("optimizer_offload", False, True),
)
