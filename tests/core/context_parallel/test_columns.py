"""Ranks that send latents compute what one process does that expands them first: values, gradients, bytes."""

from __future__ import annotations

from contextlib import nullcontext
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from megapar.core.comm.accounts import CommBytes
from megapar.core.context_parallel.columns import Expansion, LatentReader
from megapar.core.context_parallel.heads import own_heads, queries_to_heads, to_positions
from megapar.core.context_parallel.positions import GATHERED, RING, ULYSSES, SequenceLayout
from megapar.core.tensor_parallel.weight_gradients import linear
from tests.core.context_parallel import test_method
from tests.core.context_parallel.test_method import HEADS, LENGTH, MASKS, SAMPLES, attend_heads, worst
from tests.support.attention import plain_attention_of
from tests.support.lazy import LazyDevice
from tests.support.ranks import run_ranks
from tests.support.saved_bytes import saved_bytes
from tests.support.traffic import RecordedTraffic

RANK, PLAIN, ROTARY, VALUE = 6, 5, 4, 7
FEATURES = RANK + ROTARY


def draw(dtype=torch.float64):
    """q [B, S, N, D], latents [B, S, R], rotary keys [B, S, Dr] and the weight [N, Dn + V, R]."""
    generator = torch.Generator().manual_seed(5)
    shapes = (
        (SAMPLES, LENGTH, HEADS, PLAIN + ROTARY),
        (SAMPLES, LENGTH, RANK),
        (SAMPLES, LENGTH, ROTARY),
        (HEADS, PLAIN + VALUE, RANK),
    )
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def expanded(latents, rotary, weight, defer_wgrad=None):
    """Keys [B, N, S, D] and values [B, N, S, V]."""
    up = linear(latents, weight.flatten(0, 1), None, defer_wgrad).unflatten(-1, weight.shape[:2]).transpose(1, 2)
    plain, v = up.split([PLAIN, VALUE], dim=-1)
    return torch.cat([plain, rotary[:, None].expand(-1, weight.shape[0], -1, -1)], dim=-1), v


def make(rank, size, algorithm, comm=None, **more):
    return test_method.make(rank, size, algorithm, comm or RecordedTraffic(), latents=True, **more)


def leaves_of(method, dtype=torch.float64):
    """(this rank's positions, the tensors of ``draw`` at them)."""
    own = method.layout.positions(LENGTH, method.axis.rank)
    *parts, weight = draw(dtype)
    return own, [*(x[:, own] for x in parts), weight]


def attend(method, q, latents, rotary, weight, mask=MASKS["causal"], **options):
    """y [B, S/cp, N, V] for this rank's positions."""
    if method.deals_heads:
        message = torch.cat([latents, rotary], dim=-1)
        q, message = queries_to_heads(q, message, method.axis, method.comm)
        own = own_heads(Expansion(weight), method.axis)
        k, v = expanded(*message.split([RANK, ROTARY], dim=-1), own.weight, own.defer_wgrad)
        y = plain_attention_of(mask, q.transpose(1, 2), k, v).transpose(1, 2)
        return to_positions(y, method.axis, method.comm)
    heads = (q.transpose(1, 2), latents.unsqueeze(1), rotary.unsqueeze(1))
    return attend_heads(method, heads, mask, expansion=Expansion(weight), **options)


def error_of(y, leaves, mask, own, dtype=torch.float64):
    """The worst error of y and of the gradients, by keys and values that are made first in one process.

    The weight's gradient is summed over the ranks.
    """
    grads = list(torch.autograd.grad(y.double().square().sum(), leaves))
    assert [grad.dtype for grad in grads] == [leaf.dtype for leaf in leaves]
    grads[3] = grads[3].double()
    dist.all_reduce(grads[3])
    q, latents, rotary, weight = wholes = [x.double().requires_grad_() for x in draw(dtype)]
    k, v = expanded(latents, rotary, weight)
    want = plain_attention_of(mask, q.transpose(1, 2), k, v).transpose(1, 2)
    wants = torch.autograd.grad(want.square().sum(), wholes)
    return worst((y, *grads), [*(x[:, own] for x in (want, *wants[:3])), wants[3]])


def compare(rank, size, algorithm, slices, name, zigzag=True, lazy=False):
    """(worst error, order of messages, bytes sent)."""
    sent, comm, mask = CommBytes(), RecordedTraffic(), MASKS[name]
    expand = LatentReader.expand

    def noted(*args):
        comm.events.append("expand")
        return expand(*args)

    device = LazyDevice() if lazy else None
    with device or nullcontext(), patch.object(LatentReader, "expand", noted):
        if device is not None:
            comm.device = device
        method = make(rank, size, algorithm, comm, slices=slices, sent=sent)
        if not zigzag:
            method = type(method)(method.axis, algorithm, SequenceLayout(size), comm, latents=True)
        own, leaves = leaves_of(method)
        leaves = [x.requires_grad_() for x in leaves]
        y = attend(method, *leaves, mask)
        error = error_of(y, leaves, mask, own)
        comm.check_settled()
        if device is not None:
            device.settle()
    return error, comm.events, dict(sent)


@pytest.mark.parametrize("algorithm", [RING, GATHERED, ULYSSES])
@pytest.mark.parametrize(
    ("size", "name", "zigzag"), [(2, "causal", True), (2, "causal", False), (4, "documents", True)]
)
def test_latents_are_expanded_where_they_arrive(algorithm, size, name, zigzag):
    for error, *_ in run_ranks(size, compare, algorithm, 1, name, zigzag, backend="late"):
        assert error < 1e-12


@pytest.mark.parametrize("algorithm", [RING, GATHERED])
@pytest.mark.parametrize(("size", "slices", "name"), [(2, 3, "documents"), (4, 4, "documents"), (4, 2, "causal")])
def test_slices_share_latents(algorithm, size, slices, name):
    for error, *_ in run_ranks(size, compare, algorithm, slices, name, backend="late"):
        assert error < 1e-12


@pytest.mark.parametrize(("algorithm", "slices"), [(RING, 1), (GATHERED, 1), (ULYSSES, 1), (RING, 2)])
def test_buffers_live_as_long_as_streams_use_them(algorithm, slices):
    for error, *_ in run_ranks(2, compare, algorithm, slices, "causal", True, True, backend="late"):
        assert error < 1e-12


def test_a_position_costs_its_latent_and_rotary_key():
    """R + Dr features each way, where keys and values are N (D + V); the messages and their order are those of kv."""
    rows, element = SAMPLES * LENGTH // 4, 8
    column = FEATURES * element
    for _, order, sent in run_ranks(4, compare, RING, 1, "causal"):
        assert sent == {("cp", "send"): 9 * rows * column}
        # A block is expanded while the next one is on its way.
        step = ["send v", "send ^", "expand"]
        assert order[:10] == ["send ^", "expand", *step, *step, "send v", "expand"]
    for _, _, sent in run_ranks(4, compare, GATHERED, 1, "causal"):
        assert sent == {("cp", "all_gather"): 2 * 3 * rows * column, ("cp", "reduce_scatter"): 3 * rows * column}
    for _, order, sent in run_ranks(4, compare, ULYSSES, 1, "causal"):
        heads = rows * HEADS * (PLAIN + ROTARY + VALUE) * element
        assert sent == {
            ("cp", "all_gather"): 3 * rows * column,
            ("cp", "reduce_scatter"): 3 * rows * column,
            ("cp", "all_to_all"): 2 * heads * 3 // 4,
        }
        assert order[:2] == ["all_gather ^", "all_to_all ^"]


def dropped(rank, size, algorithm, slices):
    """Twice the sum of y^2, and the same from the gradient of a latent that makes all values one."""
    torch.manual_seed(rank)
    method = make(rank, size, algorithm, slices=slices)
    q, latents, rotary, weight = leaves_of(method)[1]
    latents[..., 0], weight[:, PLAIN:], weight[:, PLAIN:, 0] = 1.0, 0.0, 1.0
    weight[:, :PLAIN, 0] = 0.0  # the first feature of a latent is in values alone, and values are that feature
    y = attend(method, q, latents.requires_grad_(), rotary, weight, dropout=0.4)
    (grad,) = torch.autograd.grad(y.square().sum(), latents)
    return 2 * float(y.square().sum().detach()), float(grad[..., 0].sum())


@pytest.mark.parametrize(("algorithm", "slices"), [(RING, 1), (GATHERED, 1), (RING, 3), (GATHERED, 3)])
def test_dropout_repeats_in_the_backward(algorithm, slices):
    squares, gradients = zip(*run_ranks(4, dropped, algorithm, slices), strict=True)
    assert sum(gradients) == pytest.approx(sum(squares))


def kept(rank, size, algorithm):
    """Elements that the graph keeps."""
    method = make(rank, size, algorithm)
    leaves = [x.requires_grad_() for x in leaves_of(method)[1]]
    return saved_bytes(lambda: attend(method, *leaves)) // 8


@pytest.mark.parametrize("algorithm", [RING, GATHERED])
def test_queries_latents_and_outputs_are_kept_alone(algorithm):
    rows = SAMPLES * LENGTH // 2
    features = HEADS * (PLAIN + ROTARY) + FEATURES + HEADS * (VALUE + 1)  # q, latent, out and lse
    for elements in run_ranks(2, kept, algorithm):
        assert elements == rows * features + HEADS * (PLAIN + VALUE) * RANK


def half(rank, size, algorithm, wide):
    """Relative errors of y and of the gradients in bf16; latents in fp32 get a gradient that is not rounded."""
    method = make(rank, size, algorithm)
    own, leaves = leaves_of(method, torch.bfloat16)
    leaves = [x.to(torch.float32 if wide and 0 < i < 3 else x.dtype).requires_grad_() for i, x in enumerate(leaves)]
    y = attend(method, *leaves, flash=True)
    return error_of(y, leaves, MASKS["causal"], own, torch.bfloat16)


@pytest.mark.parametrize("algorithm", [RING, GATHERED])
@pytest.mark.parametrize("wide", [False, True])
def test_bf16(algorithm, wide):
    assert max(run_ranks(2, half, algorithm, wide)) < 2e-2
