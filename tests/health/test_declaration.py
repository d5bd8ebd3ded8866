"""Ranks that run something else are refused before there is a group; one entry speaks for a node."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

from megapar.arguments import FLAGS, parse
from megapar.core.device.base import Device
from megapar.errors import ConfigError, DistributedError, MegaparError
from megapar.health import declaration
from megapar.health.declaration import Declaration, Node, RankEntry, differences, verdict
from megapar.trainer import train
from megapar.training.building.corpus import make_corpus
from tests.support.counted_store import CountedStore
from tests.support.ranks import run_ranks
from tests.support.training import COMMON, SMALL, last_wins

CHANGED = {"--lr": "0.001", "--hidden-size": "64", "--ffn-hidden-size": "128"}
FACTS = {"torch": "2.11.0", "source 1 of the data": "abcd"}
GIVEN = frozenset({"--lr"})


def node(first: int, last: int, host: str, entry: Declaration) -> Node:
    return Node(host, tuple(range(first, last + 1)), entry.to_text().encode())


def entry(flags: dict[str, str] | None = None, facts: dict[str, str] | None = None, given: str = "") -> Declaration:
    return Declaration({**CHANGED, **(flags or {})}, GIVEN | frozenset(given.split()), {**FACTS, **(facts or {})})


def said(*nodes: Node) -> list[str]:
    return [str(one) for one in differences(nodes, lambda name: "the flags." if name.startswith("--") else "files.")]


def test_an_entry_is_the_same_as_text_and_back() -> None:
    one = entry(given="--seed --ffn-hidden-size")
    assert Declaration.from_text(one.to_text().encode()) == one
    assert (
        Declaration(dict(reversed(CHANGED.items())), GIVEN, FACTS).to_text()
        == Declaration(CHANGED, GIVEN, FACTS).to_text()
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


ENVIRON = {"WORLD_SIZE": "2", "GROUP_RANK": "0", "LOCAL_RANK": "0"}
TIMEOUT = timedelta(seconds=30)


def declared(*flags: str, environ: Mapping[str, str] = ENVIRON, kind: str = "moe") -> RankEntry:
    config = parse(kind, last_wins((*SMALL[kind], *COMMON), flags), {"WORLD_SIZE": environ.get("WORLD_SIZE", "2")})
    return RankEntry.of(config, make_corpus(config), Device(), environ)


def differing(one: RankEntry, other: RankEntry) -> set[str]:
    """Flags and facts that are not the same."""
    pairs = ((one.flags, other.flags), (one.facts, other.facts), (one.of_node, other.of_node))
    return {name for here, there in pairs for name in {**here, **there} if here.get(name) != there.get(name)}


def test_flags_versions_code_and_data_are_declared() -> None:
    found = declared()
    assert found.flags["--lr"] == "0.01"
    assert found.facts["device"] == "cpu"
    assert found.flags["--dtype"] == "auto"
    assert {"megapar", "torch", "Python", "code", "source 1 of the data"} <= set(found.of_node)
    assert "--lr" in found.given
    assert "--weight-decay" not in found.given


def test_the_last_digit_of_a_number_is_declared() -> None:
    assert differing(declared("--lr", "0.00123456789"), declared("--lr", "0.0012345678")) == {"--lr"}


def test_what_may_differ_between_nodes_is_not_declared(tmp_path: Path) -> None:
    here = declared("--metrics-jsonl", str(tmp_path / "m"), "--save", str(tmp_path / "a"))
    assert differing(here, declared("--device", "cpu", "--save", str(tmp_path / "b"))) == set()
    assert differing(here, declared()) == {"--save"}  # whether ranks save they do agree in
    exempt = {name for name, flag in FLAGS.items() if flag.per_node}
    logs = {"metrics_jsonl", "tensorboard_dir", "wandb_save_dir", "swanlab_save_dir"}
    assert exempt == {"device", "local_checkpoint_dir", "memory_check", "ranks_per_node", *logs}


def test_data_is_declared_by_its_content(tmp_path: Path) -> None:
    text = "".join(f"The {n}th line of a document that is long enough.\n" for n in range(400))
    for name, content in (("a.txt", text), ("b.txt", text), ("c.txt", text.replace("0", "1"))):
        (tmp_path / name).write_text(content)
    one, same, other = (declared("--data-path", str(tmp_path / name)) for name in ("a.txt", "b.txt", "c.txt"))
    assert differing(one, same) == set()
    assert {"source 1 of the data"} <= differing(one, other) <= {"source 1 of the data", "the tokenizer's fingerprint"}
    more = declared(
        "--data-path", str(tmp_path / "a.txt"), "--eval-data-path", str(tmp_path / "b.txt"), "--eval-iters", "1"
    )
    assert "the number of sources of --eval-data-path" in differing(one, more)


def test_one_rank_of_a_node_finds_out_what_takes_time() -> None:
    assert declared(environ={**ENVIRON, "LOCAL_RANK": "1"}).of_node == {}
    assert declared(environ={"LOCAL_RANK": "1"}).of_node  # of which nobody says who is beside it


def exchange(rank: int, world_size: int, rendezvous: str, entries: Sequence[RankEntry]) -> str:
    store = dist.PrefixStore("agree", dist.FileStore(rendezvous, world_size))
    try:
        entries[rank](store, rank, world_size, TIMEOUT)
    except ConfigError as error:
        return str(error)
    return ""


def asked(*entries: RankEntry) -> list[str]:
    found: list[str] = run_ranks(len(entries), exchange, entries, group=False)
    return found


def test_ranks_of_two_nodes_agree_or_hear_all_differences() -> None:
    first = RankEntry({"--lr": "1"}, frozenset(), {"device": "cpu"}, {"code": "a"}, "0", 0)
    second = replace(first, of_node={}, local_rank=1)
    other = [replace(first, node="1"), replace(second, node="1")]
    assert asked(first, second, *other) == [""] * 4
    other = [replace(one, flags={"--lr": "2"}) for one in other]
    other[0] = replace(other[0], of_node={"code": "b"})
    found = asked(first, second, *other)
    assert len(set(found)) == 1
    assert "[agreement] --lr is 1 on ranks 0-1 (" in found[0]
    assert "and 2 on ranks 2-3 (" in found[0]
    assert "code is a on ranks 0-1 (" in found[0]


def test_a_rank_that_is_not_as_its_own_node_is_found() -> None:
    first = RankEntry({"--lr": "1"}, frozenset(), {}, {"code": "a"}, "0", 0)
    found = asked(first, replace(first, flags={"--lr": "2"}, of_node={}, local_rank=1))
    assert "[agreement] --lr is 1 on rank 0 (" in found[0]
    assert found[0] == found[1]
    assert "code" not in found[0]


def test_a_rank_asks_little_of_the_store_and_the_first_one_reads_all_at_once() -> None:
    counted: Any = CountedStore()
    nodes, ranks = 64, 8
    flags = {f"--flag-{n}": "1" for n in range(200)}
    for rank in range(nodes * ranks):
        node, local = divmod(rank, ranks)
        of_node = {} if local else {"code": "a"}
        RankEntry(flags, frozenset(), {"device": "cpu"}, of_node, str(node), local).declare(counted, rank)
    assert counted.calls == {"set": nodes * (2 + ranks), "get": nodes * (ranks - 1)}
    counted.calls.clear()
    assert verdict(counted, nodes * ranks) == []
    assert counted.calls == {"multi_get": 2}


def start(rank: int, world_size: int, rendezvous: str, flags: Sequence[Sequence[str]]) -> tuple[str, bool]:
    """What a run ends with, and whether there was a group."""
    place: dict[str, str] = {
        "RANK": str(rank),
        "LOCAL_RANK": "0",
        "GROUP_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
    }
    made: list[Any] = []
    real = dist.init_process_group

    def make(*arguments: Any, **options: Any) -> None:
        made.append(1)
        real(*arguments, **options)

    with patch.dict(os.environ, place), patch.object(dist, "init_process_group", make):
        try:
            train(parse("moe", list(flags[rank]), place), f"file://{rendezvous}")
        except MegaparError as error:
            return f"{type(error).__name__}: {error}", bool(made)
    return "", bool(made)


def test_a_run_of_nodes_that_differ_makes_no_group() -> None:
    common = last_wins((*SMALL["moe"], *COMMON), ("--train-iters", "2"))
    assert run_ranks(2, start, [common, common], group=False) == [("", True)] * 2
    other = last_wins(common, ("--weight-decay", "0.5", "--seed", "7"))
    for text, made in run_ranks(2, start, [common, other], group=False):
        assert not made
        assert text.startswith("ConfigError: [agreement] --seed is ")
        assert "[agreement] --weight-decay is " in text


@pytest.mark.parametrize("kind", ["moe", "ernie"])
def test_every_flag_that_is_compared_has_a_text(kind: str) -> None:
    found = declared(kind=kind).flags
    assert all(isinstance(text, str) and text for text in found.values())


def test_nodes_that_would_choose_different_dispatches_hear_of_it() -> None:
    """Eight ranks on nodes of 2, or of 4: dispatch by node would go two ways."""
    flags = ("--validate-only", "--world-size", "8", "--ep-degree", "8", "--num-experts", "8")
    eight = {**ENVIRON, "WORLD_SIZE": "8"}
    two, four = (
        declared(*flags, "--moe-dispatch", "node", "--ranks-per-node", ranks, environ={**eight, "GROUP_RANK": ranks})
        for ranks in "24"
    )
    assert differing(two, four) == {"the dispatch of experts"}
    assert differing(two, declared(*flags, "--moe-dispatch", "plain", environ=eight)) == {
        "--moe-dispatch",
        "the dispatch of experts",
    }
    assert "pass --moe-dispatch plain on all of them" in asked(two, four)[0]


def test_nodes_with_other_trainers_are_told_so() -> None:
    assert "same trainer" in declaration._fix(declaration._SCRIPT)


def test_empty_ranks_are_those_of_a_single_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "")
    line = last_wins((*SMALL["moe"], *COMMON), ("--train-iters", "1", "--save", str(tmp_path)))
    assert train(parse("moe", line, starting=True)).iteration == 1
