"""Translation tables for the words in front of a script (form: ``verdict.table``), and what has to be computed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from megapar.tools.translation.cases import Function, collected, first, number, whole
from megapar.tools.translation.verdict import LEFT, RENAMED, UNNECESSARY, Decided, Foreign, Given, table


def read_launchers() -> dict[str, Mapping[str, Foreign]]:
    """Read the table of each launcher from its part of ``tables/launchers.txt``, which begins with ``== NAME``."""
    text = (Path(__file__).parent / "tables" / "launchers.txt").read_text(encoding="utf-8")
    _, *parts = re.split(r"^== (.+)\n", text, flags=re.MULTILINE)
    found = dict(zip(parts[::2], map(table, parts[1::2]), strict=True))
    return {**found, "ft_launcher": {**found["torchrun"], **found["ft_launcher"]}}


LAUNCHERS: Mapping[str, Mapping[str, Foreign]] = read_launchers()


def _one_node(given: Given) -> bool:
    if "worker-num" in given:
        return given["worker-num"] == given.get("local-worker-num", "8")
    names = ("nnodes", "num-nodes", "nodes", "num-machines")
    return all(given.get(name, "1") == "1" for name in names) and "," not in given.get("host", "")


def _rendezvous(value: str, given: Given) -> Decided:
    address = given.get("master-addr", given.get("main-process-ip"))
    port = given.get("master-port", given.get("main-process-port"))
    if _one_node(given):
        return UNNECESSARY, "", "a single node needs no rendezvous"
    if not address or not port:
        missing = "--master_port" if address else "--master_addr"
        return LEFT, "", f"--rdzv-endpoint needs address and port, but {missing} is not set"
    if set("$`") & set(address + port):
        return (
            LEFT,
            "",
            "--rdzv-endpoint HOST:PORT is computed by the script; scripts/slurm.sbatch does that under Slurm",
        )
    return RENAMED, f"megapar launch --rdzv-endpoint {address}:{port}", ""


def _node_rank(value: str, given: Given) -> Decided:
    if _one_node(given):
        return UNNECESSARY, "", "there is one node"
    return LEFT, "", "each node has its own"


def _ranks_here(value: str, given: Given) -> Decided:
    if (ranks := whole(value)) is None:
        return LEFT, "", "--nproc-per-node is a number of ranks"
    return RENAMED, f"megapar launch --nproc-per-node {ranks}", ""


def _divided(ours: str, by: str, usual: int, refused: str, reason: str = "") -> Function:
    """Return the function for the ranks of all nodes, divided by the argument ``by``."""

    def decide(value: str, given: Given) -> Decided:
        quotient, rest = divmod(number(value), max(1.0, first(given, by, otherwise=usual)))
        if rest:
            return LEFT, "", f"set {ours}: the ranks of all nodes are not a multiple of {refused}"
        return RENAMED, f"megapar launch {ours} {int(quotient)}", reason

    return decide


def _hosts(value: str, given: Given) -> Decided:
    return RENAMED, f"megapar launch --nnodes {len(value.split(','))}", ""


def _listed(value: str, given: Given) -> Decided:
    devices = [word for word in value.strip("'\"").split(",") if word]
    return RENAMED, f"megapar launch --nproc-per-node {len(devices)}", ""


_worker_num = _divided(
    "--nnodes", "local-worker-num", 8, "those of this node", "the ranks of all nodes / those of this node"
)
_num_processes = _divided("--nproc-per-node", "num-machines", 1, "the nodes")


FUNCTIONS: Mapping[str, Function] = collected(globals())
