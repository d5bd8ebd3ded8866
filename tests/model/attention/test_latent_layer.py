"""Latent attention in every form is that of whole samples, and keeps latents in place of keys and values.

That of whole samples is the published class: tests/model/conformance has rows with and without a query rank.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megapar.core.comm.axis import Axis
from megapar.core.comm.in_flight import CommContext
from megapar.core.device.compiled import Compiled
from megapar.core.tensor_parallel.execution import Execution
from megapar.core.tensor_parallel.weight_gradients import WeightGradients
from megapar.model.attention.latent import LatentAttentionSizes
from megapar.model.attention.latent_layer import LatentAttention
from megapar.model.layers.context import Context
from megapar.model.layers.rotary import RotaryEmbedding
from megapar.model.rope import Rope
from megapar.moe.slicing import Slicing
from tests.support.attention import causal_mask, sliced
from tests.support.ranks import run_ranks
from tests.support.saved_bytes import saved_bytes

BATCH, LENGTH, THETA = 2, 16, 1e4
ROPE = Rope(THETA)
ENDS = (6, 16, 16 + 7, 32)


def latent_sizes(**changes) -> LatentAttentionSizes:
    """Small sizes, all different."""
    numbers = {"hidden_size": 24, "num_groups": 4, "key_dim": 14, "value_dim": 10, "rotary_dim": 6}
    numbers |= {"query_rank": 18, "latent_rank": 11, "dropout": 0.0, "flash": True, **changes}
    return LatentAttentionSizes(
        kind="latent",
        queries_per_group=1,
        softmax_scale=numbers.pop("softmax_scale", numbers["key_dim"] ** -0.5),
        causal=True,
        qkv_bias=False,
        output_bias=False,
        qk_norm=False,
        qk_norm_scope="head",
        epsilon=1e-6,
        rope=ROPE,
        **numbers,
    )


def whole_weights(sizes: LatentAttentionSizes, dtype=torch.float64) -> dict[str, Tensor]:
    """Weights of the whole layer, by the names of its parameters."""
    Rq, R, Dr = sizes.query_rank, sizes.latent_rank, sizes.rotary_dim
    N, V, H = sizes.num_heads, sizes.value_dim, sizes.hidden_size
    shapes = {
        "down.weight": (Rq + R + Dr, H),
        "kv_norm.weight": (R,),
        "q_up.weight": (N, sizes.key_dim, Rq or H),
        "kv_up.weight": (N, sizes.plain_dim + V, R),
        "proj.weight": (H, N * V),
    } | ({"q_norm.weight": (Rq,)} if Rq else {})
    generator = torch.Generator().manual_seed(5)
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64).mul(0.4).add(len(shape) == 1).to(dtype)
        for name, shape in shapes.items()
    }


SPLIT = {"q_up.weight": 0, "kv_up.weight": 0, "proj.weight": 1}


def layer(sizes: LatentAttentionSizes, dtype=torch.float64, *, mp=None, sp=False, execution=None, **more):
    """The layer with this rank's pieces of the weights."""
    mp = mp or Axis.single("mp")
    options = {"mp": mp, "sequence_parallel": sp, "dtype": dtype, "device": None}
    attention = LatentAttention(sizes, 0, execution=execution or Execution(), **more, **options)
    with torch.no_grad():
        for name, parameter in attention.named_parameters():
            whole = whole_weights(sizes, dtype)[name]
            dim = SPLIT.get(name)
            parameter.copy_(whole if dim is None else whole.chunk(mp.size, dim)[mp.rank])
    return attention


def inputs(sizes: LatentAttentionSizes, dtype=torch.float64) -> tuple[Tensor, tuple[Tensor, Tensor], Tensor]:
    """Hidden states, the angles of their positions, and the gradient of the output."""
    generator = torch.Generator().manual_seed(3)
    x, upstream = torch.randn(2, BATCH, LENGTH, sizes.hidden_size, generator=generator, dtype=torch.float64)
    positions = torch.arange(LENGTH).expand(BATCH, LENGTH)
    angles = RotaryEmbedding(sizes.rotary_dim, THETA, dtype).angles(positions)
    return x.to(dtype).requires_grad_(), angles, upstream.to(dtype)


def gradients(attention: nn.Module, y: Tensor, x: Tensor, upstream: Tensor) -> dict[str, Tensor]:
    named = {"x": x, **dict(attention.named_parameters())}
    return dict(zip(named, torch.autograd.grad(y, tuple(named.values()), upstream), strict=True))


def same(found: dict[str, Tensor], wanted: dict[str, Tensor], bound=1e-11) -> None:
    assert found.keys() == wanted.keys()
    for name, want in wanted.items():
        error = (found[name] - want).abs().max() / want.abs().max()
        assert error <= bound, (name, float(error))


def contexts(angles, *, packed=False, slices=1, **more) -> Context:
    cut = Slicing(slices).cut(LENGTH) if slices > 1 else ()
    places = {"slices": cut, "own_slices": cut, "whole_slices": cut}
    mask, ropes = causal_mask(BATCH, LENGTH, ENDS if packed else None), {ROPE: angles}
    return Context(mask, None, BATCH * LENGTH, ropes, **places, **more)


FORMS: dict[str, Callable[[LatentAttention, Tensor, tuple[Tensor, Tensor], bool], Tensor]] = {
    "whole": lambda layer, x, angles, packed: layer(x, contexts(angles, packed=packed)),
    "prepared": lambda layer, x, angles, packed: sliced(
        layer, x, contexts(angles, packed=packed, slices=3), prepared=True
    ),
    "slices": lambda layer, x, angles, packed: sliced(
        layer, x, contexts(angles, packed=packed, slices=3), prepared=False
    ),
}


def by_document(attention, x, angles) -> Tensor:
    """The layer on each document alone."""
    pieces = []
    for first, end in zip((0, *ENDS), ENDS, strict=False):
        sample, place = first // LENGTH, slice(first % LENGTH, first % LENGTH + end - first)
        own = tuple(part[sample : sample + 1, place] for part in angles)
        pieces.append(attention(x[sample : sample + 1, place], contexts(own))[0])
    return torch.cat(pieces).view(x.shape)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("selective", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_forms(form, packed, selective, dtype):
    """Whole and by slices, packed, recomputed or not, with values smaller and larger than keys."""
    for changes in ({}, {"value_dim": 18, "softmax_scale": 0.4, "query_rank": 0}):
        sizes = latent_sizes(**changes)
        x, angles, upstream = inputs(sizes)
        attention = layer(sizes)
        want = by_document(attention, x, angles) if packed else attention(x, contexts(angles))
        wanted = gradients(attention, want, x, upstream)
        x, angles, upstream = inputs(sizes, dtype)
        attention = layer(sizes, dtype)
        attention.selective = selective
        y = FORMS[form](attention, x, angles, packed)
        bound = 1e-11 if dtype == torch.float64 else 1e-5
        same({"y": y.detach()} | gradients(attention, y, x, upstream), {"y": want.detach()} | wanted, bound)


def test_the_scale_of_the_scores():
    """A factor on the softmax scale is one on the queries' weights."""
    sizes = latent_sizes()
    x, angles, _ = inputs(sizes)
    scaled, larger = layer(latent_sizes(softmax_scale=1.7 * 14**-0.5)), layer(sizes)
    with torch.no_grad():
        larger.q_up.weight.mul_(1.7)
    torch.testing.assert_close(scaled(x, contexts(angles)), larger(x, contexts(angles)), rtol=0, atol=1e-12)


def bytes_of_a_position(sizes: LatentAttentionSizes) -> int:
    """What a position keeps in fp32 on a CPU: latents, queries, what attention made; neither keys nor values."""
    Rq, R, Dr = sizes.query_rank, sizes.latent_rank, sizes.rotary_dim
    N, V = sizes.num_heads, sizes.value_dim
    width = max(sizes.key_dim, V)
    down, norms = Rq + R + Dr, 2 * (Rq + R) + 2  # its product; per norm the normalized latent, the result and a scale
    return 4 * (down + norms + N * width + (N * width + N) + N * V)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_what_is_kept(form, packed):
    sizes = latent_sizes()
    x, angles, _ = inputs(sizes, torch.float32)
    attention = layer(sizes, torch.float32)
    known = (x, *attention.parameters(), *angles)
    found = saved_bytes(lambda: FORMS[form](attention, x, angles, packed), known)
    copied = sizes.hidden_size * 4 if form == "slices" else 0  # slices of two samples are copied for the product
    assert found == BATCH * LENGTH * (bytes_of_a_position(sizes) + copied)


@pytest.mark.parametrize("selective", [False, True])
def test_compiled(selective):
    """Compiled functions give the same, and what they save are latents, too."""
    sizes = latent_sizes()
    x, angles, upstream = inputs(sizes, torch.float32)
    attention, run = layer(sizes, torch.float32), Compiled(backend="aot_eager")
    want = attention(x, contexts(angles))
    wanted = {"y": want.detach()} | gradients(attention, want, x, upstream)
    compiled = layer(sizes, torch.float32, execution=Execution(run=run, selective=selective))
    known = (x, *attention.parameters(), *compiled.parameters(), *angles)
    sizes_kept = [saved_bytes(lambda one=one: one(x, contexts(angles)), known) for one in (attention, compiled)]
    assert sizes_kept[1] <= sizes_kept[0]
    y = compiled(x, contexts(angles))
    same({"y": y.detach()} | gradients(compiled, y, x, upstream), wanted, 1e-5)
    assert not run.given_up
    assert {function.__name__ for function in run.functions} == {"attend", "joined", "rms_norm", "rotated"}


def alone(sizes, ends=None) -> tuple[Tensor, dict[str, Tensor]]:
    """Output and gradients of one process."""
    x, angles, upstream = inputs(sizes)
    attention = layer(sizes)
    y = attention(x, Context(causal_mask(BATCH, LENGTH, ends), None, BATCH * LENGTH, {ROPE: angles}))
    return y.detach(), gradients(attention, y, x, upstream)


def on_mp(rank, size, sp, form, query_rank, early, deferred):
    """Compare with one process: the output, and every gradient of this rank's pieces."""
    mp = Axis("mp", size, rank, dist.group.WORLD, tuple(range(size)))
    sizes = latent_sizes(query_rank=query_rank)
    comm, later = CommContext(), WeightGradients() if deferred else None
    attention = layer(sizes, mp=mp, sp=sp, execution=Execution(comm=comm, weight_gradients=later))
    x, angles, upstream = inputs(sizes)
    cut = Slicing(2).cut(LENGTH) if form == "slices" else (slice(0, LENGTH),)
    # This rank's positions are its part of every slice.
    pieces = [torch.arange(LENGTH)[place].chunk(size)[rank] if sp else torch.arange(LENGTH)[place] for place in cut]
    own = torch.cat(pieces)
    x_own = x.detach()[:, own].requires_grad_()
    if form == "slices":
        lengths = torch.tensor([0, *map(len, pieces)]).cumsum(0).tolist()
        places = tuple(slice(*pair) for pair in itertools.pairwise(lengths))
        cuts = {"slices": cut, "own_slices": places, "whole_slices": cut}
        context = Context(causal_mask(BATCH, LENGTH), None, 32, {ROPE: angles}, **cuts)
        y = sliced(attention, x_own, context, prepared=False, hides=early)
    else:
        y = attention(x_own, contexts(angles))
    with later.keep(0) if later else nullcontext():
        y.backward(upstream[:, own])
    if later:
        later.run(0)
    comm.check_settled()
    want, wanted = alone(sizes)
    found = {"y": y.detach(), "x": x_own.grad}
    wanted = {"y": want[:, own], **wanted, "x": wanted["x"][:, own]}
    for name, parameter in attention.named_parameters():
        found[name], dim = parameter.grad, SPLIT.get(name)
        if dim is not None:
            wanted[name] = wanted[name].chunk(size, dim)[rank]
        elif sp:
            dist.all_reduce(found[name])
    same(found, wanted)
    return comm.launched


@pytest.mark.parametrize("query_rank", [0, 18])
@pytest.mark.parametrize(
    ("sp", "form", "early", "deferred"),
    [
        (False, "whole", False, False),
        (True, "whole", False, True),
        (False, "slices", False, True),
        (True, "slices", False, False),
        (True, "slices", True, False),
        (True, "slices", True, True),
    ],
)
def test_ranks_that_share_heads(sp, form, early, deferred, query_rank):
    for launched in run_ranks(2, on_mp, sp, form, query_rank, early, deferred):
        assert launched["all_gather"] > 0 if sp else launched["all_reduce"] > 0
