"""``megapar launch``: validates once, prints one report, then runs torch's elastic agent in this process.

torchrun turns every failure into status 1. Here a refusal stays 2, and a run that was stopped and saved ends with 0.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from megapar.config.config import Config
from megapar.errors import Complaint, ConfigError, MegaparError, input_status
from megapar.health.stop.signal_listener import write_stderr
from megapar.launch_environment import LAUNCH, STOP_TIMEOUT
from megapar.tools.launcher import secret_file
from megapar.tools.launcher.environment import environment, few_cores, interfaces
from megapar.tools.launcher.failures import REFUSED, is_refusal
from megapar.tools.launcher.launch_options import Launch, read
from megapar.tools.launcher.program import Program, with_layout
from megapar.tools.launcher.run_module import module_command
from megapar.tools.launcher.stopper import Stopped, Stopper, Waiting
from megapar.training.reports.streams import guard_streams

if TYPE_CHECKING:
    from megapar.tools.launcher.meeting import MeetingPlace


def main(argv: Sequence[str]) -> int:
    """Validate the command, run the job and return its status: 0 done, 2 refused, 1 anything else."""
    # The parent may ignore SIGCHLD, and exec keeps that. The kernel would then discard the exit status of the ranks,
    # which subprocess reads as 0. The ranks inherit the default as well.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        launch, options = read(argv)
    except MegaparError as error:
        write_stderr(f"megapar launch: {error}")
        return input_status(error)
    config = _validate(launch)
    defaults = environment(launch.nproc_per_node, config)
    launch = replace(launch, environment={name: value for name, value in defaults.items() if name not in os.environ})
    guard_streams()
    for line in (*few_cores(launch.nproc_per_node), *_fewer_nodes(launch)):
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
    """Meet the other nodes, run the job and return its status.

    Raises MegaparError, and Stopped if a signal arrives while no ranks are running.
    """
    if launch.log_dir:
        _make_log_folder(launch.log_dir)
    first = f"{launch.rdzv_endpoint} to answer" if launch.rdzv_endpoint else "the import of torch"
    with stopper.idle("meeting the other nodes"), Waiting(lambda: first):
        place = _meet(launch)
    os.environ[STOP_TIMEOUT] = f"{stopper.ranks_seconds:g}"
    launch = _named(launch, place)
    for name, value in {**launch.environment, **interfaces(place.address)}.items():
        os.environ[name] = value
        print(f"megapar launch: {name}={value}", file=sys.stderr)
    if preflight and (status := _preflight(launch, place, stopper)):
        print("megapar launch: the preflight failed; the job is not started", file=sys.stderr)
        return status
    return run(launch, place, stopper)


def _preflight(launch: Launch, place: MeetingPlace, stopper: Stopper) -> int:
    """Run the preflight and return its status; 0 if it is already over, for a node that joins a running job."""
    from megapar.tools.launcher.agent import ClosedError

    name, measure = f"{launch.rdzv_id}-preflight", module_command("megapar.tools.launcher.preflight")
    first = replace(launch, command=measure, rdzv_id=name, max_restarts=0, warm_start=False)
    try:
        return run(first, place, stopper)
    except ClosedError:
        message = "the preflight of this job is already over; joining the job without one"
        print(f"megapar launch: {message}", file=sys.stderr, flush=True)
        return 0


def _make_log_folder(path: str) -> None:
    """Create the folder. Raises ConfigError if that fails; later write errors in it do not end the run."""
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        message = f"--log-dir {path} is not a folder and cannot be created: {error.strerror}."
        raise ConfigError([Complaint("log-dir", message)]) from error


def _meet(launch: Launch) -> MeetingPlace:
    """Return where the nodes meet. Raises DistributedError, and ConfigError for a secret that has become invalid."""
    from megapar.tools.launcher import meeting

    single_node = launch.nnodes == 1
    job_secret = secret_file.take(launch.secret_file, os.environ)
    if not single_node and not job_secret:
        print(f"megapar launch: {secret_file.NO_SECRET}", file=sys.stderr, flush=True)
    if not launch.rdzv_endpoint:
        return meeting.meet_here()
    if launch.rdzv_conf.get("store_type") == "file":
        address = launch.local_addr or (meeting.LOOPBACK if single_node else "")
        place = meeting.meet_by_file(launch.rdzv_endpoint, address)
    else:
        is_host = launch.rdzv_conf.get("is_host", "").lower()
        hosts = None if not is_host else is_host in ("1", "true", "yes", "t", "y")
        place = meeting.meet_at(launch.rdzv_endpoint, launch.local_addr, hosts)
    if place.hosted:
        print(f"megapar launch: nodes meet at {place.endpoint}", file=sys.stderr, flush=True)
    # The secret of a single node is shared with no other launcher, so a random one is enough.
    return replace(place, secret=os.urandom(32) if single_node else job_secret)


def _named(launch: Launch, place: MeetingPlace) -> Launch:
    """Return the launch with a job name that all nodes agree on. Sets ``LAUNCH`` to the unique name of this launch."""
    from megapar.tools.launcher.secret import launch_name

    name = launch_name(launch.nnodes, launch.rdzv_id, place.store, place.secret)
    os.environ[LAUNCH] = name
    return replace(launch, rdzv_id=launch.rdzv_id or name)


def _validate(launch: Launch) -> Config | None:
    """Validate the configuration once for all ranks of this node; return None for scripts that are not megapar's.

    Exits after a refusal, ``--help`` or ``--validate-only``. Every node prints its own refusal: a disk may be missing
    on one of them only.
    """
    program = Program.of(launch.command)
    if not program.kind:
        return None
    from megapar.arguments import parse_or_exit
    from megapar.training.loop.outline import outline

    # The environment that the ranks will have. The address of their store is not known yet, but it will be set, and so
    # will the ranks' numbers: rank 0 stands for them, because the other ranks print nothing.
    environ = {
        "WORLD_SIZE": str(launch.world_size),
        "RANK": "0",
        "MASTER_ADDR": "?",
        "MASTER_PORT": "?",
        "TORCHELASTIC_RUN_ID": launch.rdzv_id,
    }
    try:
        # warn=False: rank 0 prints the warnings.
        return parse_or_exit(program.kind, program.flags, environ, outline=outline, warn=False, starting=True)
    except SystemExit as end:
        if end.code == REFUSED and launch.nnodes > 1:
            number = "" if launch.node_rank is None else f"node {launch.node_rank}, "
            write_stderr(f"megapar launch: refused on {number}{socket.gethostname()}")
        raise


def _fewer_nodes(launch: Launch) -> Iterator[str]:
    """Yield a line on the layout for each smaller number of nodes that is allowed."""
    for nodes in range(launch.min_nodes, launch.nnodes):
        ranks = nodes * launch.nproc_per_node
        try:
            yield f"on {nodes} nodes: {with_layout([str(launch.world_size), *launch.command], ranks)[1] or 'unchanged'}"
        except LookupError as error:
            yield f"on {nodes} nodes the run would end: {error}"


def run(launch: Launch, place: MeetingPlace, stopper: Stopper) -> int:
    """Start the ranks, wait for them and return the status: 0 success, 2 if the first failure is a refusal, else 1."""
    from megapar.tools.launcher.agent import make_agent

    command = ["-u", *launch.command]
    if launch.min_nodes < launch.nnodes:
        command = ["-u", *module_command("megapar.tools.launcher.program"), str(launch.world_size), *launch.command]
    agent = make_agent(launch, place, command, stopper)
    leave_open = False
    try:
        result = agent.run()
    except Stopped:
        leave_open = launch.min_nodes < launch.nnodes  # the other nodes continue, or keep waiting, without this one
        raise
    finally:
        if not leave_open:
            agent.close_rendezvous()
    if result is None:  # torch returns None to a spare node that was never needed
        print("megapar launch: the job has ended on the other nodes, which did not need this one", file=sys.stderr)
        return 0
    if not result.is_failed():
        return 0
    return REFUSED if is_refusal(result.failures) else 1
