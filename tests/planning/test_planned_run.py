"""A plan that shares parts with others of a search has the figures of one that shares none."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

import pytest

from megapar.arguments import parse
from megapar.planning.assume import Assumed
from megapar.planning.devices import device_kind
from megapar.planning.plan import Plan
from megapar.planning.planned_run import PlannedRun, Shared
from megapar.planning.variation import command_line

MOE: Mapping[str, Any] = {
    **{"num_layers": 8, "hidden_size": 1024, "num_attention_heads": 16, "seq_length": 4096, "num_experts": 8},
    **{"vocab_size": 32000, "micro_batch_size": 1, "global_batch_size": 64, "dtype": "bf16"},
    **{"untie_embeddings_and_output_weights": True, "first_k_dense": 1},
}
ERNIE: Mapping[str, Any] = {
    **{"num_layers": 8, "hidden_size": 1024, "num_attention_heads": 16, "seq_length": 512, "dtype": "bf16"},
    **{"vocab_size": 32000, "micro_batch_size": 1, "global_batch_size": 64},
}
LAYOUTS: tuple[Mapping[str, Any], ...] = (
    {},
    {"sharding_stage": 3},
    {"dp_degree": 2, "rank_order": ("dp", "sharding", "pp", "cp", "mp")},
    {"pp_degree": 2},
    {"pp_degree": 2, "rank_order": ("dp", "sharding", "pp", "cp", "mp")},
    {"pp_degree": 2, "pp_schedule": "zero_bubble"},
    {"pp_degree": 2, "pp_schedule": "interleaved", "vpp_degree": 2, "pp_seg_method": "balanced"},
    {"mp_degree": 2, "recompute_interval": 1},
    {"mp_degree": 2, "recompute_interval": 1, "recompute_partition": True, "optimizer_offload": True},
    {"mp_degree": 2, "sequence_parallel": True, "tp_comm_overlap": "off"},
    {"micro_batch_size": 2, "recompute_granularity": "selective"},
)
EXPERTS: tuple[Mapping[str, Any], ...] = (
    {"ep_degree": 4},
    {"ep_degree": 4, "ampipe_degree": 2},
    {"ep_degree": 4, "ampipe_degree": 2, "ampipe_cross_layer": True},
    {"ep_degree": 4, "ampipe_degree": 2, "recompute_method": "block", "recompute_num_layers": 3},
    {"ep_degree": 4, "mp_degree": 2, "sequence_parallel": True, "expert_mp_degree": 1},
)


@pytest.mark.parametrize(("kind", "model", "layouts"), [("moe", MOE, (*LAYOUTS, *EXPERTS)), ("ernie", ERNIE, LAYOUTS)])
def test_shared_parts_change_no_figure(
    kind: str, model: Mapping[str, Any], layouts: tuple[Mapping[str, Any], ...]
) -> None:
    shared, device = Shared(), device_kind("h100-80g")
    for layout in chain(layouts, reversed(layouts)):
        line = [*command_line({**model, **layout}), "--rules-only", "--world-size", "16"]
        config = parse(kind, line, {})
        assert Plan(config, device, shared=shared).to_dict() == Plan(config, device).to_dict(), layout
    assert len(shared.parts) > len(layouts)


def test_a_part_is_made_once() -> None:
    shared, made = Shared(), []
    for _ in range(2):
        assert shared.get("key", lambda: made.append(1) or "part") == "part"
    assert made == [1]


def test_a_part_of_another_owner_is_made_again() -> None:
    shared, one, other = Shared(), object(), object()
    parts = [shared.of(owner, "key", dict) for owner in (one, one, other, one)]
    assert parts[0] is parts[1]
    assert parts[1] is not parts[2]
    assert parts[2] is not parts[3]


@pytest.mark.parametrize(("way", "share"), [("megatron", 8 / 7), ("allgather", 8 / 7), ("ulysses", 1.0)])
def test_scores_in_a_window_are_those_of_the_rank_with_most_keys(way: str, share: float) -> None:
    """In a window of a run, rank 0 of two has 1/2 + 1 of a run's keys, and rank 1 has 2, where the mean is 7/4."""
    sizes, scores = {**ERNIE, "num_experts": 0, "seq_length": 1024, "window_size": 256}, []
    for layout in ({}, {"cp_degree": 2, "context_parallel_algo": f"{way}_cp_algo"}):
        config = parse("moe", [*command_line({**sizes, **layout}), "--rules-only", "--world-size", "2"], {})
        layer = PlannedRun(config, device_kind("h100-80g"), Assumed(), Shared()).costs.layer(0)
        scores.append(next(one.scores for one in layer.operators if one.name == "core"))
    assert scores[1] == pytest.approx(scores[0] / 2 * share)
