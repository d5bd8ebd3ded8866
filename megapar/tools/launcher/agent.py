"""torch's elastic agent with shorter waits, fewer hopeless restarts and its own failure messages."""

from __future__ import annotations

import logging
import math
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousError, RendezvousTimeoutError

from megapar.errors import DistributedError
from megapar.health.stop.parent import be_launcher
from megapar.launch_environment import failure_file
from megapar.tools.launcher.failures import (
    Failure,
    PendingKills,
    describe_unkillable,
    end_ranks,
    failed_ranks,
    first_failure,
    is_refusal,
    next_action,
    repeated,
)
from megapar.tools.launcher.launch_options import Launch
from megapar.tools.launcher.meeting import MeetingPlace, make_handler, nodes_of
from megapar.tools.launcher.rank_files import RankLogs
from megapar.tools.launcher.stopper import Stopper, Waiting
from megapar.tools.launcher.warm import Warm, starting_with

MAX_GRACE_SECONDS = 10  # for ranks of a failed job to report their errors, not to finish their work
_FAILURES = "torch.distributed.elastic.multiprocessing.api"


def make_agent(launch: Launch, place: MeetingPlace, arguments: Sequence[str], stopper: Stopper) -> Agent:
    """Return an agent that runs ``python ARGUMENTS`` as the ranks of this node, and informs the stopper."""
    # On a signal, the agent would exit immediately and lose the statuses of its ranks. The stopper handles signals
    # instead. "none" is not the name of a signal; an empty value would select torch's default list.
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "none"
    logging.getLogger(_FAILURES).addFilter(_is_worth_logging)
    spec = WorkerSpec(
        role="rank",
        local_world_size=launch.nproc_per_node,
        entrypoint=sys.executable,
        args=tuple(arguments),
        rdzv_handler=make_handler(launch, place),
        max_restarts=launch.max_restarts,
        monitor_interval=0.1,
        local_addr=place.address,
    )
    grace = math.ceil(min(launch.stop_timeout, MAX_GRACE_SECONDS))
    return Agent(spec, RankLogs(launch.log_dir), grace, stopper, Warm() if launch.warm_start else None)


class ClosedError(DistributedError):
    """A rendezvous that is closed: its job has ended or accepts no more nodes."""


class Agent(LocalElasticAgent):
    """torch's agent with shorter waits, fewer hopeless restarts and its own failure messages.

    After a failure, torch gives the other ranks 30 s to exit, regardless of ``shutdown_timeout``. Ranks that wait in a
    collective or are stopped exit only on SIGKILL, so this time dominates a restart. Here they get ``grace`` seconds.
    The agent also does not wait for a rank that no signal can end, does not start ranks next to such a process, and
    does not restart if the same failure would repeat. It informs the stopper of its phases and sets the environment by
    which ranks end with their launcher.
    """

    def __init__(self, spec: WorkerSpec, logs: LogsSpecs, grace: int, stopper: Stopper, warm: Warm | None) -> None:
        # Prefix log lines with the global rank, not with torch's local one.
        super().__init__(spec, logs_specs=logs, shutdown_timeout=grace, log_line_prefix_template="[rank${rank}]:")
        stopper.on_stop = self.no_more_restarts
        self._stopper = stopper
        self._warm = warm
        self._dying = PendingKills()
        self._checked_at = 0.0
        self._restarts_blocked = False
        self._killed: set[int] = set()
        self._failure: Failure | None = None

    def run(self, role: str = "default") -> Any:
        """Run the ranks. Raises DistributedError if the nodes cannot agree, ClosedError if the job has ended."""
        try:
            return super().run(role)
        except RendezvousClosedError as error:
            reason = "the job has ended on the other nodes, or accepts no more nodes"
            raise ClosedError(f"the nodes' rendezvous failed: {reason}") from error
        except RendezvousError as error:
            raise DistributedError(f"the nodes' rendezvous failed: {str(error) or type(error).__name__}") from error
        finally:
            if self._warm is not None:
                self._warm.close()

    def no_more_restarts(self) -> None:
        """End the job after the next failure instead of restarting the ranks."""
        self._remaining_restarts = 0

    def close_rendezvous(self) -> None:
        """End the job on all nodes."""
        self._worker_group.spec.rdzv_handler.shutdown()

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        handler: Any = worker_group.spec.rdzv_handler
        limit = handler._settings.timeout.join.total_seconds()
        try:
            with self._stopper.idle("waiting for nodes"), Waiting(lambda: nodes_of(handler), limit):
                super()._rendezvous(worker_group)
        except RendezvousTimeoutError as error:
            raise DistributedError(f"gave up waiting for {nodes_of(handler)}, after {limit:g} s") from error
        except (ValueError, LookupError, TypeError) as error:  # torch does not check the JSON of the other agents
            raise DistributedError(f"the messages of the other nodes cannot be parsed: {error!r:.200}") from error

    def _exit_barrier(self) -> None:
        with self._stopper.leaving():
            super()._exit_barrier()

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result: RunResult = super()._monitor_workers(worker_group)
        ranks = self._pcontext
        assert ranks is not None
        if result.state == WorkerState.FAILED:
            # Without a killed rank, read the notes of all ranks: the rank that failed first may exit after the ranks
            # that lost it.
            killed = any(failure.exitcode < 0 for failure in result.failures.values())
            failed = [failure.local_rank for failure in result.failures.values()] if killed else list(ranks.error_files)
            files = [ranks.error_files[rank] for rank in failed]
            notes = [failure_file({"TORCHELASTIC_ERROR_FILE": file}) or "" for file in files]
            previous, self._failure = self._failure, first_failure(notes)
            if self._remaining_restarts and is_refusal(result.failures):
                self._block_restarts("the run is refused; it is not restarted")
            if self._remaining_restarts and (why := repeated(previous, self._failure)):
                self._block_restarts(why)
            self._report(result, ranks.error_files)
        elif result.state == WorkerState.HEALTHY and time.monotonic() > self._checked_at + 1:
            self._checked_at = time.monotonic()
            if stuck := self._dying.stuck(ranks.pids()):
                pids = ranks.pids()
                ranks.close()  # ends the other ranks and reports those that cannot be ended
                failures = {
                    worker_group.workers[rank].global_rank: ProcessFailure(rank, pids[rank], 1, "") for rank in stuck
                }
                return RunResult(WorkerState.FAILED, failures=failures)
        return result

    def _report(self, result: RunResult, error_files: Mapping[int, str]) -> None:
        """Print which ranks failed and whether the job restarts. error_files: local rank -> torch's error file."""
        maximum, left = self._worker_group.spec.max_restarts, self._remaining_restarts
        notes = {
            rank: failure_file({"TORCHELASTIC_ERROR_FILE": error_files[failure.local_rank]})
            for rank, failure in result.failures.items()
        }
        statuses = {rank: failure.exitcode for rank, failure in result.failures.items()}
        job_ends = self._restarts_blocked or bool(self._stopper.signal)
        killed = {rank for rank, failure in result.failures.items() if failure.local_rank in self._killed}
        if message := failed_ranks(statuses, notes, next_action(maximum, left, job_ends=job_ends), killed):
            print(f"megapar launch: {message}", file=sys.stderr, flush=True)

    def _block_restarts(self, why: str) -> None:
        self._remaining_restarts, self._restarts_blocked = 0, True
        print(f"megapar launch: {why}", file=sys.stderr, flush=True)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        be_launcher(os.environ, self._worker_group.spec.rdzv_handler.get_run_id())
        if self._warm is not None:
            with self._stopper.idle("importing torch for the ranks"):
                self._warm.ready()
        with self._stopper.starting(), starting_with(self._warm):
            started: dict[int, Any] = super()._start_workers(worker_group)
        ranks: Any = self._pcontext  # torch's SubprocessContext
        close, grace = ranks.close, self._shutdown_timeout
        self._killed = set()
        numbers = [f"rank {worker_group.workers[rank].global_rank}: {pid}" for rank, pid in sorted(started.items())]
        print(f"megapar launch: processes: {', '.join(numbers)}", file=sys.stderr, flush=True)

        def within_grace(death_sig: signal.Signals | None = None, timeout: int = grace) -> None:
            handlers = ranks.subprocess_handlers
            alive = {rank for rank, handler in handlers.items() if handler.proc.poll() is None}
            stuck = end_ranks(handlers, death_sig or signal.SIGTERM, timeout)
            self._killed |= {rank for rank in alive if handlers[rank].proc.poll() == -signal.SIGKILL}
            for rank in stuck:
                self._block_restarts(describe_unkillable(worker_group.workers[rank].global_rank, ranks.pids()[rank]))
                del ranks.subprocess_handlers[rank]  # otherwise torch waits for it
                ranks._running_local_ranks.discard(rank)
            close(death_sig, timeout)

        # After a failure, torch's SubprocessContext calls its close() without a timeout, and start_processes, which
        # creates it, does not take one. The only way to set it is on the object. Ranks that are stopped because nodes
        # join keep torch's 30 s.
        ranks.close = within_grace
        return started


def _is_worth_logging(record: logging.LogRecord) -> bool:
    """Return False for torch's messages on failed ranks, which the launcher reports, and on unhandled signals."""
    return not record.getMessage().startswith(("failed (exitcode:", "Sending process", "Failed to register signal"))
