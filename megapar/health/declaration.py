"""Check that all ranks of a start run the same thing: one entry per node, compared by rank 0 through the ranks' store.

This happens before any process group exists. Nodes that run something else may hang in one, or train with numbers that
belong to neither configuration.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from megapar.arguments import FLAGS, Config
from megapar.checkpoints.ownership.data_facts import KNOWLEDGE, DataFacts
from megapar.checkpoints.ownership.identity import made_by
from megapar.config.draft import is_given
from megapar.config.report import written
from megapar.core.comm.world import roll_call
from megapar.core.device.base import Device
from megapar.data.corpus import Corpus
from megapar.data.fingerprint import Fingerprint, fingerprints_of
from megapar.errors import Complaint, ConfigError, DistributedError
from megapar.files.location import at
from megapar.files.task_file import named_tasks
from megapar.schema.flag import SCRIPTS, Flag
from megapar.training.building.parts import experts_dispatch

RULE = "agreement"
_LAST_WORD = timedelta(seconds=30)  # for all ranks to read a refusal before the first one exits
_SHOWN = 16  # hexadecimal digits of a hash
_BY_CONTENT = ("data_path", "eval_data_path", "hf_dataset", "tokenizer_model", *KNOWLEDGE)
_DEVICE = "device"
_SCRIPT = "the script"
_DISPATCH = "the dispatch of experts"
_MOST_RANGES, _MOST_HOSTS, _MOST_VALUES, _MOST_LETTERS = 4, 3, 4, 60  # in a message


@dataclass(frozen=True)
class Declaration:
    """The run of one node.

    Attributes:
        flags: Spelling of a flag to its value as text.
        given: The flags that the user set. The others are defaults or derived from these.
        facts: Versions, hashes of code and data, and similar values by name.
    """

    flags: Mapping[str, str]
    given: frozenset[str]
    facts: Mapping[str, str]

    def to_text(self) -> str:
        """Return the declaration as JSON. Equal declarations have the same text."""
        value = {"flags": dict(self.flags), "given": sorted(self.given), "facts": dict(self.facts)}
        return json.dumps(value, sort_keys=True)

    @classmethod
    def from_text(cls, text: bytes | str) -> Declaration:
        """Parse a declaration. Raises DistributedError if ``to_text`` did not write this text."""
        try:
            value = json.loads(text)
            flags, given, facts = value["flags"], value["given"], value["facts"]
            words = [*flags, *flags.values(), *given, *facts, *facts.values()]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise DistributedError(f"the declaration of a rank cannot be read: {text[:80]!r}") from error
        if not all(isinstance(word, str) for word in words):
            raise DistributedError(f"the declaration of a rank contains a value that is not text: {text[:80]!r}")
        return cls(flags, frozenset(given), facts)


@dataclass(frozen=True)
class Node:
    """Ranks of one host with the same declaration."""

    host: str
    ranks: tuple[int, ...]
    entry: bytes


def differences(nodes: Sequence[Node], fix: Callable[[str], str]) -> list[Complaint]:
    """Return a complaint for each flag or fact that differs between nodes, with its values and their ranks.

    If set flags differ, derived ones are not reported. ``fix`` returns the remedy for a name; each remedy is given
    once. Raises DistributedError for an entry that is not a declaration.
    """
    by_entry: dict[bytes, list[Node]] = {}
    for node in nodes:
        by_entry.setdefault(node.entry, []).append(node)
    if len(by_entry) < 2:
        return []
    entries = {text: Declaration.from_text(text) for text in by_entry}
    flags = dict(_differing({text: entry.flags for text, entry in entries.items()}))
    given = frozenset[str]().union(*(entry.given for entry in entries.values()))
    set_flags = {name: values for name, values in flags.items() if name in given}
    facts = dict(_differing({text: entry.facts for text, entry in entries.items()}))
    messages = {name: _message(name, values, by_entry) for name, values in {**(set_flags or flags), **facts}.items()}
    last = {fix(name): name for name in messages}
    return [
        Complaint(RULE, message, fix(name) if last[fix(name)] == name else "") for name, message in messages.items()
    ]


def _differing(tables: Mapping[bytes, Mapping[str, str]]) -> Iterator[tuple[str, dict[str, list[bytes]]]]:
    """Yield the names with more than one value, and for each value the entries that have it.

    A name that only one version of the code has is skipped: the hash of the code differs too, and is reported.
    """
    for name in dict.fromkeys(name for table in tables.values() for name in table):
        values: dict[str, list[bytes]] = {}
        for text, table in tables.items():
            if name in table:
                values.setdefault(table[name], []).append(text)
        if len(values) > 1:
            yield name, values


def _message(name: str, values: Mapping[str, Sequence[bytes]], by_entry: Mapping[bytes, Sequence[Node]]) -> str:
    having = {value: [node for text in texts for node in by_entry[text]] for value, texts in values.items()}
    ordered = sorted(having.items(), key=lambda pair: min(node.ranks[0] for node in pair[1]))
    parts = [f"{_clipped(value)} on {_place(nodes)}" for value, nodes in ordered[:_MOST_VALUES]]
    if len(ordered) > _MOST_VALUES:
        parts.append(f"other values on {_place([node for _, nodes in ordered[_MOST_VALUES:] for node in nodes])}")
    return f"{name} is {', '.join(parts[:-1])} and {parts[-1]}."


def _clipped(value: str) -> str:
    return value if len(value) <= _MOST_LETTERS else f"{value[: _MOST_LETTERS - 3]}..."


def _place(nodes: Sequence[Node]) -> str:
    """Return ranks and hosts as text, such as "ranks 0-7, 16 (a, b)"."""
    ranks = sorted(rank for node in nodes for rank in node.ranks)
    hosts = Counter(node.host for node in nodes)
    more = f" and {len(hosts) - _MOST_HOSTS} more" if len(hosts) > _MOST_HOSTS else ""
    named = ", ".join(list(hosts)[:_MOST_HOSTS]) + more
    return f"rank{'s' * (len(ranks) > 1)} {_ranges(ranks)} ({named})"


def _ranges(ranks: Sequence[int]) -> str:
    pairs: list[list[int]] = []
    for rank in ranks:
        if pairs and pairs[-1][1] == rank - 1:
            pairs[-1][1] = rank
        else:
            pairs.append([rank, rank])
    shown = [str(first) if first == last else f"{first}-{last}" for first, last in pairs[:_MOST_RANGES]]
    left = sum(last - first + 1 for first, last in pairs[_MOST_RANGES:])
    return ", ".join(shown) + (f" and {left} more" if left else "")


@dataclass(frozen=True)
class RankEntry(Declaration):
    """The declaration of this rank. Calling it with the ranks' store returns if all ranks run the same.

    Attributes:
        of_node: Facts that only local rank 0 collects for its node, such as the hash of the code.
        node: Name of the node, the same on all its ranks. "" without a launcher. Local rank 0 writes the entry of the
            node, and the other ranks compare themselves with it.
    """

    of_node: Mapping[str, str]
    node: str
    local_rank: int

    @classmethod
    def of(cls, config: Config, corpus: Corpus, device: Device, environ: Mapping[str, str] = os.environ) -> RankEntry:
        """Return this rank's entry. Reads data whose fingerprint is not in the cache. Raises DataError."""
        flags = [
            flag
            for flag in FLAGS.values()
            if config.kind in flag.models and not (flag.per_node or flag.meta or flag.name in _BY_CONTENT)
        ]
        values = config.values()
        number, local_rank = environ.get("GROUP_RANK", ""), int(environ.get("LOCAL_RANK") or "0")
        node = f"{number} on {socket.gethostname()}" if number else ""
        return cls(
            {flag.spelling: _text(values[flag.name], flag) for flag in flags},
            frozenset(flag.spelling for flag in flags if is_given(config.origins.get(flag.name))),
            {
                _SCRIPT: SCRIPTS[config.kind],
                _DEVICE: device.type,
                "the tokenizer's fingerprint": corpus.tokenizer.fingerprint()[:_SHOWN],
                **_dispatch(config, device),
                **{f"{name} of conversations": fact for name, fact in corpus.chat_facts().items()},
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
        digest = hashlib.sha256(self.to_text().encode()).hexdigest()
        key = f"entry of node {self.node}" if self.node else f"entry of rank {rank}"
        is_leader = not self.node or self.local_rank == 0
        if is_leader:
            store.set(f"hash of {key}", digest)
        if is_leader or store.get(f"hash of {key}").decode() != digest:
            key = key if is_leader else f"entry of rank {rank}"
            store.set(key, Declaration(self.flags, self.given, {**self.of_node, **self.facts}).to_text())
        store.set(f"rank {rank}", json.dumps([socket.gethostname(), key]))


def make_entry(config: Config, corpus: Corpus, device: Device) -> RankEntry | None:
    """Return this rank's entry, or None for a single rank. Raises DataError."""
    return RankEntry.of(config, corpus, device) if config.grid.world_size > 1 else None


def installed() -> dict[str, str]:
    """Return the versions and the code hash of this node."""
    versions = made_by(0, 0)
    return {
        "megapar": versions["megapar"],
        "torch": versions["torch"],
        "Python": versions["python"],
        "code": versions["code"],
    }


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
    paths, per = data.eval_data_path, data.document_per
    heldout = fingerprints_of(paths, data.text_field, per=per) if paths else ()
    facts |= _sources("--eval-data-path", heldout)
    for name, path in named_tasks(data.eval_tasks):
        facts[f"the content of task {name}"] = at(path).sha256()[:_SHOWN]
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
        named = f"{source.name}, " if source.named else ""
        facts[f"source {number} of {name}"] = f"{named}{(source.value or 'unknown')[:_SHOWN]}{weight}{split}"
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
    if name == _SCRIPT:
        return "Run the same trainer on all nodes."
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
    return [(complaint.rule, complaint.message, complaint.fix) for complaint in differences(nodes, _fix)]
