"""Ranks that send latents compute what one process does that expands them first: values, gradients, bytes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from megapar.core.attention_mask import AttentionMask
from megapar.core.comm.axis import Axis
from megapar.core.comm.comm_bytes import CommBytes
from megapar.core.context_parallel.blockwise import attend_blockwise
from megapar.core.context_parallel.columns import Expansion, LatentReader
from megapar.core.context_parallel.heads import own_heads, queries_to_heads, to_positions
from megapar.core.context_parallel.method import ContextParallel
from megapar.core.context_parallel.positions import GATHERED, RING, ULYSSES, SequenceLayout, choose_layout
from megapar.core.context_parallel.slices import SharedSlices
from megapar.core.tensor_parallel.weight_gradients import WeightGradients, linear
from tests.core.context_parallel.test_method import RecordedTraffic
from tests.support.attention import plain_attention_of
from tests.support.lazy import LazyDevice
from tests.support.ranks import run_ranks

SAMPLES, LENGTH, HEADS, RANK, PLAIN, ROTARY, VALUE = 2, 16, 4, 6, 5, 4, 7
FEATURES = RANK + ROTARY
ENDS, LENGTHS = (7, 16, 16 + 3, 32), (16, 5)


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


def whole(tensors, **mask):
    """(y [B, S, N, V], gradients of the four tensors), by keys and values that are made first."""
    q, latents, rotary, weight = (x.detach().requires_grad_() for x in tensors)
    k, v = expanded(latents, rotary, weight)
    y = plain_attention_of(mask_of(q, **mask), q.transpose(1, 2), k, v).transpose(1, 2)
    return y, torch.autograd.grad(y.square().sum(), (q, latents, rotary, weight))


def mask_of(q, causal=True, ends=None, lengths=None):
    return AttentionMask.of(q.shape[0], LENGTH, causal=causal, ends=ends, lengths=lengths)


def make(rank, size, algorithm, comm, sent=None, causal=True, slices=1, zigzag=True):
    layout = choose_layout(algorithm, size, causal=causal, length=LENGTH, slices=slices, balanced=slices == 3)
    if not zigzag:
        layout = SequenceLayout(size)
    axis = Axis("cp", size, rank, dist.group.WORLD, tuple(range(size)), CommBytes() if sent is None else sent)
    return ContextParallel(axis, algorithm, layout, comm, latents=True)


def attend(method, q, latents, rotary, expansion, *, dropout=0.0, flash=False, **mask):
    """y [B, S/cp, N, V] for this rank's positions."""
    mask = mask_of(q, **mask)
    if method.deals_heads:
        message = torch.cat([latents, rotary], dim=-1)
        q, message = queries_to_heads(q, message, method.axis, method.comm)
        own = own_heads(expansion, method.axis)
        k, v = expanded(*message.split([RANK, ROTARY], dim=-1), own.weight, own.defer_wgrad)
        y = plain_attention_of(mask, q.transpose(1, 2), k, v).transpose(1, 2)
        return to_positions(y, method.axis, method.comm)
    heads = (q.transpose(1, 2), latents.unsqueeze(1), rotary.unsqueeze(1))
    if method.layout.slices == 1:
        plan = method.plan(mask)
        options = {"flash": flash, "dropout": dropout, "expansion": expansion}
        return attend_blockwise(*heads, method.transport, plan, **options).transpose(1, 2)
    plans = method.slice_plans(mask)
    shared = SharedSlices(method.axis, method.slice_transport, plans, flash=flash)
    pieces = zip(*(x.split([len(p.runs[method.axis.rank]) for p in plans], dim=2) for x in heads), strict=True)
    parts = [shared.attend(*piece, number, dropout, expansion) for number, piece in enumerate(pieces)]
    return torch.cat(parts, dim=2).transpose(1, 2)


def compare(rank, size, algorithm, slices, mask, zigzag=True, lazy=False):
    """(worst error, relative to the largest number; order of messages; bytes sent).

    Of y and of the gradients; that of the weight is summed over the ranks first.
    """
    sent, comm = CommBytes(), RecordedTraffic()
    device = LazyDevice() if lazy else None
    if device is not None:
        comm.device = device
        device.__enter__()
    method = make(rank, size, algorithm, comm, sent, mask["causal"], slices, zigzag)
    expand = LatentReader.expand

    def noted(*args):
        comm.order.append("expand")
        return expand(*args)

    LatentReader.expand = noted
    own = method.layout.positions(LENGTH, rank)
    *parts, weight = draw()
    leaves = [*(x[:, own].requires_grad_() for x in parts), weight.requires_grad_()]
    y = attend(method, *leaves[:3], Expansion(leaves[3]), **mask)
    grads = list(torch.autograd.grad(y.square().sum(), leaves))
    comm.check_settled()
    LatentReader.expand = expand
    if device is not None:
        device.settle()
        device.__exit__(None, None, None)
    bytes_sent = dict(sent)
    dist.all_reduce(grads[3])
    want, want_grads = whole(draw(), **mask)
    wants = [x[:, own] for x in (want, *want_grads[:3])] + [want_grads[3]]
    error = max(float(((a - b).abs().max() / b.abs().max()).detach()) for a, b in zip((y, *grads), wants, strict=True))
    return error, comm.order, bytes_sent


CAUSAL, DOCUMENTS = {"causal": True}, {"causal": True, "ends": ENDS}
BOTH_WAYS, PADDING = {"causal": False}, {"causal": False, "lengths": LENGTHS}


@pytest.mark.parametrize("algorithm", [RING, GATHERED, ULYSSES])
@pytest.mark.parametrize(
    ("size", "mask", "zigzag"),
    [
        (2, CAUSAL, True),
        (2, CAUSAL, False),
        (4, DOCUMENTS, True),
        (4, CAUSAL, True),
        (2, BOTH_WAYS, True),
        (4, PADDING, True),
    ],
)
def test_latents_are_expanded_where_they_arrive(algorithm, size, mask, zigzag):
    for error, *_ in run_ranks(size, compare, algorithm, 1, mask, zigzag, backend="late"):
        assert error < 1e-12


@pytest.mark.parametrize("algorithm", [RING, GATHERED])
@pytest.mark.parametrize(
    ("size", "slices", "mask"), [(2, 2, CAUSAL), (2, 3, DOCUMENTS), (4, 4, DOCUMENTS), (4, 2, CAUSAL)]
)
def test_slices_share_latents(algorithm, size, slices, mask):
    for error, *_ in run_ranks(size, compare, algorithm, slices, mask, backend="late"):
        assert error < 1e-12


@pytest.mark.parametrize(("algorithm", "slices"), [(RING, 1), (GATHERED, 1), (ULYSSES, 1), (RING, 2)])
def test_buffers_live_as_long_as_streams_use_them(algorithm, slices):
    for error, *_ in run_ranks(2, compare, algorithm, slices, CAUSAL, True, True, backend="late"):
        assert error < 1e-12


def test_a_position_costs_its_latent_and_rotary_key():
    """R + Dr features each way, where keys and values are N (D + V); the messages and their order are those of kv."""
    rows, element = SAMPLES * LENGTH // 4, 8
    column = FEATURES * element
    for _, order, sent in run_ranks(4, compare, RING, 1, CAUSAL):
        assert sent == {("cp", "send"): 9 * rows * column}
        # A block is expanded while the next one is on its way.
        step = ["send v", "send ^", "expand"]
        assert order[:10] == ["send ^", "expand", *step, *step, "send v", "expand"]
    for _, _, sent in run_ranks(4, compare, GATHERED, 1, CAUSAL):
        assert sent == {("cp", "all_gather"): 2 * 3 * rows * column, ("cp", "reduce_scatter"): 3 * rows * column}
    for _, order, sent in run_ranks(4, compare, ULYSSES, 1, CAUSAL):
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
    method = make(rank, size, algorithm, RecordedTraffic(), slices=slices)
    own = method.layout.positions(LENGTH, rank)
    q, latents, rotary, weight = draw()
    latents[..., 0], weight[:, PLAIN:], weight[:, PLAIN:, 0] = 1.0, 0.0, 1.0
    weight[:, :PLAIN, 0] = 0.0  # the first feature of a latent is in values alone, and values are that feature
    leaves = [x[:, own].requires_grad_() for x in (q, latents, rotary)]
    y = attend(method, *leaves, Expansion(weight), causal=True, dropout=0.4)
    (grad,) = torch.autograd.grad(y.square().sum(), leaves[1])
    return 2 * float(y.square().sum().detach()), float(grad[..., 0].sum())


@pytest.mark.parametrize(("algorithm", "slices"), [(RING, 1), (GATHERED, 1), (RING, 3), (GATHERED, 3)])
def test_dropout_repeats_in_the_backward(algorithm, slices):
    squares, gradients = zip(*run_ranks(4, dropped, algorithm, slices), strict=True)
    assert sum(gradients) == pytest.approx(sum(squares))


def kept(rank, size, algorithm, slices):
    """Elements that the graph keeps."""
    method = make(rank, size, algorithm, RecordedTraffic(), slices=slices)
    own = method.layout.positions(LENGTH, rank)
    *parts, weight = draw()
    leaves = [*(x[:, own].requires_grad_() for x in parts), weight.requires_grad_()]
    storages = {}

    def pack(x):
        storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes() // 8
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        y = attend(method, *leaves[:3], Expansion(leaves[3]), causal=True)
    del y
    return sum(storages.values())


@pytest.mark.parametrize("algorithm", [RING, GATHERED])
def test_queries_latents_and_outputs_are_kept_alone(algorithm):
    rows = SAMPLES * LENGTH // 2
    features = HEADS * (PLAIN + ROTARY) + FEATURES + HEADS * (VALUE + 1)  # q, latent, out and lse
    for elements in run_ranks(2, kept, algorithm, 1):
        assert elements == rows * features + HEADS * (PLAIN + VALUE) * RANK


def deferred(rank, size, algorithm, slices):
    """The weight's gradient computed at once, and by the products that were kept."""
    found = []
    for defers in (False, True):
        later = WeightGradients()
        method = make(rank, size, algorithm, RecordedTraffic(), slices=slices)
        own = method.layout.positions(LENGTH, rank)
        *parts, weight = draw()
        parameter = torch.nn.Parameter(weight)
        leaves = [x[:, own].requires_grad_() for x in parts]
        expansion = Expansion(parameter, later.of(parameter) if defers else None)
        loss = attend(method, *leaves, expansion, causal=True).square().sum()
        if defers:
            with later.keep("step"):
                loss.backward()
            assert parameter.grad is None
            later.run("step")
        else:
            loss.backward()
        found.append(parameter.grad)
    assert float(found[0].abs().max()) > 1
    return float((found[0] - found[1]).abs().max())


@pytest.mark.parametrize(("algorithm", "slices"), [(RING, 1), (GATHERED, 1), (ULYSSES, 1), (RING, 2)])
def test_products_of_the_weight_may_be_kept(algorithm, slices):
    assert max(run_ranks(2, deferred, algorithm, slices)) < 1e-12


def half(rank, size, algorithm, wide):
    """Relative errors of y and of the gradients in bf16; latents in fp32 get a gradient that is not rounded."""
    method = make(rank, size, algorithm, RecordedTraffic())
    own = method.layout.positions(LENGTH, rank)
    *parts, weight = draw(torch.bfloat16)
    leaves = [x[:, own] for x in parts] + [weight]
    leaves = [x.to(torch.float32 if wide and 0 < i < 3 else x.dtype).requires_grad_() for i, x in enumerate(leaves)]
    y = attend(method, *leaves[:3], Expansion(leaves[3]), causal=True, flash=True)
    grads = list(torch.autograd.grad(y.float().square().sum(), leaves))
    assert [g.dtype for g in grads] == [x.dtype for x in leaves]
    grads[3] = grads[3].double()
    dist.all_reduce(grads[3])
    want, want_grads = whole([x.double() for x in draw(torch.bfloat16)])
    wants = [x[:, own] for x in (want, *want_grads[:3])] + [want_grads[3]]
    return max(float(((a - b).norm() / b.norm()).detach()) for a, b in zip((y, *grads), wants, strict=True))


@pytest.mark.parametrize("algorithm", [RING, GATHERED])
@pytest.mark.parametrize("wide", [False, True])
def test_bf16(algorithm, wide):
    assert max(run_ranks(2, half, algorithm, wide)) < 2e-2
