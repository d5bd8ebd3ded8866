"""What ``megapar launch`` is asked for: its options, and what of them is refused before anything starts."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path

from megapar.config.hints import near_path
from megapar.tools.launcher.warm import wanted
from megapar.tools.parser import Parser, count, seconds, whole

BACKENDS = ("c10d", "etcd", "etcd-v2", "static")
STORES = ("file", "tcp")
BOOLEANS = ("1", "true", "t", "yes", "y", "0", "false", "f", "no", "n")
WHOLE = (
    *("timeout", "read_timeout", "join_timeout", "last_call_timeout", "close_timeout", "heartbeat_timeout"),
    *("keep_alive_interval", "keep_alive_max_attempt"),
)
"""Settings of a rendezvous that torch reads as whole numbers. With 0 it refuses times, gives up before it has begun, or
takes every node for dead; only etcd's last call may be over at once.
"""
PORTS = 1 << 16


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
    secret_file: str = ""
    require_secret: bool = False
    warm_start: bool = False

    @property
    def world_size(self) -> int:
        """Ranks on all nodes when all are there."""
        return self.nproc_per_node * self.nnodes


def read(argv: Sequence[str]) -> tuple[Launch, argparse.Namespace]:
    """What to start, and the options as they were given; ends the process with status 2 and all complaints at once."""
    parser = make_parser()
    options = parser.parse_args(argv)
    complaints = list(_complaints(options))
    if complaints:
        parser.error("; ".join(complaints))
    return make_launch(options), options


def _complaints(options: argparse.Namespace) -> Iterator[str]:
    if not Path(options.script).is_file():
        yield f"script {options.script} does not exist. {near_path(options.script)}".rstrip(" .")
    many, backend = options.nnodes[1] > 1, options.rdzv_backend
    if many and not options.rdzv_endpoint:
        yield "several nodes need --rdzv-endpoint HOST:PORT of one of them"
    if many and options.max_restarts and not options.rdzv_id and backend not in ("c10d", "static"):
        yield (
            "--max-restarts on several nodes needs a --rdzv-id of this job alone, the same on every node, or "
            "--rdzv-backend c10d"
        )
    if options.max_restarts and backend == "static":
        yield "--max-restarts needs --rdzv-backend c10d: static nodes meet once"
    if backend == "static":
        yield from _static_complaints(options)
    if backend not in BACKENDS:
        installed = {found.name for found in entry_points(group="torchrun.handlers")}
        if backend not in installed:
            yield f"--rdzv-backend {backend} is none of {', '.join(sorted({*BACKENDS, *installed}))}"
    yield from _settings_complaints(options.rdzv_conf, backend)


def _static_complaints(options: argparse.Namespace) -> Iterator[str]:
    """What torch's static nodes cannot find out from one another."""
    nodes, rank, (_, colon, port) = options.nnodes[1], options.node_rank, options.rdzv_endpoint.rpartition(":")
    if rank is None:
        yield "--rdzv-backend static needs --node-rank, this node's number from 0 on"
    elif not 0 <= rank < nodes:
        yield f"--node-rank {rank} is none of {nodes} static nodes, which count from 0 on"
    if not (colon and port.isdecimal() and int(port) < PORTS) and (options.rdzv_endpoint or nodes == 1):
        yield "--rdzv-backend static needs --rdzv-endpoint HOST:PORT, where node 0 listens"


def _settings_complaints(text: str, backend: str) -> Iterator[str]:
    for pair in filter(None, text.split(",")):
        name, equals, value = pair.partition("=")
        if not equals or not name:
            yield f"--rdzv-conf {pair} is not NAME=VALUE"
        elif name in WHOLE and (not value.isdecimal() or int(value) < _least(name, backend)):
            yield f"--rdzv-conf {pair}: {value!r} is not a whole number from {_least(name, backend)} on"
        elif name == "is_host" and value.lower() not in BOOLEANS:
            yield f"--rdzv-conf {pair}: {value!r} is neither true nor false"
        elif name == "store_type" and backend == "c10d" and value not in STORES:
            yield f"--rdzv-conf {pair}: {value!r} is neither {' nor '.join(STORES)}"


def _least(name: str, backend: str) -> int:
    """Of a setting in ``WHOLE``. Backends that others have made take what they like."""
    return int(backend in BACKENDS and (name, backend) != ("last_call_timeout", "etcd"))


def make_parser() -> argparse.ArgumentParser:
    """Of the launcher's own options; the script's flags are left as they are."""
    parser = Parser(
        prog="megapar launch",
        description="Check the configuration once, then start the ranks of this node.",
        epilog="Exit status: 0 done (also after a signal, once the checkpoint is safe), 2 refused, 1 anything else.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--nproc-per-node", type=count, default=1, metavar="N", help="ranks on this node (default: 1)")
    add("--nnodes", type=_nodes, default=(1, 1), metavar="N", help="nodes (default: 1), or MIN:MAX of them")
    add(
        "--max-restarts",
        type=whole,
        default=0,
        metavar="N",
        help="how often all ranks are started again after one failed, from the newest sound checkpoint (default: 0)",
    )
    add("--node-rank", type=int, metavar="N", help="this node's number; only node 0 prints the report")
    _add_meeting(parser)
    add(
        "--log-dir",
        default="",
        metavar="DIR",
        help="write every rank's output to a file there, too: DIR/JOB/attempt-K/rank-N.log",
    )
    add(
        "--warm-start",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="fork ranks from one process per node that has imported torch: a restart takes a second then (default: "
        "for megapar's own scripts, unless torch_npu is installed)",
    )
    add("--preflight", action="store_true", help="first time every node's products and every group's bandwidth")
    add(
        "--stop-timeout",
        type=seconds,
        default=300.0,
        metavar="SECONDS",
        help="time the ranks get to save after a signal before they are killed (default: 300)",
    )
    add("script", help="pretrain_moe.py, pretrain_ernie.py, or a script of your own")
    add("flags", nargs=argparse.REMAINDER, help="the script's flags")
    return parser


def _add_meeting(parser: argparse.ArgumentParser) -> None:
    """How the nodes of a job find each other, and know that they are its nodes."""
    add = parser.add_argument
    add("--rdzv-backend", default="c10d", help="rendezvous backend of torch's elastic agent (default: c10d)")
    add(
        "--rdzv-endpoint",
        default="",
        metavar="HOST:PORT",
        help="where nodes meet, an address of one of them; on one node, localhost:0 gives scripts of your own the "
        "MASTER_ADDR and MASTER_PORT that torchrun sets (default: one node meets by files, and nothing listens)",
    )
    add("--rdzv-id", default="", help="name of the job, the same on every node (default: a random one)")
    add("--local-addr", default="", metavar="HOST", help="this node's address (default: as it reaches the endpoint)")
    add(
        "--secret-file",
        default="",
        metavar="FILE",
        help="the job's secret, by which its nodes know each other: a file of mode 0600, the same on every node "
        "(default: the variable MEGAPAR_SECRET)",
    )
    add("--require-secret", action="store_true", help="refuse to start several nodes without a secret")
    add("--rdzv-conf", default="", metavar="K=V,...", help="further rendezvous settings")


def _nodes(text: str) -> tuple[int, int]:
    least, _, most = text.partition(":")
    low, high = count(least), count(most or least)
    if low > high:
        raise argparse.ArgumentTypeError(f"MIN:MAX with MIN <= MAX, got {text}")
    return low, high


def make_launch(options: argparse.Namespace) -> Launch:
    """What was asked for, with nothing looked up yet."""
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
        secret_file=options.secret_file,
        require_secret=options.require_secret,
        warm_start=wanted(options.warm_start, options.script),
    )
