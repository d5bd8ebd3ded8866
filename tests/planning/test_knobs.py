"""Candidates keep no flag without an effect, and knobs offer what the model and the ranks allow."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megapar.arguments import parse
from megapar.planning.knobs import KNOBS, MICRO_BATCH, RECOMPUTE, SCHEDULE, Candidate, Scope
from megapar.planning.variation import command_line


def scope(**changes: Any) -> Scope:
    sizes = parse("moe", ["--num-layers", "12", "--num-experts", "8", "--seq-length", "4096"], {}).model
    return replace(Scope("moe", sizes, 16, 8, 64, latent=False), **changes)


def values(knob: Any, name: str, candidate: Candidate) -> list[Any]:
    return [other.get(name) for other in knob.others(candidate, scope())]


def test_a_flag_without_effect_is_dropped_with_the_one_that_it_needs() -> None:
    layout = Candidate.of({"mp_degree": 2, "sequence_parallel": True, "expert_mp_degree": 1, "pp_schedule": "gpipe"})
    assert layout.flags() == {"mp_degree": 2, "sequence_parallel": True, "expert_mp_degree": 1}
    assert layout.but({"mp_degree": 1}).flags() == {}
    sliced = Candidate.of({"ep_degree": 2, "ampipe_degree": 2, "ampipe_cross_layer": True})
    assert sliced.but({"ep_degree": 1}) == Candidate()
    assert Candidate.of({"recompute_offload": True}) == Candidate()


def test_differences_name_the_values_to_change() -> None:
    one, other = Candidate.of({"mp_degree": 2}), Candidate.of({"mp_degree": 2, "ep_degree": 4})
    assert one.differences(other) == {"ep_degree": 1}
    assert other.differences(one) == {"ep_degree": 4}
    assert command_line({"ep_degree": 4, "hybrid_dp": False, "recompute_method": None}) == [
        *("--ep-degree", "4", "--no-hybrid-dp", "--recompute-method", "None")
    ]


def test_other_values_are_those_that_the_ranks_allow() -> None:
    assert values(MICRO_BATCH, "micro_batch_size", Candidate()) == [1, 2]  # 4 samples on each of 16 ranks
    staged = Candidate.of({"pp_degree": 4})
    assert values(MICRO_BATCH, "micro_batch_size", staged) == [1, 2, 8, 16]
    assert values(SCHEDULE, "vpp_degree", Candidate()) == []
    assert values(SCHEDULE, "vpp_degree", staged) == [1, 2, 3, 1, 2]  # gpipe, interleaved twice, zero bubble twice


def test_numbers_of_recomputed_layers_include_the_neighbours() -> None:
    now = Candidate.of({"recompute_method": "block", "recompute_num_layers": 6})
    counts = values(RECOMPUTE, "recompute_num_layers", now)
    assert {5, 7} <= set(counts)
    assert 6 not in counts


def test_a_trainer_has_no_knobs_of_the_other() -> None:
    offered = [knob for knob in KNOBS if any(knob.others(Candidate.of({"mp_degree": 2}), scope(kind="ernie")))]
    assert offered
    assert not any("ep_degree" in knob.flags or "ampipe_degree" in knob.flags for knob in offered)
