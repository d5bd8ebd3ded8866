"""Layers cut over mp against the same layers on one rank: outputs, input gradients, weight gradients."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Replicate, init_device_mesh

from megapar.core.axis import Axis
from megapar.core.collectives import all_gather, copy
from megapar.core.tensor_parallel import (
    ColumnLinear,
    RowLinear,
    VocabularyEmbedding,
    cross_entropy_,
    gather_vocabulary,
    local,
    vocabulary_range,
)
from tests.support.ranks import run_ranks

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


def pair(mp, sequence_parallel):
    """A column and a row layer with this rank's pieces of one set of weights."""
    options = {"bias": True, "mp": mp, "sequence_parallel": sequence_parallel, "dtype": DTYPE, "device": None}
    column = ColumnLinear(4, (2, 6), split=1, **options)
    row = RowLinear(6, 4, **options)
    with torch.no_grad():
        column.weight.copy_(draw(0, 2, 6, 4).chunk(mp.size, 1)[mp.rank])
        column.bias.copy_(draw(1, 2, 6).chunk(mp.size, 1)[mp.rank])
        row.weight.copy_(draw(2, 4, 6).chunk(mp.size, 1)[mp.rank])
        row.bias.copy_(draw(3, 4))
    return column, row


def mlp(mp, sequence_parallel):
    """(y, dx, column dw, column db, row dw, row db) of column -> product of the halves -> row."""
    column, row = pair(mp, sequence_parallel)
    x, dy = draw(4, 3, 8, 4), draw(5, 3, 8, 4)
    if sequence_parallel:
        x, dy = (t.chunk(mp.size, 1)[mp.rank] for t in (x, dy))
    x = x.clone().requires_grad_()
    gate, up = column(x).unbind(2)
    y = row(gate * up)
    y.backward(dy)
    grads = [p.grad for p in (column.weight, column.bias, row.weight, row.bias)]
    return [y.detach(), x.grad, *grads]


def linear_on_ranks(rank, world_size, sequence_parallel):
    return mlp(world(rank, world_size), sequence_parallel)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_linear_layers_equal_one_rank(sequence_parallel):
    whole = mlp(SINGLE, False)
    results = run_ranks(2, linear_on_ranks, sequence_parallel)
    for rank, (y, dx, column_dw, column_db, row_dw, row_db) in enumerate(results):
        for i, value in ((0, y), (1, dx)):
            assert close(value, whole[i].chunk(2, 1)[rank] if sequence_parallel else whole[i])
        assert close(column_dw, whole[2].chunk(2, 1)[rank])
        assert close(column_db, whole[3].chunk(2, 1)[rank])
        assert close(row_dw, whole[4].chunk(2, 1)[rank])
        assert sequence_parallel or close(row_db, whole[5])
    if sequence_parallel:  # a partial sum on each rank
        assert close(results[0][5] + results[1][5], whole[5])


def embed(mp, sequence_parallel):
    start, rows = vocabulary_range(VOCABULARY, mp)
    layer = VocabularyEmbedding(VOCABULARY, 4, mp=mp, sequence_parallel=sequence_parallel, dtype=DTYPE, device=None)
    with torch.no_grad():
        layer.weight.copy_(draw(0, VOCABULARY, 4)[start : start + rows])
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


def entropy_on_ranks(rank, world_size):
    mp = world(rank, world_size)
    start, columns = vocabulary_range(VOCABULARY, mp)
    logits = 5 * draw(0, 6, VOCABULARY)
    piece = logits[:, start : start + columns].clone()
    losses = cross_entropy_(piece, torch.tensor([0, 6, -100, 3, 4, 2]), start, mp)
    return losses, piece, gather_vocabulary(piece, VOCABULARY, mp)


@pytest.mark.parametrize("ranks", [1, 2])
def test_cross_entropy_of_a_cut_vocabulary(ranks):
    logits = (5 * draw(0, 6, VOCABULARY)).requires_grad_()
    labels = torch.tensor([0, 6, -100, 3, 4, 2])
    expected = F.cross_entropy(logits, labels, reduction="none")
    expected.sum().backward()
    if ranks == 1:
        whole = logits.detach().clone()
        results = [(cross_entropy_(whole, labels, 0, SINGLE), whole, gather_vocabulary(whole, VOCABULARY, SINGLE))]
    else:
        results = run_ranks(ranks, entropy_on_ranks)
    for losses, _, gathered in results:
        assert close(losses, expected.detach())
        assert close(gathered, logits.grad)
    assert close(torch.cat([gradient for _, gradient, _ in results], dim=1), logits.grad)


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


def enter_on_ranks(rank, world_size):
    """The two ways into a layer, fed to a part that differs per rank, have equal gradients."""
    mp = world(rank, world_size)
    x = draw(0, 2, 4, 3)
    whole = x.clone().requires_grad_()
    ((rank + 1) * copy(whole, mp)).square().sum().backward()
    piece = x.chunk(world_size, 1)[rank].clone().requires_grad_()
    ((rank + 1) * all_gather(piece, mp, 1)).square().sum().backward()
    return close(piece.grad, whole.grad.chunk(world_size, 1)[rank])


def test_gathered_and_copied_inputs_have_one_gradient():
    assert run_ranks(2, enter_on_ranks) == [True, True]
