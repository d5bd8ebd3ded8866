"""Check that all ranks of a start run the same thing: one entry per node, compared by rank 0 through the ranks' store.

This happens before any process group exists. Nodes that run something else may hang in one, or train with numbers that
belong to neither configuration.
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
from megapar.data.corpus import Corpus
from megapar.data.fingerprint import Fingerprint, fingerprints_of
from megapar.errors import Complaint, ConfigError, DistributedError
from megapar.health.start.declaration import Declaration, Node, differences
from megapar.schema.flag import SCRIPTS, Flag
from megapar.training.building.build import experts_dispatch
from megapar.training.checkpoints.data_facts import KNOWLEDGE, DataFacts
from megapar.training.checkpoints.identity import made_by

_LAST_WORD = timedelta(seconds=30)  # for all ranks to read a refusal before the first one exits
_SHOWN = 16  # hexadecimal digits of a hash
_BY_CONTENT = ("data_path", "eval_data_path", "hf_dataset", "tokenizer_model", *KNOWLEDGE)
_DEVICE = "device"
_DISPATCH = "the dispatch of experts"


@dataclass(frozen=True)
class Declaring:
    """The entry of this rank. Calling it with the ranks' store returns if all ranks run the same.

    Attributes:
        flags: The flags that are compared.
        given: The flags that are set explicitly.
        facts: Facts that every rank knows.
        of_node: Facts that only local rank 0 collects for its node, such as the hash of the code.
        node: Name of the node, the same on all its ranks. "" without a launcher. Local rank 0 writes the entry of the
            node, and the other ranks compare themselves with it.
        local_rank: Rank on the node.
    """

    flags: Mapping[str, str]
    given: frozenset[str]
    facts: Mapping[str, str]
    of_node: Mapping[str, str]
    node: str
    local_rank: int

    @classmethod
    def of(cls, config: Config, corpus: Corpus, device: Device, environ: Mapping[str, str] = os.environ) -> Declaring:
        """Return this rank's entry. Reads data whose fingerprint is not in the cache. Raises DataError."""
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
                **_dispatch(config, device),
            },
            {} if node and local_rank else {**installed(), **_data(config)},
            node,
            local_rank,
        )

    def __call__(self, store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> None:
        """Compare the entries of all ranks. Raises ConfigError, on every rank, if they differ.

        Raises DistributedError if an entry is missing after ``timeout``. The store must be new.
        """
        try:
            self.declare(store, rank)
            if rank == 0:
                store.set("verdict", json.dumps(verdict(store, world_size)))
            complaints = json.loads(store.get("verdict"))
        except RuntimeError as error:  # includes the errors of torch's stores
            raise DistributedError(
                f"rank {rank}: not all ranks declared within {timeout.total_seconds():g} s what they run: "
                f"{str(error).splitlines()[0]}. Check their logs."
            ) from error
        if complaints:
            with suppress(DistributedError, RuntimeError):  # the store may end with the first rank that exits
                roll_call(dist.PrefixStore("heard", store), "world", range(world_size), rank, min(timeout, _LAST_WORD))
            raise ConfigError([Complaint(*complaint) for complaint in complaints])

    def declare(self, store: dist.Store, rank: int) -> None:
        """Write this rank's entry. Ranks with the same flags and facts as local rank 0 share the entry of the node."""
        own = hashlib.sha256(Declaration(self.flags, self.given, self.facts).to_text().encode()).hexdigest()
        key = f"entry of node {self.node}" if self.node else f"entry of rank {rank}"
        is_leader = not self.node or self.local_rank == 0
        if is_leader:
            store.set(f"hash of {key}", own)
        if is_leader or store.get(f"hash of {key}").decode() != own:
            key = key if is_leader else f"entry of rank {rank}"
            store.set(key, Declaration(self.flags, self.given, {**self.of_node, **self.facts}).to_text())
        store.set(f"rank {rank}", json.dumps([socket.gethostname(), key]))


def make_declared(config: Config, corpus: Corpus, device: Device) -> Declaring | None:
    """Return this rank's entry, or None for a single rank. Raises DataError."""
    return Declaring.of(config, corpus, device) if config.grid.world_size > 1 else None


def installed() -> dict[str, str]:
    """Return the versions and the code hash of this node."""
    made = made_by(0, 0)
    return {"megapar": made["megapar"], "torch": made["torch"], "Python": made["python"], "code": made["code"]}


def _is_compared(flag: Flag) -> bool:
    return not (flag.per_node or flag.meta or flag.name in _BY_CONTENT)


def _text(value: Any, flag: Flag) -> str:
    """Return the text to compare for a value. Paths may differ between nodes, so only their presence is compared."""
    if flag.path:
        return "given" if value else "not given"
    return repr(value) if isinstance(value, float) else written(value, flag)


def _data(config: Config) -> dict[str, str]:
    """Return the facts of the data, by its content."""
    data = config.data
    read = DataFacts.of(config)
    facts = _sources("the data", read.sources)
    apart = fingerprints_of(data.eval_data_path, data.text_field) if data.eval_data_path else ()
    facts |= _sources("--eval-data-path", apart)
    given = {file.name: file.value for file in read.knowledge or ()}
    for spelling in (FLAGS[name].spelling for name in KNOWLEDGE):
        facts[f"the content of {spelling}"] = (given.get(spelling) or "none")[:_SHOWN]
    return facts


def _sources(name: str, sources: Sequence[Fingerprint]) -> dict[str, str]:
    """Return the facts of sources by their fingerprints, since their names are paths."""
    facts = {f"the number of sources of {name}": str(len(sources))}
    for number, source in enumerate(sources, 1):
        weight = f" with weight {float(source.weight)!r}" if source.weight is not None else ""
        split = f", split by {source.cut}" if source.cut else ""
        facts[f"source {number} of {name}"] = f"{(source.value or 'unknown')[:_SHOWN]}{weight}{split}"
    return facts


def _dispatch(config: Config, device: Device) -> dict[str, str]:
    """Return the dispatch of experts, which a rank chooses by its device and the ranks of its node."""
    if config.grid.ep == 1:
        return {}
    chosen = experts_dispatch(config, device)
    return {_DISPATCH: f"{chosen.name} of {chosen.node_ranks} ranks of ep" if chosen.node_ranks else chosen.name}


def _fix(name: str) -> str:
    if name.startswith("--"):
        return "Pass the same flags on all nodes, for example from one script or one --config file."
    if name in installed():
        return "Install the same version on all nodes."
    if name == _DISPATCH:
        return "Nodes have different devices or numbers of ranks: pass --moe-dispatch plain on all of them."
    return "Pass the same --device on all nodes." if name == _DEVICE else "Put the same files on all nodes."


def verdict(store: dist.Store, world_size: int) -> list[tuple[str, str, str]]:
    """Return the differences between the ranks that have declared themselves: rule, message and fix of each."""
    declared = [json.loads(text) for text in store.multi_get([f"rank {rank}" for rank in range(world_size)])]
    places: dict[tuple[str, str], list[int]] = {}
    for rank, (host, key) in enumerate(declared):
        places.setdefault((key, host), []).append(rank)
    keys = list(dict.fromkeys(key for key, _ in places))
    entries = dict(zip(keys, store.multi_get(keys), strict=True))
    nodes = [Node(host, tuple(ranks), entries[key]) for (key, host), ranks in places.items()]
    return [(found.rule, found.message, found.fix) for found in differences(nodes, _fix)]
