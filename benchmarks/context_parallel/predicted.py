"""Exposed messages of this benchmark by the planner's timeline, next to the measured ones in README.md.

    python -m benchmarks.context_parallel.predicted

The plan's attention core gets two rates that were measured separately: an algorithm's computation alone, and the time
that its messages add if each is waited for where it is launched. Errors are shares of that time.
"""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks.support.device import scaled
from benchmarks.support.prediction import Row, planned, print_rows
from megapar.core.device.kinds import kinds
from megapar.planning.operator_program import WHOLE, OperatorPrograms
from megapar.planning.operator_time import OperatorTime
from megapar.planning.timeline import Event, ProgramPart, Send, Timeline, Wait, Work

README = Path(__file__).with_name("README.md")
MEASURED = re.compile(r"^\| (ring|gathered|Ulysses) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|", re.MULTILINE)
ALGORITHMS = {"ring": "megatron_cp_algo", "gathered": "allgather_cp_algo", "Ulysses": "ulysses_cp_algo"}
LENGTH = 4096


def rows() -> list[Row]:
    """Return the algorithms of the table."""
    found = []
    for name, *numbers in MEASURED.findall(README.read_text()):
        alone, waiting, _, waited = map(float, numbers)
        messages = waiting - alone
        found.append(Row(name, "waiting, s", waited, _waited(ALGORITHMS[name], alone, messages), messages))
    return found


def _waited(algorithm: str, computation: float, messages: float) -> float:
    """Return the time that forward and backward wait, if they compute and send for so long."""
    core = _core(algorithm, 1.0, 1.0)
    works = sum(event.seconds for event in _events(core) if isinstance(event, Work))
    bare = Timeline().run(_waiting(core)).waited
    core = _core(algorithm, works / computation, bare / messages)
    return Timeline().run(core.forward).waited + Timeline().run(core.backward).waited


def _core(algorithm: str, faster: float, wider: float) -> ProgramPart:
    """Return the core's program on a CPU that is so many times as fast, with links that are so many times as wide."""
    flags = ["--dtype", "fp32", "--world-size", "2", "--cp-degree", "2", "--num-experts", "0"]
    flags += ["--num-layers", "1", "--hidden-size", "512", "--num-attention-heads", "8", "--num-query-groups", "4"]
    flags += ["--seq-length", str(LENGTH), "--context-parallel-algo", algorithm]
    run = planned("moe", flags, scaled(kinds()["cpu"], faster, wider))
    programs = OperatorPrograms(run, OperatorTime(run), defers=False)
    operator = next(operator for operator in run.costs.attention if operator.name == "core")
    return programs.communicating("core", operator, WHOLE)


def _events(core: ProgramPart) -> list[Event]:
    return [*core.forward, *core.backward]


def _waiting(core: ProgramPart) -> list[Event]:
    """Return the launches of a program, each waited for at once."""
    launched = [event for event in _events(core) if isinstance(event, Send)]
    return [event for one in launched for event in (one, Wait(one.name))]


def main() -> None:
    """Print the table."""
    print_rows(rows())


if __name__ == "__main__":
    main()
