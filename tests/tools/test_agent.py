"""What megapar's agent does otherwise than torch's."""

from __future__ import annotations

import signal

import pytest
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import SubprocessContext

from megapar.tools.agent import Meeting, make_agent, meet_here


class Ranks(SubprocessContext):
    """Processes that note how they are ended."""

    def __init__(self) -> None:
        self.subprocess_handlers = {}
        self.ended: list[tuple[signal.Signals | None, int]] = []

    def close(self, death_sig: signal.Signals | None = None, timeout: int = 30) -> None:
        self.ended.append((death_sig, timeout))


def test_ranks_that_are_left_after_a_failure_get_the_grace_and_healthy_ones_their_own_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ranks, place = Ranks(), meet_here()
    monkeypatch.setattr(
        LocalElasticAgent, "_start_workers", lambda self, group: setattr(self, "_pcontext", ranks) or {}
    )
    agent = make_agent(Meeting("c10d", "x", 1, 1, place.address, place.store), ["-c", ""], 1, 0, grace=7)
    agent._start_workers(agent._worker_group)
    ranks.close()  # as torch's supervision does
    agent._stop_workers(agent._worker_group)
    assert ranks.ended == [(None, 7), (signal.SIGTERM, 30)]
