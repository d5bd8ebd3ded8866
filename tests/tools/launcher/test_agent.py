"""What megapar's agent does otherwise than torch's."""

from __future__ import annotations

import signal
import subprocess

import pytest
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from megapar.tools.launcher.agent import Agent, make_agent
from megapar.tools.launcher.launch_options import read
from megapar.tools.launcher.meeting import meet_here
from megapar.tools.launcher.stopper import Stopper


class Stuck:
    """A process that no signal ends, as torch holds it."""

    def __init__(self) -> None:
        self.proc, self.signals = self, list[signal.Signals]()
        self.pid = 0

    def poll(self) -> int | None:
        return None

    def wait(self, timeout: float) -> None:
        raise subprocess.TimeoutExpired("", timeout)

    def close(self, death_sig: signal.Signals) -> None:
        self.signals.append(death_sig)


class Ranks:
    """Processes that note how they are ended."""

    def __init__(self) -> None:
        self.ended: list[tuple[signal.Signals | None, int]] = []
        self.subprocess_handlers: dict[int, Stuck] = {}
        self._running_local_ranks: set[int] = set()

    def pids(self) -> dict[int, int]:
        return {rank: one.proc.pid for rank, one in self.subprocess_handlers.items()}

    def close(self, death_sig: signal.Signals | None = None, timeout: int = 30) -> None:
        self.ended.append((death_sig, timeout))


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    made = Ranks()
    monkeypatch.setattr(
        LocalElasticAgent, "_start_workers", lambda self, group: setattr(self, "_pcontext", made) or made.pids()
    )
    return made


def agent(*options: str) -> Agent:
    launch, _ = read(["--rdzv-id", "x", "--stop-timeout", "7", *options, __file__])
    return make_agent(launch, meet_here(), ["-c", ""], Stopper(7.0))


def test_ranks_that_are_left_after_a_failure_get_the_grace_and_healthy_ones_their_own_time(ranks: Ranks) -> None:
    made = agent()
    made._start_workers(made._worker_group)
    ranks.close()  # as torch's supervision does
    made._stop_workers(made._worker_group)
    assert ranks.ended == [(None, 7), (signal.SIGTERM, 30)]


def test_nothing_waits_for_a_rank_that_no_signal_ends(ranks: Ranks, capsys: pytest.CaptureFixture[str]) -> None:
    stuck = Stuck()
    ranks.subprocess_handlers, ranks._running_local_ranks = {0: stuck}, {0}
    made = agent("--max-restarts", "5", "--no-warm-start")
    made._worker_group.workers[0].global_rank = 3
    made._start_workers(made._worker_group)
    ranks.close()
    assert stuck.signals == [signal.SIGTERM, signal.SIGKILL]
    assert ranks.subprocess_handlers == {}
    assert ranks._running_local_ranks == set()
    assert made._remaining_restarts == 0
    said = capsys.readouterr().err
    assert "processes: rank 3: 0\n" in said
    assert "process 0 of rank 3 cannot be ended" in said


class Deaf(Stuck):
    """A process that only SIGKILL ends."""

    def poll(self) -> int | None:
        return -signal.SIGKILL if signal.SIGKILL in self.signals else None

    def wait(self, timeout: float) -> None:
        if self.poll() is None:
            super().wait(timeout)


def test_which_ranks_had_to_be_killed_is_known(ranks: Ranks, capsys: pytest.CaptureFixture[str]) -> None:
    ranks.subprocess_handlers = {0: Deaf()}
    made = agent("--no-warm-start")
    made._start_workers(made._worker_group)
    ranks.close()
    assert made._killed == {0}
