"""The chunked cross-entropy against the plain one: value and every gradient."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megapar.core.comm.axis import Axis
from megapar.core.device.dtypes import at_least_fp32
from megapar.model.layers.loss import collect, vocab_parallel_linear_cross_entropy
from megapar.model.sizes import NO_LOSS
from megapar.moe.stats import MoeStats

SINGLE = Axis.single("mp")


def reference_cross_entropy(hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor) -> Tensor:
    """The same loss on one rank, written plainly: all logits at once, gradients by autograd."""
    logits = F.linear(hidden, weight, bias).to(at_least_fp32(hidden.dtype))
    return F.cross_entropy(logits, labels, ignore_index=NO_LOSS, reduction="sum")


def inputs(rows, *, dtype=torch.float64, bias=True, hidden=8, vocab=13):
    generator = torch.Generator().manual_seed(rows)

    def draw(*shape):
        return torch.randn(shape, generator=generator).to(dtype).requires_grad_()

    labels = torch.randint(vocab, (rows,), generator=generator)
    labels[::3] = -100
    return draw(rows, hidden), draw(vocab, hidden), draw(vocab) if bias else None, labels


def gradients(loss, tensors):
    return torch.autograd.grad(3.0 * loss, [t for t in tensors if t is not None])


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 5, 12, 13])
@pytest.mark.parametrize("logits_bytes", [1, 13 * 4 * 8, 1 << 20])
def test_equals_the_reference(rows, bias, logits_bytes):
    hidden, weight, offset, labels = inputs(rows, bias=bias)
    loss = vocab_parallel_linear_cross_entropy(
        hidden, weight, offset, labels, vocab_size=13, mp=SINGLE, logits_bytes=logits_bytes
    )
    expected = reference_cross_entropy(hidden, weight, offset, labels)
    assert torch.allclose(loss, expected, rtol=1e-13, atol=1e-13)
    tensors = (hidden, weight, offset)
    for a, b in zip(gradients(loss, tensors), gradients(expected, tensors), strict=True):
        assert torch.allclose(a, b, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("logits_bytes", [1, 1 << 20])
def test_labels_count_by_their_weights(dtype, tolerance, logits_bytes):
    hidden, weight, offset, labels = inputs(13, dtype=dtype)
    weights = torch.rand(13, generator=torch.Generator().manual_seed(1)).mul_(2)  # also where there is no label
    loss = vocab_parallel_linear_cross_entropy(
        hidden, weight, offset, labels, weights, vocab_size=13, mp=SINGLE, logits_bytes=logits_bytes
    )
    exact = tuple(t.detach().double().requires_grad_() for t in (hidden, weight, offset))
    apart = F.cross_entropy(F.linear(*exact), labels, ignore_index=NO_LOSS, reduction="none")
    expected = (weights.double() * apart).sum()
    assert loss.item() == pytest.approx(expected.item(), rel=tolerance)
    for a, b in zip(gradients(loss, (hidden, weight, offset)), gradients(expected, exact), strict=True):
        assert a.dtype == dtype
        assert float((a - b).norm() / b.norm()) < tolerance


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_lower_precisions_are_near(dtype, tolerance):
    hidden, weight, offset, labels = inputs(40, dtype=dtype)
    loss = vocab_parallel_linear_cross_entropy(
        hidden, weight, offset, labels, vocab_size=13, mp=SINGLE, logits_bytes=13 * 7 * 4
    )
    assert loss.dtype == torch.float32
    exact = tuple(t.detach().double().requires_grad_() for t in (hidden, weight, offset))
    expected = reference_cross_entropy(*exact, labels)
    assert float(loss) == pytest.approx(float(expected), rel=tolerance)
    for a, b in zip(gradients(loss, (hidden, weight, offset)), gradients(expected, exact), strict=True):
        assert a.dtype == dtype
        assert float((a - b).norm() / b.norm()) < tolerance


def test_all_ignored_and_no_rows_are_zero():
    for rows in (0, 4):
        hidden, weight, offset, labels = inputs(rows)
        labels.fill_(-100)
        loss = vocab_parallel_linear_cross_entropy(hidden, weight, offset, labels, vocab_size=13, mp=SINGLE)
        assert float(loss) == 0.0
        assert not any(bool(g.any()) for g in gradients(loss, (hidden, weight, offset)))


def test_large_logits_do_not_overflow():
    hidden, weight, offset, labels = inputs(6)
    loss = vocab_parallel_linear_cross_entropy(1e4 * hidden, weight, offset, labels, vocab_size=13, mp=SINGLE)
    expected = reference_cross_entropy(1e4 * hidden, weight, offset, labels)
    assert torch.allclose(loss, expected, rtol=1e-12)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2**-8)])
@pytest.mark.parametrize("logits_bytes", [1, 1 << 20])
def test_logits_of_200_have_the_loss_and_gradients_of_fp64(dtype, tolerance, logits_bytes):
    """Of unit vectors, whose products are exact in any dtype; labels are the likeliest token, and the least likely."""
    logits = (400 * torch.rand(8, 13, generator=torch.Generator().manual_seed(0)) - 200).to(dtype)
    logits[:, 5], logits[:, 6] = 200, -200
    labels = torch.tensor([5, 6, 0, 5, 6, 1, -100, 5])
    hidden, weight = (x.requires_grad_() for x in (torch.eye(8, dtype=dtype), logits.t().contiguous()))
    loss = vocab_parallel_linear_cross_entropy(
        hidden, weight, None, labels, vocab_size=13, mp=SINGLE, logits_bytes=logits_bytes
    )
    exact, counted = logits.double(), labels != NO_LOSS
    above = exact - exact.amax(1, keepdim=True)
    log_probs = above - above.exp().sum(1, keepdim=True).log()
    want = -log_probs[counted, labels[counted]].sum()
    into = (log_probs.exp() - F.one_hot(labels * counted, 13)) * counted[:, None]
    assert loss.item() == pytest.approx(want.item(), rel=1e-6)
    for found, wanted in zip(gradients(loss, (hidden, weight)), (into @ exact.t(), into.t()), strict=True):
        torch.testing.assert_close(found.double(), 3 * wanted, rtol=0, atol=tolerance * 3 * float(wanted.abs().max()))


def test_gradients_are_those_of_small_differences():
    hidden, weight, offset, labels = inputs(5)
    assert torch.autograd.gradcheck(
        lambda *own: vocab_parallel_linear_cross_entropy(
            *own, labels, vocab_size=13, mp=SINGLE, logits_bytes=13 * 2 * 8
        ),
        (hidden, weight, offset),
    )


def test_backward_may_run_twice():
    hidden, weight, offset, labels = inputs(6)
    loss = vocab_parallel_linear_cross_entropy(hidden, weight, offset, labels, vocab_size=13, mp=SINGLE)
    first = torch.autograd.grad(loss, weight, retain_graph=True)[0]
    second = torch.autograd.grad(2 * loss, weight)[0]
    assert torch.allclose(2 * first, second, rtol=1e-14)


def test_a_frozen_weight_gets_no_gradient():
    hidden, weight, _, labels = inputs(6, bias=False)
    loss = vocab_parallel_linear_cross_entropy(hidden, weight.detach(), None, labels, vocab_size=13, mp=SINGLE)
    expected = reference_cross_entropy(hidden, weight, None, labels)
    a, b = torch.autograd.grad(loss, hidden)[0], torch.autograd.grad(expected, hidden)[0]
    assert torch.allclose(a, b, rtol=1e-12)


def test_a_weight_that_is_not_this_ranks_piece_is_refused():
    hidden, weight, _, labels = inputs(6, bias=False)
    with pytest.raises(ValueError, match="13 vocabulary rows, but rank 0 of 1 holds 26"):
        vocab_parallel_linear_cross_entropy(hidden, weight, None, labels, vocab_size=26, mp=SINGLE)


@pytest.mark.parametrize("bias", [False, True])
def test_sums_over_logits_of_16_bits_are_in_fp32(bias):
    """A CPU rounds the product itself to its dtype; nothing behind it is."""
    hidden, weight, own_bias, labels = inputs(64, dtype=torch.bfloat16, bias=bias, hidden=64, vocab=501)
    hidden = 8 * hidden.detach()
    loss = vocab_parallel_linear_cross_entropy(hidden, weight, own_bias, labels, vocab_size=501, mp=Axis.single("mp"))
    logits = (hidden @ weight.detach().t()).double()
    want = F.cross_entropy(logits if own_bias is None else logits + own_bias.detach(), labels, reduction="sum")
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.item(), want.item(), rtol=2e-6, atol=0)


def test_a_router_loss_is_the_sum_of_its_layers():
    """Layers whose loads are opposite do not even each other out."""
    probs, load = torch.tensor([[3.0, 1.0], [1.0, 3.0]]), torch.tensor([[4, 0], [0, 4]])
    stats = [
        MoeStats(p, n, 0.125, p.sum(), 4, sequence=None, orthogonal=None, load=n, over=None)
        for p, n in zip(probs, load, strict=True)
    ]
    terms = collect({"lm": torch.zeros(())}, stats)
    assert float(terms.aux) == sum(float(one.aux) for one in stats) == 3.0
    assert float(terms.z) == sum(float(one.z) for one in stats) == 2.0
