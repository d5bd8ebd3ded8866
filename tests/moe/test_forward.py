"""A layer slice by slice: the whole's numbers, drops per slice against an oracle, and pieces of experts' rows."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megapar.moe.layer import MoeLayer
from megapar.moe.sizes import MoeSizes
from megapar.moe.slicing import Slicing
from tests.support import late
from tests.support.nodes import axis_by_node
from tests.support.ranks import run_ranks

HIDDEN, EXPERTS, LENGTH, BATCH = 6, 4, 9, 2
POLICIES = ("token", "choice", "probs")


def make(*, ep=None, favoured=None, **sizes):
    """A layer in fp64 with its parameters drawn; ``favoured``: an expert that every token chooses first."""
    sizes = {"topk": 2, "min_capacity": 1, "capacity_factor": 0.6, **sizes}
    whole = MoeLayer(MoeSizes(HIDDEN, 8, EXPERTS, **sizes), dtype=torch.float64)
    generator = torch.Generator().manual_seed(3)
    for parameter in whole.parameters():
        nn.init.normal_(parameter, std=0.5, generator=generator)
    if favoured is not None:
        whole.router.correction_bias[favoured] = 100.0
    if ep is None:
        return whole
    layer = MoeLayer(whole.sizes, ep=ep, dtype=torch.float64)
    for name, parameter in layer.named_parameters():
        source = whole.get_parameter(name).data
        parameter.data.copy_(source.chunk(ep.size)[ep.rank] if name.startswith("experts") else source)
    layer.router.correction_bias.copy_(whole.router.correction_bias)
    return layer


def draw(index=0, padding=False):
    """x, the gradient from behind, valid."""
    generator = torch.Generator().manual_seed(10 + index)
    x, upstream = (torch.randn(BATCH, LENGTH, HIDDEN, dtype=torch.float64, generator=generator) for _ in range(2))
    valid = torch.ones(BATCH, LENGTH, dtype=torch.bool)
    if padding:
        valid[0, 4:] = False
        valid[1, 3:] = False  # the last slices have no token at all
    return x.requires_grad_(), upstream, valid if padding else None


def through(layer, slicing, x, valid, tokens=None):
    """(y, statistics) slice by slice. tokens: of the whole micro-batch, if ranks share it."""
    forward = layer.begin(slicing, x.shape[1], tokens or _tokens(x, valid), valid, x.shape[0])
    slices = slicing.cut(x.shape[1])
    for s in slices:
        forward.dispatch(x[:, s], None if valid is None else valid[:, s])
    combines, handles, _ = forward.compute_experts()
    stats = forward.stats()
    parts = [combines.finish(c, own).view_as(x[:, s]) for c, (s, own) in enumerate(zip(slices, handles, strict=True))]
    return torch.cat(parts, dim=1), stats


def gradients(layer, x, upstream, y, stats):
    ((y * upstream).sum() + 0.7 * stats.aux + 0.3 * stats.z).backward()
    return {"x": x.grad, **{name: parameter.grad for name, parameter in layer.named_parameters()}}


def same(got, want, message=""):
    for name, b in want.items():
        scale = max(float(b.detach().abs().max()) if b.numel() else 0.0, 1e-3)
        assert float((got[name] - b).detach().abs().max() if b.numel() else 0.0) <= 1e-10 * scale, f"{message} {name}"


WAYS = [Slicing(2), Slicing(4, balanced=True), Slicing(expert_pieces=2), Slicing(3, expert_pieces=3)]


@pytest.mark.parametrize("padding", [False, True])
@pytest.mark.parametrize("sizes", [{}, {"kind": "deepspeed_moe"}, {"topk": 1}, {"kind": "deepspeed_moe", "topk": 4}])
@pytest.mark.parametrize("slicing", WAYS, ids=str)
def test_slices_have_the_numbers_of_the_whole(slicing, sizes, padding):
    layer = make(**sizes)
    x, upstream, valid = draw(padding=padding)
    y, stats = layer(x, valid, _tokens(x, valid))
    want = gradients(layer, x, upstream, y, stats)
    other = make(**sizes)
    x, upstream, valid = draw(padding=padding)
    got_y, got = through(other, slicing, x, valid)
    same({"y": got_y}, {"y": y})
    same(gradients(other, x, upstream, got_y, got), want)
    assert torch.equal(got.load, stats.load)
    assert torch.equal(got.dropped, stats.dropped)
    assert float((got.aux - stats.aux).detach().abs()) < 1e-12
    assert float((got.z - stats.z).detach().abs()) < 1e-12


@pytest.mark.parametrize("padding", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_capacity_per_slice_drops_as_each_slice_alone_would(policy, padding):
    slicing = Slicing(3, capacity="slice")
    layer = make(kind="deepspeed_moe", drop_policy=policy)
    x, _, valid = draw(padding=padding)
    y, stats = through(layer, slicing, x, valid)
    dropped = 0
    for s in slicing.cut(LENGTH):
        tokens = None if valid is None else int(valid[:, s].sum())
        part, alone = layer(x[:, s], None if valid is None else valid[:, s], tokens)
        same({"y": y[:, s]}, {"y": part}, str(s))
        dropped += int(alone.dropped)
    assert int(stats.dropped) == dropped > 0


def on_ranks(rank, world_size, slicing, sizes, padding, favoured, node=0):
    """(differences checked on the rank) all-to-alls, exchanges of counts, host waits. node: as ``axis_by_node``."""
    ep = axis_by_node(rank, world_size, node)
    wanted = None
    for index in range(world_size):
        alone = make(favoured=favoured, **sizes)
        x, upstream, valid = draw(index, padding)
        y, stats = (
            through(alone, slicing, x, valid) if slicing.capacity == "slice" else alone(x, valid, _tokens(x, valid))
        )
        grads = gradients(alone, x, upstream, y, stats)
        own = grads.pop("x")
        wanted = grads if wanted is None else {name: wanted[name] + grad for name, grad in grads.items()}
        if index == rank:
            mine = (y, stats, own)
    layer = make(ep=ep, favoured=favoured, **sizes)
    x, upstream, valid = draw(rank, padding)
    y, stats = through(layer, slicing, x, valid)
    got = gradients(layer, x, upstream, y, stats)
    same({"y": y, "x": got.pop("x")}, {"y": mine[0], "x": mine[2]})
    assert torch.equal(stats.dropped, mine[1].dropped)
    for name, grad in got.items():
        if name.startswith("experts"):
            same({name: grad}, {name: wanted[name].chunk(world_size)[rank]})
        else:
            dist.all_reduce(grad)
            same({name: grad}, {name: wanted[name]})
    layer.comm.check_settled()
    assert late.in_flight() == []
    launched = layer.comm.launched
    return launched["all_to_all"], launched["counts"], layer.comm.host_waits


def _tokens(x, valid):
    return x[..., 0].numel() if valid is None else int(valid.sum())


CASES = [
    (Slicing(3), {}, (12, 3, 3)),
    (Slicing(3), {"kind": "deepspeed_moe"}, (12, 3, 3)),
    (Slicing(3, capacity="slice"), {"kind": "deepspeed_moe"}, (12, 0, 0)),
    (Slicing(2, capacity="slice"), {"kind": "deepspeed_moe", "drop_policy": "probs"}, (8, 0, 0)),
    (Slicing(2, expert_pieces=2), {"kind": "deepspeed_moe"}, (32, 2, 2)),
]


@pytest.mark.parametrize("backend", ["gloo", "late"])
@pytest.mark.parametrize("favoured", [None, 3])
@pytest.mark.parametrize(("slicing", "sizes", "counted"), CASES, ids=str)
def test_on_two_ranks(slicing, sizes, counted, favoured, backend):
    """Also where the last slices of a rank are padding, and where all tokens choose one expert first: a rank of one
    expert may then send, receive or compute nothing. Four all-to-alls per slice (and piece), and one wait of the host
    per slice where splits are uneven."""
    sizes = {**sizes, "topk": 1} if favoured is not None else sizes
    for result in run_ranks(2, on_ranks, slicing, sizes, favoured is not None, favoured, backend=backend):
        assert result == counted
