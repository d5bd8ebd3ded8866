"""The choice of the experts' dispatch: flags, the launcher's nodes, the formula; and who hears of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from megapar.arguments import Config, parse
from megapar.core.device.kinds import kinds
from megapar.errors import ConfigError
from megapar.launch_environment import equal_nodes
from megapar.training.building.expert_dispatch import DispatchChoice, assumed_node, dispatch_choice
from megapar.training.checkpoints.identity import flags_of
from megapar.training.loop.outline import outline

H100 = kinds()["h100-80g"]
SIZES = (
    *("--num-layers", "2", "--hidden-size", "2048", "--num-attention-heads", "16", "--num-experts", "128"),
    *("--moe-router-topk", "8", "--moe-ffn-hidden-size", "768", "--seq-length", "4096", "--vocab-size", "1000"),
    *("--micro-batch-size", "1", "--data-path", "mock", "--validate-only"),
)


def config(*flags: str, ranks: int = 16, environ: Mapping[str, str] | None = None) -> Config:
    return parse("moe", [*SIZES, "--world-size", str(ranks), "--ep-degree", str(ranks), *flags], environ or {})


def chosen(*flags: str, ranks: int = 16, node: int | None = None) -> DispatchChoice:
    return dispatch_choice(config(*flags, ranks=ranks), H100, "bf16", node)


def test_without_nodes_all_ranks_are_on_one_and_nothing_changes() -> None:
    assert chosen() == DispatchChoice(0, "the 16 ranks of ep are on one node")
    assert chosen(node=16).name == "plain"
    assert dispatch_choice(config("--ep-degree", "1"), H100, "bf16", 8).node_ranks == 0


def test_auto_goes_by_node_where_it_is_faster_by_estimate() -> None:
    """The formula by hand: rows of 4112 and 4096 bytes at 50 GB/s, four of them by pairs; once per node and rank."""
    found = chosen("--ranks-per-node", "8")
    assert found.node_ranks == 8
    tokens, latency = 4096, H100.device_class.latency_seconds
    plain = sum(tokens * 4 * row / 50e9 + latency for row in (4112, 4096)) * 2
    between, within = 0.9969041, 5.7719487
    by_node = sum(tokens * row * (between / 50e9 + within / 450e9) + 2 * latency for row in (4144, 4096)) * 2
    assert found.reason == f"{plain / by_node:.2f} times the speed of plain by estimate on h100-80g, 2 nodes"


def test_auto_stays_plain_where_it_is_not_worth_it() -> None:
    """A choice per token has no copies to save, and short messages only have more latencies."""
    assert chosen("--ranks-per-node", "8", "--moe-router-topk", "1").node_ranks == 0
    assert chosen("--ranks-per-node", "8", "--seq-length", "32").node_ranks == 0


def test_auto_stays_plain_where_ep_is_not_whole_nodes() -> None:
    ragged = config("--num-experts", "12", "--moe-router-topk", "4", "--ranks-per-node", "8", ranks=12)
    assert dispatch_choice(ragged, H100, "bf16") == DispatchChoice(
        0, "the 12 ranks of ep are not whole nodes of 8 ranks"
    )


def test_more_experts_than_a_slot_can_name_travel_plainly() -> None:
    nodes = ("--ranks-per-node", "8")
    assert chosen(*nodes, "--num-experts", "32768").node_ranks == 8
    assert chosen(*nodes, "--num-experts", "32784") == DispatchChoice(0, "by node takes 32,768 experts at most")
    with pytest.raises(ConfigError, match=r"moe-dispatch-experts.*takes 32,768 experts at most.*--num-experts 32768"):
        config("--moe-dispatch", "node", "--num-experts", "32784")


def test_a_request_is_followed_or_refused() -> None:
    assert chosen("--moe-dispatch", "plain", node=8) == DispatchChoice(0, "by --moe-dispatch")
    assert chosen("--moe-dispatch", "node", "--moe-router-topk", "1", node=4) == DispatchChoice(4, "by --moe-dispatch")
    with pytest.raises(ConfigError, match="are not several nodes of 16, as far as this rank's launcher tells"):
        chosen("--moe-dispatch", "node")
    with pytest.raises(ConfigError, match=r"moe-dispatch-nodes.*needs several nodes"):
        config("--moe-dispatch", "node", "--ranks-per-node", "16")


@pytest.mark.parametrize(
    ("local", "world", "nodes", "ranks"),
    [
        ("8", "16", "2", 8),
        ("8", "16", "", 8),  # a launcher that does not count nodes
        ("8", "16", "3", None),  # 8 + 4 + 4
        ("4", "6", "2", None),
        ("", "16", "2", None),
        ("eight", "16", "2", None),
    ],
)
def test_the_launcher_tells_the_ranks_of_a_node_if_all_have_as_many(
    local: str, world: str, nodes: str, ranks: int | None
) -> None:
    environ = {"LOCAL_WORLD_SIZE": local, "WORLD_SIZE": world, "GROUP_WORLD_SIZE": nodes}
    assert equal_nodes(environ) == ranks
    assert config(environ=environ).parallel.ranks_per_node == ranks


def test_a_flag_overrides_the_launcher() -> None:
    environ = {"LOCAL_WORLD_SIZE": "16", "WORLD_SIZE": "16"}
    assert config("--ranks-per-node", "4", environ=environ).parallel.ranks_per_node == 4


def test_validate_only_shows_the_choice() -> None:
    told = config("--ranks-per-node", "4")
    line = f"dispatch of experts: {dispatch_choice(told, H100, 'bf16').describe()}\n"
    assert line in outline(told)
    assert "dispatch of experts: node (" in outline(config())  # nodes of 8, as such a device's have
    alone = replace(told, grid=replace(told.grid, ep=1))
    assert "dispatch of experts" not in outline(alone)


def test_a_checkpoint_may_be_continued_by_the_other_dispatch() -> None:
    assert not {"moe_dispatch", "ranks_per_node"} & flags_of(config("--moe-dispatch", "plain")).keys()


def test_ranks_of_a_planned_node() -> None:
    assert assumed_node(H100, 64) == 8
    assert assumed_node(kinds()["cpu"], 64) == 64
