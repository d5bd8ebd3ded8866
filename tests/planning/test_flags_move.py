"""Every flag has one role in a search, and every flag that a search tries moves a figure of some plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, NamedTuple

import pytest

from megapar.arguments import FLAGS, parse
from megapar.errors import ConfigError
from megapar.planning.devices import device_kind
from megapar.planning.knobs import DROPPED, KNOBS, TRIED_FLAGS, WITHOUT_EFFECT
from megapar.planning.plan import Plan
from megapar.planning.variation import command_line
from megapar.schema.role import BY_HAND, OUTSIDE, PROPERTY, TRIED

SMALL: Mapping[str, Any] = {
    **{"num_layers": 8, "hidden_size": 2048, "num_attention_heads": 16, "seq_length": 4096, "num_experts": 0},
    **{"vocab_size": 32000, "micro_batch_size": 1, "global_batch_size": 64, "dtype": "bf16"},
}
MP: Mapping[str, Any] = {"mp_degree": 2}
SP: Mapping[str, Any] = {**MP, "sequence_parallel": True}
PP: Mapping[str, Any] = {"pp_degree": 2}
CP: Mapping[str, Any] = {"cp_degree": 2}
EP: Mapping[str, Any] = {"num_experts": 8, "moe_ffn_hidden_size": 1024, "ep_degree": 8}
MLA: Mapping[str, Any] = {"multi_latent_attention": True}
DROPS: Mapping[str, Any] = {**EP, "ep_degree": 4, "moe_model_type": "deepspeed_moe", "moe_capacity_factor": 1.25}
FULL: Mapping[str, Any] = {"recompute_interval": 1}
SLICED: Mapping[str, Any] = {**EP, "ampipe_degree": 2}
PIECES: Mapping[str, Any] = {**DROPS, "use_pipe_experts": True, "pipe_experts_multi_data": 2}
BLOCK: Mapping[str, Any] = {"recompute_method": "block", "recompute_num_layers": 2}


class Move(NamedTuple):
    """A value of a flag, the flags of both plans, those that the value needs, and the kind of device."""

    value: Any
    base: Mapping[str, Any] = {}
    needs: Mapping[str, Any] = {}
    kind: str = "h100-80g"


MOVES: Mapping[str, Move] = {
    "mp_degree": Move(2),
    "pp_degree": Move(2),
    "cp_degree": Move(2),
    "ep_degree": Move(4, EP),
    "expert_mp_degree": Move(1, {**EP, **SP}),
    "sharding_degree": Move(4, needs={"hybrid_dp": True}),
    "dp_degree": Move(2),
    "hybrid_dp": Move(True, needs={"sharding_degree": 8}),
    "rank_order": Move(("dp", "sharding", "pp", "cp", "mp"), PP),
    "sequence_parallel": Move(True, MP),
    "tp_comm_overlap": Move("off", SP),
    "context_parallel_algo": Move("ulysses_cp_algo", CP),
    "mla_cp_exchange": Move("kv", {**CP, **MLA}),
    "sharding_stage": Move(2),
    "sharding_segment_strategy": Move("segment_broadcast_MB", kind="cpu"),
    "segment_broadcast_mb": Move(512.0, {"sharding_segment_strategy": "segment_broadcast_MB"}, kind="cpu"),
    "sharding_prefetch_segments": Move(0, kind="cpu"),
    "gradient_merge_mode": Move("step", {"sharding_stage": 2}),
    "overlap_grad_reduce": Move("off"),
    "overlap_param_gather": Move("off"),
    "optimizer_offload": Move(True),
    "pp_seg_method": Move("balanced", {**PP, "vocab_size": 256000}),
    "pp_schedule": Move("gpipe", PP),
    "vpp_degree": Move(4, {**PP, "pp_schedule": "interleaved", "vpp_degree": 2}),
    "recompute_interval": Move(1),
    "recompute_offload": Move(True, FULL),
    "recompute_partition": Move(True, {**FULL, **MP}),
    "recompute_granularity": Move("selective"),
    "recompute_method": Move("block", needs={"recompute_num_layers": 2}),
    "recompute_num_layers": Move(4, BLOCK),
    "ampipe_degree": Move(2, EP),
    "ampipe_tp_sp_comm_overlap": Move(True, {**SP, **SLICED, "ep_degree": 4}),
    "ampipe_slicing": Move("balanced", SLICED),
    "ampipe_cross_layer": Move(True, SLICED),
    "use_pipe_experts": Move(True, DROPS),
    "pipe_experts_multi_data": Move(4, PIECES),
    "pipe_experts_multi_stream": Move(True, {**PIECES, **SP}),
    "moe_dispatch": Move("plain", {**EP, "num_experts": 32, "ep_degree": 16, "moe_router_topk": 4}),
    "micro_batch_size": Move(2),
}


# Overlap, offload, and pieces of experts, whose seconds move and not memory or bytes alone.
MOVES_TIME = {
    *("ampipe_tp_sp_comm_overlap", "use_pipe_experts", "pipe_experts_multi_stream", "tp_comm_overlap"),
    *("recompute_offload", "recompute_partition", "optimizer_offload", "overlap_grad_reduce", "overlap_param_gather"),
}


def figures(values: Mapping[str, Any], kind: str) -> tuple[Any, ...]:
    """Return the time, memory and traffic of a plan on 16 devices."""
    line = [*command_line({**SMALL, **values}), "--rules-only", "--world-size", "16"]
    plan = Plan(parse("moe", line, {}), device_kind(kind))
    return asdict(plan.speed), tuple(asdict(stage) for stage in plan.memory), plan.traffic, plan.crossing


def test_every_role_that_a_search_does_not_try_has_a_reason() -> None:
    roles = {flag.role for flag in FLAGS.values()}
    assert {role.kind for role in roles} == {TRIED, BY_HAND, PROPERTY, OUTSIDE}
    assert all(bool(role.reason) == (role.kind != TRIED) for role in roles)
    assert {FLAGS[name].role.kind for name in DROPPED} == {TRIED, BY_HAND}


def test_a_search_tries_every_knob() -> None:
    tried = {name for knob in KNOBS for name in knob.flags}
    # A degree of sharding is the quotient that --dp-degree leaves.
    assert tried | {"sharding_degree"} == set(TRIED_FLAGS)


@pytest.mark.parametrize("name", TRIED_FLAGS)
def test_a_knob_moves_a_figure(name: str) -> None:
    move = MOVES[name]
    before = figures(move.base, move.kind)
    after = figures({**move.base, **move.needs, name: move.value}, move.kind)
    assert before != after
    moved = abs(after[0]["step_seconds"] / before[0]["step_seconds"] - 1) > 1e-5
    assert moved or name not in MOVES_TIME


# Another value of each flag without effect, by its type; lists and files are left out.
OTHERS: Mapping[str, Any] = {"int": 3, "float": 3.0, "bool": True, "switch": "off"}


def test_flags_without_effect_move_nothing() -> None:
    before, tried = figures({}, "h100-80g"), 0
    for name in WITHOUT_EFFECT:
        flag = FLAGS[name]
        values = flag.choices or [OTHERS[flag.type]] if flag.type in OTHERS else flag.choices
        for value in values:
            try:
                after = figures({name: not flag.defaults["moe"] if flag.type == "bool" else value}, "h100-80g")
            except ConfigError:  # it needs others, or a folder
                continue
            assert after == before, name
            tried += 1
    assert tried > 15


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_segments_and_prefetch_move_time_and_memory_at_each_stage(stage: int) -> None:
    by_size: Mapping[str, Any] = {"sharding_segment_strategy": "segment_broadcast_MB"}
    by_anchors: Mapping[str, Any] = {"sharding_segment_strategy": "segment_anchors"}
    strategies: list[Mapping[str, Any]] = [
        {},
        *({**by_size, "segment_broadcast_mb": size} for size in (1.0, 128.0, 1e4)),
        {**by_anchors, "segment_anchors": ("layers.2", "layers.6")},
    ]
    line = {**FULL, "sharding_stage": stage, "untie_embeddings_and_output_weights": True, "global_batch_size": 16}
    speeds = [figures({**line, **strategy}, "h100-80g")[0]["step_seconds"] for strategy in strategies]
    peaks = [figures({**line, **strategy}, "cpu")[1][0]["peak"] for strategy in strategies]
    assert len({*speeds}) == len(strategies)
    assert len({*peaks}) >= len(strategies) - 1  # below stage 3, buffers of two sizes may be reused alike
    assert max(speeds) == speeds[3]  # nothing is left to hide its message under
    none, four = (figures({**line, "sharding_prefetch_segments": count}, "h100-80g") for count in (0, 4))
    assert (none[0]["step_seconds"] > four[0]["step_seconds"]) == (stage < 3)  # FSDP2 gathers one ahead by itself
