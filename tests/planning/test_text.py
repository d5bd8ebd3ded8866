"""``megapar plan --timeline``: bars of one layer, none of which overlap on a lane, as text and as an object."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from megapar.planning.operator_time import OperatorTime
from megapar.planning.stage_time import StagePrograms
from megapar.planning.text import layer_timeline
from megapar.tools.main import main
from tests.planning.test_program import run_of

CONFIG = Path(__file__).parents[2] / "configs" / "qwen3-30b-a3b.yaml"
FLAGS = ("--config", str(CONFIG), "--mp-degree", "1", "--sequence-parallel=false", "--ep-degree", "16")
FLAGS += ("--moe-dispatch", "plain")


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
