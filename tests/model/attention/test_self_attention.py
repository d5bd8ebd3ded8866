"""A kind of attention is one class: everything around it works for one whose values have another size than its keys."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megapar.core.attention_mask import AttentionMask
from megapar.core.comm.axis import Axis
from megapar.core.context_parallel.method import ContextParallel
from megapar.core.context_parallel.positions import GATHERED, RING, ULYSSES, choose_layout
from megapar.core.device.attention.mask import DeviceMask
from megapar.core.tensor_parallel.layers import ColumnLinear, RowLinear
from megapar.model.attention.kinds import ATTENTION_KINDS, kind_of
from megapar.model.attention.self_attention import SelfAttention, make_attention
from megapar.model.attention_sizes import AttentionSizes
from megapar.model.ernie.block import ErnieBlock
from megapar.model.ernie3.recurrence import Branch, BranchContext, generate, understand
from megapar.model.layers.context import Context
from megapar.model.layers.rotary import RotaryEmbedding, rotate
from megapar.moe.slicing import Slicing
from tests.model.small import DENSE, ERNIE, LATENT, MOE, batch_for, build
from tests.support.attention import causal_mask, sliced
from tests.support.ranks import run_ranks

LENGTH, ENDS = 16, (6, 16, 16 + 7, 32)
ALONE = {"mp": Axis.single("mp"), "sequence_parallel": False, "dtype": torch.float64, "device": None}
VALUE_DIMS = (4, 12)  # queries and keys have 8 features


class ApartAttention(SelfAttention):
    """Queries, keys and values by a product each: ``project``, ``output`` and the memory of ERNIE 3.0."""

    def __init__(self, sizes, layer, *, cp=None, **options):
        super().__init__(sizes, layer, cp=cp, **options)
        H, N, G = sizes.hidden_size, sizes.num_heads, sizes.num_groups
        self.q = ColumnLinear(H, (N, sizes.key_dim), split=0, bias=False, **options)
        self.k = ColumnLinear(H, (G, sizes.key_dim), split=0, bias=False, **options)
        self.v = ColumnLinear(H, (G, sizes.value_dim), split=0, bias=False, **options)
        self.out = RowLinear(N * sizes.value_dim, H, bias=False, **options)

    def project(self, x, angles):
        q, k, v = self.q(x), self.k(x), self.v(x)
        return (q, k, v) if angles is None else (rotate(q, angles), rotate(k, angles), v)

    def output(self, y):
        return self.out(y.flatten(2))

    def project_memory(self, memory):
        return self.k(memory), self.v(memory)


def fill(attention: ApartAttention, seed: int) -> None:
    """Draw whole weights, alike on every rank, and keep this rank's pieces."""
    generator, mp = torch.Generator().manual_seed(seed), attention.mp
    with torch.no_grad():
        for layer, dim in ((attention.q, 0), (attention.k, 0), (attention.v, 0), (attention.out, 1)):
            shape = list(layer.weight.shape)
            shape[dim] *= mp.size
            whole = 0.3 * torch.randn(shape, generator=generator, dtype=torch.float64)
            layer.weight.copy_(whole.chunk(mp.size, dim)[mp.rank])


def single(sizes: AttentionSizes, layer: int = 0, **more) -> ApartAttention:
    """The test's kind on one rank, in fp64."""
    attention = ApartAttention(sizes, layer, **more, **ALONE)
    fill(attention, layer)
    return attention


def decoder(sizes, value_dim, *, mp=None, sequence_parallel=False, **more):
    """A decoder of the test's kind of attention."""
    mp = mp or Axis.single("mp")
    model = build(sizes, dtype=torch.float64, mp=mp, sequence_parallel=sequence_parallel, **more)
    options = {"mp": mp, "sequence_parallel": sequence_parallel, "dtype": torch.float64, "device": None}
    for name, block in model.layers.items():
        own = replace(sizes.attention, value_dim=value_dim)
        block.attention = ApartAttention(own, int(name), cp=model.cp, **options)
        fill(block.attention, int(name))
    return model


def plainly(attention: ApartAttention, x: Tensor, angles, seen: Tensor) -> Tensor:
    """The layer by its formula: x [B, S, H], seen [B, 1, S, S]."""
    q, k, v = (torch.einsum("bsh,ndh->bnsd", x, part.weight) for part in (attention.q, attention.k, attention.v))
    if angles is not None:
        q, k = (rotate(t.transpose(1, 2), angles).transpose(1, 2) for t in (q, k))
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
    weights = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~seen, -torch.inf).softmax(-1)
    return (weights @ v).transpose(1, 2).flatten(2) @ attention.out.weight.T


def inputs() -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Two samples x [2, S, H] that need a gradient, and the angles of their positions."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(2, LENGTH, DENSE.hidden_size, generator=generator, dtype=torch.float64)
    return x.requires_grad_(), RotaryEmbedding(8, 1e4, torch.float64).angles(torch.arange(LENGTH).expand(2, LENGTH))


def documents_seen() -> Tensor:
    number = torch.bucketize(torch.arange(2 * LENGTH), torch.tensor(ENDS), right=True).view(2, 1, LENGTH)
    return (number.mT == number)[:, None]


def close(y, want, tensors) -> None:
    """Equal values, and equal gradients in every tensor."""
    upstream = torch.randn(want.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    torch.testing.assert_close(y, want, rtol=0, atol=1e-12)
    grads, wants = (torch.autograd.grad(one, tensors, upstream) for one in (y, want))
    for a, b in zip(grads, wants, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-11)


def causal_context(angles, *, packed=False, **more):
    return Context(causal_mask(2, LENGTH, ENDS if packed else None), None, 32, angles, **more)


@pytest.mark.parametrize("selective", [False, True])
@pytest.mark.parametrize("value_dim", VALUE_DIMS)
def test_one_process(value_dim, selective):
    """Causal, inside documents, and in both directions over all that is not padding."""
    x, angles = inputs()
    causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()[None, None]
    valid = torch.arange(LENGTH) < torch.tensor([[16], [11]])
    sizes = replace(DENSE.attention, value_dim=value_dim)
    both_ways = replace(sizes, causal=False)
    padded = DeviceMask(AttentionMask(2, LENGTH, causal=False, padded=True), valid)
    for own, context, seen in (
        (sizes, causal_context(angles), causal),
        (sizes, causal_context(angles, packed=True), documents_seen() & causal),
        (both_ways, Context(padded, valid, 27, angles), valid[:, None, None]),
    ):
        attention = single(own)
        attention.selective = selective
        close(attention(x, context), plainly(attention, x, angles, seen), (x, *attention.parameters()))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("value_dim", VALUE_DIMS)
def test_slices(value_dim, prepared, packed):
    """Slice after slice, from heads of the whole or from each slice's own."""
    x, angles = inputs()
    attention = single(replace(DENSE.attention, value_dim=value_dim))
    slices = Slicing(3).cut(LENGTH)
    cuts = {"slices": slices, "own_slices": slices, "whole_slices": slices}
    context = causal_context(angles, packed=packed, **cuts)
    seen = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()[None, None]
    want = plainly(attention, x, angles, seen & documents_seen() if packed else seen)
    close(sliced(attention, x, context, prepared=prepared), want, (x, *attention.parameters()))


def attention_gradients(model) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if ".attention." in name}


def step(model, batch, valid_tokens=None) -> float:
    loss = model(batch, valid_tokens).sums["lm"]
    loss.backward()
    return float(loss.detach())


def batch_of(ends) -> dict[str, Tensor]:
    batch = batch_for(DENSE)
    return batch if ends is None else {**batch, "ends": torch.tensor(ends)}


def on_cp(rank, size, algorithm, slices, value_dim, ends):
    """(loss, largest difference of a gradient of attention's weights) against one process."""
    axis = Axis("cp", size, rank, dist.group.WORLD, tuple(range(size)))
    layout = choose_layout(algorithm, size, causal=True, length=LENGTH, slices=slices)
    cp = ContextParallel(axis, algorithm, layout)
    model = decoder(DENSE, value_dim, cp=cp, slicing=Slicing(slices))
    own = layout.positions(LENGTH, rank)
    batch = {name: x if name == "ends" else x[:, own] for name, x in batch_of(ends).items()}
    loss = torch.tensor(step(model, batch, 2 * LENGTH), dtype=torch.float64)
    grads = attention_gradients(model)
    for x in (loss, *grads.values()):
        dist.all_reduce(x)
    alone = decoder(DENSE, value_dim)
    want = step(alone, batch_of(ends))
    wants = attention_gradients(alone)
    return float(loss) - want, max(float((grads[name] - wants[name]).abs().max()) for name in wants)


@pytest.mark.parametrize(("value_dim", "ends"), [(4, ENDS), (12, None)])
@pytest.mark.parametrize("slices", [1, 3])
@pytest.mark.parametrize("algorithm", [RING, ULYSSES, GATHERED])
def test_ranks_that_share_a_sequence(algorithm, slices, value_dim, ends):
    for loss, gradient in run_ranks(2, on_cp, algorithm, slices, value_dim, ends, backend="late"):
        assert abs(loss) < 1e-10
        assert gradient < 1e-10


def on_mp(rank, size, slices):
    """(loss, largest difference of a gradient of this rank's pieces) against one process."""
    mp = Axis("mp", size, rank, dist.group.WORLD, tuple(range(size)))
    slicing = Slicing(slices, overlap_mp=slices > 1)
    model = decoder(DENSE, 12, mp=mp, sequence_parallel=True, slicing=slicing)
    alone = decoder(DENSE, 12)
    loss, want = step(model, batch_of(None)), step(alone, batch_of(None))
    worst = 0.0
    for name, whole in attention_gradients(alone).items():
        piece = whole.chunk(size, 1 if ".out." in name else 0)[rank]
        worst = max(worst, float((attention_gradients(model)[name] - piece).abs().max()))
    return loss - want, worst


@pytest.mark.parametrize("slices", [1, 3])
def test_ranks_that_share_heads(slices):
    """A kind that starts nothing early runs where the collectives of other kinds would fly under other slices."""
    for loss, gradient in run_ranks(2, on_mp, slices):
        assert abs(loss) < 1e-10
        assert gradient < 1e-10


def test_slices_of_a_layer_of_experts():
    sliced, whole = decoder(MOE, 12, slicing=Slicing(3)), decoder(MOE, 12)
    assert step(sliced, batch_for(MOE)) == pytest.approx(step(whole, batch_for(MOE)), rel=1e-12)
    wants = attention_gradients(whole)
    for name, grad in attention_gradients(sliced).items():
        torch.testing.assert_close(grad, wants[name], rtol=0, atol=1e-10)


@pytest.mark.parametrize("flash", [False, True])
def test_both_branches_of_ernie_3(flash):
    """Understanding sees all that is not padding, a segment of generation also the memory of the one before."""
    block = ErnieBlock(ERNIE, 0, cp=ContextParallel(), **ALONE)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    block.attention = attention = single(replace(ERNIE.attention, value_dim=12, flash=flash))
    x, _ = inputs()
    slices, rows, memory = (slice(0, 8), slice(8, 16)), torch.arange(2), 4
    valid = torch.arange(LENGTH) < torch.tensor([[16], [11]])
    context = causal_context(None)
    context = BranchContext(context.mask, None, 32, slices=slices, own_slices=slices)
    understanding = Branch.understanding(rows, valid, LENGTH)
    generation = Branch.generation(rows, valid, slices, memory)

    def layer(queries: Tensor, keys: Tensor, seen: Tensor) -> Tensor:
        q, (k, v) = attention.q(queries).transpose(1, 2), (t.transpose(1, 2) for t in attention.project_memory(keys))
        weights = (q @ k.mT / 8**0.5).masked_fill(~seen, -torch.inf).softmax(-1)
        middle = block.attention_norm(queries + attention.output((weights @ v).transpose(1, 2)))
        return block.mlp_norm(middle + block.mlp(middle))

    tensors = (x, *block.parameters())
    close(understand(block, x, understanding, context), layer(x, x, valid[:, None, None]), tensors)
    own = torch.ones(8, 8, dtype=torch.bool).tril()[None, None].expand(2, 1, 8, 8)
    first = layer(x[:, :8], x[:, :8], own)
    remembered = valid[:, None, None, 8 - memory : 8].expand(2, 1, 8, memory)
    keys = torch.cat((first[:, -memory:].detach(), x[:, 8:]), dim=1)
    second = layer(x[:, 8:], keys, torch.cat((remembered, own), dim=-1))
    close(generate(block, x, generation, context), torch.cat((first, second), dim=1), tensors)


class GatedAttention(ApartAttention):
    """A kind whose output is multiplied by its input."""

    def project(self, x, angles):
        return (*super().project(x, angles), x)

    def output(self, y, *more):
        return super().output(y) * more[0]


@pytest.mark.parametrize("prepared", [None, False, True])
def test_what_project_adds_reaches_the_output(prepared):
    """As a whole, and slice after slice."""
    x, angles = inputs()
    slices = Slicing(3).cut(LENGTH)
    context = causal_context(angles, slices=slices, own_slices=slices, whole_slices=slices)
    attention = GatedAttention(DENSE.attention, 0, **ALONE)
    fill(attention, 0)
    seen = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()[None, None]
    want = plainly(attention, x, angles, seen) * x
    y = attention(x, context) if prepared is None else sliced(attention, x, context, prepared=prepared)
    close(y, want, (x, *attention.parameters()))


def test_kinds_are_chosen_by_name():
    sizes = DENSE.attention
    assert type(make_attention(sizes, 0, cp=ContextParallel(), **ALONE)) is kind_of(sizes).load_parts()
    with pytest.raises(KeyError, match="nothing"):
        make_attention(replace(sizes, kind="nothing"), 0, cp=ContextParallel(), **ALONE)
    with pytest.raises(ValueError, match="keys have 8 features and values 12"):
        make_attention(replace(sizes, value_dim=12), 0, cp=ContextParallel(), **ALONE)


@pytest.mark.parametrize("name", ATTENTION_KINDS)
def test_the_widths_of_a_kind_are_those_of_its_rows(name: str) -> None:
    latent, kind = name == "latent", ATTENTION_KINDS[name]
    sizes, made = LATENT.attention if latent else DENSE.attention, ("q_up", "kv_up") if latent else ("qkv",)
    rows = {row.name: row for row in kind.rows(sizes, "attention", lambda part: part, "layers.0")}
    products = [rows[f"attention.{part}.weight"] for part in made]
    widths = sum(row.numel // row.shape[-1] for row in products), rows["attention.proj.weight"].shape[1]
    assert (sizes.kind, kind.widths(sizes)) == (name, widths)


def test_a_kind_without_a_memory_says_so():
    class Forgetful(ApartAttention):
        project_memory = SelfAttention.project_memory

    with pytest.raises(NotImplementedError, match="Forgetful has no memory"):
        Forgetful(DENSE.attention, 0, **ALONE).project_memory(torch.zeros(2, 4, 32))
