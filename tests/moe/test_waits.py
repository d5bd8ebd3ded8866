"""What of an MoE layer an accelerator's host would wait for: nothing but the counts of uneven splits."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megapar.core.attention_mask import AttentionMask
from megapar.core.context_parallel.positions import SequenceLayout
from megapar.core.context_parallel.share import Share
from megapar.core.device.attention.mask import DeviceMask
from megapar.moe.layer import MoeLayer
from megapar.moe.sizes import MoeSizes
from megapar.moe.slicing import Slicing
from tests.moe.test_forward import through
from tests.support.host_tensors import HostTensors
from tests.support.nodes import axis_by_node
from tests.support.ranks import run_ranks

EVEN = {"kind": "deepspeed_moe", "capacity_scope": "rank"}
SHARED = {"kind": "deepspeed_moe"}
# sizes, whether the ranks share the positions of a micro-batch, slicing, ranks of a node (0: plain); waits for counts
CASES = {
    "uneven": ({}, False, Slicing(), 0, 1),
    "even": (EVEN, False, Slicing(), 0, 0),
    "shared positions": (SHARED, True, Slicing(), 0, 1),
    "slices": ({}, False, Slicing(3), 0, 3),
    "slices, each with a capacity": (EVEN, False, Slicing(3, capacity="slice"), 0, 0),
    "slices of shared positions": (SHARED, True, Slicing(2), 0, 2),
    "slices of shared positions, each with a capacity": (SHARED, True, Slicing(2, capacity="slice"), 0, 2),
    "pieces": (SHARED, False, Slicing(2, expert_pieces=2), 0, 2),
    "by node": ({}, False, Slicing(), 1, 1),
    "by node, shared positions": (SHARED, True, Slicing(), 1, 1),
    "slices by node": (EVEN, False, Slicing(3), 1, 3),
    "pieces by node": (SHARED, False, Slicing(2, expert_pieces=2), 1, 2),
}


def forward_and_backward(rank, world_size, sizes, shared, slicing, node):
    """(what the host would wait for, how often it waited for counts) in a second pass: the first one may prepare."""
    axis = axis_by_node(rank, world_size, node)
    layout = SequenceLayout(world_size, zigzag=True, slices=slicing.degree)
    share = Share(cp=axis, layout=layout) if shared else None
    moe = MoeSizes(8, 16, 4, 2, min_capacity=1, capacity_factor=0.8, **sizes)
    layer = MoeLayer(moe, ep=axis, share=share, dtype=torch.float32)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.5)
    tokens = 24 * (world_size if shared else 1)
    for _ in range(2):
        x, before = torch.randn(2, 12, 8, requires_grad=True), layer.comm.host_waits
        with HostTensors() as found:
            y, stats = through(layer, slicing, x, None, tokens) if slicing.active else layer(x, None, tokens)
            (y.sum() + stats.aux).backward()
    layer.comm.check_settled()
    assert x.grad is not None
    return dict(found.waits), layer.comm.host_waits - before


@pytest.mark.parametrize("case", CASES)
def test_only_counts_are_waited_for(case):
    *arguments, counts = CASES[case]
    for waits, host_waits in run_ranks(2, forward_and_backward, *arguments):
        assert waits == {}
        assert host_waits == counts


def test_a_number_in_a_view_and_a_list_as_index_are_found():
    x = torch.arange(4)
    with HostTensors() as found:
        x[-1] = 5
        x[[1, 0]]
        torch.tensor([1, 2]).to("meta")
        x[-1:].fill_(5)
        x[1:] = 3
        x.index_select(0, x[:1]) + 2
    assert sorted(name.split(" ")[0] for name in found.waits.elements()) == [
        "aten._to_copy.default",
        "aten.copy_.default",
        "aten.index.Tensor",
    ]


def test_documents_are_copied_from_where_the_loader_put_them():
    """It puts them into memory that the device reads by itself; a tensor made from a list lies elsewhere."""
    ends = torch.tensor([3, 8])
    with HostTensors() as found:
        mask = AttentionMask.of_documents(ends.tolist())
        documents = DeviceMask.of(mask, torch.device("meta"), ends)
    assert found.waits == {}
    assert (documents.host.flat_ends, documents.starts.shape, documents.starts.dtype) == ((3, 8), (3,), torch.int32)
