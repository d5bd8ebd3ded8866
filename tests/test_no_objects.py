"""Nothing that another process sends is unpickled: no object collective, and no pickle that could be read."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist

from megapar.core.comm import json_messages as messages
from tests.support.ranks import run_ranks
from tests.support.worker import OBJECT_COLLECTIVES

PACKAGE = Path(__file__).parents[1] / "megapar"
READS_CODE = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}

# torch's agent reads the state of its rendezvous from a pickle: made in the same process, of JSON that was checked.
OF_ITS_OWN = {"tools/launcher/rendezvous.py": ["pickle"]}


def uses(path: Path) -> Iterator[str]:
    """What a file names that could run what it is sent."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and node.attr in OBJECT_COLLECTIVES:
            yield node.attr
        elif isinstance(node, ast.Import | ast.ImportFrom):
            named = [name.name for name in node.names]
            from_ = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            yield from {name.partition(".")[0] for name in named + from_} & READS_CODE
            yield from {name for name in named if name in OBJECT_COLLECTIVES}
            if from_ == ["torch.distributed.checkpoint"] or "torch.distributed.checkpoint" in named:
                yield "torch.distributed.checkpoint"  # save and load exchange plans as objects
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
            safe = any(word.arg == "weights_only" and ast.unparse(word.value) == "True" for word in node.keywords)
            yield from [] if safe else ["torch.load"]


def test_nothing_of_the_package_reads_what_could_be_code() -> None:
    found = {str(path.relative_to(PACKAGE)): sorted(set(uses(path))) for path in PACKAGE.rglob("*.py")}
    assert {path: names for path, names in found.items() if names} == OF_ITS_OWN


def talk(rank: int, world_size: int) -> list[object]:
    group = dist.group.WORLD
    long = {"from": rank, "text": "ü" * 1000 * rank, "none": None}
    parts = [{"to": other, "text": "x" * other} for other in range(world_size)] if rank == 0 else None
    return [
        messages.all_gather(long, group),
        messages.gather([rank, 0.5], group),
        messages.broadcast("hello" if rank == 0 else None, group),
        messages.scatter(parts, group),
    ]


def test_ranks_tell_each_other_json() -> None:
    for rank, (everyone, first, said, own) in enumerate(run_ranks(3, talk)):
        assert everyone == [{"from": other, "text": "ü" * 1000 * other, "none": None} for other in range(3)]
        assert first == (None if rank else [[0, 0.5], [1, 0.5], [2, 0.5]])
        assert said == "hello"
        assert own == {"to": rank, "text": "x" * rank}
