"""``megapar launch``: one validation, one report, then torch's elastic agent in this process.

torchrun turns every failure into status 1. Here a refusal stays 2, and a run that was asked to stop and saved is 0.
"""

from __future__ import annotations

import math
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megapar.config.config import Config
from megapar.config.launched import LAUNCH, STOP_TIMEOUT
from megapar.core.health.signal_listener import write_stderr
from megapar.errors import Complaint, ConfigError, MegaparError
from megapar.schema.flag import SCRIPTS
from megapar.tools.launcher import own
from megapar.tools.launcher.environment import environment
from megapar.tools.launcher.failures import REFUSED, is_refusal
from megapar.tools.launcher.interfaces import interfaces
from megapar.tools.launcher.job_name import launch_name
from megapar.tools.launcher.launch_options import Launch, read
from megapar.tools.launcher.stopper import Stopped, Stopper
from megapar.tools.launcher.waiting import Waiting
from megapar.training.reports.streams import make_patient

if TYPE_CHECKING:
    from megapar.tools.launcher.agent import MeetingPlace

MOST_GRACE_SECONDS = 10  # for ranks whose job has failed: to say what they saw, not to finish anything


def main(argv: Sequence[str]) -> int:
    """Validate, run, and give the job's status: 0 done, 2 refused, 1 anything else."""
    # Who starts this may ignore the ends of children, and that outlives exec: the kernel keeps no status then, which
    # subprocess takes for 0. Ranks get the usual effect with it.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    launch, options = read(argv)
    script = Path(options.script)
    config = _validate(script, launch, options.node_rank)
    wanted = environment(launch.nproc_per_node, config)
    launch = replace(launch, environment={name: value for name, value in wanted.items() if name not in os.environ})
    make_patient()
    for line in _fewer_nodes(launch):
        print(f"megapar launch: {line}", file=sys.stderr)
    stopper = Stopper(launch.stop_timeout)
    stopper.install()
    try:
        return _start(launch, stopper, preflight=options.preflight)
    except MegaparError as error:
        write_stderr(f"megapar launch: {error}")
        return error.exit_status
    except Stopped as stopped:
        write_stderr(f"megapar launch: {stopped}")
        return 1
    finally:
        stopper.close()


def _start(launch: Launch, stopper: Stopper, *, preflight: bool) -> int:
    """Meet the other nodes and run; the job's status. Raises MegaparError, and Stopped where no ranks were there."""
    if launch.log_dir:
        _make_log_folder(launch.log_dir)
    with stopper.idle("meeting the other nodes"), Waiting(lambda: _first_of(launch)):
        place = _meet(launch)
    os.environ[STOP_TIMEOUT] = f"{stopper.ranks_seconds:g}"
    launch = _named(launch, place)
    for name, value in (launch.environment | (interfaces(place.address) if place else {})).items():
        os.environ[name] = value
        print(f"megapar launch: {name}={value}", file=sys.stderr)
    if preflight and (status := _preflight(launch, place, stopper)):
        print("megapar launch: the preflight failed; the job is not started", file=sys.stderr)
        return status
    return run(launch, place, stopper)


def _preflight(launch: Launch, place: MeetingPlace | None, stopper: Stopper) -> int:
    """Its status; 0 for a node that comes when it is over, to a job that runs."""
    from megapar.tools.launcher.agent import ClosedError

    name, measure = f"{launch.rdzv_id}-preflight", own.line("megapar.tools.launcher.preflight")
    before = replace(launch, command=measure, rdzv_id=name, min_nodes=launch.nnodes, max_restarts=0, warm_start=False)
    try:
        return run(before, place, stopper)
    except ClosedError:
        print("megapar launch: the preflight of this job is over: joining it without one", file=sys.stderr, flush=True)
        return 0


def _make_log_folder(path: str) -> None:
    """Raises ConfigError where there can be none; what cannot be written there later ends no run."""
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        message = f"--log-dir {path} is no folder and cannot be made: {error.strerror}."
        raise ConfigError([Complaint("log-dir", message)]) from error


def _first_of(launch: Launch) -> str:
    """What a launcher waits for before any node is there."""
    return f"{launch.rdzv_endpoint} to answer" if launch.rdzv_endpoint else "torch to be imported"


def _meet(launch: Launch) -> MeetingPlace | None:
    """Where the nodes meet, and what this one listens on; None where a backend of torch's own decides that.

    Raises DistributedError, and ConfigError for a secret that is none or is missing.
    """
    from megapar.tools.launcher import agent, secret

    alone = launch.nnodes == 1
    known = secret.take(launch.secret_file, os.environ)
    kind = launch.rdzv_conf.get("store_type", "tcp") if launch.rdzv_backend == "c10d" else "its own"
    if launch.require_secret and not alone:
        secret.require(known, launch.rdzv_backend)
    ours = kind in ("tcp", "file")
    if not alone and not (known and ours):
        print(f"megapar launch: {secret.NONE}", file=sys.stderr, flush=True)
    if not ours:
        return None
    if not launch.rdzv_endpoint:
        return agent.meet_here()
    if kind == "file":
        place = agent.meet_by_file(launch.rdzv_endpoint, launch.local_addr or (agent.LOOPBACK if alone else ""))
    else:
        said = launch.rdzv_conf.get("is_host", "").lower()
        hosts = None if not said else said in ("1", "true", "yes", "t", "y")
        place = agent.meet_at(launch.rdzv_endpoint, launch.local_addr, hosts)
    if place.hosted:
        print(f"megapar launch: nodes meet at {place.endpoint}", file=sys.stderr, flush=True)
    # Nobody else needs to know that of a node alone.
    return replace(place, secret=os.urandom(32) if alone else known)


def _named(launch: Launch, place: MeetingPlace | None) -> Launch:
    """With a name that all nodes have heard, and with another one that no launch before it had."""
    store, secret = (place.store, place.secret) if place else (None, None)
    name = launch_name(launch.nnodes, launch.rdzv_id, store, secret)
    os.environ[LAUNCH] = name
    return replace(launch, rdzv_id=launch.rdzv_id or name or "megapar")


def _validate(script: Path, launch: Launch, node_rank: int | None) -> Config | None:
    """Refuse, help or validate once for all ranks of this node; None for scripts that speak for themselves."""
    kinds = [kind for kind, name in SCRIPTS.items() if name == script.name]
    if not kinds:
        return None
    from megapar.arguments import parse_or_exit
    from megapar.training.building.outline import outline

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
    from megapar.tools.launcher.elastic import command

    for nodes in range(launch.min_nodes, launch.nnodes):
        ranks = nodes * launch.nproc_per_node
        try:
            yield f"on {nodes} nodes: {command([str(launch.world_size), *launch.command], ranks)[1] or 'unchanged'}"
        except LookupError as error:
            yield f"on {nodes} nodes the run would end: {error}"


def run(launch: Launch, place: MeetingPlace | None, stopper: Stopper) -> int:
    """Start the ranks and wait. The status is the first failed rank's 2, else 1; 0 when all ended well."""
    from megapar.tools.launcher.agent import Meeting, make_agent, no_more_restarts

    command = ["-u", *launch.command]
    if launch.min_nodes < launch.nnodes:
        command = ["-u", *own.line("megapar.tools.launcher.elastic"), str(launch.world_size), *launch.command]
    meeting = Meeting(
        backend=launch.rdzv_backend,
        id=launch.rdzv_id,
        min_nodes=launch.min_nodes,
        max_nodes=launch.nnodes,
        address=place.address if place else launch.local_addr or ("localhost" if launch.nnodes == 1 else None),
        store=place.store if place else None,
        endpoint=place.endpoint if place else launch.rdzv_endpoint,
        settings=launch.rdzv_conf,
        files=place.files if place else None,
        secret=place.secret if place else None,
    )
    grace = math.ceil(min(launch.stop_timeout, MOST_GRACE_SECONDS))
    agent = make_agent(
        meeting=meeting,
        arguments=command,
        nproc=launch.nproc_per_node,
        max_restarts=launch.max_restarts,
        grace=grace,
        log_dir=launch.log_dir,
        stopper=stopper,
        warm=launch.warm_start,
    )
    stopper.when_asked = lambda: no_more_restarts(agent)
    alone = False
    try:
        result = agent.run()
    except Stopped:
        alone = launch.min_nodes < launch.nnodes  # others go on, or wait for one another, without this node
        raise
    finally:
        if not alone:
            agent._worker_group.spec.rdzv_handler.shutdown()
    if result is None:  # torch's word for a node that stood by and was never needed
        print("megapar launch: the job has ended on the other nodes, which did not need this one", file=sys.stderr)
        return 0
    return _status(result.failures) if result.is_failed() else 0


def _status(failures: Mapping[int, Any]) -> int:
    """2 where the earliest failure is a refusal (the agent kills the ranks that are left), else 1."""
    return REFUSED if is_refusal(failures) else 1
