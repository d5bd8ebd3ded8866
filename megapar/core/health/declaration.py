"""What ranks say that they run, before any group of them exists, and where they differ. Standard library only.

An entry is the same text wherever the same is run, so that those of a thousand nodes are compared as text and only
those that differ are read.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from megapar.errors import Complaint, DistributedError

RULE = "agreement"
_MOST_RANGES, _MOST_HOSTS, _MOST_VALUES, _MOST_LETTERS = 4, 3, 4, 60  # of a message


@dataclass(frozen=True)
class Declaration:
    """What one node runs. flags: as they would be written, by their spelling. given: those that were asked for; the
    others are defaults, or follow from them. facts: versions, code, data and the like, by what they are of.
    """

    flags: Mapping[str, str]
    given: frozenset[str]
    facts: Mapping[str, str]

    def to_text(self) -> str:
        """JSON, the same for equal entries."""
        value = {"flags": dict(self.flags), "given": sorted(self.given), "facts": dict(self.facts)}
        return json.dumps(value, sort_keys=True)

    @classmethod
    def from_text(cls, text: bytes | str) -> Declaration:
        """Raises DistributedError for what ``to_text`` never wrote."""
        try:
            value = json.loads(text)
            flags, given, facts = value["flags"], value["given"], value["facts"]
            words = [*flags, *flags.values(), *given, *facts, *facts.values()]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise DistributedError(f"what a rank says that it runs cannot be read: {text[:80]!r}") from error
        if not all(isinstance(word, str) for word in words):
            raise DistributedError(f"what a rank says that it runs is not text: {text[:80]!r}")
        return cls(flags, frozenset(given), facts)


@dataclass(frozen=True)
class Node:
    """Ranks that said the same from one host. entry: the text of an Declaration."""

    host: str
    ranks: tuple[int, ...]
    entry: bytes


def differences(nodes: Sequence[Node], fix: Callable[[str], str]) -> list[Complaint]:
    """All that these nodes do not agree in, with the values and who has them.

    fix: what to do where something of this name differs; it is said once. Raises DistributedError for an entry that is
    none.
    """
    said: dict[bytes, list[Node]] = {}
    for node in nodes:
        said.setdefault(node.entry, []).append(node)
    if len(said) < 2:
        return []
    entries = {text: Declaration.from_text(text) for text in said}
    flags = dict(_apart({text: entry.flags for text, entry in entries.items()}))
    given = frozenset[str]().union(*(entry.given for entry in entries.values()))
    asked = {name: values for name, values in flags.items() if name in given}
    facts = dict(_apart({text: entry.facts for text, entry in entries.items()}))
    found = {name: _message(name, values, said) for name, values in {**(asked or flags), **facts}.items()}
    last = {fix(name): name for name in found}
    return [Complaint(RULE, message, fix(name) if last[fix(name)] == name else "") for name, message in found.items()]


def _apart(tables: Mapping[bytes, Mapping[str, str]]) -> Iterator[tuple[str, dict[str, list[bytes]]]]:
    """Names of several values, with the entries that have each of them. What only one side's code knows has one value:
    that the code differs is told.
    """
    for name in dict.fromkeys(name for table in tables.values() for name in table):
        values: dict[str, list[bytes]] = {}
        for text, table in tables.items():
            if name in table:
                values.setdefault(table[name], []).append(text)
        if len(values) > 1:
            yield name, values


def _message(name: str, values: Mapping[str, Sequence[bytes]], said: Mapping[bytes, Sequence[Node]]) -> str:
    having = {value: [node for text in texts for node in said[text]] for value, texts in values.items()}
    ordered = sorted(having.items(), key=lambda pair: min(node.ranks[0] for node in pair[1]))
    parts = [f"{_clipped(value)} on {_place(nodes)}" for value, nodes in ordered[:_MOST_VALUES]]
    if len(ordered) > _MOST_VALUES:
        parts.append(f"something else on {_place([node for _, nodes in ordered[_MOST_VALUES:] for node in nodes])}")
    return f"{name} is {', '.join(parts[:-1])} and {parts[-1]}."


def _clipped(value: str) -> str:
    return value if len(value) <= _MOST_LETTERS else f"{value[: _MOST_LETTERS - 3]}..."


def _place(nodes: Sequence[Node]) -> str:
    """Ranks and hosts, such as "ranks 0-7, 16 (a, b)"."""
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
