"""A kind of attention is one class: everything around it works for one whose values have another size than its keys."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megapar.core.attention_mask import AttentionMask
from megapar.core.comm.axis import Axis
from megapar.core.context_parallel.method import ContextParallel
from megapar.core.device.attention.mask import DeviceMask
from megapar.core.tensor_parallel.layers import ColumnLinear, RowLinear
from megapar.model.attention.kinds import ATTENTION_KINDS, kind_of
from megapar.model.attention.self_attention import SelfAttention, make_attention
from megapar.model.attention_sizes import AttentionSizes
from megapar.model.layers.context import Context
from megapar.model.layers.rotary import RotaryEmbedding, rotate
from megapar.moe.slicing import Slicing
from tests.model.small import DENSE, LATENT
from tests.support.attention import causal_mask, sliced

LENGTH, ENDS = 16, (6, 16, 16 + 7, 32)
ALONE = {"mp": Axis.single("mp"), "sequence_parallel": False, "dtype": torch.float64, "device": None}
VALUE_DIMS = (4, 12)  # queries and keys have 8 features


class ApartAttention(SelfAttention):
    """Queries, keys and values by a product each; the output is multiplied by the input, which goes past the core."""

    def __init__(self, sizes, layer, *, cp=None, **options):
        super().__init__(sizes, layer, cp=cp, **options)
        H, N, G = sizes.hidden_size, sizes.num_heads, sizes.num_groups
        self.q = ColumnLinear(H, (N, sizes.key_dim), split=0, bias=False, **options)
        self.k = ColumnLinear(H, (G, sizes.key_dim), split=0, bias=False, **options)
        self.v = ColumnLinear(H, (G, sizes.value_dim), split=0, bias=False, **options)
        self.out = RowLinear(N * sizes.value_dim, H, bias=False, **options)

    def project(self, x, angles):
        return rotate(self.q(x), angles), rotate(self.k(x), angles), self.v(x), x

    def output(self, y, *more):
        return self.out(y.flatten(2)) * more[0]


def single(sizes: AttentionSizes) -> ApartAttention:
    """The test's kind on one rank, in fp64."""
    attention, generator = ApartAttention(sizes, 0, **ALONE), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in attention.parameters():
            weight.copy_(0.3 * torch.randn(weight.shape, generator=generator, dtype=torch.float64))
    return attention


def plainly(attention: ApartAttention, x: Tensor, angles, seen: Tensor) -> Tensor:
    """The layer by its formula: x [B, S, H], seen [B, 1, S, S]."""
    q, k, v = (torch.einsum("bsh,ndh->bnsd", x, part.weight) for part in (attention.q, attention.k, attention.v))
    q, k = (rotate(t.transpose(1, 2), angles).transpose(1, 2) for t in (q, k))
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
    scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~seen, -torch.inf)
    if attention.sinks is not None:
        scores = torch.cat((scores, attention.sinks[:, None, None].expand(*scores.shape[:-1], 1)), -1)
    weights = scores.softmax(-1)[..., : k.shape[2]]
    return (weights @ v).transpose(1, 2).flatten(2) @ attention.out.weight.T * x


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
    return Context(causal_mask(2, LENGTH, ENDS if packed else None), None, 32, {DENSE.attention.rope: angles}, **more)


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
        (both_ways, Context(padded, valid, 27, {DENSE.attention.rope: angles}), valid[:, None, None]),
    ):
        attention = single(own)
        attention.selective = selective
        close(attention(x, context), plainly(attention, x, angles, seen), (x, *attention.parameters()))


@pytest.mark.parametrize("selective", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("window", [1, 2, 5, 15])
def test_a_window(window, packed, selective):
    """A layer's own: a position and those just before it, in its document."""
    x, angles = inputs()
    attention = single(replace(DENSE.attention, window=window))
    attention.selective = selective
    seen = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril().triu(1 - window)[None, None]
    seen = seen & documents_seen() if packed else seen
    context = causal_context(angles, packed=packed)
    close(attention(x, context), plainly(attention, x, angles, seen), (x, *attention.parameters()))
    assert attention.mask_of(context) is attention.mask_of(context)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("window", [1, 4, 9, 15])
def test_slices_in_a_window(window, prepared, packed):
    """A window within a slice, one that begins in the slice before it, and in the one before that."""
    x, angles = inputs()
    attention, slices = single(replace(DENSE.attention, window=window)), Slicing(3).cut(LENGTH)
    cuts = {"slices": slices, "own_slices": slices, "whole_slices": slices}
    seen = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril().triu(1 - window)[None, None]
    want = plainly(attention, x, angles, seen & documents_seen() if packed else seen)
    context = causal_context(angles, packed=packed, **cuts)
    close(sliced(attention, x, context, prepared=prepared), want, (x, *attention.parameters()))


@pytest.mark.parametrize("selective", [False, True])
@pytest.mark.parametrize("how", ["plain", "packed", "window", "slices"])
def test_sinks(how, selective):
    """A score more in each row's softmax, trained, in heads of every form."""
    x, angles = inputs()
    attention = single(replace(DENSE.attention, sinks=True, window=5 if how == "window" else 0))
    assert attention.sinks is not None
    attention.selective = selective
    with torch.no_grad():
        attention.sinks.copy_(torch.tensor([8.0, -8.0, 0.5, 2.0]))
    seen = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril().triu(-4 if how == "window" else -LENGTH)[None, None]
    seen = seen & documents_seen() if how == "packed" else seen
    want = plainly(attention, x, angles, seen)
    if how == "slices":
        cut = Slicing(3).cut(LENGTH)
        context = causal_context(angles, slices=cut, own_slices=cut, whole_slices=cut)
        found = sliced(attention, x, context, prepared=False)
    else:
        found = attention(x, causal_context(angles, packed=how == "packed"))
    close(found, want, (x, *attention.parameters()))


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


@pytest.mark.parametrize("name", ATTENTION_KINDS)
def test_clip_factors_multiply_the_scores_of_each_head(name: str) -> None:
    """And change no value: the shared rotary key of latent attention stays, and so do keys of several queries."""
    sizes = LATENT.attention if name == "latent" else replace(DENSE.attention, qkv_bias=True)
    attention = make_attention(sizes, 0, cp=ContextParallel(), **ALONE)
    generator = torch.Generator().manual_seed(4)
    parameters = dict(attention.named_parameters())
    with torch.no_grad():
        for parameter in parameters.values():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    x = torch.randn(2, LENGTH, sizes.hidden_size, generator=generator, dtype=torch.float64)
    positions = torch.arange(LENGTH).expand(2, LENGTH)
    angles = RotaryEmbedding(sizes.rotary_dim, 1e4, torch.float64, None, sizes.angles_dim).angles(positions)

    def heads() -> tuple[Tensor, Tensor]:
        q, k, v, *_ = (part.detach() for part in attention.project(x, angles))
        return torch.einsum("bsnd,btnd->bnst", q, k.repeat_interleave(q.shape[2] // k.shape[2], dim=2)), v

    before, values = heads()
    factors = torch.linspace(0.2, 1.0, sizes.num_heads, dtype=torch.float64)
    with torch.no_grad():
        for part, scale in attention.clip_factors(factors).items():
            parameters[part].mul_(scale.view(*scale.shape, *(1,) * (parameters[part].dim() - 2)))
    after, same = heads()
    torch.testing.assert_close(after, before * factors.view(1, -1, 1, 1), rtol=0, atol=1e-12)
    torch.testing.assert_close(same, values, rtol=0, atol=1e-12)


def test_a_kind_without_clip_factors_says_so() -> None:
    with pytest.raises(NotImplementedError, match="ApartAttention has no QK-clip"):
        single(DENSE.attention).clip_factors(torch.ones(4))
