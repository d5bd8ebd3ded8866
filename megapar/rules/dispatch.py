"""Rows on the dispatch of experts by node, the number of ranks of a node, and experts that move between ranks."""

from __future__ import annotations

from functools import partial

from megapar.core.grid import Grid
from megapar.moe.dispatch_bytes import MOST_EXPERTS
from megapar.schema.flag import MOE
from megapar.schema.rule import NO_EFFECT, Facts, Rule, unused

_DEGREES = ("dp_degree", "pp_degree", "sharding_degree", "cp_degree", "mp_degree", "ep_degree", "expert_mp_degree")


def _whole_nodes(f: Facts) -> bool:
    sizes = {name.removesuffix("_degree"): getattr(f, name) for name in _DEGREES if name != "expert_mp_degree"}
    try:
        grid = Grid(**sizes, emp=f.expert_mp_degree, order=f.rank_order)
    except ValueError:  # other rows refuse these degrees
        return True
    local = grid.ep_node_ranks(f.ranks_per_node)
    return local is not None and local < grid.ep


_row = partial(Rule, source="experts", models=MOE)
_no_effect = partial(Rule, source=NO_EFFECT, models=MOE)

RULES: tuple[Rule, ...] = (
    _row(
        id="moe-dispatch-nodes",
        reads=("moe_dispatch", "ranks_per_node", *_DEGREES, "rank_order"),
        # Without the number of ranks on a node, a plan knows it from the device, and a start that all are on one.
        when=lambda f: f.moe_dispatch == "node" and f.ep_degree > 1 and f.ranks_per_node is not None,
        requires=_whole_nodes,
        message="--moe-dispatch node needs several nodes with equally many consecutive ranks of each group of ep",
        fix="Use --moe-dispatch plain, or an --ep-degree of several whole nodes.",
        passing="--world-size 4 --ep-degree 4 --ranks-per-node 2 --moe-dispatch node",
        failing="--world-size 8 --ep-degree 4 --ranks-per-node 4 --moe-dispatch node",
    ),
    _row(
        id="moe-dispatch-experts",
        reads=("moe_dispatch", "ep_degree", "num_experts"),
        when=lambda f: f.moe_dispatch == "node" and f.ep_degree > 1,
        requires=lambda f: f.num_experts <= MOST_EXPERTS,
        message=f"--moe-dispatch node takes {MOST_EXPERTS:,} experts at most: their numbers travel as 16 bits",
        fix=lambda f: f"Use --moe-dispatch plain, or --num-experts {MOST_EXPERTS // f.ep_degree * f.ep_degree}.",
        passing="--world-size 4 --ep-degree 4 --ranks-per-node 2 --moe-dispatch node --num-experts 32768",
        failing="--world-size 4 --ep-degree 4 --ranks-per-node 2 --moe-dispatch node --num-experts 32772",
    ),
    unused(
        "moe-dispatch-unused",
        ("moe_dispatch",),
        ("ep_degree",),
        lambda f: f.ep_degree <= 1,
        "with --ep-degree 1",
        fix="Leave it out.",
        models=MOE,
        passing="--world-size 2 --ep-degree 2 --moe-dispatch plain",
        failing="--moe-dispatch plain",
    ),
    _no_effect(
        id="moe-rebalance-experts",
        reads=("moe_rebalance_interval", "ep_degree", "num_experts"),
        when=lambda f: f.moe_rebalance_interval > 0,
        requires=lambda f: 1 < f.ep_degree < f.num_experts,
        message="--moe-rebalance-interval moves experts between ranks of ep that have several each",
        fix="Leave it out, or choose an --ep-degree above 1 and below --num-experts.",
        passing="--world-size 2 --ep-degree 2 --num-experts 4 --moe-rebalance-interval 100",
        failing="--world-size 4 --ep-degree 4 --num-experts 4 --moe-rebalance-interval 100",
    ),
)
