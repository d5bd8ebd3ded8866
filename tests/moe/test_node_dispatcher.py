"""Dispatch by node on 2 nodes of 2 ranks: the layer against one process, and against the plain dispatch."""

from __future__ import annotations

import itertools
from datetime import timedelta
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from megapar.core.comm.axis import Axis
from megapar.core.comm.in_flight import CommContext
from megapar.core.comm.world import World
from megapar.core.device.base import Device
from megapar.core.grid import Grid
from megapar.errors import DistributedError
from megapar.moe.dispatch_bytes import node_row_bytes
from megapar.moe.node_dispatcher import NodeDispatcher, NodeShape
from megapar.moe.slicing import Slicing
from tests.moe import test_forward
from tests.moe.test_token_dispatcher import CASES, EXPERTS, HIDDEN, Case, LateDevice, check, drops, make, whole_layer
from tests.support import late
from tests.support.ranks import run_ranks
from tests.support.sent_rows import rows_by_node

# degrees, sequence parallelism, ranks of ep on each node
LAYOUTS = {
    "2 x 2": ({"sharding": 4, "ep": 4}, False, 2),
    "4 x 1": ({"sharding": 4, "ep": 4}, False, 1),
    "2 x 1, edp 2": ({"sharding": 4, "ep": 2}, False, 1),
    "2 x 2 over mp, cut": ({"sharding": 2, "mp": 2, "ep": 4}, True, 2),
    "2 x 1, emp 2": ({"sharding": 2, "mp": 2, "ep": 2, "emp": 2}, False, 1),
    "2 x 1, emp 2, cut": ({"sharding": 2, "mp": 2, "ep": 2, "emp": 2}, True, 1),
}


def on_ranks(rank, world_size, rendezvous, layout, sequence_parallel, node, backend):
    if backend == "late":
        late.register()
    device = LateDevice() if backend == "late" else Device()
    world = World.start(Grid(**layout), device, timedelta(seconds=60), f"file://{rendezvous}")
    world.make_nodes(node)
    dropped = 0
    for case in CASES:
        try:
            dropped += check(world, sequence_parallel, case)
        except Exception as error:
            raise AssertionError(f"{case}: {error}") from error
    assert late.in_flight() == []
    world.close()
    return dropped


# The late backend is gloo that forgives less. Rows of tests/equivalence have the other layouts.
SUITE = ("2 x 2", "2 x 1, emp 2", "2 x 1, emp 2, cut")


@pytest.mark.parametrize(
    ("layout", "backend"),
    [
        pytest.param(layout, backend, marks=[] if backend == "late" and layout in SUITE else [pytest.mark.table])
        for layout, backend in itertools.product(LAYOUTS, ("late", "gloo"))
    ],
)
def test_equal_to_one_process(layout, backend):
    degrees, sequence_parallel, node = LAYOUTS[layout]
    dropped = run_ranks(4, on_ranks, degrees, sequence_parallel, node, backend, group=False)
    assert min(dropped) > 0


def sliced(rank, world_size, experts, *arguments):
    with patch.object(test_forward, "EXPERTS", experts):
        return test_forward.on_ranks(rank, world_size, *arguments, 2)


SLICED = [
    (Slicing(3), {}, (12, 3, 3)),
    (Slicing(3), {"kind": "deepspeed_moe"}, (12, 3, 3)),
    (Slicing(2, capacity="slice"), {"kind": "deepspeed_moe", "drop_policy": "probs"}, (8, 2, 2)),
    (Slicing(2, expert_pieces=2), {"kind": "deepspeed_moe"}, (32, 2, 2)),
    (Slicing(expert_pieces=3), {"topk": 3}, (24, 1, 1)),
]


@pytest.mark.parametrize("backend", [pytest.param("gloo", marks=pytest.mark.table), "late"])
@pytest.mark.parametrize("favoured", [None, 3])
@pytest.mark.parametrize(("slicing", "sizes", "counted"), SLICED, ids=str)
def test_in_slices_and_pieces(slicing, sizes, counted, favoured, backend):
    """The message of a slice is still one exchange, and the host waits once for its counts."""
    sizes = {**sizes, "topk": 1} if favoured is not None else sizes
    for result in run_ranks(4, sliced, 8, slicing, sizes, favoured is not None, favoured, backend=backend):
        assert result == counted


def trained(layer, whole, rank, case):
    """Outputs and all gradients of a layer with this rank's part of the whole one's experts."""
    for name, parameter in layer.named_parameters():
        given = whole.get_parameter(name).data
        parameter.data.copy_(given.chunk(4)[rank] if name.startswith("experts") else given)
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(3, 11, HIDDEN, dtype=torch.float64, generator=generator).requires_grad_()
    y, stats = layer(x)
    (y.square().sum() + stats.aux).backward()
    return {"y": y.detach(), "x": x.grad, **{name: parameter.grad for name, parameter in layer.named_parameters()}}


def beside_plain(rank, world_size, rendezvous):
    """(largest difference from plain dispatch relative to the numbers, bytes sent by node and as counted)."""
    world = World.start(Grid(sharding=4, ep=4), Device(), timedelta(seconds=60), f"file://{rendezvous}")
    plain = world.axis("ep")
    world.make_nodes(2)
    worst, found = 0.0, []
    for case in (Case({"topk": 4}), Case(drops("token", topk=4)), Case({"topk": 1})):
        whole, mp = whole_layer(case), world.axis("mp")
        want = trained(make(case.moe(), mp=mp, ep=plain), whole, rank, case)
        layer, chosen = make(case.moe(), mp=mp, ep=world.axis("ep")), []
        outgoing = NodeShape.outgoing

        def listed(shape, experts, kept, outgoing=outgoing, chosen=chosen):
            pairs = torch.where(torch.ones_like(experts, dtype=torch.bool) if kept is None else kept, experts, -1)
            chosen.append(pairs)
            return outgoing(shape, experts, kept)

        world.sent_bytes.take()
        with patch.object(NodeShape, "outgoing", listed):
            got = trained(layer, whole, rank, case)
        sent = world.sent_bytes.take()
        for name, b in want.items():
            worst = max(worst, float((got[name] - b).abs().max() / b.abs().max().clamp(min=1e-3)))
        everyone = [torch.empty_like(chosen[0]) for _ in range(world_size)]
        dist.all_gather(everyone, chosen[0])
        routing = [[[e for e in token if e >= 0] for token in own.tolist()] for own in everyone]
        rows = rows_by_node(routing, EXPERTS, 2)[rank]
        both = 2 * (node_row_bytes(HIDDEN, case.moe().topk, 8, 8) + HIDDEN * 8)
        found.append((sent.get("ep_between/all_to_all", 0), both * rows.between))
        found.append((sent.get("ep_within/all_to_all", 0), both * rows.within))
    world.close()
    return worst, found


def test_as_plain_dispatch_and_bytes_as_the_recorded_routing():
    """Outputs and gradients to 1e-12; in four passes, both hops send what the formula counts from the routing.

    Together: what a rank sends in two of the passes are the rows that it received in the other two.
    """
    results = run_ranks(4, beside_plain, group=False)
    assert max(worst for worst, _ in results) < 1e-12
    for hop in zip(*(found for _, found in results), strict=True):
        assert sum(sent for sent, _ in hop) == sum(rows for _, rows in hop) > 0


def divided(rank, world_size, rendezvous):
    world = World.start(Grid(sharding=4, ep=4), Device(), timedelta(seconds=60), f"file://{rendezvous}")
    before = world.num_groups
    with pytest.raises(DistributedError, match="the 4 ranks of ep are not several nodes of 4"):
        world.make_nodes(4)
    world.make_nodes(2)
    nodes = world.axis("ep").nodes
    names = {axis.name for axis in world.axes()}
    world.close()
    return nodes.between.ranks, nodes.within.ranks, world.num_groups - before, names >= {"ep_between", "ep_within"}


def test_a_world_divides_ep_by_node():
    found = run_ranks(4, divided, group=False)
    assert [between for between, *_ in found] == [(0, 2), (1, 3), (0, 2), (1, 3)]
    assert [within for _, within, *_ in found] == [(0, 1), (0, 1), (2, 3), (2, 3)]
    assert [rest for *_, groups, named in found for rest in (groups, named)] == [2, True] * 4


def test_numbers_of_experts_fit_in_two_bytes():
    axes = Axis.single("ep"), Axis.single("emp")
    NodeDispatcher(2**15, *axes, False, False, CommContext())
    with pytest.raises(DistributedError, match="32,768 experts at most, not 32,769"):
        NodeDispatcher(2**15 + 1, *axes, False, False, CommContext())


def drawn(data):
    """(shape, for each rank experts and kept pairs)."""
    nodes, ranks, local = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    shape = NodeShape(nodes * ranks * local, nodes, ranks, data.draw(st.integers(0, 3)))
    topk = data.draw(st.integers(1, min(4, shape.experts)))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    routing = []
    for _ in range(shape.group):
        tokens = data.draw(st.integers(0, 5))
        scores = torch.rand(tokens, shape.experts, generator=generator)
        kept = torch.rand(tokens, topk, generator=generator) < data.draw(st.sampled_from([0.0, 0.6, 1.0]))
        routing.append((scores.topk(topk).indices, kept))
    return shape, routing


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_both_ends_of_every_message_agree(data):
    shape, routing = drawn(data)
    numbers = torch.stack([shape.outgoing(*pairs).table for pairs in routing])[:, None]
    splits = [shape.split(numbers, rank, 0) for rank in range(shape.group)]
    for message in range(shape.messages):
        for rank, own in enumerate(splits):
            node, place = divmod(rank, shape.ranks)
            for other in range(shape.nodes):
                there = splits[other * shape.ranks + place][message]
                assert own[message].to_nodes[other] == there.from_nodes[node]
            for other in range(shape.ranks):
                there = splits[node * shape.ranks + other][message]
                assert own[message].to_ranks[other] == there.from_ranks[place]
    for rank in range(shape.group):
        first, arrived = rank * shape.local, torch.zeros(shape.local, dtype=torch.int64)
        for experts, kept in routing:
            arrived += torch.bincount(experts[kept], minlength=shape.experts)[first : first + shape.local]
        assert sum(sum(split.pairs[0]) for split in splits[rank]) == int(arrived.sum())
        if not shape.pieces:
            assert list(splits[rank][0].pairs[0]) == arrived.tolist()


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_rows_of_one_message_are_those_of_the_formula(data):
    """``sent_rows`` counts the rows that leave a rank and a node; plans use its expectation."""
    shape, routing = drawn(data)
    shape = NodeShape(shape.experts, shape.nodes, shape.ranks, 0)
    numbers = torch.stack([shape.outgoing(*pairs).table for pairs in routing])[:, None]
    listed = [[e[k].tolist() for e, k in zip(*pairs, strict=True)] for pairs in routing]
    for rank, sent in enumerate(rows_by_node(listed, shape.experts, shape.ranks)):
        node, place = divmod(rank, shape.ranks)
        (split,) = shape.split(numbers, rank, 0)
        assert sum(split.to_nodes) - split.to_nodes[node] == sent.between
        assert sum(split.to_ranks) - split.to_ranks[place] == sent.within
