"""Exposed messages of this benchmark by the planner's timeline, next to the committed results.

    python -m benchmarks.communication_hiding.predicted

The plan of the same run gets two rates from the serial step: its computation alone, and its messages alone. The cost of
short products is from one measurement: at 512 positions, four slices take 1.13 times the serial computation.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.communication_hiding.shape import WAYS, make_sizes
from benchmarks.support.device import scaled
from benchmarks.support.table import print_table
from megapar.arguments import parse
from megapar.core.device.kinds import DeviceKind, kinds
from megapar.moe.slicing import Slicing
from megapar.planning.operator_time import OperatorTime
from megapar.planning.planned_run import PlannedRun
from megapar.planning.stage_time import StagePrograms, StageTime
from megapar.planning.timeline import BETWEEN, LINKS

RESULTS = Path(__file__).with_name("results")
SMALL = 23.0  # rows at which a product of this CPU takes twice as long per row
ALLOWED = 0.15  # of the messages' own time


@dataclass(frozen=True)
class Row:
    """One way of slicing at one rate, in seconds.

    Attributes:
        link: Rate of the link.
        way: Name of the way.
        messages: The serial step's messages alone.
        measured: Measured time of waiting.
        predicted: The same of the timeline.
    """

    link: str
    way: str
    messages: float
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        """Error of the prediction as a share of the messages' own time."""
        return (self.predicted - self.measured) / self.messages


def rows() -> list[Row]:
    """Return all ways and rates of the committed results."""
    found = []
    for path in sorted(RESULTS.glob("*.json")):
        result = json.loads(path.read_text())
        for rate in result["rates"]:
            kind = _kind(result.get("seq_length", 1024), rate["seconds"]["alone serial"], rate["exposed"]["serial"])
            for way in WAYS:
                time = _time(WAYS[way], result.get("seq_length", 1024), kind)
                waited = time.forward.waited + time.backward.waited
                found.append(Row(rate["link"], way, rate["exposed"]["serial"], rate["exposed"][way], waited))
    return found


def _kind(length: int, computation: float, waiting: float) -> DeviceKind:
    """Return a CPU whose serial step has the measured computation and messages."""
    kind = replace(kinds()["cpu"], node=1)
    serial = _time(WAYS["serial"], length, kind)
    link = LINKS.index(BETWEEN)
    messages = serial.forward.busy[link] + serial.backward.busy[link]
    faster = (serial.both - serial.forward.waited - serial.backward.waited) / computation
    return scaled(kind, faster, messages / waiting)


def _time(way: Slicing, length: int, kind: DeviceKind) -> StageTime:
    """Return the planned time of one sample."""
    run = PlannedRun(parse("moe", _flags(way, length), {}, planning=True), kind)
    calibration = replace(OperatorTime(run).calibration, small=SMALL, shown=0.0)
    return StagePrograms(run, OperatorTime(run, calibration)).stage(0)


def _flags(way: Slicing, length: int) -> list[str]:
    """Return the command line of the benchmark's model."""
    sizes = make_sizes("cpu")
    assert sizes.moe is not None
    numbers = {
        "--world-size": 2,
        "--ep-degree": 2,
        "--num-layers": sizes.num_layers,
        "--hidden-size": sizes.hidden_size,
        "--num-attention-heads": sizes.num_attention_heads,
        "--num-query-groups": sizes.num_query_groups,
        "--ffn-hidden-size": sizes.ffn_hidden_size,
        "--vocab-size": sizes.vocab_size,
        "--seq-length": length,
        "--num-experts": sizes.moe.num_experts,
        "--moe-router-topk": sizes.moe.topk,
        "--ampipe-degree": way.degree,
    }
    line = ["--rules-only", "--dtype", "fp32", "--untie-embeddings-and-output-weights"]
    line += [word for name, number in numbers.items() for word in (name, str(number))]
    line += ["--ampipe-cross-layer"] if way.cross_layer else []
    if way.expert_pieces:
        line += ["--moe-model-type", "deepspeed_moe", "--use-pipe-experts"]
        line += ["--pipe-experts-multi-data", str(way.expert_pieces * way.degree)]
    return line


def main() -> None:
    """Print the table."""
    columns = ["link", "way", "messages", "measured", "predicted", "error"]
    print_table(
        columns,
        [
            [r.link, r.way, f"{r.messages:.2f}", f"{r.measured:.2f}", f"{r.predicted:.2f}", f"{r.error:+.0%}"]
            for r in rows()
        ],
    )


if __name__ == "__main__":
    main()
