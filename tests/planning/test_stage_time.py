"""Seconds of operators and messages, of a stage's chains of layers and hidden communication, and their timeline."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from unittest.mock import patch

import pytest

from megapar.arguments import parse
from megapar.core.units import GIBIBYTE
from megapar.model.cost.model_cost import CommCost, Product
from megapar.planning import stage_time
from megapar.planning.calibration import calibrations
from megapar.planning.devices import device_kind
from megapar.planning.operator_time import MessageTime, OperatorTime
from megapar.planning.planned_run import PlannedRun
from megapar.planning.speed import Clock, Speed, predict
from megapar.planning.stage_time import StagePrograms, StageTime
from megapar.planning.text import layer_timeline
from megapar.tools.main import main
from tests.planning.test_program import run_of

DEEP = ("--num-layers", "12", "--num-experts", "8", "--ep-degree", "4", "--hidden-size", "1024", "--seq-length", "4096")


def time_of(run: PlannedRun, stage: int = 0) -> StageTime:
    return StagePrograms(run, OperatorTime(run)).stage(stage)


@pytest.mark.parametrize("more", [(), ("--first-k-dense", "2"), ("--recompute-interval", "1")])
def test_a_chain_takes_as_long_as_if_all_of_its_layers_were_run(more: tuple[str, ...]) -> None:
    run = run_of(*DEEP, *more, "--ampipe-degree", "2", "--ampipe-cross-layer")
    short = time_of(run)
    with patch.object(stage_time, "SIMULATED", 100):
        whole = time_of(run)
    assert short.both == pytest.approx(whole.both)
    assert short.exposed == pytest.approx(whole.exposed)
    assert short.backward.busy == pytest.approx(whole.backward.busy)


def test_a_recomputation_sends_all_but_the_last_combine_again() -> None:
    kept, again = (
        time_of(run_of(*DEEP, "--ampipe-degree", "2", *more)) for more in ((), ("--recompute-interval", "1"))
    )
    assert again.forward == kept.forward
    sent = again.backward.busy[0] - kept.backward.busy[0]
    assert 0.5 * kept.forward.busy[0] < sent < 0.6 * kept.forward.busy[0]


def test_offloaded_and_divided_inputs_take_their_links() -> None:
    flags = ("--num-experts", "0", "--num-layers", "8", "--mp-degree", "2", "--recompute-interval", "1")
    plain, offload, partition = (
        time_of(run_of(*flags, *more)) for more in ((), ("--recompute-offload",), ("--recompute-partition",))
    )
    assert offload.forward.busy[2] > 0 < offload.backward.busy[3]
    assert partition.backward.busy[0] > plain.backward.busy[0]
    assert len({plain.both, offload.both, partition.both}) == 3


def test_a_schedule_that_defers_weight_gradients_runs_them_apart() -> None:
    flags = ("--num-experts", "0", "--num-layers", "8", "--pp-degree", "2", "--gradient-merge-acc-step", "8")
    whole, apart = (time_of(run_of(*flags, "--pp-schedule", name), 1) for name in ("1f1b", "zero_bubble"))
    assert apart.weight > 0 == whole.weight
    assert apart.backward.seconds < whole.backward.seconds


CALIBRATION = calibrations()["megapar"]


def times(*flags: str, ranks: int = 16, kind: str = "h100") -> OperatorTime:
    config = parse("moe", ["--validate-only", "--world-size", str(ranks), "--dtype", "bf16", *flags], {})
    return OperatorTime(PlannedRun(config, device_kind(kind)))


def test_parts_of_a_product_take_longer_than_the_whole() -> None:
    time, product = times(), Product(4096, 2048, 2048)
    whole, parts = time.products([product]), [time.products([product], count) for count in (2, 16)]
    assert whole == pytest.approx(product.flops * (1 + CALIBRATION.small / 2048) / 989e12 / CALIBRATION.product)
    assert 2 * parts[0] == pytest.approx(whole)  # still 2,048 rows
    assert 16 * parts[1] == pytest.approx(whole * (1 + CALIBRATION.small / 256) / (1 + CALIBRATION.small / 2048))


def test_a_collective_occupies_both_links() -> None:
    time = times("--num-experts", "16", "--ep-degree", "16")
    seconds = time.message(CommCost("ep", "all_to_all", 15e9, "forward"))
    assert seconds.inside == pytest.approx(7e9 / 450e9 / CALIBRATION.inside)
    assert seconds.between == pytest.approx(8e9 / 50e9 / CALIBRATION.between)
    assert seconds.seconds == pytest.approx(seconds.between + seconds.latency)
    assert time.message(CommCost("mp", "all_reduce", 1e9, "forward")) == MessageTime()


@pytest.mark.parametrize(("ep", "rate"), [(2, 28e9), (4, 84e9), (8, 196e9)])
def test_a_group_inside_a_node_has_the_links_of_a_mesh_that_it_spans(ep: int, rate: float) -> None:
    time = times("--num-experts", "16", "--ep-degree", str(ep), ranks=8, kind="ascend-910b2")
    seconds = time.message(CommCost("ep", "all_to_all", 1e9, "forward"))
    assert seconds.inside == pytest.approx(1e9 / rate / CALIBRATION.inside)
    assert seconds.between == 0


def test_a_message_to_the_next_stage_has_one_link_of_a_mesh() -> None:
    flags = ("--pp-degree", "8", "--num-layers", "8", "--gradient-merge-acc-step", "8")
    seconds = times(*flags, ranks=8, kind="ascend-910b2").message(CommCost("pp", "send", 1e9, "forward"))
    assert seconds.inside == pytest.approx(1e9 / 28e9 / CALIBRATION.inside)


CONFIG = Path(__file__).parents[2] / "configs" / "qwen3-30b-a3b.yaml"
FLAGS = ("--config", str(CONFIG), "--mp-degree", "1", "--sequence-parallel=false", "--ep-degree", "16")
FLAGS += ("--moe-dispatch", "plain")
OVER_MP = (*FLAGS[:2], "--mp-degree", "2", "--ep-degree", "8")
PIECES = ("--moe-model-type", "deepspeed_moe", "--use-pipe-experts", "--pipe-experts-multi-data")


def speed(*flags: str, kind: str = "b200-180g") -> Speed:
    return predict(run_of(*FLAGS, *flags, kind=kind, ranks=16))


def test_no_step_is_shorter_than_its_messages_between_nodes() -> None:
    """Qwen3-30B-A3B on 16 B200: 768 GiB a step between nodes take 19.4 s, however they are hidden."""
    run = run_of(*FLAGS, "--ampipe-degree", "2", kind="b200-180g", ranks=16)
    least = 768 * GIBIBYTE / (run.kind.between * OperatorTime(run).calibration.between)
    assert least == pytest.approx(19.4, abs=0.05)
    for degree in ("1", "2", "4", "16", "64"):
        for cross in ((), ("--ampipe-cross-layer",) if degree != "1" else ()):
            assert speed("--ampipe-degree", degree, *cross).step_seconds > least


def test_exposed_time_depends_on_degree_slicing_layers_and_cover() -> None:
    ways = (
        ("--ampipe-degree", "1"),
        ("--ampipe-degree", "2"),
        ("--ampipe-degree", "4"),
        ("--ampipe-degree", "2", "--ampipe-slicing", "balanced"),
        ("--ampipe-degree", "2", "--ampipe-cross-layer"),
        ("--ampipe-degree", "4", "--ampipe-cross-layer"),
        ("--ampipe-degree", "2", "--recompute-interval", "1"),
        (*PIECES, "1"),
        (*PIECES, "2"),
    )
    exposed = [round(speed(*way).exposed_seconds, 6) for way in ways]
    assert len(set(exposed)) == len(ways)
    assert exposed[0] > exposed[1] > exposed[4] > exposed[5]
    fast, slow = (speed("--ampipe-degree", "2", kind=kind).exposed_seconds for kind in ("b200-180g", "h100-80g"))
    assert fast > slow  # there is less work to hide the same messages under


def test_many_slices_are_slower_than_four() -> None:
    four, many = (speed("--ampipe-degree", degree, kind="h100-80g").step_seconds for degree in ("4", "64"))
    assert many > 2 * four


def test_what_attention_needs_over_mp_is_hidden_beside_whole_experts_too() -> None:
    flags = (*OVER_MP, "--ampipe-degree", "2", "--expert-mp-degree", "1")
    before, after = (predict(run_of(*flags, *more, ranks=16)) for more in ((), ("--ampipe-tp-sp-comm-overlap",)))
    assert abs(after.step_seconds / before.step_seconds - 1) > 1e-5


@pytest.mark.parametrize("more", [(), ("--ampipe-degree", "2"), ("--ampipe-degree", "2", "--ampipe-cross-layer")])
def test_the_drawn_layer_takes_as_long_as_the_planned_ones(more: tuple[str, ...]) -> None:
    run = run_of(*FLAGS, *more, ranks=16)
    found, stage = layer_timeline(run), StagePrograms(run, OperatorTime(run)).stage(0)
    for drawing, span in ((found.forward, stage.forward), (found.backward, stage.backward)):
        assert drawing.seconds * 48 == pytest.approx(span.seconds - span.slowed, rel=0.1)  # with embedding and head
        for lane in drawing.busy:
            bars = sorted((bar.start, bar.end) for bar in drawing.bars if bar.lane == lane)
            assert all(before[1] <= after[0] * (1 + 1e-9) for before, after in pairwise(bars))
        assert drawing.busy["compute"] + drawing.busy.get("wait", 0.0) == pytest.approx(1.0)
        assert all(share <= 1 + 1e-9 for share in drawing.busy.values())


def test_the_page_and_the_object_have_the_drawing(capsys: pytest.CaptureFixture[str]) -> None:
    line = ["plan", "--timeline", *FLAGS, "--world-size", "16", "--ampipe-degree", "2"]
    main(line)
    page = capsys.readouterr().out
    assert "timeline of a moe layer" in page
    assert "compute   0 att" in page
    main([*line, "--json"])
    drawn = json.loads(capsys.readouterr().out)["timeline"]
    assert drawn["layer"] == "moe"
    assert {event["lane"] for event in drawn["forward"]["events"]} == {"compute", "wait", "inside", "between"}
    assert 0.5 < drawn["forward"]["busy_shares"]["between"] < 1


def test_a_step_ends_when_its_last_stage_does_not_when_the_one_that_sends_longest_does() -> None:
    """Stage 0 reduces dense layers over all ranks; those of stage 1 have whole experts and a long update."""
    flags = ("--num-layers", "4", "--hidden-size", "2048", "--num-attention-heads", "16", "--seq-length", "2048")
    flags += ("--untie-embeddings-and-output-weights", "--vocab-size", "32000", "--ffn-hidden-size", "6144")
    flags += ("--first-k-dense", "2", "--num-experts", "128", "--moe-ffn-hidden-size", "4096", "--ep-degree", "8")
    flags += ("--pp-degree", "2", "--micro-batch-size", "1", "--gradient-merge-acc-step", "4")
    run = run_of(*flags, "--overlap-grad-reduce", "off", "--overlap-param-gather", "off", ranks=16)
    clock = Clock(run, calibrations()[run.assumed.software])
    (sends, steps), (less, more) = (clock.step_end(stage, clock.stage(stage)) for stage in (0, 1))
    assert sends > less
    assert sends + steps < less + more
    assert predict(run).optimizer_seconds == more
