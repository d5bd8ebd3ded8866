"""The measured AMPipe degree: what may be chosen, how it is decided, and that it is kept."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
import torch

from megapar.arguments import parse
from megapar.core.comm.axis import Axis
from megapar.training.building import ampipe_degree as degree
from tests.equivalence.compare import differences
from tests.equivalence.run import Trace, trace
from tests.equivalence.table import FORCED_SUITE
from tests.support.forced import forced_parts
from tests.support.ranks import run_ranks


def legal(line: str, world_size: int = 2) -> tuple[tuple[int, ...], str]:
    line = f"--data-path mock --ampipe-degree auto {line}"
    return degree.legal_degrees(parse("moe", shlex.split(line), {"WORLD_SIZE": str(world_size)}))


SPLIT = "--ep-degree 2 --mp-degree 2 --sequence-parallel --expert-mp-degree 1 --moe-model-type deepspeed_moe"


@pytest.mark.parametrize(
    ("line", "degrees", "why"),
    [
        ("--ep-degree 2", (1, 2, 4), ""),
        ("--ep-degree 2 --moe-model-type deepspeed_moe", (1, 2, 4), ""),
        ("--ep-degree 2 --seq-length 3", (1, 2), ""),
        ("", (1,), "--ep-degree"),
        ("--ep-degree 2 --hidden-dropout 0.1", (1,), "dropout"),
        ("--cp-degree 2 --ep-degree 2", (1,), "order of the data"),
        ("--ep-degree 2 --no-use-flash-attn", (1,), "flash"),
        ("--ep-degree 2 --recompute-interval 1 --reset-attention-mask", (1, 2, 4), ""),
        ("--ep-degree 2 --adaptive-recompute-device-size 1024", (1,), "adaptive"),
        ("--ep-degree 2 --moe-model-type deepspeed_moe --moe-drop-policy probs", (1,), "probs"),
        ("--ep-degree 2 --moe-model-type deepspeed_moe --ampipe-capacity slice", (1,), "drop"),
        (f"{SPLIT} --moe-capacity-scope rank", (1,), "drop"),
        (SPLIT, (1, 2, 4), ""),
    ],
)
def test_only_degrees_that_leave_the_numbers_alone(line: str, degrees: tuple[int, ...], why: str) -> None:
    found, reason = legal(line)
    assert found == degrees
    assert why in reason


def test_a_degree_must_be_worth_it() -> None:
    assert degree.choose({1: 1.0, 2: 0.99, 4: 1.2})[0] == 1
    assert degree.choose({1: 1.0, 2: 0.97, 4: 0.9})[0] == 4
    chosen, why = degree.choose({1: 1.0, 2: 0.5})
    assert chosen == 2
    assert "1: 1000.0 ms, 2: 500.0 ms" in why


def test_turns_are_interleaved_and_the_first_round_is_unseen() -> None:
    turns: list[int] = []

    def timed(slices: int) -> float:
        turns.append(slices)
        return 100.0 if len(turns) <= 2 else float(slices)

    seconds = degree.measure((1, 2), timed, Axis.single("world"), torch.device("cpu"))
    assert turns == [1, 2] * (1 + degree.REPEATS)
    assert seconds == {1: 1.0, 2: 2.0}


def kept(root: Path) -> set[int]:
    """The degrees that checkpoints under ``root`` hold."""
    return {json.loads(path.read_text())["ampipe_degree"] for path in root.rglob("scalars.json")}


def test_a_resumed_run_takes_the_stored_degree_and_has_the_numbers_of_one_process(tmp_path: Path) -> None:
    row, folders = FORCED_SUITE[0][0], [str(tmp_path / name) for name in "ab"]
    flags = [*row.flags(), "--dtype", "fp64"]

    def ranks(degree: int, *more: str) -> Trace:
        asked = (trace, "moe", [*flags, *more], 2, None, "gloo", forced_parts(degree=degree))
        found: Trace = run_ranks(2, *asked, group=False)[0]
        return found

    first = ranks(2, "--save", folders[0], "--save-interval", "1")
    later = ranks(4, "--load", folders[0], "--ckpt-step", "1", "--save", folders[1])
    assert [kept(Path(folder)) for folder in folders] == [{2}, {2}]
    assert len(later.losses) == 1
    alone = run_ranks(1, trace, "moe", [*row.reference_flags(), "--dtype", "fp64"], 2, group=False)[0]
    assert differences(first.continued_by(later), alone) == []
