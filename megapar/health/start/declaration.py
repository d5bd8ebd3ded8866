"""Declarations: the flags and facts of each node's run, compared before any process group exists.

Equal declarations are equal texts. Those of a thousand nodes are therefore compared as text, and only the differing
ones are parsed.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from megapar.errors import Complaint, DistributedError

RULE = "agreement"
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
    """Ranks of one host with the same declaration.

    Attributes:
        host: Name of the host.
        ranks: The ranks, in ascending order.
        entry: The text of the Declaration.
    """

    host: str
    ranks: tuple[int, ...]
    entry: bytes


def differences(nodes: Sequence[Node], fix: Callable[[str], str]) -> list[Complaint]:
    """Return a complaint for each flag or fact that differs between nodes, with its values and their ranks.

    If set flags differ, derived ones are not reported. Raises DistributedError for an entry that is not a declaration.

    Args:
        nodes: Nodes of the job.
        fix: Returns the remedy for a flag or fact of this name. Each remedy is given once.
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
    found = {name: _message(name, values, by_entry) for name, values in {**(set_flags or flags), **facts}.items()}
    last = {fix(name): name for name in found}
    return [Complaint(RULE, message, fix(name) if last[fix(name)] == name else "") for name, message in found.items()]


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
