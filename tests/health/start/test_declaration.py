"""Entries of nodes as text, and what is said of those that differ."""

from __future__ import annotations

import json

import pytest

from megapar.errors import DistributedError
from megapar.health.start.declaration import Declaration, Node, differences

FLAGS = {"--lr": "0.001", "--hidden-size": "64", "--ffn-hidden-size": "128"}
FACTS = {"torch": "2.11.0", "source 1 of the data": "abcd"}
GIVEN = frozenset({"--lr"})


def node(first: int, last: int, host: str, entry: Declaration) -> Node:
    return Node(host, tuple(range(first, last + 1)), entry.to_text().encode())


def entry(flags: dict[str, str] | None = None, facts: dict[str, str] | None = None, given: str = "") -> Declaration:
    return Declaration({**FLAGS, **(flags or {})}, GIVEN | frozenset(given.split()), {**FACTS, **(facts or {})})


def said(*nodes: Node) -> list[str]:
    return [str(one) for one in differences(nodes, lambda name: "the flags." if name.startswith("--") else "files.")]


def test_an_entry_is_the_same_as_text_and_back() -> None:
    one = entry(given="--seed --ffn-hidden-size")
    assert Declaration.from_text(one.to_text().encode()) == one
    assert (
        Declaration(dict(reversed(FLAGS.items())), GIVEN, FACTS).to_text() == Declaration(FLAGS, GIVEN, FACTS).to_text()
    )


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", "{}", json.dumps({"flags": {"--lr": 1}, "given": [], "facts": {}}), "[" * 100_000],
)
def test_what_is_no_entry_is_refused(text: str) -> None:
    with pytest.raises(DistributedError, match="the declaration of a rank"):
        Declaration.from_text(text)


def test_nodes_that_run_the_same_agree() -> None:
    assert said(node(0, 7, "a", entry()), node(8, 15, "b", entry())) == []
    # A value that is the default of one and asked for by the other is the same value.
    assert said(node(0, 7, "a", entry()), node(8, 15, "b", entry(given="--hidden-size"))) == []


def test_all_differences_are_told_at_once_with_values_ranks_and_hosts() -> None:
    other = entry({"--lr": "0.0005"}, {"torch": "2.12.0", "source 1 of the data": "ef01"})
    assert said(node(0, 7, "a", entry()), node(8, 15, "b", other), node(16, 16, "c", entry())) == [
        "[agreement] --lr is 0.001 on ranks 0-7, 16 (a, c) and 0.0005 on ranks 8-15 (b). the flags.",
        "[agreement] source 1 of the data is abcd on ranks 0-7, 16 (a, c) and ef01 on ranks 8-15 (b).",
        "[agreement] torch is 2.11.0 on ranks 0-7, 16 (a, c) and 2.12.0 on ranks 8-15 (b). files.",
    ]


def test_what_follows_from_a_flag_that_differs_is_not_told() -> None:
    other = entry({"--hidden-size": "32", "--ffn-hidden-size": "64"}, given="--hidden-size")
    (only,) = said(node(0, 0, "a", entry()), node(1, 1, "b", other))
    assert "--hidden-size is 64 on rank 0 (a) and 32 on rank 1 (b)" in only
    # But never is a difference lost.
    (only,) = said(node(0, 0, "a", entry()), node(1, 1, "b", entry({"--ffn-hidden-size": "64"})))
    assert "--ffn-hidden-size is 128 on rank 0 (a) and 64 on rank 1 (b)" in only


def test_what_other_code_does_not_know_is_not_compared() -> None:
    other = entry({"--new": "1"}, {"code": "1234"}, given="--new")
    (only,) = said(node(0, 0, "a", entry(facts={"code": "5678"})), node(1, 1, "b", other))
    assert "code is 5678 on rank 0 (a) and 1234 on rank 1 (b)" in only


def test_messages_stay_short() -> None:
    nodes = [node(2 * n, 2 * n, f"host-{n}", entry({"--lr": f"{n}." + "1" * 100})) for n in range(100)]
    (only,) = said(*nodes)
    assert len(only) < 700
    assert "other values on ranks 8, 10, 12, 14 and 92 more (host-4, host-5, host-6 and 93 more)" in only
