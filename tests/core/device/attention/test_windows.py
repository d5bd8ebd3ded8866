"""Attention in a window by tiles is attention with a mask, and what it holds does not depend on the square."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megapar.core.device.attention import windows
from megapar.core.device.attention.mask import causal_keys
from megapar.core.device.attention.whole import plain_attention
from megapar.core.device.attention.windows import attention_window

# Positions and window: whole blocks, a last one of one row, of all but one, windows of one key and all but one.
CASES = [(16, 2), (32, 4), (33, 4), (35, 4), (34, 4), (9, 1), (9, 8), (13, 7), (2, 1)]


def heads(length: int, sizes: tuple[int, int, int, int], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Queries, keys and values as a layer makes them: views of [2, S, heads, features]."""
    queries, groups, key_dim, value_dim = sizes
    generator = torch.Generator().manual_seed(0)
    shapes = ((queries, key_dim), (groups, key_dim), (groups, value_dim))
    drawn = (torch.randn(2, length, *shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return tuple(x.to(dtype).transpose(1, 2).requires_grad_() for x in drawn)


def masked(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    return plain_attention(q, k, v, causal_keys(q.shape[2], q.shape[2], q.device, window=window), 0.0)


def worst(got: Tensor, want: Tensor, inputs: tuple[Tensor, ...]) -> float:
    """The largest difference of two outputs and of their gradients."""
    upstream = torch.randn(want.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(want.dtype)
    pairs = zip(*((y, *torch.autograd.grad(y, inputs, upstream)) for y in (got, want)), strict=True)
    return max((one - other).detach().abs().max().item() for one, other in pairs)


@pytest.mark.parametrize("sizes", [(4, 2, 8, 8), (4, 1, 8, 12), (2, 2, 12, 8)])
@pytest.mark.parametrize(("length", "window"), CASES)
def test_tiles_are_the_mask(length: int, window: int, sizes: tuple[int, int, int, int]) -> None:
    """In fp64, forward and backward; windows of one key more or less are far from it."""
    inputs = heads(length, sizes, torch.float64)
    got = attention_window(*inputs, window=window)
    assert worst(got, masked(*inputs, window), inputs) < 1e-13
    for other in (window - 1, window + 1):
        assert other == 0 or (got - masked(*inputs, other)).detach().abs().max() > 1e-3


@pytest.mark.parametrize("queries", [1, 2, 3, 4, 5, 11, 12, 15])
@pytest.mark.parametrize("window", [1, 2, 4, 7, 15])
def test_queries_may_be_the_last_positions(queries: int, window: int) -> None:
    """Keys before the first query's window are not read, and their gradients are zero."""
    q, k, v = heads(16, (4, 2, 8, 12), torch.float64)
    own = q[:, :, 16 - queries :]
    seen = causal_keys(queries, 16, q.device, before=16 - queries, window=window)
    assert worst(attention_window(own, k, v, window=window), plain_attention(own, k, v, seen, 0.0), (q, k, v)) < 1e-13
    dropped = attention_window(own, k, torch.eye(16, dtype=torch.float64).expand(2, 2, 16, 16), window=3, dropout=0.5)
    assert (dropped[..., ~causal_keys(queries, 16, q.device, before=16 - queries, window=3)] == 0).all()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_tiles_round_once(dtype: torch.dtype, tolerance: float) -> None:
    """Against fp64 of the same inputs: plain products of the dtype round their weights, too."""
    inputs = heads(35, (4, 2, 16, 16), dtype)
    exact = tuple(x.detach().double().requires_grad_() for x in inputs)
    got, want = attention_window(*inputs, window=4), masked(*exact, 4)
    upstream = torch.randn(want.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    found = (got, *torch.autograd.grad(got, inputs, upstream))
    right = (want, *torch.autograd.grad(want, exact, upstream.double()))
    assert max((a - b).detach().abs().max().item() for a, b in zip(found, right, strict=True)) < tolerance


def test_plain_tiles_are_those_of_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU without FlashAttention takes the tiles by plain products."""
    inputs = heads(35, (4, 2, 8, 8), torch.float64)
    monkeypatch.setattr(windows, "block_cpu", windows.block_reference)
    monkeypatch.setattr(windows, "block_backward_cpu", windows.block_backward_reference)
    assert worst(attention_window(*inputs, window=4), masked(*inputs, 4), inputs) < 1e-13


def test_dropout_draws_inside_the_window() -> None:
    q, k, _ = heads(16, (4, 2, 8, 8), torch.float64)
    one_hot = torch.eye(16, dtype=torch.float64).expand(2, 2, 16, 16)
    weights = attention_window(q, k, one_hot, window=3, dropout=0.5)
    seen = causal_keys(16, 16, q.device, window=3)
    assert (weights[..., ~seen] == 0).all()
    assert 0.2 < (weights[..., seen] == 0).double().mean() < 0.8


def test_an_expanded_gradient_is_read_as_it_is() -> None:
    """That of a sum has features with stride 0, which the kernel would take for neighbours."""
    inputs = heads(35, (4, 2, 8, 8), torch.float64)
    pairs = zip(
        *(
            torch.autograd.grad(form.sum(), inputs)
            for form in (attention_window(*inputs, window=4), masked(*inputs, 4))
        ),
        strict=True,
    )
    assert all((one - other).abs().max() < 1e-13 for one, other in pairs)


@pytest.mark.parametrize("window", [0, 16, 17])
def test_a_window_that_hides_nothing_is_another_call(window: int) -> None:
    with pytest.raises(ValueError, match="pass 1 to 15"):
        attention_window(*heads(16, (4, 2, 8, 8), torch.float64), window=window)


def test_no_tensor_is_larger_than_the_inputs():
    """Neither a mask nor scores: the largest tensor of forward and backward has the elements of the queries."""
    inputs, sizes = heads(2048, (2, 2, 8, 8), torch.float32), []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            sizes.extend(t.numel() for t in torch.utils._pytree.tree_leaves(out) if isinstance(t, torch.Tensor))
            return out

    with Watch():
        attention_window(*inputs, window=32).sum().backward()  # its gradient is one number, expanded
    assert max(sizes) <= inputs[0].numel()
