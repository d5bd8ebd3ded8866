"""Rows on axes and ranks: how degrees factor the world, and what each axis must divide."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

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
MOE = ("moe",)

_NAMES = ("sharding_asked", "mp_degree", "pp_degree", "cp_degree")


def _factors(f: Facts) -> bool:
    used = f.mp_degree * f.pp_degree * f.cp_degree * max(1, f.sharding_asked)
    if f.world_size % used:
        return False
    return bool(f.hybrid_dp or f.sharding_asked == -1 or f.world_size == used)


def _near_layouts(f: Facts) -> str:
    """Up to three legal sets of degrees, nearest in ratio; an axis of size 1 stays off."""
    free = [name for name in _NAMES if getattr(f, name) > 1] or ["sharding_asked"]
    found = []
    for values in product(*(_near(f.world_size, getattr(f, name)) for name in free)):
        used = math.prod(values)
        if f.world_size % used:
            continue
        hybrid = f.world_size > used and f.sharding_asked != -1
        distance = sum(_distance(value, getattr(f, name)) for name, value in zip(free, values, strict=True))
        text = " ".join(f"{spell(name)} {value}" for name, value in zip(free, values, strict=True))
        # Half a factor of e: keep what was said of --hybrid-dp unless the degrees are clearly nearer without it.
        found.append((distance + (hybrid != f.hybrid_dp) * 0.5, text + (" --hybrid-dp" if hybrid else "")))
    how = " (megapar launch --nproc-per-node N starts several on a node)" if f.world_size == 1 else ""
    return f"Nearest legal: {'; '.join(text for _, text in sorted(found)[:3])}; or start {_near_worlds(f)} ranks{how}."


def _replicas(f: Facts) -> tuple[int, ...]:
    """The numbers of replicas that fill the world: one where sharding is asked for, else any that divides the rest."""
    used = f.mp_degree * f.pp_degree * f.cp_degree * max(1, f.sharding_asked)
    if f.world_size % used:
        return ()
    rest = f.world_size // used
    return divisors(rest) if f.sharding_asked == -1 else (rest,)


def _dp_choices(f: Facts) -> str:
    legal = sorted(_replicas(f), key=lambda value: abs(value - f.dp_asked))[:4]
    return f"Choose --dp-degree {either(sorted(legal))}." if legal else "No number does: the other degrees do not fit."


def _near_worlds(f: Facts) -> str:
    """Numbers of ranks that the degrees fill: one below, where there is one, and one above."""
    used = f.mp_degree * f.pp_degree * f.cp_degree * max(1, f.sharding_asked)
    whole = f.sharding_asked != -1 and not f.hybrid_dp
    least = used * (2 if f.hybrid_dp and f.sharding_asked != -1 else 1)
    below = used if whole else max(least, f.world_size // used * used)
    above = used if whole else max(least, -(-f.world_size // used) * used)
    return either(sorted({below, above}))


def _near(world: int, wanted: int) -> list[int]:
    return sorted(divisors(world), key=lambda value: _distance(value, wanted))[:12]


def _distance(value: int, wanted: int) -> float:
    return abs(math.log(value / max(1, wanted)))


def _expert_room(f: Facts) -> int:
    """Ranks that ep can fill without spanning dp."""
    folded = f.mp_degree if f.expert_mp_degree == 1 else 1
    return int(f.sharding_degree * f.cp_degree * folded)


def _ep_fits(f: Facts) -> bool:
    room = _expert_room(f)
    spans = f.ep_degree % room == 0 and (room * f.dp_degree) % f.ep_degree == 0
    return bool(room % f.ep_degree == 0 or spans)


def _ep_choices(f: Facts) -> str:
    room = _expert_room(f)
    legal = sorted({*divisors(room), *(room * value for value in divisors(f.dp_degree))})
    near = sorted(sorted(legal, key=lambda value: abs(value - f.ep_degree))[:5])
    return f"Choose --ep-degree {either(near)}."


def _vocabulary_ranks(f: Facts) -> int:
    """Mp ranks that get some of the vocabulary."""
    length = -(-f.vocab_size // f.mp_degree)
    return int(-(-f.vocab_size // length))


def _near_vocabulary(f: Facts) -> int:
    """The next multiple of mp; flags take 8 tokens or more."""
    return int(-(-max(8, f.vocab_size) // f.mp_degree) * f.mp_degree)


def _divides(
    id: str, part: str, whole: str, message: str, passing: str, failing: str, when: Test = always, **more: Any
) -> Rule:
    """The row `part divides whole`."""
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


RULES: tuple[Rule, ...] = (
    Rule(
        id="world-size",
        reads=("world_size", *_NAMES, "hybrid_dp"),
        requires=_factors,
        message="world = [N x] sharding x mp x pp x cp must hold exactly, N > 1 only with --hybrid-dp",
        fix=_near_layouts,
        source=f"{SOURCE}; {PADDLE_SHARDING}",
        passing="--world-size 32 --sharding-degree 4 --mp-degree 8",
        failing="--world-size 32 --sharding-degree 5 --mp-degree 3",
    ),
    Rule(
        id="dp-degree",
        reads=("dp_asked", "world_size", *_NAMES),
        when=lambda f: f.dp_asked != -1,
        requires=lambda f: f.dp_asked in _replicas(f),
        message="--dp-degree is -1, or so many replicas of sharding x mp x pp x cp ranks as fill the world exactly",
        fix=_dp_choices,
        source=SOURCE,
        passing="--world-size 8 --dp-degree 2 --mp-degree 2",
        failing="--world-size 8 --dp-degree 3",
    ),
    Rule(
        id="dp-degree-hybrid",
        reads=("dp_asked", "hybrid_dp"),
        when=lambda f: f.dp_asked > 1,
        requires=lambda f: f.hybrid_dp,
        message="--dp-degree above 1 is --hybrid-dp, which is switched off here",
        fix="Leave --no-hybrid-dp (hybrid_dp: false) out, or --dp-degree.",
        source=SOURCE,
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
    Rule(
        id="hybrid-dp-degree",
        reads=("hybrid_dp", "sharding_asked", "dp_asked", "world_size"),
        when=lambda f: f.hybrid_dp and f.dp_asked == -1,
        requires=lambda f: f.sharding_asked != -1,
        message="--hybrid-dp needs --sharding-degree or --dp-degree: -1 would leave no ranks to replicate over",
        fix=lambda f: (
            f"Choose --sharding-degree {either(divisors(f.world_size)[:-1][:6])}."
            if f.world_size > 1
            else "Leave --hybrid-dp out: one rank has nothing to replicate over (megapar launch starts several)."
        ),
        source=SOURCE,
        passing="--world-size 4 --sharding-degree 2 --hybrid-dp",
        failing="--world-size 4 --hybrid-dp",
    ),
    Rule(
        id="sharding-degree-zero",
        reads=("sharding_asked",),
        requires=lambda f: f.sharding_asked != 0,
        message="--sharding-degree is at least 1, or -1 for every rank that the other degrees leave",
        source=SOURCE,
        passing="--sharding-degree 1",
        failing="--sharding-degree 0",
    ),
    Rule(
        id="rank-order",
        reads=("rank_order",),
        requires=lambda f: sorted(f.rank_order) == ["cp", "dp", "mp", "pp", "sharding"],
        message="--rank-order names dp, pp, sharding, cp and mp, each once",
        source=SOURCE,
        passing="--rank-order sharding,dp,pp,cp,mp",
        failing="--rank-order dp,pp,tp,cp,mp",
    ),
    Rule(
        id="world-size-launched",
        reads=("validate_only", "rules_only", "world_size", "launched_size"),
        when=lambda f: not f.validate_only and not f.rules_only,
        requires=lambda f: f.world_size == f.launched_size,
        message="a run has as many ranks as its --world-size, which a configuration file may say, too",
        fix=lambda f: (
            f"Start {f.world_size} ranks; or say --world-size {f.launched_size} on the line, which wins over a file; "
            "or add --validate-only, which starts none."
        ),
        source=SOURCE,
        passing="--world-size 1",
        failing="--world-size 8",
    ),
    Rule(
        id="ep-room",
        reads=("ep_degree", "expert_mp_degree", "sharding_degree", "cp_degree", "mp_degree", "dp_degree"),
        requires=_ep_fits,
        message=(
            "--ep-degree divides sharding x cp (x mp when --expert-mp-degree is 1), or is a multiple of it and then "
            "spans dp"
        ),
        fix=_ep_choices,
        source=SOURCE,
        passing="--world-size 8 --ep-degree 4",
        failing="--world-size 8 --ep-degree 3 --num-experts 9",
        models=MOE,
    ),
    Rule(
        id="ep-experts",
        reads=("ep_degree", "num_experts"),
        when=lambda f: f.num_experts > 0,
        requires=lambda f: f.num_experts % f.ep_degree == 0,
        message="--ep-degree must divide --num-experts",
        fix=lambda f: f"Choose --ep-degree {near_divisors(f.num_experts, f.ep_degree)}.",
        source=SOURCE,
        passing="--world-size 4 --ep-degree 4 --num-experts 8",
        failing="--world-size 4 --ep-degree 4 --num-experts 6",
        models=MOE,
    ),
    Rule(
        id="ep-without-experts",
        reads=("ep_degree", "num_experts"),
        when=lambda f: f.num_experts == 0,
        requires=lambda f: f.ep_degree == 1,
        message="--ep-degree > 1 would do nothing in a dense decoder",
        source=SOURCE,
        passing="--num-experts 0",
        failing="--num-experts 0 --world-size 2 --ep-degree 2",
        models=MOE,
    ),
    Rule(
        id="expert-mp",
        reads=("expert_mp_degree", "mp_degree"),
        requires=lambda f: f.expert_mp_degree in (1, f.mp_degree),
        message="--expert-mp-degree is --mp-degree, or 1",
        fix=lambda f: f"Choose {either(sorted({1, f.mp_degree}))}.",
        source=SOURCE,
        passing="--world-size 4 --mp-degree 4 --expert-mp-degree 4",
        failing="--world-size 4 --mp-degree 4 --expert-mp-degree 2",
        models=MOE,
    ),
    Rule(
        id="expert-mp-sequence",
        reads=("expert_mp_degree", "mp_degree", "sequence_parallel", "num_experts"),
        when=lambda f: f.mp_degree > 1 and f.expert_mp_degree == 1 and f.num_experts > 0,
        requires=lambda f: f.sequence_parallel,
        message="--expert-mp-degree 1 with mp needs --sequence-parallel, else every mp rank dispatches the same tokens",
        fix="Add --sequence-parallel, or leave --expert-mp-degree out.",
        source=SOURCE,
        passing="--world-size 2 --mp-degree 2 --expert-mp-degree 1 --sequence-parallel",
        failing="--world-size 2 --mp-degree 2 --expert-mp-degree 1",
        models=MOE,
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
        when=lambda f: f.num_query_groups != f.num_attention_heads,  # else mp-heads has said it
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
    Rule(
        id="mp-vocabulary",
        reads=("mp_degree", "vocab_size"),
        when=lambda f: f.mp_degree > 1,
        requires=lambda f: _vocabulary_ranks(f) == f.mp_degree,
        message="mp ranks hold runs of ceil(--vocab-size / mp) tokens, and none may be left without",
        fix=lambda f: f"Choose --mp-degree {_vocabulary_ranks(f)}, or --vocab-size {_near_vocabulary(f)}.",
        source=SOURCE,
        passing="--world-size 4 --mp-degree 4 --vocab-size 10",
        failing="--world-size 4 --mp-degree 4 --vocab-size 9",
    ),
    Rule(
        id="emp-ffn",
        reads=("expert_mp_degree", "moe_ffn_hidden_size", "num_experts"),
        when=lambda f: f.num_experts > 0,
        requires=lambda f: f.moe_ffn_hidden_size % f.expert_mp_degree == 0,
        message="--expert-mp-degree must divide --moe-ffn-hidden-size",
        fix=lambda f: f"Choose --moe-ffn-hidden-size {near_multiples(f.expert_mp_degree, f.moe_ffn_hidden_size)}.",
        source=SOURCE,
        passing="--world-size 2 --mp-degree 2 --moe-ffn-hidden-size 256",
        failing="--world-size 2 --mp-degree 2 --moe-ffn-hidden-size 255",
        models=MOE,
    ),
    Rule(
        id="mp-shared-experts",
        reads=("mp_degree", "moe_shared_experts", "moe_ffn_hidden_size", "num_experts"),
        when=lambda f: f.num_experts > 0 and f.moe_shared_experts > 0,
        requires=lambda f: f.moe_shared_experts * f.moe_ffn_hidden_size % f.mp_degree == 0,
        message="--mp-degree must divide the shared experts' width, --moe-shared-experts x --moe-ffn-hidden-size",
        fix=lambda f: f"Choose --mp-degree {near_divisors(f.moe_shared_experts * f.moe_ffn_hidden_size, f.mp_degree)}.",
        source=SOURCE,
        passing="--world-size 2 --mp-degree 2 --moe-shared-experts 2 --moe-ffn-hidden-size 255 --expert-mp-degree 1",
        failing="--world-size 2 --mp-degree 2 --moe-shared-experts 1 --moe-ffn-hidden-size 255 --expert-mp-degree 1",
        models=MOE,
    ),
    Rule(
        id="emp-layer-ffn",
        reads=("expert_mp_degree", "mp_degree", "moe_layer_ffn_hidden_sizes", "moe_shared_experts"),
        when=lambda f: f.moe_layer_ffn_hidden_sizes is not None,
        requires=lambda f: all(
            size % f.expert_mp_degree == 0 and f.moe_shared_experts * size % f.mp_degree == 0
            for size in f.moe_layer_ffn_hidden_sizes
        ),
        message="--expert-mp-degree must divide every size of --moe-layer-ffn-hidden-sizes, --mp-degree shared widths",
        fix=lambda f: f"Choose multiples of {f.mp_degree}.",
        source=SOURCE,
        passing="--world-size 2 --mp-degree 2 --num-layers 2 --moe-layer-ffn-hidden-sizes 64 32",
        failing="--world-size 2 --mp-degree 2 --num-layers 2 --moe-layer-ffn-hidden-sizes 64 33",
        models=MOE,
    ),
    Rule(
        id="sequence-parallel-mp",
        reads=("sequence_parallel", "mp_degree"),
        when=lambda f: f.sequence_parallel,
        requires=lambda f: f.mp_degree > 1,
        message="--sequence-parallel would do nothing with --mp-degree 1",
        fix="Leave it out, or choose --mp-degree 2.",
        source=NO_EFFECT,
        passing="--world-size 2 --mp-degree 2 --sequence-parallel",
        failing="--sequence-parallel",
    ),
    Rule(
        id="tp-comm-overlap-unused",
        reads=("changed", "mp_degree"),
        when=lambda f: "tp_comm_overlap" in f.changed,
        requires=lambda f: f.mp_degree > 1,
        message="--tp-comm-overlap, on or off, would do nothing with --mp-degree 1",
        fix="Leave it out.",
        source=SOURCE,
        passing="--world-size 2 --mp-degree 2 --no-tp-comm-overlap",
        failing="--no-tp-comm-overlap",
    ),
    Rule(
        id="tp-comm-overlap-fused",
        reads=("tp_comm_overlap", "sequence_parallel", "mp_degree"),
        when=lambda f: f.tp_comm_overlap == "fused" and f.mp_degree > 1,
        requires=lambda f: f.sequence_parallel,
        message="torch fuses gathers and reduce-scatters with products, and --tp-comm-overlap fused has none of them "
        "without --sequence-parallel",
        fix="Add --sequence-parallel, or choose --tp-comm-overlap on.",
        source=NO_EFFECT,
        passing="--world-size 2 --mp-degree 2 --sequence-parallel --tp-comm-overlap fused --device cuda --bf16",
        failing="--world-size 2 --mp-degree 2 --tp-comm-overlap fused --device cuda --bf16",
    ),
    Rule(
        id="tp-comm-overlap-fused-device",
        reads=("tp_comm_overlap", "device"),
        when=lambda f: f.tp_comm_overlap == "fused",
        requires=lambda f: f.device in ("auto", "cuda"),
        message="--tp-comm-overlap fused reads the memory of a node's other NVIDIA GPUs",
        fix="Choose --device cuda, or --tp-comm-overlap on.",
        source="devices",
        passing="--world-size 2 --mp-degree 2 --sequence-parallel --tp-comm-overlap fused --device cuda --bf16",
        failing="--world-size 2 --mp-degree 2 --sequence-parallel --tp-comm-overlap fused --device cpu --bf16",
    ),
    Rule(
        id="tp-comm-overlap-fused-dtype",
        reads=("tp_comm_overlap", "dtype"),
        when=lambda f: f.tp_comm_overlap == "fused",
        requires=lambda f: f.dtype in ("auto", "bf16"),
        message="--tp-comm-overlap fused is for products in bf16",
        fix="Choose --dtype bf16, or --tp-comm-overlap on.",
        source="devices",
        passing="--world-size 2 --mp-degree 2 --sequence-parallel --tp-comm-overlap fused --device cuda --bf16",
        failing="--world-size 2 --mp-degree 2 --sequence-parallel --tp-comm-overlap fused --device cuda --dtype fp32",
    ),
    Rule(
        id="sequence-parallel-length",
        reads=("sequence_parallel", "mp_degree", "cp_degree", "seq_length"),
        when=lambda f: f.sequence_parallel,
        requires=lambda f: f.seq_length % (f.mp_degree * f.cp_degree) == 0,
        message="with --sequence-parallel, mp x cp must divide --seq-length",
        fix=lambda f: f"Choose --seq-length {near_multiples(f.mp_degree * f.cp_degree, f.seq_length)}.",
        source=SOURCE,
        passing="--world-size 2 --mp-degree 2 --sequence-parallel --seq-length 128",
        failing="--world-size 2 --mp-degree 2 --sequence-parallel --seq-length 127",
    ),
    Rule(
        id="cp-ring-length",
        reads=("cp_degree", "context_parallel_algo", "seq_length"),
        when=lambda f: f.cp_degree > 1 and f.context_parallel_algo == "megatron_cp_algo",
        requires=lambda f: f.seq_length % (2 * f.cp_degree) == 0,
        message="ring context parallelism cuts the sequence into 2 x cp zig-zag chunks, which must divide --seq-length",
        fix=lambda f: f"Choose --seq-length {near_multiples(2 * f.cp_degree, f.seq_length)}.",
        source="context parallelism",
        passing="--world-size 2 --cp-degree 2 --seq-length 256",
        failing="--world-size 2 --cp-degree 2 --seq-length 254",
        models=("moe",),  # attention that looks both ways is even without a zig-zag
    ),
    Rule(
        id="cp-gathered-length",
        reads=("cp_degree", "seq_length"),
        when=lambda f: f.cp_degree > 1,
        requires=lambda f: f.seq_length % f.cp_degree == 0,
        message="--cp-degree must divide --seq-length",
        fix=lambda f: f"Choose --seq-length {near_multiples(f.cp_degree, f.seq_length)}.",
        source="context parallelism",
        passing="--world-size 2 --cp-degree 2 --context-parallel-algo allgather_cp_algo --seq-length 254",
        failing="--world-size 2 --cp-degree 2 --context-parallel-algo allgather_cp_algo --seq-length 255",
    ),
    Rule(
        id="cp-ulysses-heads",
        reads=("cp_degree", "context_parallel_algo", "num_attention_heads", "mp_degree"),
        when=lambda f: f.cp_degree > 1 and f.context_parallel_algo == "ulysses_cp_algo",
        requires=lambda f: f.num_attention_heads % (f.mp_degree * f.cp_degree) == 0,
        message="ulysses context parallelism shares heads: mp x cp must divide --num-attention-heads",
        fix=lambda f: f"Choose --cp-degree {near_divisors(max(1, f.num_attention_heads // f.mp_degree), f.cp_degree)}.",
        source="context parallelism",
        passing="--world-size 4 --cp-degree 4 --context-parallel-algo ulysses_cp_algo",
        failing="--world-size 8 --cp-degree 8 --context-parallel-algo ulysses_cp_algo",
    ),
    Rule(
        id="cp-algo-unused",
        reads=("cp_degree", "context_parallel_algo"),
        when=lambda f: f.cp_degree == 1,
        requires=lambda f: f.context_parallel_algo == "megatron_cp_algo",
        message="--context-parallel-algo would do nothing with --cp-degree 1",
        source=NO_EFFECT,
        passing="--world-size 2 --cp-degree 2 --context-parallel-algo allgather_cp_algo",
        failing="--context-parallel-algo allgather_cp_algo",
    ),
)
