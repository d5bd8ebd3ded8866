"""Time in which a thousand nodes find out that they run the same, or where they differ.

    python -m benchmarks.agreement.run

One process stands for all ranks, over torch's TCP store on loopback. It declares the entries of a real configuration,
one for each node, one after the other; the first rank compares them, and every rank reads the verdict. The time
includes all work of the store and of the first rank. What the ranks of a cluster do in parallel is done one after the
other.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from unittest.mock import patch

import torch.distributed as dist

from megapar.arguments import parse
from megapar.core.device.base import Device
from megapar.health.declaration import RankEntry, verdict
from megapar.training.building.corpus import make_corpus

FLAGS = ("--data-path", "mock", "--num-experts", "0", "--seq-length", "128", "--vocab-size", "4096")
CASES: dict[str, Callable[[int, int], bool]] = {
    "all the same": lambda node, nodes: False,
    "one is another": lambda node, nodes: node == nodes - 1,
    "no two are the same": lambda node, nodes: True,
}


def seconds(store: dist.Store, nodes: int, ranks: int, changed: Callable[[int, int], bool]) -> tuple[float, float, int]:
    """Return (seconds of a start, seconds of the first rank's comparison in it, number of differences that it finds).

    ``ranks``: of a node.
    """
    config = parse("moe", FLAGS, {"WORLD_SIZE": "2"})
    whole = RankEntry.of(config, make_corpus(config), Device(), {"GROUP_RANK": "0", "LOCAL_RANK": "0"})
    start = time.perf_counter()
    for node in range(nodes):
        flags = {**whole.flags, "--lr": str(node)} if changed(node, nodes) else whole.flags
        with patch.object(socket, "gethostname", lambda number=node: f"host-{number}"):
            for local in range(ranks):
                of_node = {} if local else whole.of_node
                one = replace(whole, flags=flags, node=str(node), local_rank=local, of_node=of_node)
                one.declare(store, node * ranks + local)
    compare = time.perf_counter()
    found = verdict(store, nodes * ranks)
    compared = time.perf_counter() - compare
    store.set("verdict", json.dumps(found))
    for _ in range(nodes * ranks):
        json.loads(store.get("verdict"))
    return time.perf_counter() - start, compared, len(found)


def main() -> None:
    """Print the table and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=1024)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1], help="of a node")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    store = dist.TCPStore("localhost", 0, is_master=True, timeout=timedelta(seconds=60), wait_for_workers=False)
    found: dict[str, list[float]] = {}
    print("| | all of it, in turn | the first rank's comparison |\n|---|---|---|")
    for ranks in options.ranks:
        for case, changed in CASES.items():
            times = []
            for number in range(options.rounds):
                taken, compared, count = seconds(
                    dist.PrefixStore(f"{ranks}-{case}-{number}", store), options.nodes, ranks, changed
                )
                assert bool(count) is (case != "all the same")
                times.append((taken, compared))
            name = f"{options.nodes} nodes of {ranks} rank{'s' * (ranks > 1)}, {case}"
            found[name] = [round(statistics.median(column), 3) for column in zip(*times, strict=True)]
            print(f"| {name} | {found[name][0]:.3f} s | {found[name][1]:.3f} s |", flush=True)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
