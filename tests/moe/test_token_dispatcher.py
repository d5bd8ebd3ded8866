"""The layer on many ranks against one process that holds every micro-batch: outputs, statistics, every gradient."""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass, field, replace
from datetime import timedelta
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from megapar.core.comm.axis import Axis
from megapar.core.comm.in_flight import CommContext
from megapar.core.comm.world import World
from megapar.core.device.base import Device
from megapar.core.grid import Grid
from megapar.core.sharding.cut import box_at
from megapar.errors import DistributedError
from megapar.model.decoder.table import decoder_table
from megapar.model.layers.mlp import Mlp
from megapar.moe.dispatcher import RoutedPairs
from megapar.moe.expert_order import order_by_expert, transpose_runs
from megapar.moe.layer import MoeLayer
from megapar.moe.sizes import MoeSizes
from megapar.moe.token_dispatcher import TokenDispatcher
from tests.model.small import MOE
from tests.support import late
from tests.support.ranks import run_ranks

HIDDEN, FFN, EXPERTS, LENGTH = 6, 8, 8, 8
COEFFICIENTS = (0.7, 0.3)


@dataclass(frozen=True)
class Case:
    """One layer, its inputs, and what is special about them.

    batch: samples of each data rank's micro-batch. padding: "none", "some", or "rank": data rank 0 is all padding.
    favoured: experts that every token chooses first.
    """

    sizes: dict[str, object] = field(default_factory=dict)
    batch: tuple[int, ...] = (2, 2, 2, 2)
    padding: str = "none"
    favoured: tuple[int, ...] = ()

    def moe(self) -> MoeSizes:
        least = {"num_experts": EXPERTS, "topk": 2, "min_capacity": 1, "capacity_factor": 0.7}
        return MoeSizes(HIDDEN, FFN, **{**least, **self.sizes})


def drops(policy, **more):
    return {"kind": "deepspeed_moe", "drop_policy": policy, **more}


POLICIES = ("token", "choice", "probs")
BIASED = {"add_bias": True, "activation": "gelu"}
CASES = (
    *(Case({"topk": topk}, padding=padding) for topk in (1, 2, 4) for padding in ("none", "some")),
    *(
        Case(drops(policy, topk=topk), padding=padding)
        for (policy, topk), padding in zip(
            itertools.product(POLICIES, (1, 2, 4)), itertools.cycle(("none", "some")), strict=False
        )
    ),
    *(Case(sizes, padding="rank") for sizes in ({}, *map(drops, POLICIES))),
    *(Case(sizes, favoured=(7,)) for sizes in ({}, *map(drops, POLICIES))),
    Case({"topk": 1}, favoured=(0,)),
    Case(batch=(1, 3, 2, 0)),
    Case({**BIASED, "shared_experts": 1}, padding="some"),
    Case(drops("token", **BIASED, shared_experts=2), padding="some"),
    *(Case(drops(policy, capacity_scope="rank"), padding="some") for policy in POLICIES),
    Case(drops("token", capacity_scope="rank", add_bias=True)),
)

LAYOUTS = {
    "ep 2": ({"sharding": 2, "ep": 2}, False),
    "ep 2 over dp": ({"dp": 2, "ep": 2}, False),
    "ep 4": ({"sharding": 4, "ep": 4}, False),
    "ep 2, edp 2": ({"sharding": 4, "ep": 2}, False),
    "ep 2 x emp 2": ({"sharding": 2, "mp": 2, "ep": 2, "emp": 2}, False),
    "ep 2 x emp 2, cut": ({"sharding": 2, "mp": 2, "ep": 2, "emp": 2}, True),
    "emp 2": ({"mp": 2, "emp": 2}, False),
    "emp 2, cut": ({"mp": 2, "emp": 2}, True),
    "ep 2 in mp, cut": ({"mp": 2, "ep": 2}, True),
    "ep 4 over mp, cut": ({"sharding": 2, "mp": 2, "ep": 4}, True),
    "ep 4 in mp, cut": ({"mp": 4, "ep": 4}, True),
    "edp 2 in mp, cut": ({"mp": 2}, True),
}


class LateDevice(Device):
    """The CPU on the late backend."""

    backend = "late"


def table(sizes):
    """The rows of the layer's parameters, by their names in the layer."""
    prefix = "layers.0.moe."
    whole = replace(MOE, num_layers=1, first_k_dense=0, hidden_size=HIDDEN, moe=sizes, add_bias_linear=sizes.add_bias)
    whole = replace(whole, activation=sizes.activation)
    return {row.name.removeprefix(prefix): row for row in decoder_table(whole) if row.name.startswith(prefix)}


def make(sizes, *, mp, sequence_parallel=False, **axes):
    shared = None
    if sizes.shared_experts:
        shared = Mlp(
            sizes.hidden_size,
            sizes.shared_width,
            gated=sizes.gated,
            bias=sizes.add_bias,
            mp=mp,
            sequence_parallel=sequence_parallel,
            dtype=torch.float64,
            device=None,
        )
    return MoeLayer(sizes, shared=shared, mp=mp, sequence_parallel=sequence_parallel, dtype=torch.float64, **axes)


def whole_layer(case):
    layer = make(case.moe(), mp=Axis.single("mp"))
    generator = torch.Generator().manual_seed(3)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.5, generator=generator)
    for place, expert in enumerate(case.favoured):
        layer.router.correction_bias[expert] = 100.0 - place
    return layer


def inputs(case, index):
    """x, the gradient that comes from behind, and valid of data rank ``index``."""
    generator = torch.Generator().manual_seed(10 + index)
    shape = (case.batch[index], LENGTH)
    x, upstream = (torch.randn(*shape, HIDDEN, dtype=torch.float64, generator=generator) for _ in range(2))
    valid = torch.ones(shape, dtype=torch.bool)
    if case.padding == "some":
        valid[0, LENGTH - 1 - index :] = False
        valid[1, 2 * index + 1 :] = False
    elif case.padding == "rank" and index == 0:
        valid[:] = False
    return x.requires_grad_(), upstream, valid


def run(layer, case, x, upstream, valid, tokens):
    """(y, stats) with all gradients made."""
    y, stats = layer(x, None if case.padding == "none" else valid, tokens)
    ((y * upstream).sum() + COEFFICIENTS[0] * stats.aux + COEFFICIENTS[1] * stats.z).backward()
    return y.detach(), stats


def run_by_rank(layer, case, x, upstream, valid, pieces):
    """As ``run`` where each of ``pieces`` chunks of the sequence has a capacity of its own: drops of the chunks,
    statistics of the whole."""
    chunks = [t.chunk(pieces, dim=1) for t in (x, upstream, valid)]
    parts = [layer(x_, valid_, int(valid_.sum())) for x_, _, valid_ in zip(*chunks, strict=True)]
    _, stats = layer(x, valid, int(valid.sum()))
    loss = sum((y * up).sum() for (y, _), up in zip(parts, chunks[1], strict=True))
    (loss + COEFFICIENTS[0] * stats.aux + COEFFICIENTS[1] * stats.z).backward()
    y = torch.cat([y.detach() for y, _ in parts], dim=1)
    return y, stats._replace(over=sum(part.dropped for _, part in parts))


def check(world, sequence_parallel, case):
    sizes, grid = case.moe(), world.grid
    mp, data, edp = (world.axis(name) for name in ("mp", "data", "edp"))
    pieces = mp.size if sequence_parallel else 1
    whole = whole_layer(case)
    wanted = []
    for index in range(grid.data_ranks):
        x, upstream, valid = inputs(case, index)
        if sizes.capacity_scope == "rank" and pieces > 1:
            y, stats = run_by_rank(whole, case, x, upstream, valid, pieces)
        else:
            y, stats = run(whole, case, x, upstream, valid, int(valid.sum()))
        wanted.append((y, stats, x.grad))

    layer = make(sizes, mp=mp, ep=world.axis("ep"), emp=world.axis("emp"), sequence_parallel=sequence_parallel)
    rows = table(sizes)
    places = {name: (world.axis(name).size, world.axis(name).rank) for name in ("mp", "ep", "emp")}
    for name, parameter in layer.named_parameters():
        parameter.data.copy_(whole.get_parameter(name).data[box_at(rows[name], places).slices])
    layer.router.correction_bias.copy_(whole.router.correction_bias)

    x, upstream, valid = inputs(case, data.rank)
    tokens = int(valid.sum())

    def own(t):
        return t.chunk(pieces, dim=1)[mp.rank if sequence_parallel else 0]

    own_x = own(x.detach()).clone().requires_grad_()
    y, stats = run(layer, case, own_x, own(upstream), own(valid), tokens)
    wanted_y, wanted_stats, wanted_dx = wanted[data.rank]
    close(y, own(wanted_y), "y")
    close(own_x.grad, own(wanted_dx), "dx")
    for name in ("aux", "z"):
        close(getattr(stats, name).detach(), getattr(wanted_stats, name).detach(), name)
    assert torch.equal(stats.load, wanted_stats.load)
    assert torch.equal(stats.dropped, wanted_stats.dropped)
    for name, parameter in layer.named_parameters():
        grad, row = parameter.grad.clone(), rows[name]
        for axis in (edp,) if row.expert else (data, *((mp,) if partial(row, sequence_parallel) else ())):
            if axis.size > 1:
                dist.all_reduce(grad, group=axis.group)
        close(grad, whole.get_parameter(name).grad[box_at(row, places).slices], name)
    layer.comm.check_settled()
    return int(stats.dropped)


def announced(rank, world_size, rendezvous):
    """(collectives in the order of their launch, counts of the ranks that share experts, by a gather over all)."""
    place = {"RANK": str(rank), "WORLD_SIZE": str(world_size)}
    with patch.dict(os.environ, place):
        grid = Grid(sharding=2, mp=2, ep=2, emp=2)
        world = World.start(grid, Device(), timedelta(seconds=60), f"file://{rendezvous}")
    comm = CommContext(device=world.device)
    dispatcher = TokenDispatcher(4, world.axis("ep"), world.axis("emp"), True, False, comm)
    experts_Tk = torch.randint(0, 4, (9, 2), generator=torch.Generator().manual_seed(rank))
    launched = []
    with patch.object(Axis, "note", lambda axis, kind: launched.append(axis.name)):
        ordered = dispatcher.sort(RoutedPairs(experts_Tk, None), 0)
        arriving = dispatcher.exchange_counts(ordered).arriving
    counts = ordered.counts.view(2, 2)
    everyone = [torch.empty_like(counts) for _ in range(world_size)]
    dist.all_gather(everyone, counts)
    ep, emp = world.axis("ep"), world.axis("emp")
    # emp is innermost: who shares experts with a rank stands beside it.
    senders = [[place - emp.rank + sharer for place in ep.ranks] for sharer in range(emp.size)]
    wanted = torch.stack([torch.stack([everyone[sender][ep.rank] for sender in row]) for row in senders])
    world.close()
    return launched, torch.equal(arriving, wanted)


def test_counts_of_cut_tokens_go_over_emp_before_they_queue_over_ep():
    for launched, arriving in run_ranks(4, announced, group=False):
        assert launched == ["emp", "ep"]
        assert arriving


def partial(row, sequence_parallel):
    return row.mp_partial == "always" or (row.mp_partial == "sp" and sequence_parallel)


def close(got, want, name):
    assert got.shape == want.shape, name
    if got.numel():
        scale = float(want.abs().max())
        difference = float((got - want).abs().max())
        assert difference <= 1e-10 * max(scale, 1e-3), f"{name}: {difference} of {scale}"


def on_ranks(rank, world_size, rendezvous, layout, sequence_parallel, backend):
    if backend == "late":
        late.register()
    device = LateDevice() if backend == "late" else Device()
    world = World.start(Grid(**layout), device, timedelta(seconds=60), f"file://{rendezvous}")
    dropped = 0
    for case in CASES:
        try:
            dropped += check(world, sequence_parallel, case)
        except Exception as error:
            raise AssertionError(f"{case}: {error}") from error
    assert late.in_flight() == []
    world.close()
    return dropped


# The late backend is gloo that forgives less: what has to be shown without it are calls that are not in flight there.
PLAIN = ("ep 2 x emp 2, cut",)


@pytest.mark.parametrize(
    ("layout", "backend"),
    [
        pytest.param(layout, backend, marks=[] if backend == "late" or layout in PLAIN else [pytest.mark.table])
        for layout, backend in itertools.product(LAYOUTS, ("gloo", "late"))
    ],
)
def test_equal_to_one_process(layout, backend):
    degrees, sequence_parallel = LAYOUTS[layout]
    world_size = Grid(**degrees).world_size
    dropped = run_ranks(world_size, on_ranks, degrees, sequence_parallel, backend, group=False)
    assert min(dropped) > 0


def count_launches(rank, world_size, kind):
    """Kinds of exchanges that one forward and one backward launch on two ranks of ep."""
    ep = Axis("ep", world_size, rank, dist.group.WORLD, tuple(range(world_size)))
    sizes = Case(kind).moe()
    layer = whole_and_cut(sizes, ep)
    x = torch.randn(2, LENGTH, HIDDEN, dtype=torch.float64, requires_grad=True)
    y, _ = layer(x)
    there = dict(layer.comm.launched)
    y.sum().backward()
    return there, dict(layer.comm.launched)


def whole_and_cut(sizes, ep):
    layer = make(sizes, mp=Axis.single("mp"), ep=ep)
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    return layer


def test_tokens_and_weights_travel_together():
    """Four all-to-alls per layer and step; the counts are exchanged once and only for uneven splits."""
    for there, both in run_ranks(2, count_launches, {}):
        assert there == {"counts": 1, "all_to_all": 2}
        assert both == {"counts": 1, "all_to_all": 4}
    for there, both in run_ranks(2, count_launches, drops("token")):
        assert there == {"all_to_all": 2}
        assert both == {"all_to_all": 4}


@pytest.fixture
def fake_group():
    dist.init_process_group("fake", rank=1, world_size=4, store=FakeStore())
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize("valid", [None, "padded"])
@pytest.mark.parametrize("cut", [False, True])
def test_the_host_never_waits_with_even_splits(fake_group, valid, cut):
    """Fake tensors have no values: any wait for the device would raise. ``cut``: also gathered over emp."""
    sizes = MoeSizes(16, 32, 8, 2, kind="deepspeed_moe", capacity_scope="rank", add_bias=True)
    ep, mp = Axis("ep", 4, 1, fake_group, (0, 1, 2, 3)), Axis("mp", 4, 1, fake_group, (0, 1, 2, 3))
    axes = {"emp": mp, "mp": mp, "sequence_parallel": True} if cut else {}
    with FakeTensorMode():
        layer = MoeLayer(sizes, ep=ep, dtype=torch.bfloat16, **axes)
        x = torch.empty(3, 7, 16, dtype=torch.bfloat16, requires_grad=True)
        tokens = 21 * (4 if cut else 1)
        y, stats = layer(x, None if valid is None else torch.empty(3, 7, dtype=torch.bool), tokens)
        (y.sum() + stats.aux + stats.z).backward()
        assert x.grad.shape == x.shape


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_all_that_travels_is_aligned(fake_group, monkeypatch, dtype, cut):
    """Whole rows of 16 bytes, there and back and their gradients: else NCCL copies them byte by byte."""
    launched = []

    def launch(comm, exchange, x, *options, **more):
        if x.is_floating_point():
            launched.append((exchange.kind, x.shape[1] * x.element_size() % 16, x.storage_offset() * x.element_size()))
        return plainly(comm, exchange, x, *options, **more)

    plainly = CommContext.launch
    monkeypatch.setattr(CommContext, "launch", launch)
    sizes = MoeSizes(16, 32, 8, 2, kind="deepspeed_moe", capacity_scope="rank")
    ep, mp = Axis("ep", 4, 1, fake_group, (0, 1, 2, 3)), Axis("mp", 4, 1, fake_group, (0, 1, 2, 3))
    axes = {"emp": mp, "mp": mp, "sequence_parallel": True} if cut else {}
    layer = MoeLayer(sizes, ep=ep, dtype=dtype, **axes)
    for parameter in layer.parameters():
        nn.init.zeros_(parameter)
    y, _ = layer(torch.zeros(3, 8, 16, dtype=dtype, requires_grad=True), None, 24 * (4 if cut else 1))
    y.sum().backward()
    assert len(launched) >= 4
    assert [entry for entry in launched if any(entry[1:])] == []


def bf16_run(rank, world_size):
    """Output and gradients in bf16 with the experts on two ranks, and with all of them here."""
    sizes = MoeSizes(8, 16, 4, 2)
    ep = Axis("ep", world_size, rank, dist.group.WORLD, tuple(range(world_size)))
    whole, layer = MoeLayer(sizes, dtype=torch.bfloat16), MoeLayer(sizes, ep=ep, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(4)
    for name, parameter in whole.named_parameters():
        nn.init.normal_(parameter, std=0.3, generator=generator)
        own = parameter.data.chunk(world_size)[rank] if name.startswith("experts") else parameter.data
        layer.get_parameter(name).data.copy_(own)
    generator.manual_seed(5 + rank)
    x = torch.randn(2, 5, 8, generator=generator).bfloat16()
    upstream = torch.randn(2, 5, 8, generator=generator).bfloat16()
    results = []
    for module in (whole, layer):
        x_ = x.clone().requires_grad_()
        y, _ = module(x_)
        y.backward(upstream)
        results.append((y.detach(), x_.grad, module.router.weight.grad))
    return results


def test_bf16_loses_nothing_on_the_way():
    """The weights are fp32 and travel as such: forward and the gradients of this rank's tokens are bit for bit."""
    for whole, parted in run_ranks(2, bf16_run):
        for a, b in zip(whole, parted, strict=True):
            assert torch.equal(a, b)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_gathered_rows_are_sorted_by_expert_without_their_padding(data):
    blocks, sources, experts = (data.draw(st.integers(1, 3)) for _ in range(3))
    numbers = st.lists(st.integers(0, 3), min_size=blocks * sources * experts, max_size=blocks * sources * experts)
    counts = torch.tensor(data.draw(numbers)).view(blocks, sources, experts)
    room = int(counts.sum((1, 2)).max()) + data.draw(st.integers(0, 2))
    rows = []  # what lies where: (expert, block, source, place), or None for padding
    for block in range(blocks):
        own = [
            (expert, block, source, place)
            for source in range(sources)
            for expert in range(experts)
            for place in range(counts[block, source, expert])
        ]
        rows += own + [None] * (room - len(own))
    real = [row for row in rows if row is not None]
    order, counts_L, _ = order_by_expert(counts, room, len(real))
    assert [rows[place] for place in order.pair.tolist()] == sorted(real)
    assert counts_L.tolist() == [sum(row[0] == expert for row in real) for expert in range(experts)]
    for place, row in enumerate(rows):
        kept = order.pair_kept is None or bool(order.pair_kept[place])
        assert kept == (row is not None)
        if kept:
            assert order.pair[order.row[place]] == place


@pytest.mark.parametrize(("sources", "experts", "length"), [(3, 2, 4), (1, 3, 2), (2, 1, 3), (2, 2, 0)])
def test_runs_of_one_length_are_sorted_without_their_counts(sources, experts, length):
    counts = torch.full((1, sources, experts), length)
    wanted, counts_L, _ = order_by_expert(counts, sources * experts * length, sources * experts * length)
    got, lengths_L, _ = transpose_runs(counts, sources, experts, length)
    assert torch.equal(lengths_L, counts_L)
    assert torch.equal(got.pair, wanted.pair)
    assert torch.equal(got.row, wanted.row)
    assert got[2:] == wanted[2:] == (None, None)


def test_axes_that_do_not_fit_are_refused():
    sizes = MoeSizes(8, 16, 4, 2)
    four, two = (Axis("mp", size, 0, None, tuple(range(size))) for size in (4, 2))
    with pytest.raises(DistributedError, match="--expert-mp-degree to 1 or 4"):
        MoeLayer(sizes, mp=four, emp=two, device="meta")
    with pytest.raises(DistributedError, match="--sequence-parallel, or --expert-mp-degree 2"):
        MoeLayer(sizes, mp=two, device="meta")
    with pytest.raises(ValueError, match="not divisible by the 3 ranks of ep"):
        MoeLayer(sizes, ep=Axis("ep", 3, 0, None, (0, 1, 2)), device="meta")
    three = Axis("emp", 3, 0, None, (0, 1, 2))
    with pytest.raises(ValueError, match="not divisible by the 3 ranks of emp"):
        MoeLayer(sizes, mp=three, emp=three, device="meta")
