"""All ranks of a start run the same thing: one entry for each node, compared by one rank through the ranks' store.

Before any group exists, as nodes that run something else may hang in one, or train on with numbers that are nobody's.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from megapar.arguments import FLAGS, Config
from megapar.config.draft import is_given
from megapar.config.help import written
from megapar.core.comm.world import roll_call
from megapar.core.device.base import Device
from megapar.core.health.declaration import Declaration, Node, differences
from megapar.data.corpus import Corpus
from megapar.data.text.fingerprint import Fingerprint, fingerprints_of
from megapar.errors import Complaint, ConfigError, DistributedError
from megapar.schema.flag import SCRIPTS, Flag
from megapar.training.checkpoints.data_facts import KNOWLEDGE, DataFacts
from megapar.training.checkpoints.identity import made_by

_LAST_WORD = timedelta(seconds=30)  # for ranks to hear that they are refused, before the first one ends
_SHOWN = 16  # hexadecimal digits of a hash
_BY_CONTENT = ("data_path", "eval_data_path", "hf_dataset", "tokenizer_model", *KNOWLEDGE)
_DEVICE = "device"


@dataclass(frozen=True)
class Declaring:
    """What this rank runs. Called with the ranks' store it returns where all ranks run the same.

    node: what the ranks of this node have in common, "" where no launcher says; the one with local_rank 0 speaks for
    them, and the others compare themselves with it. facts: that each of them knows; of_node: that one of a node finds
    out for all, such as the hash of the code.
    """

    flags: Mapping[str, str]
    given: frozenset[str]
    facts: Mapping[str, str]
    of_node: Mapping[str, str]
    node: str
    local_rank: int

    @classmethod
    def of(cls, config: Config, corpus: Corpus, device: Device, environ: Mapping[str, str] = os.environ) -> Declaring:
        """Reads data of which the cache does not know the fingerprint. Raises DataError."""
        flags = [flag for flag in FLAGS.values() if config.kind in flag.models and _is_compared(flag)]
        values = config.values()
        number, local_rank = environ.get("GROUP_RANK", ""), int(environ.get("LOCAL_RANK") or "0")
        node = f"{number} on {socket.gethostname()}" if number else ""
        return cls(
            {flag.spelling: _text(values[flag.name], flag) for flag in flags},
            frozenset(flag.spelling for flag in flags if is_given(config.origins.get(flag.name))),
            {
                "the script": SCRIPTS[config.kind],
                _DEVICE: device.type,
                "the tokenizer's fingerprint": corpus.tokenizer.fingerprint()[:_SHOWN],
            },
            {} if node and local_rank else {**installed(), **_data(config)},
            node,
            local_rank,
        )

    def __call__(self, store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> None:
        """store: of all ranks, where nobody has declared anything. timeout: for the slowest of them.

        Raises ConfigError, on every rank, where they differ, and DistributedError where some stay silent.
        """
        try:
            self.declare(store, rank)
            if rank == 0:
                store.set("verdict", json.dumps(verdict(store, world_size)))
            heard = json.loads(store.get("verdict"))
        except RuntimeError as error:  # also what torch's stores raise
            raise DistributedError(
                f"rank {rank}: not all ranks said within {timeout.total_seconds():g} s what they run: "
                f"{str(error).splitlines()[0]}. Look at their logs."
            ) from error
        if heard:
            with suppress(DistributedError, RuntimeError):  # whoever ends first may take the store with it
                roll_call(dist.PrefixStore("heard", store), "world", range(world_size), rank, min(timeout, _LAST_WORD))
            raise ConfigError([Complaint(*one) for one in heard])

    def declare(self, store: dist.Store, rank: int) -> None:
        """Say what this rank runs, and where it speaks for its node, what that has."""
        own = hashlib.sha256(Declaration(self.flags, self.given, self.facts).to_text().encode()).hexdigest()
        key = f"entry of node {self.node}" if self.node else f"entry of rank {rank}"
        speaks = not self.node or self.local_rank == 0
        if speaks:
            store.set(f"hash of {key}", own)
        if speaks or store.get(f"hash of {key}").decode() != own:
            key = key if speaks else f"entry of rank {rank}"
            store.set(key, Declaration(self.flags, self.given, {**self.of_node, **self.facts}).to_text())
        store.set(f"rank {rank}", json.dumps([socket.gethostname(), key]))


def make_declared(config: Config, corpus: Corpus, device: Device) -> Declaring | None:
    """What this rank of several runs. Raises DataError."""
    return Declaring.of(config, corpus, device) if config.grid.world_size > 1 else None


def installed() -> dict[str, str]:
    """Versions and code of this node."""
    found = made_by(0, 0)
    return {"megapar": found["megapar"], "torch": found["torch"], "Python": found["python"], "code": found["code"]}


def _is_compared(flag: Flag) -> bool:
    return not (flag.per_node or flag.meta or flag.name in _BY_CONTENT)


def _text(value: Any, flag: Flag) -> str:
    """A value as it is compared; of a path, which may differ from node to node, only if it is given."""
    if flag.path:
        return "given" if value else "not given"
    return repr(value) if isinstance(value, float) else written(value, flag)


def _data(config: Config) -> dict[str, str]:
    """What is read, by its content."""
    data = config.data
    read = DataFacts.of(config)
    found = _sources("the data", read.sources)
    apart = fingerprints_of(data.eval_data_path, data.text_field) if data.eval_data_path else ()
    found |= _sources("--eval-data-path", apart)
    given = {one.name: one.value for one in read.knowledge or ()}
    for spelling in (FLAGS[name].spelling for name in KNOWLEDGE):
        found[f"the content of {spelling}"] = (given.get(spelling) or "none")[:_SHOWN]
    return found


def _sources(name: str, sources: Sequence[Fingerprint]) -> dict[str, str]:
    """Each by its fingerprint; the names are paths."""
    found = {f"the number of sources of {name}": str(len(sources))}
    for number, one in enumerate(sources, 1):
        weight = f" with weight {float(one.weight)!r}" if one.weight is not None else ""
        split = f", split by {one.cut}" if one.cut else ""
        found[f"source {number} of {name}"] = f"{(one.value or 'unknown')[:_SHOWN]}{weight}{split}"
    return found


def _fix(name: str) -> str:
    if name.startswith("--"):
        return "Give all nodes the same flags, such as by one script or one --config file."
    if name in installed():
        return "Install the same on all nodes."
    return "Give all nodes the same --device." if name == _DEVICE else "Give all nodes the same files."


def verdict(store: dist.Store, world_size: int) -> list[tuple[str, str, str]]:
    """Where the ranks differ that have declared themselves: rule, message and fix of each complaint."""
    told = [json.loads(one) for one in store.multi_get([f"rank {rank}" for rank in range(world_size)])]
    places: dict[tuple[str, str], list[int]] = {}
    for rank, (host, key) in enumerate(told):
        places.setdefault((key, host), []).append(rank)
    keys = list(dict.fromkeys(key for key, _ in places))
    entries = dict(zip(keys, store.multi_get(keys), strict=True))
    nodes = [Node(host, tuple(ranks), entries[key]) for (key, host), ranks in places.items()]
    return [(one.rule, one.message, one.fix) for one in differences(nodes, _fix)]
