"""Rows on AMPipe and pipe-experts. d is --ampipe-degree, N is --pipe-experts-multi-data."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

from megapar.rules.pipeline import zero_bubble
from megapar.schema.flag import MOE
from megapar.schema.rule import (
    ADVICE,
    DOWNGRADE,
    LIFTED,
    MINDSPEED_AMPIPE,
    NO_EFFECT,
    SETTLED,
    Facts,
    Rule,
    Test,
    near_multiples,
    unused,
)

_PIPED = ("ampipe_degree", "use_pipe_experts", "pipe_experts_multi_data", "pipe_experts_multi_stream")
_OFF = (("use_pipe_experts", False), ("pipe_experts_multi_stream", False), ("pipe_experts_multi_data", 1))


def _sliced(f: Facts) -> bool:
    return bool(f.ampipe_degree > 1)


def _capacity(f: Facts) -> int:
    tokens = f.micro_batch_size * f.seq_length
    factor = Fraction(str(f.moe_capacity_factor)).limit_denominator(10**6)  # as in ``moe.sizes.MoeSizes``
    even = math.ceil(tokens * factor * f.moe_router_topk / f.num_experts)
    return int(max(even, f.moe_min_capacity))


def _enough_pieces(f: Facts) -> str:
    d = f.ampipe_degree
    fewer = d if f.pipe_experts_multi_stream or f.num_experts // f.ep_degree > 1 else 2 * d
    return f"Set --pipe-experts-multi-data to {fewer} or another such multiple, or leave --use-pipe-experts out."


def _row(id: str, reads: tuple[str, ...], **more: Any) -> Rule:
    return Rule(id=id, reads=reads, **{"source": MINDSPEED_AMPIPE, "models": MOE, **more})


def _sliced_row(id: str, reads: tuple[str, ...], **more: Any) -> Rule:
    """Build a row on --ampipe-degree above 1."""
    return _row(id, ("ampipe_degree", *reads), **{"when": _sliced, **more})


def _excludes(id: str, reads: tuple[str, ...], free: Test, what: str, failing: str, **more: Any) -> Rule:
    return _sliced_row(
        id,
        reads,
        requires=free,
        message=f"--ampipe-degree > 1 cannot be combined with {what}",
        passing="--moe-model-type deepspeed_moe --ampipe-degree 2 --strict-seed-rules",
        failing=f"--moe-model-type deepspeed_moe --ampipe-degree 2 {failing}",
        **more,
    )


def _settled(id: str, reads: tuple[str, ...], free: Test, why: str, failing: str, passing: str = "") -> Rule:
    """Row for --ampipe-degree auto: if it is violated, a degree above 1 hides nothing or changes the numbers."""
    auto = "--world-size 2 --ep-degree 2 --ampipe-degree auto"
    return _row(
        f"ampipe-auto-{id}",
        ("ampipe_degree", *reads),
        when=lambda f: f.ampipe_degree == 0,
        requires=free,
        message=why,
        source="ampipe",
        kind=SETTLED,
        passing=f"{auto} {passing}".strip(),
        failing=f"{auto} {failing}" if id != "ep" else failing,
    )


RULES: tuple[Rule, ...] = (
    _sliced_row(
        "ampipe-kind",
        ("moe_model_type", "num_experts"),
        requires=lambda f: f.moe_model_type == "deepspeed_moe" and f.num_experts > 0,
        message="--ampipe-degree > 1 needs experts of --moe-model-type deepspeed_moe",
        kind=LIFTED,
        reason="dropless experts are also sliced, with uneven splits",
        passing="--ampipe-degree 2 --moe-model-type deepspeed_moe",
        failing="--ampipe-degree 2 --moe-model-type megatron_moe",
    ),
    _sliced_row(
        "ampipe-experts",
        ("num_experts",),
        requires=lambda f: f.num_experts > 0,
        message="--ampipe-degree > 1 needs experts",
        passing="--ampipe-degree 2 --num-experts 4",
        failing="--ampipe-degree 2 --num-experts 0",
    ),
    _sliced_row(
        "ampipe-flash",
        ("use_flash_attn",),
        requires=lambda f: f.use_flash_attn,
        message="--ampipe-degree > 1 needs --use-flash-attn",
        passing="--ampipe-degree 2",
        failing="--ampipe-degree 2 --no-use-flash-attn",
    ),
    _sliced_row(
        "ampipe-ep",
        ("ep_degree",),
        requires=lambda f: f.ep_degree > 1,
        message="--ampipe-degree > 1 hides the all-to-all of expert parallelism and needs --ep-degree > 1",
        source="AMPipe",
        passing="--world-size 2 --ep-degree 2 --ampipe-degree 2",
        failing="--ampipe-degree 2",
    ),
    _sliced_row(
        "ampipe-length",
        ("seq_length",),
        requires=lambda f: f.seq_length % f.ampipe_degree == 0,
        message="--ampipe-degree must divide --seq-length",
        fix=lambda f: f"Choose --seq-length {near_multiples(f.ampipe_degree, f.seq_length)}.",
        kind=LIFTED,
        reason="the lengths of slices may differ by a position",
        passing="--ampipe-degree 2 --seq-length 256",
        failing="--ampipe-degree 2 --seq-length 255",
    ),
    _row(
        "ampipe-length-mp",
        ("ampipe_degree", "seq_length", "sequence_parallel", "mp_degree"),
        when=lambda f: _sliced(f) and f.sequence_parallel,
        requires=lambda f: f.seq_length % (f.ampipe_degree * f.mp_degree) == 0,
        message="with --sequence-parallel, d x mp must divide --seq-length",
        fix=lambda f: f"Choose --seq-length {near_multiples(f.ampipe_degree * f.mp_degree, f.seq_length)}.",
        kind=LIFTED,
        reason="the lengths of slices may differ by a position per mp rank",
        source="AMPipe",
        passing="--world-size 2 --mp-degree 2 --sequence-parallel --ampipe-degree 2 --seq-length 256",
        failing="--world-size 2 --mp-degree 2 --sequence-parallel --ampipe-degree 2 --seq-length 254",
    ),
    _sliced_row(
        "ampipe-short",
        ("seq_length", "sequence_parallel", "mp_degree", "cp_degree"),
        requires=lambda f: f.ampipe_degree * f.cp_degree * (f.mp_degree if f.sequence_parallel else 1) <= f.seq_length,
        message="every slice needs a position of --seq-length (on every cp rank, and mp rank with --sequence-parallel)",
        source="sequence of slices",
        passing="--ampipe-degree 2 --seq-length 16",
        failing="--ampipe-degree 16 --seq-length 8",
    ),
    _row(
        "ampipe-length-ring",
        ("ampipe_degree", "seq_length", "cp_degree", "context_parallel_algo"),
        when=lambda f: _sliced(f) and f.cp_degree > 1 and f.context_parallel_algo == "megatron_cp_algo",
        requires=lambda f: f.seq_length % (2 * f.ampipe_degree * f.cp_degree) == 0,
        message="with ring context parallelism, 2 x d x cp must divide --seq-length",
        fix=lambda f: f"Choose --seq-length {near_multiples(2 * f.ampipe_degree * f.cp_degree, f.seq_length)}.",
        kind=LIFTED,
        reason="the lengths of slices may differ by a position per cp rank",
        source="AMPipe",
        passing="--world-size 2 --cp-degree 2 --ampipe-degree 2 --seq-length 256",
        failing="--world-size 2 --cp-degree 2 --ampipe-degree 2 --seq-length 252",
    ),
    _row(
        "ampipe-cp",
        ("ampipe_degree", "cp_degree"),
        when=lambda f: _sliced(f) and f.cp_degree > 1,
        requires=lambda f: f.ampipe_degree == 2,
        message="with --cp-degree > 1 only --ampipe-degree 2 is supported",
        fix="Choose --ampipe-degree 2.",
        kind=LIFTED,
        reason="every rank has a part of every slice, in zig-zag order from slice to slice",
        passing="--world-size 2 --cp-degree 2 --ampipe-degree 2",
        failing="--world-size 2 --cp-degree 2 --ampipe-degree 4",
    ),
    _row(
        "ampipe-cp-algo",
        ("ampipe_degree", "cp_degree", "context_parallel_algo"),
        when=lambda f: _sliced(f) and f.cp_degree > 1,
        requires=lambda f: f.context_parallel_algo == "megatron_cp_algo",
        message="with --cp-degree > 1, --ampipe-degree > 1 needs --context-parallel-algo megatron_cp_algo",
        kind=LIFTED,
        reason="the all-gather of keys and the all-to-all of heads are also done slice by slice",
        source="AMPipe",
        passing="--world-size 2 --cp-degree 2 --ampipe-degree 2",
        failing="--world-size 2 --cp-degree 2 --ampipe-degree 2 --context-parallel-algo allgather_cp_algo",
    ),
    _row(
        "ampipe-pipe-experts",
        (*_PIPED, "num_experts", "ep_degree"),
        when=lambda f: _sliced(f) and f.use_pipe_experts,
        requires=lambda f: (
            f.pipe_experts_multi_data % f.ampipe_degree == 0
            and (
                f.pipe_experts_multi_data > f.ampipe_degree
                or f.pipe_experts_multi_stream
                or f.num_experts // f.ep_degree > 1
            )
        ),
        message=(
            "--use-pipe-experts with --ampipe-degree > 1 needs an N that is a multiple of d (and greater than d, if a "
            "rank has one expert, without --pipe-experts-multi-stream)"
        ),
        fix=_enough_pieces,
        kind=DOWNGRADE,
        sets=_OFF,
        passing="--ampipe-degree 2 --use-pipe-experts --pipe-experts-multi-data 4",
        failing="--ampipe-degree 2 --use-pipe-experts --pipe-experts-multi-data 3",
    ),
    _row(
        "ampipe-pipe-experts-whole",
        _PIPED,
        when=lambda f: _sliced(f) and f.use_pipe_experts,
        requires=lambda f: f.pipe_experts_multi_data > f.ampipe_degree or f.pipe_experts_multi_stream,
        message="--use-pipe-experts with --ampipe-degree > 1 needs an N greater than d, or --pipe-experts-multi-stream",
        kind=LIFTED,
        reason="the experts of a rank are pieces, even if each one's rows stay together",
        passing="--ampipe-degree 2 --use-pipe-experts --pipe-experts-multi-data 4",
        failing="--ampipe-degree 2 --use-pipe-experts --pipe-experts-multi-data 2",
    ),
    _excludes(
        "ampipe-grad-overlap",
        ("overlap_grad_reduce",),
        lambda f: f.overlap_grad_reduce != "on",
        "--overlap-grad-reduce",
        "--overlap-grad-reduce",
        kind=LIFTED,
        reason="every gradient is completed once per backward pass, whatever the degree",
    ),
    _excludes(
        "ampipe-param-overlap",
        ("overlap_param_gather",),
        lambda f: f.overlap_param_gather != "on",
        "--overlap-param-gather",
        "--overlap-param-gather",
        kind=LIFTED,
        reason="a layer waits for its parameters once, before its first slice",
    ),
    _excludes(
        "ampipe-nanopipe",
        ("use_nanopipe", "pp_schedule"),
        lambda f: not zero_bubble(f),
        "--use-nanopipe or --pp-schedule zero_bubble, which is the same",
        "--world-size 2 --pp-degree 2 --pp-schedule zero_bubble",
        kind=LIFTED,
        reason="the contributions of all slices are summed, and a weight's gradient is completed once",
    ),
    _excludes(
        "ampipe-recompute-bubble",
        ("recompute_in_bubble", "recompute_in_advance"),
        lambda f: not (f.recompute_in_bubble or f.recompute_in_advance),
        "--recompute-in-bubble or --recompute-in-advance",
        "--recompute-in-bubble",
    ),
    _excludes(
        "ampipe-adaptive-recompute",
        ("adaptive_recompute_device_size",),
        lambda f: f.adaptive_recompute_device_size == 0,
        "adaptive selective recompute",
        "--adaptive-recompute-device-size 32768",
    ),
    _row(
        "pipe-experts-kind",
        ("use_pipe_experts", "moe_model_type", "num_experts"),
        when=lambda f: f.use_pipe_experts,
        requires=lambda f: f.moe_model_type == "deepspeed_moe" and f.num_experts > 0,
        message="--use-pipe-experts needs experts of --moe-model-type deepspeed_moe",
        passing="--use-pipe-experts --moe-model-type deepspeed_moe",
        failing="--use-pipe-experts --moe-model-type megatron_moe",
    ),
    _row(
        "pipe-experts-stream",
        ("pipe_experts_multi_stream", "sequence_parallel"),
        when=lambda f: f.pipe_experts_multi_stream,
        requires=lambda f: f.sequence_parallel,
        message="--pipe-experts-multi-stream orders ep and mp collectives, and needs --sequence-parallel",
        passing="--use-pipe-experts --pipe-experts-multi-stream --world-size 2 --mp-degree 2 --sequence-parallel",
        failing="--use-pipe-experts --pipe-experts-multi-stream",
    ),
    _row(
        "pipe-experts-nothing",
        ("use_pipe_experts", "num_experts", "ep_degree", "pipe_experts_multi_data"),
        when=lambda f: f.use_pipe_experts and f.num_experts > 0,
        requires=lambda f: f.num_experts // f.ep_degree > 1 or f.pipe_experts_multi_data > 1,
        message="a single local expert with N = 1 leaves nothing to pipeline",
        fix="Set --pipe-experts-multi-data to 2 or more, lower --ep-degree, or leave --use-pipe-experts out.",
        kind=DOWNGRADE,
        sets=_OFF,
        passing="--use-pipe-experts --num-experts 8 --ep-degree 4 --world-size 4",
        failing="--use-pipe-experts --num-experts 4 --ep-degree 4 --world-size 4",
    ),
    _row(
        "pipe-experts-pieces",
        (
            "use_pipe_experts",
            "pipe_experts_multi_data",
            "micro_batch_size",
            "seq_length",
            "num_experts",
            "moe_capacity_factor",
            "moe_router_topk",
            "moe_min_capacity",
        ),
        when=lambda f: f.use_pipe_experts and f.num_experts > 0,
        requires=lambda f: 1 <= f.pipe_experts_multi_data <= _capacity(f),
        message="--pipe-experts-multi-data must be at least 1 and at most an expert's capacity",
        fix=lambda f: f"Choose 1 to {_capacity(f)}.",
        passing="--use-pipe-experts --pipe-experts-multi-data 4",
        failing="--use-pipe-experts --pipe-experts-multi-data 100000",
    ),
    _row(
        "ampipe-fine",
        ("ampipe_degree",),
        requires=lambda f: f.ampipe_degree <= 2,
        message="only --ampipe-degree 2 is recommended: smaller slices need more casts and additions",
        fix="The run keeps this degree; compare its speed with degree 2.",
        kind=ADVICE,
        passing="--ampipe-degree 2",
        failing="--ampipe-degree 4",
    ),
    _row(
        "pipe-experts-unused",
        ("use_pipe_experts", "pipe_experts_multi_data", "pipe_experts_multi_stream"),
        when=lambda f: not f.use_pipe_experts,
        requires=lambda f: f.pipe_experts_multi_data == 1 and not f.pipe_experts_multi_stream,
        source=NO_EFFECT,
        message="--pipe-experts-multi-data and --pipe-experts-multi-stream have no effect without --use-pipe-experts",
        passing="--use-pipe-experts --pipe-experts-multi-data 2",
        failing="--pipe-experts-multi-data 2",
    ),
    _row(
        "ampipe-overlap-unused",
        ("ampipe_tp_sp_comm_overlap", "ampipe_degree", "mp_degree"),
        when=lambda f: f.ampipe_tp_sp_comm_overlap,
        requires=lambda f: f.ampipe_degree != 1 and f.mp_degree > 1,
        source=NO_EFFECT,
        message="--ampipe-tp-sp-comm-overlap has no effect with --ampipe-degree 1 or --mp-degree 1",
        passing="--ampipe-tp-sp-comm-overlap --ampipe-degree 2 --world-size 2 --mp-degree 2",
        failing="--ampipe-tp-sp-comm-overlap",
    ),
    _row(
        "pipe-experts-alone",
        ("use_pipe_experts", "ep_degree", "expert_mp_degree"),
        when=lambda f: f.use_pipe_experts,
        requires=lambda f: f.ep_degree > 1 or f.expert_mp_degree > 1,
        message="--use-pipe-experts has no effect with --ep-degree 1 and whole experts: nothing is communicated",
        fix="Leave it out, or raise --ep-degree.",
        source="pipe-experts",
        passing="--use-pipe-experts --world-size 2 --ep-degree 2",
        failing="--use-pipe-experts",
    ),
    unused(
        "ampipe-options-unused",
        ("ampipe_capacity", "ampipe_slicing", "ampipe_cross_layer"),
        ("ampipe_degree",),
        lambda f: f.ampipe_degree == 1,
        "with --ampipe-degree 1",
        fix="",
        models=MOE,
        passing="--ampipe-degree 2 --ampipe-cross-layer",
        failing="--ampipe-cross-layer",
    ),
    _row(
        "ampipe-capacity-unused",
        ("ampipe_capacity", "moe_model_type"),
        when=lambda f: f.moe_model_type != "deepspeed_moe",
        requires=lambda f: f.ampipe_capacity == "global",
        message="--ampipe-capacity slice has no effect with dropless --moe-model-type megatron_moe",
        fix="Leave it out, or choose --moe-model-type deepspeed_moe.",
        source=NO_EFFECT,
        passing="--ampipe-degree 2 --ampipe-capacity slice --moe-model-type deepspeed_moe",
        failing="--ampipe-degree 2 --ampipe-capacity slice --moe-model-type megatron_moe",
    ),
    _row(
        "ampipe-drop-policy",
        ("ampipe_degree", "moe_model_type", "moe_drop_policy", "ampipe_capacity"),
        when=lambda f: _sliced(f) and f.moe_model_type == "deepspeed_moe" and f.ampipe_capacity == "global",
        requires=lambda f: f.moe_drop_policy == "token",
        message="drop policies choice and probs need the router outputs of all slices",
        fix="Choose --moe-drop-policy token, or --ampipe-capacity slice.",
        source="mixture of experts",
        passing="--ampipe-degree 2 --moe-model-type deepspeed_moe",
        failing="--ampipe-degree 2 --moe-model-type deepspeed_moe --moe-drop-policy choice",
    ),
    _settled(
        "ep",
        ("num_experts", "ep_degree"),
        lambda f: f.num_experts > 0 and f.ep_degree > 1,
        "without --ep-degree there is no all-to-all to hide",
        "--ampipe-degree auto",
    ),
    _settled(
        "flash", ("use_flash_attn",), lambda f: f.use_flash_attn, "slices need --use-flash-attn", "--no-use-flash-attn"
    ),
    _settled(
        "pp",
        ("pp_degree",),
        lambda f: f.pp_degree == 1,
        "with a pipeline the degree must be set explicitly, because it is not measured",
        "--world-size 4 --pp-degree 2",
    ),
    _settled(
        "cp",
        ("cp_degree",),
        lambda f: f.cp_degree == 1,
        "with --cp-degree the order of the data depends on the degree, which must be set explicitly",
        "--world-size 4 --cp-degree 2",
    ),
    _settled(
        "adaptive",
        ("adaptive_recompute_device_size",),
        lambda f: not f.adaptive_recompute_device_size,
        "adaptive recompute measures whole layers",
        "--adaptive-recompute-device-size 1024",
    ),
    _settled(
        "dropout",
        ("attention_dropout", "hidden_dropout"),
        lambda f: f.attention_dropout == 0 and f.hidden_dropout == 0,
        "slices draw different dropout masks",
        "--hidden-dropout 0.1",
    ),
    _settled(
        "norms",
        ("norm_placement",),
        lambda f: f.norm_placement == "input",
        "slices need --norm-placement input",
        "--norm-placement output",
    ),
    _settled(
        "order",
        ("moe_model_type", "moe_drop_policy"),
        lambda f: f.moe_model_type != "deepspeed_moe" or f.moe_drop_policy == "token",
        "slices cannot use --moe-drop-policy choice or probs, which compare all tokens",
        "--moe-model-type deepspeed_moe --moe-drop-policy probs",
        "--moe-model-type deepspeed_moe",
    ),
    _settled(
        "capacity",
        ("moe_model_type", "ampipe_capacity"),
        lambda f: f.moe_model_type != "deepspeed_moe" or f.ampipe_capacity != "slice",
        "slices with separate capacities would drop different tokens",
        "--moe-model-type deepspeed_moe --ampipe-capacity slice",
        "--moe-model-type deepspeed_moe",
    ),
    _settled(
        "scope",
        ("moe_model_type", "moe_capacity_scope", "sequence_parallel"),
        lambda f: f.moe_model_type != "deepspeed_moe" or f.moe_capacity_scope != "rank" or not f.sequence_parallel,
        "with --moe-capacity-scope rank and --sequence-parallel, slices would drop different tokens",
        "--mp-degree 2 --sequence-parallel --expert-mp-degree 1 --moe-model-type deepspeed_moe "
        "--moe-capacity-scope rank",
        "--moe-model-type deepspeed_moe",
    ),
)
