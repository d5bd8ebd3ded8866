"""The options of ``megapar launch`` and their checks, which run before anything starts."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any

from megapar.config.read import spellings
from megapar.errors import ConfigError
from megapar.files.paths import MOUNT, REMOTE, is_url
from megapar.tools.launcher import secret_file
from megapar.tools.launcher.program import arguments_of, complaints_about, wants_warm_start
from megapar.tools.parser import Parser, count, seconds, whole

STORES = ("file", "tcp")
BOOLEANS = ("1", "true", "t", "yes", "y", "0", "false", "f", "no", "n")
WHOLE = (
    *("timeout", "read_timeout", "join_timeout", "last_call_timeout", "close_timeout", "heartbeat_timeout"),
    *("keep_alive_interval", "keep_alive_max_attempt"),
)
"""Rendezvous settings that torch parses as whole numbers. With 0 it rejects time limits, gives up immediately, or
declares every node dead.
"""
_TORCHRUN: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("--master-addr", "--master_addr"), "--rdzv-endpoint HOST:PORT"),
        **dict.fromkeys(("--master-port", "--master_port"), "--rdzv-endpoint HOST:PORT"),
        "--standalone": "--nnodes 1, which is the default,",
        "--config": "pretrain moe --config",
    }
)
"""What torchrun's options, and the trainers' before their name, are here."""


@dataclass(frozen=True)
class Launch:
    """A checked ``megapar launch`` command.

    Attributes without a line here are options of the command line, with their meaning.

    Attributes:
        min_nodes: Nodes that the job needs to start.
        nnodes: Nodes of the complete job.
        rdzv_endpoint: HOST:PORT, or a path for a file store; "" for a single node without a port.
        command: Arguments of the Python interpreter: the script, or a command of megapar, and its flags.
        environment: Variables for the ranks in addition to this process's environment.
        secret_file: File with the job's secret; "" to read the variable.
        warm_start: Ranks are forked from a process that has imported torch.
        node_rank: This node's number, which orders the nodes; None without one.
    """

    nproc_per_node: int
    min_nodes: int
    nnodes: int
    max_restarts: int
    rdzv_endpoint: str
    rdzv_id: str
    rdzv_conf: Mapping[str, str]
    stop_timeout: float
    command: tuple[str, ...]
    local_addr: str
    log_dir: str
    secret_file: str
    require_secret: bool
    warm_start: bool
    node_rank: int | None
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def world_size(self) -> int:
        """Number of ranks of the complete job."""
        return self.nproc_per_node * self.nnodes


def read(argv: Sequence[str]) -> tuple[Launch, argparse.Namespace]:
    """Parse and check the command line. Return the launch and the parsed options.

    Invalid options end the process with status 2 and one message that lists all complaints. Raises MegaparError if
    the checkpoint of ``evaluate`` cannot be used.
    """
    parser = make_parser()
    names = {name.replace("-", "_"): name for name in parser._option_string_actions}  # torchrun takes both
    options = parser.parse_args([_hyphenated(word, names) for word in argv])
    options.flags = list(argv)[len(argv) - len(options.flags) :]  # the script's own, as they were written
    complaints = list(_complaints(options))
    if complaints:
        parser.error("; ".join(complaints))
    return make_launch(options), options


def _hyphenated(word: str, names: Mapping[str, str]) -> str:
    name, equals, value = word.partition("=")
    return names.get(name.replace("-", "_"), name) + equals + value if name.startswith("--") else word


def _pairs(text: str) -> list[str]:
    """Return the NAME=VALUE of a list with commas, without blanks around them, as torchrun reads it."""
    return ["=".join(part.strip() for part in pair.split("=", 1)) for pair in text.split(",") if pair.strip()]


def _complaints(options: argparse.Namespace) -> Iterator[str]:
    yield from complaints_about(options.script, options.flags)
    for name, path in (("--log-dir", options.log_dir), ("--secret-file", options.secret_file)):
        if is_url(path or ""):
            yield f"{REMOTE} (here {name} {path}). {MOUNT}"
    file = "" if is_url(options.secret_file) else options.secret_file
    try:
        secret_file.take(file, dict(os.environ), required=options.require_secret and options.nnodes[1] > 1)
    except ConfigError as error:
        yield from (f"{one.message} {one.fix}".rstrip(".") for one in error.complaints)
    if options.nnodes[1] > 1 and not options.rdzv_endpoint:
        yield "several nodes need --rdzv-endpoint HOST:PORT of one of them"
    elif options.rdzv_endpoint and "store_type=file" not in _pairs(options.rdzv_conf):
        try:
            split_endpoint(options.rdzv_endpoint)
        except ValueError as error:
            yield str(error)
    for pair in _pairs(options.rdzv_conf):
        name, equals, value = pair.partition("=")
        if not equals or not name:
            yield f"--rdzv-conf {pair} is not NAME=VALUE"
        elif name in ("backend", "endpoint", "run_id", "min_nodes", "max_nodes", "local_addr"):
            yield f"--rdzv-conf {pair} is an option of the launcher itself (--help)"
        elif name in WHOLE and (not value.isdecimal() or int(value) < 1):
            yield f"--rdzv-conf {pair}: {value!r} is not a whole number >= 1"
        elif name == "is_host" and value.lower() not in BOOLEANS:
            yield f"--rdzv-conf {pair}: {value!r} is neither true nor false"
        elif name == "store_type" and value not in STORES:
            yield f"--rdzv-conf {pair}: {value!r} is neither {' nor '.join(STORES)}"


def split_endpoint(endpoint: str) -> tuple[str, int]:
    """Split HOST:PORT; the default port is 29400, torch's. Raises ValueError if either part is invalid."""
    host, colon, port = endpoint.rpartition(":")
    if not colon or (endpoint.startswith("[") and endpoint.endswith("]")):
        host, port = endpoint, "29400"
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"--rdzv-endpoint must be HOST:PORT, with a port up to 65535, got {endpoint}")
    return host.strip("[]"), int(port)


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the launcher's own options. It leaves the script's flags unparsed."""
    parser = Parser(
        prog="megapar launch",
        description="Check the configuration once, then start the ranks of this node.",
        examples=(
            "--nproc-per-node 8 pretrain moe --config mixtral-8x7b",
            "--nproc-per-node 8 --nnodes 2 --rdzv-endpoint node0:29500 --max-restarts 3 pretrain moe --config my.yaml",
            "pretrain moe --help                      the flags of the trainer",
        ),
        epilog="Exit status: 0 done (also after a signal, if the checkpoint was saved), 2 refused, 1 anything else.",
        elsewhere={**{f"--{name}": f"--{name} after the script" for name in spellings()}, **_TORCHRUN},
    )
    add = parser.add_argument
    add("--nproc-per-node", type=count, default=1, metavar="N", help="ranks on this node (default: 1)")
    add("--nnodes", type=_nodes, default=(1, 1), metavar="N", help="number of nodes, or MIN:MAX (default: 1)")
    add(
        "--max-restarts",
        type=whole,
        default=0,
        metavar="N",
        help="restarts of all ranks after one failed, each from the newest valid checkpoint (default: 0)",
    )
    add(
        "--node-rank",
        type=whole,
        metavar="N",
        help="this node's number, from 0: node 0 has rank 0 and prints the report (default: nodes are ordered by their "
        "addresses)",
    )
    _add_meeting(parser)
    add(
        "--log-dir",
        default="",
        metavar="DIR",
        help="also write each rank's output to its own file, DIR/JOB/attempt-K/rank-N.log",
    )
    add(
        "--warm-start",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="fork ranks from one process per node that has imported torch, so that a restart takes about half a "
        "second (default: on for megapar's own scripts and commands on Linux, unless torch_npu is installed)",
    )
    add(
        "--preflight",
        action="store_true",
        help="before the job, measure each rank's matrix products and the bandwidth of all ranks, nodes and pairs",
    )
    add(
        "--stop-timeout",
        type=seconds,
        default=300.0,
        metavar="SECONDS",
        help="time that ranks have to save after a signal before they are killed (default: 300)",
    )
    add("script", help="pretrain moe, pretrain ernie, pretrain_moe.py, pretrain_ernie.py, evaluate, or your own script")
    add("flags", nargs=argparse.REMAINDER, help="its flags")
    return parser


def _add_meeting(parser: argparse.ArgumentParser) -> None:
    """Add the options by which the nodes of a job find and authenticate each other."""
    add = parser.add_argument
    add("--rdzv-backend", choices=("c10d",), default="c10d", help="accepted for commands of torchrun (default: c10d)")
    add(
        "--rdzv-endpoint",
        default="",
        metavar="HOST:PORT",
        help="address and port (29400, if it has none) of one node, where all nodes meet; on one node, localhost:0 "
        "sets MASTER_ADDR and MASTER_PORT for your own scripts, as torchrun does (default: a single node uses files "
        "and opens no port)",
    )
    add("--rdzv-id", default="", help="name of the job, the same on every node (default: a random name)")
    add(
        "--local-addr",
        default="",
        metavar="HOST",
        help="this node's address for the other nodes (default: the address from which it reaches the endpoint)",
    )
    add(
        "--secret-file",
        default="",
        metavar="FILE",
        help="file of mode 0600 with the secret that authenticates the job's nodes, the same on every node "
        "(default: the variable MEGAPAR_SECRET)",
    )
    add("--require-secret", action="store_true", help="refuse to start several nodes without a secret")
    add("--rdzv-conf", default="", metavar="K=V,...", help="further rendezvous settings")


def _nodes(text: str) -> tuple[int, int]:
    minimum, _, maximum = text.partition(":")
    low, high = count(minimum), count(maximum or minimum)
    if low > high:
        raise argparse.ArgumentTypeError(f"MIN:MAX with MIN <= MAX, got {text}")
    return low, high


def make_launch(options: argparse.Namespace) -> Launch:
    """Return the launch that the parsed options describe. Resolves no address.

    Reads no file, except those of the checkpoint of ``evaluate``, for which it may raise MegaparError.
    """
    settings = dict(pair.partition("=")[::2] for pair in _pairs(options.rdzv_conf))
    min_nodes, max_nodes = options.nnodes
    derived: dict[str, Any] = {
        "min_nodes": min_nodes,
        "nnodes": max_nodes,
        "rdzv_conf": settings,
        "command": arguments_of(options.script, options.flags),
        "warm_start": wants_warm_start(options.warm_start, options.script),
    }
    taken = {item.name: getattr(options, item.name) for item in fields(Launch) if hasattr(options, item.name)}
    return Launch(**taken | derived)
