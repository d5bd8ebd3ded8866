"""Exposed messages of this benchmark by the planner's timeline, next to the committed results.

    python -m benchmarks.communication_hiding.predicted

The plan of the same run gets two rates from the serial step: its computation alone, and its messages alone. Errors are
shares of the messages' own time.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

from benchmarks.communication_hiding.shape import WAYS, make_sizes
from benchmarks.support.device import StepParts, fitted
from benchmarks.support.prediction import Row, cpu_calibration, cpu_on_nodes, planned, print_rows
from megapar.core.device.kinds import DeviceKind
from megapar.moe.slicing import Slicing
from megapar.planning.operator_time import OperatorTime
from megapar.planning.stage_time import StagePrograms, StageTime
from megapar.planning.timeline import BETWEEN, LINKS

RESULTS = Path(__file__).with_name("results")
SERIAL = "serial"


def rows() -> list[Row]:
    """Return all ways and rates of the committed results."""
    found = []
    for path in sorted(RESULTS.glob("*.json")):
        result = json.loads(path.read_text())
        length = result.get("seq_length", 1024)
        for rate in result["rates"]:
            messages = rate["exposed"][SERIAL]
            parts = StepParts(rate["seconds"][f"alone {SERIAL}"], messages)
            kind = fitted(cpu_on_nodes(1), partial(_serial, length), parts)
            for way in WAYS:
                time, name = _time(WAYS[way], length, kind), f"{rate['link']}, {way}"
                waited = time.forward.waited + time.backward.waited
                found.append(Row(name, "waiting, s", rate["exposed"][way], waited, messages, given=way == SERIAL))
    return found


def _serial(length: int, kind: DeviceKind) -> StepParts:
    """Return the planned parts of the serial step."""
    time, link = _time(WAYS[SERIAL], length, kind), LINKS.index(BETWEEN)
    messages = time.forward.busy[link] + time.backward.busy[link]
    return StepParts(time.both - time.forward.waited - time.backward.waited, messages)


def _time(way: Slicing, length: int, kind: DeviceKind) -> StageTime:
    """Return the planned time of one sample."""
    run = planned("moe", _flags(way, length), kind)
    return StagePrograms(run, OperatorTime(run, cpu_calibration(run))).stage(0)


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
    line = ["--dtype", "fp32", "--untie-embeddings-and-output-weights"]
    line += [word for name, number in numbers.items() for word in (name, str(number))]
    line += ["--ampipe-cross-layer"] if way.cross_layer else []
    if way.expert_pieces:
        line += ["--moe-model-type", "deepspeed_moe", "--use-pipe-experts"]
        line += ["--pipe-experts-multi-data", str(way.expert_pieces * way.degree)]
    return line


def main() -> None:
    """Print the table."""
    print_rows(rows())


if __name__ == "__main__":
    main()
