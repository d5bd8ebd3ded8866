"""Layers cut over mp against the same layers on one rank: outputs, input gradients, weight gradients."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch.utils.checkpoint
from torch.distributed.tensor import DTensor, Replicate, init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from megapar.core.comm.axis import Axis
from megapar.core.comm.in_flight import CommContext
from megapar.core.tensor_parallel.execution import Execution
from megapar.core.tensor_parallel.layers import (
    ColumnLinear,
    RowLinear,
    VocabularyEmbedding,
    gather_vocabulary,
    local,
    vocab_parallel_cross_entropy_,
    vocabulary_range,
)
from megapar.core.tensor_parallel.overlapped_linear import Overlap
from tests.support import fused, late
from tests.support.ranks import run_ranks
from tests.support.traffic import RecordedTraffic

SINGLE = Axis.single("mp")
DTYPE = torch.float64
VOCABULARY = 7  # uneven over two ranks: 4 and 3


def draw(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def world(rank, world_size):
    return Axis("mp", world_size, rank, dist.group.WORLD, tuple(range(world_size)))


def close(a, b):
    return torch.allclose(a, b, rtol=1e-12, atol=1e-12)


def test_column_linear_keeps_its_real_axes():
    layer = ColumnLinear(4, (2, 6), split=1, bias=True, mp=SINGLE, sequence_parallel=False, dtype=DTYPE, device=None)
    with torch.no_grad():
        layer.weight.copy_(draw(0, 2, 6, 4))
        layer.bias.copy_(draw(1, 2, 6))
    x = draw(2, 3, 5, 4)
    y = layer(x)
    assert y.shape == (3, 5, 2, 6)
    assert close(y, torch.einsum("bsi,gfi->bsgf", x, layer.weight) + layer.bias)


# How the layers communicate: blocking, in one piece, in uneven pieces.
WAYS = {
    "blocking": Overlap(pieces=1, blocking=True),
    "whole": Overlap(pieces=1),
    "pieces": Overlap(pieces=3, piece_bytes=1),
    "batched": Overlap(pieces=3, piece_bytes=1, batched=True),
    "batched whole": Overlap(pieces=1, batched=True),
}
SAMPLES, LENGTH = 3, 16


def pair(mp, sequence_parallel, overlap, bias, comm):
    """A column and a row layer with this rank's pieces of one set of weights."""
    options = {"bias": bias, "mp": mp, "sequence_parallel": sequence_parallel, "dtype": DTYPE, "device": None}
    options["execution"] = Execution(overlap=overlap, comm=comm)
    column = ColumnLinear(4, (2, 8), split=1, **options)
    row = RowLinear(8, 4, **options)
    with torch.no_grad():
        column.weight.copy_(draw(0, 2, 8, 4).chunk(mp.size, 1)[mp.rank])
        row.weight.copy_(draw(2, 4, 8).chunk(mp.size, 1)[mp.rank])
        if bias:
            column.bias.copy_(draw(1, 2, 8).chunk(mp.size, 1)[mp.rank])
            row.bias.copy_(draw(3, 4))
    return torch.nn.ModuleList((column, row))


def mlp(mp, sequence_parallel=False, overlap=WAYS["whole"], samples=SAMPLES, bias=True, recomputed=False):
    """{name: tensor} of column -> product of the halves -> row: y, dx and the weights' gradients.

    Input and output gradient are not contiguous. Nothing may be in flight afterwards, inputs must be left alone, and
    the hook of every parameter must have been called once.
    """
    comm = CommContext()
    column, row = layers = pair(mp, sequence_parallel, overlap, bias, comm)
    x, dy = draw(4, 4, LENGTH, samples).transpose(0, 2), draw(5, samples, 4, LENGTH).transpose(1, 2)
    if sequence_parallel:
        x, dy = (t.chunk(mp.size, 1)[mp.rank] for t in (x, dy))
    assert not x.is_contiguous()
    assert not dy.is_contiguous()
    x_before, dy_before = x.clone(), dy.clone()
    x = x.detach().requires_grad_()
    calls = []
    for parameter in layers.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: calls.append(id(p)))

    def unit(x):
        gate, up = column(x).unbind(2)
        return row(gate * up)

    y = torch.utils.checkpoint.checkpoint(unit, x, use_reentrant=False) if recomputed else unit(x)
    y.backward(dy)
    comm.check_settled()
    assert not late.in_flight()
    assert torch.equal(x, x_before)
    assert torch.equal(dy, dy_before)
    assert sorted(calls) == sorted(map(id, layers.parameters()))
    grads = {f"{name} gradient": p.grad for name, p in layers.named_parameters()}
    return {"y": y.detach(), "dx": x.grad, **grads}


def linear_on_ranks(rank, world_size):
    """Results by (sequence parallel, way, samples, bias, recomputed)."""
    mp = world(rank, world_size)
    return {
        key: mlp(mp, key[0], WAYS[key[1]], *key[2:])
        for key in itertools.product((False, True), WAYS, (1, SAMPLES), (False, True), (False, True))
    }


def fused_on_ranks(rank, world_size):
    """The same by torch's fused operators, in their plain forms, and what was sent."""
    fused.on_a_cpu()
    mp, way = world(rank, world_size), Overlap(fused=True)
    keys = itertools.product((True,), ("fused",), (1, SAMPLES), (False, True), (False, True))
    results = {key: mlp(mp, True, way, *key[2:]) for key in keys}
    mp.sent_bytes.clear()
    mlp(mp, True, way)
    sent = mp.sent_bytes.take()
    mlp(mp, True, WAYS["blocking"])
    assert sent == mp.sent_bytes.take()
    return results


@pytest.mark.parametrize("ranks", [2, 4])
def test_fused_operators_equal_one_rank(ranks):
    compare(run_ranks(ranks, fused_on_ranks))


@pytest.mark.parametrize(("ranks", "backend"), [(2, "late"), (4, "late"), (2, "gloo")])
def test_linear_layers_equal_one_rank(ranks, backend):
    compare(run_ranks(ranks, linear_on_ranks, backend=backend))


def compare(results):
    """Of all ranks with the same layers on one."""
    for key in results[0]:
        sequence_parallel, _, samples, bias, _ = key
        whole = mlp(SINGLE, samples=samples, bias=bias)
        for name, want in whole.items():
            values = [result[key][name] for result in results]
            if name == "1.bias gradient":  # a partial sum on each rank of sequence parallelism
                got = sum(values) if sequence_parallel else values[0]
            elif name in ("y", "dx"):
                got = torch.cat(values, 1) if sequence_parallel else values[-1]
            else:
                got = torch.cat(values, 1)
            assert close(got, want), (key, name)


class Lettered(RecordedTraffic):
    """Names collectives by their first letter."""

    def name_of(self, exchange, x):
        return f"{exchange.kind[0]}{exchange.kind[4] if exchange.kind[0] == 'a' else ''}"


class Products(TorchDispatchMode):
    """Writes down every matrix product."""

    def __init__(self, events):
        super().__init__()
        self.events = events

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_):
            self.events.append("x")
        return func(*args, **(kwargs or {}))


def order_on_ranks(rank, world_size, sequence_parallel):
    """What the column and the row layer do, forward and backward, in order."""
    comm, overlap = Lettered(), Overlap(pieces=2, piece_bytes=1)
    events = comm.events
    column, row = pair(world(rank, world_size), sequence_parallel, overlap, False, comm)
    x = draw(0, 1, LENGTH // world_size if sequence_parallel else LENGTH, 4).requires_grad_()
    drawn = []
    with Products(events):
        y = column(x)
        drawn.append(" ".join(events))
        events.clear()
        z = row(y[:, :, 0].detach().requires_grad_())
        drawn.append(" ".join(events))
        for out in (z, y):
            events.clear()
            out.backward(torch.ones_like(out))
            drawn.append(" ".join(events))
    return drawn


ORDERS = {  # of the column, the row, the row's backward and the column's, by sequence parallelism
    True: ["ag^ ag^ x agv x agv x", "x x r^ x x r^ rv rv", "ag^ ag^ x x agv x agv x x", "ag^ x r^ agv x rv"],
    False: ["x", "x ar^ x ar^ arv arv", "x x", "x ar^ x ar^ x arv arv"],
}


@pytest.mark.parametrize("sequence_parallel", ORDERS)
def test_collectives_fly_under_products(sequence_parallel):
    assert run_ranks(2, order_on_ranks, sequence_parallel) == [ORDERS[sequence_parallel]] * 2


def needs_on_ranks(rank, world_size, sequence_parallel):
    """Collectives of the backward pass where only the input, or only the weights, need a gradient."""
    launched = []
    for trained in (False, True):
        comm = CommContext()
        layers = pair(world(rank, world_size), sequence_parallel, Overlap(pieces=1), True, comm)
        layers.requires_grad_(trained)
        x = draw(0, 2, LENGTH, 4).requires_grad_(not trained)
        column, row = layers
        y = row(column(x)[:, :, 0])
        comm.launched.clear()
        y.sum().backward()
        launched.append(dict(comm.launched))
        assert all((parameter.grad is None) != trained for parameter in layers.parameters())
    return launched


def test_only_needed_gradients_communicate():
    for input_only, weights_only in run_ranks(2, needs_on_ranks, True):
        assert input_only == {"all_gather": 1, "reduce_scatter": 1}  # dy in, dx out; the input is not gathered again
        assert weights_only == {"all_gather": 2}  # dy, and the input again
    for input_only, weights_only in run_ranks(2, needs_on_ranks, False):
        assert input_only == {"all_reduce": 1}
        assert weights_only == {}


def kept_on_ranks(rank, world_size, overlap):
    """Elements that a column layer keeps for its backward pass, besides its weight."""
    column, _ = pair(world(rank, world_size), True, WAYS[overlap], False, CommContext())
    kept = []
    x = draw(0, 2, LENGTH, 4).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        column(x)
    return sum(kept) - column.weight.numel()


def test_of_a_gathered_input_the_own_rows_are_kept():
    assert run_ranks(2, kept_on_ranks, "whole") == [2 * LENGTH * 4] * 2
    assert run_ranks(2, kept_on_ranks, "blocking") == [2 * LENGTH * 4] * 2


@pytest.mark.parametrize(
    ("rows", "row_bytes", "lengths"),
    [
        (100, 10, [25, 25, 25, 25]),
        (10, 100, [3, 3, 3, 1]),
        (100, 5, [50, 50]),
        (3, 1000, [1, 1, 1]),
        (1, 1000, [1]),
        (100, 1, [100]),
        (0, 1000, [0]),
    ],
)
def test_pieces_are_as_many_as_pay(rows, row_bytes, lengths):
    pieces = Overlap(pieces=4, piece_bytes=250).cut(rows, row_bytes)
    assert [piece.stop - piece.start for piece in pieces] == lengths
    assert pieces[-1].stop == rows


def embed(mp, sequence_parallel):
    first_token, rows = vocabulary_range(VOCABULARY, mp)
    layer = VocabularyEmbedding(VOCABULARY, 4, mp=mp, sequence_parallel=sequence_parallel, dtype=DTYPE, device=None)
    with torch.no_grad():
        layer.weight.copy_(draw(0, VOCABULARY, 4)[first_token : first_token + rows])
    tokens = torch.tensor([[0, 6, 3, 4, 3, 1], [5, 2, 2, 6, 0, 4]])
    x, dx = layer(tokens), draw(1, 2, 6, 4)
    x.backward(dx.chunk(mp.size, 1)[mp.rank] if sequence_parallel else dx)
    return x.detach(), layer.weight.grad


def embed_on_ranks(rank, world_size, sequence_parallel):
    return embed(world(rank, world_size), sequence_parallel)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_embedding_of_an_uneven_vocabulary_equals_one_rank(sequence_parallel):
    whole_x, whole_dw = embed(SINGLE, False)
    for rank, (x, dw) in enumerate(run_ranks(2, embed_on_ranks, sequence_parallel)):
        assert close(x, whole_x.chunk(2, 1)[rank] if sequence_parallel else whole_x)
        assert close(dw, whole_dw.split((4, 3))[rank])


LABELS = (0, 6, 5, 3, 4, 2)


def entropy(mp, dtype, factor):
    """Log-probabilities, this rank's gradient in ``dtype``, and the whole one."""
    first_token, columns = vocabulary_range(VOCABULARY, mp)
    logits = (factor * draw(0, 6, VOCABULARY)).to(torch.promote_types(dtype, torch.float32))
    piece = logits[:, first_token : first_token + columns].clone()
    log_probs, piece = vocab_parallel_cross_entropy_(piece, torch.tensor(LABELS), first_token, mp, dtype)
    return log_probs, piece, gather_vocabulary(piece, VOCABULARY, mp)


def entropy_on_ranks(rank, world_size, *options):
    return entropy(world(rank, world_size), *options)


@pytest.mark.parametrize(
    ("dtype", "tolerance", "factor"), [(DTYPE, 1e-12, 5), (torch.bfloat16, 1e-2, 5), (torch.float32, 1e-4, 200)]
)
@pytest.mark.parametrize("ranks", [1, 2])
def test_cross_entropy_of_a_cut_vocabulary(ranks, dtype, tolerance, factor):
    """With logits up to 10, and up to 400, whose exponentials overflow and vanish."""
    logits = (factor * draw(0, 6, VOCABULARY)).requires_grad_()
    expected = F.cross_entropy(logits, torch.tensor(LABELS), reduction="none")
    expected.sum().backward()
    results = [entropy(SINGLE, dtype, factor)] if ranks == 1 else run_ranks(ranks, entropy_on_ranks, dtype, factor)
    for log_probs, gradient, gathered in results:
        assert gradient.dtype == dtype
        torch.testing.assert_close(-log_probs.double(), expected.detach(), rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(gathered.double(), logits.grad, rtol=tolerance, atol=tolerance)
    whole = torch.cat([gradient for _, gradient, _ in results], dim=1)
    torch.testing.assert_close(whole.double(), logits.grad, rtol=tolerance, atol=tolerance)


def test_a_rank_without_tokens_is_refused():
    with pytest.raises(ValueError, match="a vocabulary of 2 leaves rank 2 of 3 on mp without tokens"):
        vocabulary_range(2, Axis("mp", 3, 2, None, (0, 1, 2)))


def dtensor_on_rank(rank, world_size):
    mesh = init_device_mesh("cpu", (world_size,))
    weight = torch.ones(2, 3, requires_grad=True)
    whole = DTensor.from_local(weight, mesh, [Replicate()])
    (2 * local(whole)).sum().backward()
    return type(local(whole)) is torch.Tensor, weight.grad


def test_local_reads_through_a_dtensor_and_passes_the_gradient():
    plain = torch.ones(2)
    assert local(plain) is plain
    ((is_plain, grad),) = run_ranks(1, dtensor_on_rank)
    assert is_plain
    assert torch.equal(grad, torch.full((2, 3), 2.0))
