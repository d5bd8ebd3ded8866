"""Attention of blocks: every form against the reference, the reference against autograd."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megapar.core.device.attention import blocks as block_attention
from megapar.core.device.attention import whole as attention
from megapar.core.device.attention.blocks import (
    AttentionBlock,
    block_backward_cuda,
    block_backward_reference,
    block_cuda,
    block_reference,
)
from megapar.core.device.ops import OPS
from tests.support.ascend import stand_in

stand_in()
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
# heads, groups, queries, keys, features of a value (keys have 8), causal
SHAPES = [
    (4, 4, 6, 6, 8, True),
    (4, 2, 6, 6, 8, True),
    (4, 2, 3, 9, 8, False),
    (4, 1, 9, 2, 8, False),
    (4, 4, 6, 6, 16, True),
    (4, 2, 3, 9, 4, False),
]


def draw(seed, *shape, dtype):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def tensors(shape, dtype):
    heads, groups, queries, keys, value_dim, _ = shape
    q, grad = (draw(seed, 2, heads, queries, size, dtype=dtype) for seed, size in ((0, 8), (3, value_dim)))
    return q, *(draw(seed, 2, groups, keys, size, dtype=dtype) for seed, size in ((1, 8), (2, value_dim))), grad


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_reference_backward_is_that_of_autograd(shape):
    *leaves, grad = tensors(shape, torch.float64)
    leaves = [x.requires_grad_() for x in leaves]
    block = block_reference(*leaves, causal=shape[-1])
    want = torch.autograd.grad(block.out, leaves, grad)
    detached = AttentionBlock(block.out.detach(), block.lse.detach())
    got = block_backward_reference(grad, *(x.detach() for x in leaves), detached, causal=shape[-1])
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-13)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("device", [name for name in OPS["attention_block"] if name != "reference"])
def test_forms_equal_the_reference(device, shape, dtype):
    if device == "cuda" and dtype == torch.bfloat16:
        pytest.skip("FlashAttention runs on a GPU only; its calls are checked below")
    q, k, v, grad = tensors(shape, dtype)
    exact = [x.double() for x in (q, k, v, grad)]
    want = block_reference(*exact[:3], causal=shape[-1])
    got = OPS["attention_block"][device](q, k, v, causal=shape[-1])
    assert got.lse.dtype == torch.float32
    # What comes back from merging is the same for all.
    merged = AttentionBlock(want.out.to(dtype), want.lse.float(), got.drawn)
    got_grads = OPS["attention_block_backward"][device](grad, q, k, v, merged, causal=shape[-1])
    want_grads = block_backward_reference(exact[3], *exact[:3], want, causal=shape[-1])
    for a, b in zip((*got[:2], *got_grads), (*want[:2], *want_grads), strict=True):
        assert float((a - b).norm() / b.norm()) < TOLERANCE[dtype]


@pytest.mark.parametrize("form", ["reference", "cpu"])
def test_dropout_is_repeated_from_what_was_drawn(form):
    q, k, v, grad = tensors(SHAPES[1], torch.float64 if form == "reference" else torch.float32)
    torch.manual_seed(0)
    block = OPS["attention_block"][form](q, k, v, causal=True, dropout=0.5)
    (kept,) = block.drawn
    assert set(kept.unique().tolist()) == {0.0, 2.0}
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    repeated = [x.repeat_interleave(2, 1) for x in leaves[1:]]
    scores = leaves[0] @ repeated[0].mT * 8**-0.5
    weights = scores.masked_fill(torch.ones(6, 6).triu(1).bool(), -torch.inf).softmax(-1)
    out = (weights * kept) @ repeated[1]
    torch.testing.assert_close(block.out, out)
    want = torch.autograd.grad(out, leaves, grad)
    got = OPS["attention_block_backward"][form](grad, q, k, v, block, causal=True, dropout=0.5)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_gpu_kernel_is_called_as_it_wants(shape, monkeypatch):
    """Traced without a GPU: the kernel's own checks of arguments, and the shapes that come back."""
    monkeypatch.setattr(attention, "capability_of", lambda like: (8, 0))
    with FakeTensorMode():
        heads, groups, queries, keys, value_dim, causal = shape
        q = torch.empty(2, heads, queries, 8, device="cuda", dtype=torch.bfloat16)
        k, v = (torch.empty(2, groups, keys, size, device="cuda", dtype=torch.bfloat16) for size in (8, value_dim))
        block = block_cuda(q, k, v, causal=causal, dropout=0.1)
        assert (block.out.shape, block.lse.shape) == ((*q.shape[:-1], value_dim), q.shape[:-1])
        assert (block.out.dtype, block.lse.dtype) == (torch.bfloat16, torch.float32)
        dq, dk, dv = block_backward_cuda(torch.empty_like(block.out), q, k, v, block, causal=causal, dropout=0.1)
        assert (dq.shape, dk.shape, dv.shape) == (q.shape, k.shape, v.shape)


def test_the_gpu_kernel_gets_log_sum_exps_without_gaps(monkeypatch):
    """It takes their address alone, and the rows of a ring's tile are a slice: gradients were wrong by factors."""
    calls = []
    monkeypatch.setattr(attention, "capability_of", lambda like: (9, 0))
    monkeypatch.setattr(block_attention, "_cuda_backward", lambda *args, **more: calls.append(args) or args[:3])
    q, k, v, grad = tensors(SHAPES[0], torch.bfloat16)
    lse = draw(4, 2, 4, 12, dtype=torch.float32)[:, :, 6:]
    block_backward_cuda(grad, q, k, v, AttentionBlock(q, lse), causal=True)
    assert calls[0][5].is_contiguous()
    assert torch.equal(calls[0][5], lse)


@pytest.mark.parametrize("capability", [(7, 0), (0, 0)], ids=["V100", "AMD"])
def test_a_gpu_without_the_kernel_takes_plain_products(capability, monkeypatch):
    """FlashAttention has no code for a V100, and what it has for AMD's GPUs is not known to give these outputs."""
    monkeypatch.setattr(attention, "capability_of", lambda like: capability)
    monkeypatch.setattr(block_attention, "_cuda_forward", lambda *_: pytest.fail("the kernel was called"))
    q, k, v = (torch.randn(1, 2, 4, 8, dtype=torch.float16) for _ in range(3))
    block, want = block_cuda(q, k, v, causal=True), block_reference(q, k, v, causal=True)
    torch.testing.assert_close((block.out, block.lse), (want.out, want.lse))
    grads = (form(q, q, k, v, block, causal=True) for form in (block_backward_cuda, block_backward_reference))
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)
