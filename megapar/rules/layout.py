"""Rows on the device mesh: the degrees must multiply to the number of ranks, and each must divide some sizes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from megapar.schema.flag import MOE
from megapar.schema.rule import (
    NO_EFFECT,
    PADDLE_SHARDING,
    Facts,
    Rule,
    Test,
    always,
    divisors,
    either,
    near_divisors,
    near_multiples,
    spell,
)

SOURCE = "axes and ranks"

HYBRID_PENALTY = 0.72  # factors of two
_NAMES = ("sharding_requested", "mp_degree", "pp_degree", "cp_degree")


def _factors(f: Facts) -> bool:
    used = f.mp_degree * f.pp_degree * f.cp_degree * max(1, f.sharding_requested)
    if f.world_size % used:
        return False
    return bool(f.hybrid_dp or f.sharding_requested == -1 or f.world_size == used)


def layouts(ranks: int, choices: Mapping[str, Sequence[int]]) -> Iterator[dict[str, int]]:
    """Yield the degrees, one of the choices of each axis, whose product divides the number of ranks."""
    if not choices:
        yield {}
        return
    (axis, degrees), *others = choices.items()
    for degree in degrees:
        if ranks % degree == 0:
            for more in layouts(ranks // degree, dict(others)):
                yield {axis: degree, **more}


def near_degrees(ranks: int, requested: int, most: int) -> list[int]:
    """Return the divisors of the number of ranks that are nearest to a degree in ratio, nearest first."""
    return sorted(divisors(ranks), key=lambda degree: max(degree, requested) / max(1, min(degree, requested)))[:most]


def distance(before: Mapping[str, int], after: Mapping[str, int], weights: Mapping[str, float] | None = None) -> float:
    """Return how far degrees are from the requested ones: the sum of their ratios, in factors of two."""
    weight = weights or dict.fromkeys(before, 1.0)
    return sum(weight[axis] * abs(math.log2(after[axis] / before[axis])) for axis in weight)


def _left(f: Facts) -> int:
    """Return the ranks that the other degrees leave for sharding and replicas."""
    return max(1, f.world_size // max(1, f.mp_degree * f.pp_degree * f.cp_degree))


def _near_layouts(f: Facts) -> str:
    """Suggest up to three legal sets of degrees, the nearest in ratio; an axis of size 1 stays at 1.

    A degree of mp that does not divide the heads, or their groups, is left out: the next start would refuse it.
    """
    free = [name for name in _NAMES if getattr(f, name) > 1] or ["sharding_requested"]
    requested = {name: max(1, getattr(f, name)) for name in free}
    heads = math.gcd(f.num_attention_heads, f.num_query_groups)
    tried = {name: near_degrees(f.world_size, requested[name], f.world_size) for name in free}
    if "mp_degree" in tried:
        tried["mp_degree"] = [degree for degree in tried["mp_degree"] if heads % degree == 0]
    near = []
    for degrees in layouts(f.world_size, {name: choices[:12] for name, choices in tried.items()}):
        hybrid = f.world_size > math.prod(degrees.values()) and f.sharding_requested != -1
        text = " ".join(f"{spell(name)} {degree}" for name, degree in degrees.items())
        # Change --hybrid-dp only if the degrees are clearly nearer that way.
        penalty = HYBRID_PENALTY if hybrid != f.hybrid_dp else 0.0
        near.append((distance(requested, degrees) + penalty, text + (" --hybrid-dp" if hybrid else "")))
    how = " (megapar launch --nproc-per-node N starts several on a node)" if f.world_size == 1 else ""
    nearest = "; ".join(text for _, text in sorted(near)[:3])
    return f"Nearest legal: {nearest}; or start {_near_worlds(f)} ranks{how}."


def _replicas(f: Facts) -> tuple[int, ...]:
    """Return the legal numbers of replicas: the quotient if --sharding-degree is given, else any divisor of it."""
    used = f.mp_degree * f.pp_degree * f.cp_degree * max(1, f.sharding_requested)
    if f.world_size % used:
        return ()
    quotient = f.world_size // used
    return divisors(quotient) if f.sharding_requested == -1 else (quotient,)


def _dp_choices(f: Facts) -> str:
    legal = sorted(_replicas(f), key=lambda value: abs(value - f.dp_requested))[:4]
    if legal:
        return f"Choose --dp-degree {either(sorted(legal))}."
    return "No value is legal, because the other degrees do not divide the number of ranks: change those."


def _near_worlds(f: Facts) -> str:
    """Suggest numbers of ranks that fit the degrees: the nearest one below, if there is one, and above."""
    used = f.mp_degree * f.pp_degree * f.cp_degree * max(1, f.sharding_requested)
    whole = f.sharding_requested != -1 and not f.hybrid_dp
    least = used * (2 if f.hybrid_dp and f.sharding_requested != -1 else 1)
    below = used if whole else max(least, f.world_size // used * used)
    above = used if whole else max(least, -(-f.world_size // used) * used)
    return either(sorted({below, above}))


def _expert_room(f: Facts) -> int:
    """Return the number of ranks that ep can use without spanning dp."""
    folded = f.mp_degree if f.expert_mp_degree == 1 else 1
    return max(1, int(f.sharding_degree * f.cp_degree * folded))  # degrees of 0 are other complaints


def _ep_fits(f: Facts) -> bool:
    room = _expert_room(f)
    spans = f.ep_degree % room == 0 and (room * f.dp_degree) % f.ep_degree == 0
    return bool(room % f.ep_degree == 0 or spans)


def _ep_choices(f: Facts) -> str:
    room = _expert_room(f)
    legal = sorted({*divisors(room), *(room * value for value in divisors(max(1, f.dp_degree)))})
    near = sorted(sorted(legal, key=lambda value: abs(value - f.ep_degree))[:5])
    folded = f.expert_mp_degree > 1 and f.sharding_degree * f.cp_degree * f.mp_degree % f.ep_degree == 0
    other = ", or --expert-mp-degree 1, with which the ranks of mp hold other experts" if folded else ""
    return f"Choose --ep-degree {either(near)}{other}."


def _vocabulary_ranks(f: Facts) -> int:
    """Return the number of mp ranks that get a part of the vocabulary."""
    length = -(-f.vocab_size // f.mp_degree)
    return int(-(-f.vocab_size // length))


def _divides(
    id: str, part: str, whole: str, message: str, passing: str, failing: str, when: Test = always, **more: Any
) -> Rule:
    """Build the row that requires ``part`` to divide ``whole``."""
    return Rule(
        id=id,
        when=when,
        requires=lambda f: getattr(f, whole) % getattr(f, part) == 0,
        message=message,
        fix=lambda f: (
            f"Choose --{part.replace('_', '-')} {near_divisors(getattr(f, whole), getattr(f, part))}, "
            f"or --{whole.replace('_', '-')} {near_multiples(getattr(f, part), getattr(f, whole))}."
        ),
        passing=passing,
        failing=failing,
        **{"source": SOURCE, "reads": (part, whole), **more},
    )


_expert_row = partial(Rule, source=SOURCE, models=MOE)
_row = partial(Rule, source=SOURCE)
_context_row = partial(Rule, source="context parallelism")
_fused_row = partial(
    Rule,
    when=lambda f: f.tp_comm_overlap == "fused",
    source="devices",
    passing="--world-size 2 --mp-degree 2 --sequence-parallel --tp-comm-overlap fused --device cuda --bf16",
)
_no_effect = partial(Rule, source=NO_EFFECT)

RULES: tuple[Rule, ...] = (
    Rule(
        id="world-size",
        reads=("world_size", *_NAMES, "hybrid_dp", "num_attention_heads", "num_query_groups"),
        requires=_factors,
        message="the number of ranks must be [N x] sharding x mp x pp x cp exactly, with N > 1 only for --hybrid-dp",
        fix=_near_layouts,
        source=f"{SOURCE}; {PADDLE_SHARDING}",
        passing="--world-size 32 --sharding-degree 4 --mp-degree 8",
        failing="--world-size 32 --sharding-degree 5 --mp-degree 3",
    ),
    _row(
        id="dp-degree",
        reads=("dp_requested", "world_size", *_NAMES),
        when=lambda f: f.dp_requested != -1,
        requires=lambda f: f.dp_requested in _replicas(f),
        message="--dp-degree must be -1, or the number of ranks divided by sharding x mp x pp x cp",
        fix=_dp_choices,
        passing="--world-size 8 --dp-degree 2 --mp-degree 2",
        failing="--world-size 8 --dp-degree 3",
    ),
    _row(
        id="dp-degree-hybrid",
        reads=("dp_requested", "hybrid_dp"),
        when=lambda f: f.dp_requested > 1,
        requires=lambda f: f.hybrid_dp,
        message="--dp-degree above 1 implies --hybrid-dp, which is switched off here",
        fix="Leave out --no-hybrid-dp (hybrid_dp: false), or --dp-degree.",
        passing="--world-size 4 --dp-degree 2",
        failing="--world-size 4 --dp-degree 2 --no-hybrid-dp",
    ),
    Rule(
        id="hybrid-dp-replicas",
        reads=("hybrid_dp", "dp_degree", "world_size", "sharding_degree", "mp_degree", "pp_degree", "cp_degree"),
        when=lambda f: f.hybrid_dp,
        requires=lambda f: f.dp_degree >= 2,
        message="--hybrid-dp needs at least 2 replicas of sharding x mp x pp x cp ranks",
        fix=lambda f: (
            f"Leave --hybrid-dp out, or start {2 * f.world_size} ranks"
            + (f", or halve --sharding-degree to {f.sharding_degree // 2}." if f.sharding_degree % 2 == 0 else ".")
        ),
        source=f"{SOURCE}; {PADDLE_SHARDING}",
        passing="--world-size 32 --sharding-degree 8 --hybrid-dp",
        failing="--world-size 32 --sharding-degree 32 --hybrid-dp",
    ),
    _row(
        id="hybrid-dp-degree",
        reads=("hybrid_dp", "sharding_requested", "dp_requested", "world_size", "mp_degree", "pp_degree", "cp_degree"),
        when=lambda f: f.hybrid_dp and f.dp_requested == -1,
        requires=lambda f: f.sharding_requested != -1,
        message="--hybrid-dp needs --sharding-degree or --dp-degree: with -1, sharding would use all ranks",
        fix=lambda f: (
            f"Choose --sharding-degree {either(divisors(_left(f))[:-1][:6])}."
            if _left(f) > 1
            else "Leave --hybrid-dp out: no ranks are left for replicas (megapar launch starts several ranks)."
        ),
        passing="--world-size 4 --sharding-degree 2 --hybrid-dp",
        failing="--world-size 4 --hybrid-dp",
    ),
    _row(
        id="sharding-degree-zero",
        reads=("sharding_requested",),
        requires=lambda f: f.sharding_requested != 0,
        message="--sharding-degree must be at least 1, or -1 for all ranks left by the other degrees",
        passing="--sharding-degree 1",
        failing="--sharding-degree 0",
    ),
    _row(
        id="rank-order",
        reads=("rank_order",),
        requires=lambda f: sorted(f.rank_order) == ["cp", "dp", "mp", "pp", "sharding"],
        message="--rank-order must name dp, pp, sharding, cp and mp, each once",
        passing="--rank-order sharding,dp,pp,cp,mp",
        failing="--rank-order dp,pp,tp,cp,mp",
    ),
    _row(
        id="world-size-launched",
        reads=("validate_only", "rules_only", "world_size", "launched_size"),
        when=lambda f: not f.rules_only and (not f.validate_only or f.launched_size > 1),
        requires=lambda f: f.world_size == f.launched_size,
        message="the number of ranks must be that of --world-size, which a configuration file may also set",
        fix=lambda f: (
            f"Start {f.world_size} ranks (on one node: `megapar launch --nproc-per-node {f.world_size}` ..), "
            f"or set --world-size {f.launched_size} on the command line, which overrides a file; without a launcher, "
            "--validate-only checks any number of ranks."
        ),
        passing="--world-size 1",
        failing="--world-size 8",
    ),
    _expert_row(
        id="ep-room",
        reads=("ep_degree", "expert_mp_degree", "sharding_degree", "cp_degree", "mp_degree", "dp_degree"),
        requires=_ep_fits,
        message=(
            "--ep-degree must divide sharding x cp (x mp if --expert-mp-degree is 1), or be a multiple of it that "
            "spans dp"
        ),
        fix=_ep_choices,
        passing="--world-size 8 --ep-degree 4",
        failing="--world-size 8 --ep-degree 3 --num-experts 9",
    ),
    _expert_row(
        id="ep-experts",
        reads=("ep_degree", "num_experts"),
        when=lambda f: f.num_experts > 0,
        requires=lambda f: f.num_experts % f.ep_degree == 0,
        message="--ep-degree must divide --num-experts",
        fix=lambda f: f"Choose --ep-degree {near_divisors(f.num_experts, f.ep_degree)}.",
        passing="--world-size 4 --ep-degree 4 --num-experts 8",
        failing="--world-size 4 --ep-degree 4 --num-experts 6",
    ),
    _expert_row(
        id="ep-without-experts",
        reads=("ep_degree", "num_experts"),
        when=lambda f: f.num_experts == 0,
        requires=lambda f: f.ep_degree == 1,
        message="--ep-degree > 1 has no effect for a dense decoder",
        passing="--num-experts 0",
        failing="--num-experts 0 --world-size 2 --ep-degree 2",
    ),
    _expert_row(
        id="expert-mp",
        reads=("expert_mp_degree", "mp_degree"),
        requires=lambda f: f.expert_mp_degree in (1, f.mp_degree),
        message="--expert-mp-degree must be --mp-degree or 1",
        fix=lambda f: f"Choose {either(sorted({1, f.mp_degree}))}.",
        passing="--world-size 4 --mp-degree 4 --expert-mp-degree 4",
        failing="--world-size 4 --mp-degree 4 --expert-mp-degree 2",
    ),
    _expert_row(
        id="expert-mp-sequence",
        reads=("expert_mp_degree", "mp_degree", "sequence_parallel", "num_experts"),
        when=lambda f: f.mp_degree > 1 and f.expert_mp_degree == 1 and f.num_experts > 0,
        requires=lambda f: f.sequence_parallel,
        message=(
            "--expert-mp-degree 1 with --mp-degree > 1 needs --sequence-parallel: without it every mp rank would "
            "dispatch the same tokens"
        ),
        fix="Add --sequence-parallel, or leave --expert-mp-degree out.",
        passing="--world-size 2 --mp-degree 2 --expert-mp-degree 1 --sequence-parallel",
        failing="--world-size 2 --mp-degree 2 --expert-mp-degree 1",
    ),
    _divides(
        "mp-heads",
        "mp_degree",
        "num_attention_heads",
        "--mp-degree must divide --num-attention-heads",
        "--world-size 2 --mp-degree 2 --num-attention-heads 6 --hidden-size 192",
        "--world-size 4 --mp-degree 4 --num-attention-heads 6 --hidden-size 192",
    ),
    _divides(
        "mp-groups",
        "mp_degree",
        "num_query_groups",
        "--mp-degree must divide --num-query-groups (a key/value head is not split)",
        "--world-size 2 --mp-degree 2 --num-query-groups 2",
        "--world-size 4 --mp-degree 4 --num-query-groups 2",
        when=lambda f: f.num_query_groups != f.num_attention_heads,  # otherwise mp-heads refuses it
        reads=("mp_degree", "num_query_groups", "num_attention_heads"),
        models=MOE,
    ),
    _divides(
        "mp-ffn",
        "mp_degree",
        "ffn_hidden_size",
        "--mp-degree must divide --ffn-hidden-size",
        "--world-size 2 --mp-degree 2 --ffn-hidden-size 640",
        "--world-size 2 --mp-degree 2 --ffn-hidden-size 641",
    ),
    _row(
        id="mp-vocabulary",
        reads=("mp_degree", "vocab_size"),
        when=lambda f: f.mp_degree > 1,
        requires=lambda f: _vocabulary_ranks(f) == f.mp_degree,
        message=(
            "vocab parallel: each mp rank has ceil(--vocab-size / mp) rows of the embedding, and no rank may be left "
            "without any"
        ),
        fix=lambda f: (  # a multiple of mp, at least 8
            f"Choose --mp-degree {_vocabulary_ranks(f)}, or --vocab-size "
            f"{-(-max(8, f.vocab_size) // f.mp_degree) * f.mp_degree}."
        ),
        passing="--world-size 4 --mp-degree 4 --vocab-size 10",
        failing="--world-size 4 --mp-degree 4 --vocab-size 9",
    ),
    _expert_row(
        id="emp-ffn",
        reads=("expert_mp_degree", "moe_ffn_hidden_size", "num_experts"),
        when=lambda f: f.num_experts > 0,
        requires=lambda f: f.moe_ffn_hidden_size % f.expert_mp_degree == 0,
        message="--expert-mp-degree must divide --moe-ffn-hidden-size",
        fix=lambda f: f"Choose --moe-ffn-hidden-size {near_multiples(f.expert_mp_degree, f.moe_ffn_hidden_size)}.",
        passing="--world-size 2 --mp-degree 2 --moe-ffn-hidden-size 256",
        failing="--world-size 2 --mp-degree 2 --moe-ffn-hidden-size 255",
    ),
    _expert_row(
        id="mp-shared-experts",
        reads=("mp_degree", "moe_shared_experts", "moe_ffn_hidden_size", "num_experts"),
        when=lambda f: f.num_experts > 0 and f.moe_shared_experts > 0,
        requires=lambda f: f.moe_shared_experts * f.moe_ffn_hidden_size % f.mp_degree == 0,
        message="--mp-degree must divide the shared experts' width, --moe-shared-experts x --moe-ffn-hidden-size",
        fix=lambda f: f"Choose --mp-degree {near_divisors(f.moe_shared_experts * f.moe_ffn_hidden_size, f.mp_degree)}.",
        passing="--world-size 2 --mp-degree 2 --moe-shared-experts 2 --moe-ffn-hidden-size 255 --expert-mp-degree 1",
        failing="--world-size 2 --mp-degree 2 --moe-shared-experts 1 --moe-ffn-hidden-size 255 --expert-mp-degree 1",
    ),
    _expert_row(
        id="mp-shared-width",
        reads=("mp_degree", "moe_shared_expert_intermediate_size", "num_experts"),
        when=lambda f: f.num_experts > 0,
        requires=lambda f: f.moe_shared_expert_intermediate_size % f.mp_degree == 0,
        message="--mp-degree must divide --moe-shared-expert-intermediate-size",
        fix=lambda f: f"Choose --mp-degree {near_divisors(f.moe_shared_expert_intermediate_size, f.mp_degree)}.",
        passing="--world-size 2 --mp-degree 2 --moe-shared-expert-intermediate-size 96",
        failing="--world-size 2 --mp-degree 2 --moe-shared-expert-intermediate-size 95",
    ),
    _expert_row(
        id="emp-layer-ffn",
        reads=("expert_mp_degree", "mp_degree", "moe_layer_ffn_hidden_sizes", "moe_shared_experts"),
        when=lambda f: f.moe_layer_ffn_hidden_sizes is not None,
        requires=lambda f: all(
            size % f.expert_mp_degree == 0 and f.moe_shared_experts * size % f.mp_degree == 0
            for size in f.moe_layer_ffn_hidden_sizes
        ),
        message=(
            "--expert-mp-degree must divide every size of --moe-layer-ffn-hidden-sizes, and --mp-degree the width of "
            "the shared experts"
        ),
        fix=lambda f: f"Choose multiples of {f.mp_degree}.",
        passing="--world-size 2 --mp-degree 2 --num-layers 2 --moe-layer-ffn-hidden-sizes 64 32",
        failing="--world-size 2 --mp-degree 2 --num-layers 2 --moe-layer-ffn-hidden-sizes 64 33",
    ),
    _no_effect(
        id="sequence-parallel-mp",
        reads=("sequence_parallel", "mp_degree"),
        when=lambda f: f.sequence_parallel,
        requires=lambda f: f.mp_degree > 1,
        message="--sequence-parallel has no effect with --mp-degree 1",
        fix="Leave it out, or choose --mp-degree 2.",
        passing="--world-size 2 --mp-degree 2 --sequence-parallel",
        failing="--sequence-parallel",
    ),
    _row(
        id="tp-comm-overlap-unused",
        reads=("not_default", "mp_degree"),
        when=lambda f: "tp_comm_overlap" in f.not_default,
        requires=lambda f: f.mp_degree > 1,
        message="--tp-comm-overlap, on or off, has no effect with --mp-degree 1",
        fix="Leave it out.",
        passing="--world-size 2 --mp-degree 2 --no-tp-comm-overlap",
        failing="--no-tp-comm-overlap",
    ),
    _no_effect(
        id="tp-comm-overlap-fused",
        reads=("tp_comm_overlap", "sequence_parallel", "mp_degree"),
        when=lambda f: f.tp_comm_overlap == "fused" and f.mp_degree > 1,
        requires=lambda f: f.sequence_parallel,
        message="torch's fused operators combine all-gathers and reduce-scatters with matrix products, and without "
        "--sequence-parallel there are none for --tp-comm-overlap fused to use",
        fix="Add --sequence-parallel, or choose --tp-comm-overlap on.",
        passing="--world-size 2 --mp-degree 2 --sequence-parallel --tp-comm-overlap fused --device cuda --bf16",
        failing="--world-size 2 --mp-degree 2 --tp-comm-overlap fused --device cuda --bf16",
    ),
    _fused_row(
        id="tp-comm-overlap-fused-device",
        reads=("tp_comm_overlap", "device"),
        requires=lambda f: f.device in ("auto", "cuda"),
        message="--tp-comm-overlap fused needs NVIDIA GPUs, because it reads the memory of the node's other GPUs",
        fix="Choose --device cuda, or --tp-comm-overlap on.",
        failing="--world-size 2 --mp-degree 2 --sequence-parallel --tp-comm-overlap fused --device cpu --bf16",
    ),
    _fused_row(
        id="tp-comm-overlap-fused-dtype",
        reads=("tp_comm_overlap", "dtype"),
        requires=lambda f: f.dtype in ("auto", "bf16"),
        message="--tp-comm-overlap fused supports only bf16",
        fix="Choose --dtype bf16, or --tp-comm-overlap on.",
        failing="--world-size 2 --mp-degree 2 --sequence-parallel --tp-comm-overlap fused --device cuda --dtype fp32",
    ),
    _row(
        id="sequence-parallel-length",
        reads=("sequence_parallel", "mp_degree", "cp_degree", "seq_length"),
        when=lambda f: f.sequence_parallel,
        requires=lambda f: f.seq_length % (f.mp_degree * f.cp_degree) == 0,
        message="with --sequence-parallel, mp x cp must divide --seq-length",
        fix=lambda f: f"Choose --seq-length {near_multiples(f.mp_degree * f.cp_degree, f.seq_length)}.",
        passing="--world-size 2 --mp-degree 2 --sequence-parallel --seq-length 128",
        failing="--world-size 2 --mp-degree 2 --sequence-parallel --seq-length 127",
    ),
    _context_row(
        id="cp-ring-length",
        reads=("cp_degree", "context_parallel_algo", "seq_length"),
        when=lambda f: f.cp_degree > 1 and f.context_parallel_algo == "megatron_cp_algo",
        requires=lambda f: f.seq_length % (2 * f.cp_degree) == 0,
        message="ring attention splits the sequence into 2 x cp chunks in zig-zag order: 2 x cp must divide "
        "--seq-length",
        fix=lambda f: f"Choose --seq-length {near_multiples(2 * f.cp_degree, f.seq_length)}.",
        passing="--world-size 2 --cp-degree 2 --seq-length 256",
        failing="--world-size 2 --cp-degree 2 --seq-length 254",
        models=("moe",),  # bidirectional attention is balanced without a zig-zag
    ),
    _context_row(
        id="cp-gathered-length",
        reads=("cp_degree", "seq_length"),
        when=lambda f: f.cp_degree > 1,
        requires=lambda f: f.seq_length % f.cp_degree == 0,
        message="--cp-degree must divide --seq-length",
        fix=lambda f: f"Choose --seq-length {near_multiples(f.cp_degree, f.seq_length)}.",
        passing="--world-size 2 --cp-degree 2 --context-parallel-algo allgather_cp_algo --seq-length 254",
        failing="--world-size 2 --cp-degree 2 --context-parallel-algo allgather_cp_algo --seq-length 255",
    ),
    _context_row(
        id="cp-ulysses-heads",
        reads=("cp_degree", "context_parallel_algo", "num_attention_heads", "mp_degree"),
        when=lambda f: f.cp_degree > 1 and f.context_parallel_algo == "ulysses_cp_algo",
        requires=lambda f: f.num_attention_heads % (f.mp_degree * f.cp_degree) == 0,
        message="ulysses context parallelism splits heads: mp x cp must divide --num-attention-heads",
        fix=lambda f: f"Choose --cp-degree {near_divisors(max(1, f.num_attention_heads // f.mp_degree), f.cp_degree)}.",
        passing="--world-size 4 --cp-degree 4 --context-parallel-algo ulysses_cp_algo",
        failing="--world-size 8 --cp-degree 8 --context-parallel-algo ulysses_cp_algo",
    ),
    _no_effect(
        id="cp-algo-unused",
        reads=("cp_degree", "context_parallel_algo"),
        when=lambda f: f.cp_degree == 1,
        requires=lambda f: f.context_parallel_algo == "megatron_cp_algo",
        message="--context-parallel-algo has no effect with --cp-degree 1",
        passing="--world-size 2 --cp-degree 2 --context-parallel-algo allgather_cp_algo",
        failing="--context-parallel-algo allgather_cp_algo",
    ),
    _no_effect(
        id="mla-cp-exchange-unused",
        reads=("not_default", "multi_latent_attention", "cp_degree"),
        when=lambda f: "mla_cp_exchange" in f.not_default,
        requires=lambda f: f.multi_latent_attention and f.cp_degree > 1,
        message="--mla-cp-exchange needs --multi-latent-attention, and has no effect with --cp-degree 1",
        fix="Leave it out.",
        passing="--world-size 2 --cp-degree 2 --multi-latent-attention --mla-cp-exchange kv",
        failing="--world-size 2 --cp-degree 2 --mla-cp-exchange kv",
        models=("moe",),
    ),
)
