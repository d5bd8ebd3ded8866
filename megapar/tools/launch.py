"""``megapar launch``: one validation, one report, then torch's elastic agent in this process.

torchrun turns every failure into status 1. Here a refusal stays 2, and a run that was asked to stop and saved is 0.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from megapar.config.config import Config
from megapar.config.flag import SCRIPTS
from megapar.config.hints import near_path
from megapar.config.launched import LAUNCH
from megapar.errors import MegaparError
from megapar.tools.environment import environment
from megapar.tools.job_name import launch_name
from megapar.tools.parser import Parser, count

if TYPE_CHECKING:
    from megapar.tools.agent import Place

REFUSED = 2
MOST_GRACE_SECONDS = 10  # for ranks whose job has failed: to say what they saw, not to finish anything
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


@dataclass(frozen=True)
class Launch:
    """What to start. environment: variables for the workers beside this process' own."""

    nproc_per_node: int
    min_nodes: int
    nnodes: int
    max_restarts: int
    rdzv_backend: str
    rdzv_endpoint: str
    rdzv_id: str
    rdzv_conf: Mapping[str, str]
    stop_timeout: float
    command: tuple[str, ...]
    environment: dict[str, str]
    local_addr: str = ""
    log_dir: str = ""

    @property
    def world_size(self) -> int:
        """Ranks on all nodes when all are there."""
        return self.nproc_per_node * self.nnodes


def main(argv: Sequence[str]) -> int:
    """Validate, run, and give the job's status: 0 done, 2 refused, 1 anything else."""
    parser = _parser()
    options = parser.parse_args(argv)
    script = Path(options.script)
    if not script.is_file():
        parser.error(f"script {script} does not exist. {near_path(options.script)}")
    most = options.nnodes[1]
    if most > 1 and not options.rdzv_endpoint:
        parser.error("several nodes need --rdzv-endpoint HOST:PORT of one of them")
    if most > 1 and options.max_restarts and not options.rdzv_id and options.rdzv_backend != "c10d":
        parser.error(
            "--max-restarts on several nodes needs a --rdzv-id of this job alone, the same on every node, or "
            "--rdzv-backend c10d"
        )
    if options.max_restarts and options.rdzv_backend == "static":
        parser.error("--max-restarts needs --rdzv-backend c10d: static nodes meet once")
    launch = _launch(options)
    config = _validate(script, launch, options.node_rank)
    wanted = environment(launch.nproc_per_node, config)
    launch = replace(launch, environment={name: value for name, value in wanted.items() if name not in os.environ})
    for line in _fewer_nodes(launch):
        print(f"megapar launch: {line}", file=sys.stderr)
    try:
        place = _meet(launch)
    except MegaparError as error:
        print(f"megapar launch: {error}", file=sys.stderr)
        return error.exit_status
    launch = _named(launch, place)
    for name, value in (launch.environment | _interfaces(place)).items():
        os.environ[name] = value
        print(f"megapar launch: {name}={value}", file=sys.stderr)
    if options.preflight:
        measure = ("-m", "megapar.tools.preflight")
        name = f"{launch.rdzv_id}-preflight"
        before = replace(launch, command=measure, rdzv_id=name, min_nodes=launch.nnodes, max_restarts=0)
        status = run(before, place)
        if status:
            print("megapar launch: the preflight failed; the job is not started", file=sys.stderr)
            return status
    return run(launch, place)


def _meet(launch: Launch) -> Place | None:
    """Where the nodes meet, and what this one listens on; None where a backend of torch's own decides that."""
    from megapar.tools import agent

    if launch.rdzv_backend != "c10d" or launch.rdzv_conf.get("store_type", "tcp") != "tcp":
        return None
    if not launch.rdzv_endpoint:
        return agent.meet_here()
    said = launch.rdzv_conf.get("is_host", "").lower()
    hosts = None if not said else said in ("1", "true", "yes", "t", "y")
    place = agent.meet_at(launch.rdzv_endpoint, launch.local_addr, hosts)
    if place.hosted:
        print(f"megapar launch: nodes meet at {place.endpoint}", file=sys.stderr, flush=True)
    return place


def _named(launch: Launch, place: Place | None) -> Launch:
    """With a name that all nodes have heard, and with another one that no launch before it had."""
    name = launch_name(launch.nnodes, launch.rdzv_id, place.store if place else None)
    os.environ[LAUNCH] = name
    return replace(launch, rdzv_id=launch.rdzv_id or name or "megapar")


def _interfaces(place: Place | None) -> dict[str, str]:
    """Variables by which gloo and NCCL listen on loopback, where nothing of the job need be reached from outside."""
    if place is None or not place.address.startswith("127.") or sys.platform != "linux":
        return {}
    return {name: "lo" for name in INTERFACES if name not in os.environ}


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="megapar launch",
        description="Check the configuration once, then start the ranks of this node.",
        epilog="Exit status: 0 done (also after SIGTERM once the checkpoint is safe), 2 refused, 1 anything else.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--nproc-per-node", type=count, default=1, metavar="N", help="ranks on this node (default: 1)")
    add("--nnodes", type=_nodes, default=(1, 1), metavar="N", help="nodes (default: 1), or MIN:MAX of them")
    add(
        "--max-restarts",
        type=int,
        default=0,
        metavar="N",
        help="how often all ranks are started again after one failed, from the newest sound checkpoint (default: 0)",
    )
    add("--node-rank", type=int, metavar="N", help="this node's number; only node 0 prints the report")
    add("--rdzv-backend", default="c10d", help="rendezvous backend of torch's elastic agent (default: c10d)")
    add(
        "--rdzv-endpoint",
        default="",
        metavar="HOST:PORT",
        help="where nodes meet, an address of one of them (default: a free local port)",
    )
    add("--local-addr", default="", metavar="HOST", help="this node's address (default: as it reaches the endpoint)")
    add("--rdzv-id", default="", help="name of the job, the same on every node (default: a random one)")
    add("--rdzv-conf", default="", metavar="K=V,...", help="further rendezvous settings")
    add("--log-dir", default="", metavar="DIR", help="write every rank's output to files there, too, with its prefix")
    add("--preflight", action="store_true", help="first time every node's products and every group's bandwidth")
    add(
        "--stop-timeout",
        type=float,
        default=300.0,
        metavar="SECONDS",
        help="time the ranks get to save after SIGTERM before they are killed (default: 300)",
    )
    add("script", help="pretrain_moe.py, pretrain_ernie.py, or a script of your own")
    add("flags", nargs=argparse.REMAINDER, help="the script's flags")
    return parser


def _nodes(text: str) -> tuple[int, int]:
    least, _, most = text.partition(":")
    low, high = count(least), count(most or least)
    if low > high:
        raise argparse.ArgumentTypeError(f"MIN:MAX with MIN <= MAX, got {text}")
    return low, high


def _launch(options: argparse.Namespace) -> Launch:
    settings = dict(pair.partition("=")[::2] for pair in options.rdzv_conf.split(",") if pair)
    if options.rdzv_backend == "static" and options.node_rank is not None:
        settings["rank"] = options.node_rank
    least, most = options.nnodes
    return Launch(
        nproc_per_node=options.nproc_per_node,
        min_nodes=least,
        nnodes=most,
        max_restarts=options.max_restarts,
        rdzv_backend=options.rdzv_backend,
        rdzv_endpoint=options.rdzv_endpoint,
        rdzv_id=options.rdzv_id,
        rdzv_conf=settings,
        local_addr=options.local_addr,
        stop_timeout=options.stop_timeout,
        command=(options.script, *options.flags),
        environment={},
        log_dir=options.log_dir,
    )


def _validate(script: Path, launch: Launch, node_rank: int | None) -> Config | None:
    """Refuse, help or validate once for all ranks of this node; None for scripts that speak for themselves."""
    kinds = [kind for kind, name in SCRIPTS.items() if name == script.name]
    if not kinds:
        return None
    from megapar.arguments import parse_or_exit
    from megapar.training.sizes import outline

    # As the ranks will find it. Where they meet is not known yet; that they will is the agent's part.
    environ = {
        "WORLD_SIZE": str(launch.world_size),
        "RANK": str(node_rank or 0),
        "MASTER_ADDR": "?",
        "MASTER_PORT": "?",
        "TORCHELASTIC_RUN_ID": launch.rdzv_id,
    }
    # Rank 0 will print the warnings.
    return parse_or_exit(kinds[0], launch.command[1:], environ, outline=outline, warn=False, starting=True)


def _fewer_nodes(launch: Launch) -> Iterator[str]:
    """What the run would do on fewer nodes, where that is allowed."""
    from megapar.tools.elastic import command

    for nodes in range(launch.min_nodes, launch.nnodes):
        ranks = nodes * launch.nproc_per_node
        try:
            yield f"on {nodes} nodes: {command([str(launch.world_size), *launch.command], ranks)[1] or 'unchanged'}"
        except LookupError as error:
            yield f"on {nodes} nodes the run would end: {error}"


def run(launch: Launch, place: Place | None) -> int:
    """Start the ranks and wait. The status is the first failed rank's 2, else 1; 0 when all ended well."""
    from megapar.tools.agent import Meeting, make_agent, no_more_restarts

    command = ["-u", *launch.command]
    if launch.min_nodes < launch.nnodes:
        command = ["-u", "-m", "megapar.tools.elastic", str(launch.world_size), *launch.command]
    meeting = Meeting(
        *(launch.rdzv_backend, launch.rdzv_id, launch.min_nodes, launch.nnodes),
        address=place.address if place else launch.local_addr or ("localhost" if launch.nnodes == 1 else None),
        store=place.store if place else None,
        endpoint=place.endpoint if place else launch.rdzv_endpoint,
        settings=launch.rdzv_conf,
    )
    grace = math.ceil(min(launch.stop_timeout, MOST_GRACE_SECONDS))
    agent = make_agent(meeting, command, launch.nproc_per_node, launch.max_restarts, grace, launch.log_dir)
    stopper = Stopper(launch.stop_timeout, lambda: no_more_restarts(agent))
    stopper.install()
    try:
        result = agent.run()
    finally:
        stopper.close()
        agent._worker_group.spec.rdzv_handler.shutdown()
    return _status(result.failures) if result.is_failed() else 0


def _status(failures: Mapping[int, Any]) -> int:
    """2 where the earliest failure is a refusal (the agent kills the ranks that are left), else 1."""
    first = min(failures.values(), key=lambda failure: failure.timestamp)
    refused = any(f.exitcode == REFUSED for f in failures.values()) and first.exitcode in (REFUSED, -signal.SIGTERM)
    if refused:
        return REFUSED
    for rank, failure in sorted(failures.items()):
        how = f"signal {-failure.exitcode}" if failure.exitcode < 0 else f"status {failure.exitcode}"
        print(f"megapar launch: rank {rank} ended with {how}", file=sys.stderr)
    return 1


class Stopper:
    """Passes SIGTERM and SIGINT on to the ranks, which save and end; the second signal or the time-out kills them.

    when_asked: called at the first signal, before it is passed on.
    """

    def __init__(self, timeout_seconds: float, when_asked: Callable[[], None] = lambda: None) -> None:
        self.timeout_seconds = timeout_seconds
        self._when_asked = when_asked
        self._asked = False
        self._timer: threading.Timer | None = None

    def install(self) -> None:
        """Handle the signals of this process from now on."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        if self._asked:
            self._kill()
            return
        self._asked = True
        self._when_asked()
        _signal_children(signal.SIGTERM)
        self._timer = threading.Timer(self.timeout_seconds, self._kill)
        self._timer.daemon = True
        self._timer.start()

    def _kill(self) -> None:
        _signal_children(signal.SIGKILL)

    def close(self) -> None:
        """Forget the time-out: the ranks have ended."""
        if self._timer is not None:
            self._timer.cancel()


def _signal_children(number: signal.Signals) -> None:
    """Send a signal to the ranks: each leads a session of its own, unlike other children of this process."""
    for pid in _children(os.getpid()):
        try:
            if os.getsid(pid) == pid:
                os.kill(pid, number)
        except ProcessLookupError:
            continue


def _children(parent: int) -> list[int]:
    """Direct children by /proc; ranks are started by the agent, which does not show their numbers."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            # The second field is the command in parentheses, which may hold anything; the state and parent follow it.
            state_and_parent = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(state_and_parent[1]) == parent:
            found.append(int(entry.name))
    return found
