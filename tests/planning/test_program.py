"""The programs of layers are those that ``tests/model/test_ampipe.py`` compares with recorded orders."""

from __future__ import annotations

from itertools import pairwise

import pytest

from megapar.arguments import parse
from megapar.planning.devices import device_kind
from megapar.planning.operator_time import OperatorTime
from megapar.planning.planned_run import PlannedRun
from megapar.planning.stage_time import StagePrograms
from megapar.planning.timeline import Event, Send, Wait, Work, backward_of, forward_of
from tests.model.test_ampipe import AGAIN, drawn, drawn_over_mp, mirrored

TWO = ("--num-layers", "2", "--num-experts", "8", "--ep-degree", "4", "--first-k-dense", "0")


def run_of(*flags: str, kind: str = "h100", ranks: int = 8) -> PlannedRun:
    config = parse("moe", [*flags, "--rules-only", "--dtype", "auto", "--world-size", str(ranks)], {}, planning=True)
    return PlannedRun(config, device_kind(kind))


def programs(run: PlannedRun) -> tuple[list[Event], list[Event]]:
    """Events of the layers of the only stage, forward and backward."""
    stage = StagePrograms(run, OperatorTime(run))
    (chunk,) = run.stages.on(0)
    units = stage.units(chunk, {})
    found = stage.programs(units)
    forward = [event for program in found for event in forward_of(program)]
    turned = list(zip(found, units, strict=True))[::-1]
    return forward, [event for program, unit in turned for event in backward_of(program, recomputed=unit.recomputed)]


def noted(events: list[Event], letters: str) -> list[str]:
    """Launches and waits of the messages with these letters, and the work of each slice in attention and experts."""
    found = []
    for event in events:
        name, place = event.name.replace("'", "").split("|")
        layer, c = place.split(".")[0], name.split(".")[0].lstrip("DCaenoprstix ")
        if isinstance(event, Send | Wait) and name[0] in letters:
            found.append(f"{name[0]}{layer}.{c}" + ("^" if isinstance(event, Send) else "v"))
        elif name.startswith("experts"):
            found.append(f"exp{layer}.{c}")
        elif name.startswith("attention"):
            found.append(f"attn{layer}.{c}")
    return [one for one, after in pairwise([*found, ""]) if one != after]


@pytest.mark.parametrize("cross", [False, True])
@pytest.mark.parametrize("degree", [2, 4])
def test_slices_run_as_drawn(degree: int, cross: bool) -> None:
    flags = ("--ampipe-degree", str(degree), *(["--ampipe-cross-layer"] if cross else []))
    forward, backward = programs(run_of(*TWO, *flags))
    assert noted(forward, "DC") == drawn(degree, 2, cross, False)
    assert noted(backward, "DC") == mirrored(drawn(degree, 2, cross, False))


def noted_over_mp(events: list[Event]) -> str:
    """The same of g all-gathers and r reduce-scatters over mp, D dispatches and C combines, without numbers."""
    letters = {"g": "g", "G'": "g", "p'": "g", "r": "r", "r'": "r", "p": "r"}
    found = []
    for event in events:
        name, place = event.name.split("|")
        own = place.split(" ")[1] if " " in place else name  # of an operator, or of slices
        if name.startswith("core"):
            found.append(f"attn{name.split()[1]}")
        elif isinstance(event, Send | Wait) and not name.startswith(("sums", "counts")):
            letter = name[0] if name[0] in "DC" else letters.get(own.rstrip("0123456789"), "")
            found += [letter + ("^" if isinstance(event, Send) else "v")] if letter else []
    return " ".join(found)


@pytest.mark.parametrize("cross", [False, True])
@pytest.mark.parametrize("degree", [2, 4])
def test_what_attention_needs_over_mp_flies_as_drawn(degree: int, cross: bool) -> None:
    flags = ("--ampipe-degree", str(degree), "--ampipe-tp-sp-comm-overlap", "--tp-comm-overlap", "on")
    flags += ("--mp-degree", "2", "--sequence-parallel", "--expert-mp-degree", "1")
    found = programs(run_of(*TWO, *flags, *(["--ampipe-cross-layer"] if cross else [])))
    assert tuple(map(noted_over_mp, found)) == drawn_over_mp(degree, 2, cross)


def test_a_recomputed_unit_runs_again_while_its_last_gradients_travel() -> None:
    _, backward = programs(run_of(*TWO, "--ampipe-degree", "2", "--recompute-interval", "1"))
    assert noted_over_mp(backward) == f"{AGAIN} {AGAIN}"


def test_pieces_are_the_experts_and_their_parts_and_links_are_not_shared_if_chained() -> None:
    flags = ("--moe-model-type", "deepspeed_moe", "--use-pipe-experts", "--pipe-experts-multi-data", "2")
    flags += ("--mp-degree", "2", "--sequence-parallel", "--expert-mp-degree", "2", "--ep-degree", "4")
    for chained in ([], ["--pipe-experts-multi-stream"]):
        forward, _ = programs(run_of(*TWO, *flags, *chained))
        sent = [event for event in forward if isinstance(event, Send) and event.name[0] == "D"]
        assert len(sent) == 2 * 2 * 2  # layers, local experts, parts
        streams = {event.flight.stream for event in forward if isinstance(event, Send) and event.name[0] in "DgrC"}
        assert streams == ({"experts"} if chained else {"ep", "emp"})
        first = [event.name[0] for event in forward if isinstance(event, Send) and event.name[0] in "Dg"][:4]
        assert first == (["D", "g", "D", "g"] if chained else ["D"] * 4)


def test_slices_have_shorter_products_and_all_kernels() -> None:
    def work(*flags: str) -> float:
        forward, backward = programs(run_of(*TWO, "--seq-length", "4096", "--hidden-size", "1024", *flags))
        return sum(event.seconds for event in (*forward, *backward) if isinstance(event, Work))

    degrees = [work("--ampipe-degree", str(degree)) for degree in (1, 2, 4, 64)]
    assert degrees == sorted(degrees)
    assert degrees[3] > 3 * degrees[2]
    launches = 6e-6 * 2 * (40 + 43)
    assert work("--ampipe-degree", "64", "--hidden-size", "64") > 60 * launches


def test_keys_travel_under_tiles_of_attention() -> None:
    flags = ("--num-layers", "1", "--num-experts", "0", "--cp-degree", "4", "--seq-length", "4096")
    rounds = {"megatron_cp_algo": (3, 6), "allgather_cp_algo": (1, 2), "ulysses_cp_algo": (1, 1)}
    for algorithm, counts in rounds.items():
        found = programs(run_of(*flags, "--context-parallel-algo", algorithm))
        assert tuple(sum(isinstance(event, Send) for event in events) for events in found) == counts
