"""Experts one by one and all at once, and how the gradients of many small pieces come together."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megapar.core.device.grouped import grouped_linear_fused, grouped_linear_reference
from megapar.core.device.layer_ops import _clamped, clamped_swiglu_reference
from megapar.core.tensor_parallel.weight_gradients import WeightGradients
from megapar.moe.expert_order import weigh
from megapar.moe.experts import Experts, grouped_linear

COUNTS = (3, 0, 4)


def make(dtype: torch.dtype, *, gated: bool, bias: bool, clamped: bool = False) -> Experts:
    experts = Experts(8, 6, len(COUNTS), gated=gated, clamped=clamped, add_bias=bias, dtype=dtype)
    generator = torch.Generator().manual_seed(1)
    for parameter in experts.parameters():
        nn.init.normal_(parameter, generator=generator)
    return experts


@pytest.mark.parametrize(
    ("gated", "bias", "clamped"), [(True, False, False), (True, True, False), (False, True, False), (True, True, True)]
)
def test_weights_multiply_the_outputs(gated: bool, bias: bool, clamped: bool) -> None:
    experts, x = make(torch.float64, gated=gated, bias=bias, clamped=clamped), rows(torch.float64)
    weights = torch.rand(sum(COUNTS), dtype=torch.float64).requires_grad_()
    leaves = [x, weights, *experts.parameters()]
    plain = weigh(experts.compute(x, torch.tensor(COUNTS)), weights)
    inside = experts.compute(x, torch.tensor(COUNTS), None, weights)
    torch.testing.assert_close(inside, plain, rtol=1e-13, atol=1e-13)
    gradients = [torch.autograd.grad(y.square().sum(), leaves) for y in (inside, plain)]
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)


def rows(dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(sum(COUNTS), 8, generator=torch.Generator().manual_seed(2)).to(dtype).requires_grad_()


def one_by_one(experts: Experts, x: torch.Tensor, length: int, weights: torch.Tensor | None = None) -> torch.Tensor:
    """Each expert's rows in pieces of at most ``length``."""
    apart, start, parts = experts.per_expert(), 0, []
    for e, own in enumerate(x.split(COUNTS)):
        for piece in own.split(length) if len(own) else ():
            parts.append(apart[e](piece, None if weights is None else weights[start : start + len(piece)]))
            start += len(piece)
    return torch.cat(parts)


@pytest.mark.parametrize("weighed", [False, True])
@pytest.mark.parametrize("selective", [False, True])
@pytest.mark.parametrize(("gated", "bias"), [(True, False), (False, True)])
def test_pieces_of_one_expert_give_what_all_experts_give(
    gated: bool, bias: bool, selective: bool, weighed: bool
) -> None:
    weights = torch.rand(sum(COUNTS), dtype=torch.float64).requires_grad_() if weighed else None
    experts, x = make(torch.float64, gated=gated, bias=bias), rows(torch.float64)
    experts.selective = selective
    fired: list[nn.Parameter] = []
    for parameter in experts.parameters():
        parameter.register_post_accumulate_grad_hook(fired.append)
    leaves = [x, *experts.parameters(), *([] if weights is None else [weights])]
    want = experts(lambda own, *inputs: own.compute(*inputs), x, torch.tensor(COUNTS), None, weights)
    wanted = torch.autograd.grad(want.square().sum(), leaves)
    got = experts(one_by_one, x, 2, weights)
    got.square().sum().backward()
    assert torch.allclose(got, want, rtol=0, atol=1e-12)
    assert len(fired) == len(list(experts.parameters()))
    for leaf, grad in zip(leaves, wanted, strict=True):
        assert leaf.grad is not None
        assert torch.allclose(leaf.grad, grad, rtol=0, atol=1e-11)


def test_many_pieces_are_summed_in_fp32() -> None:
    """One row per piece: in bf16 the weights' gradients are within a rounding of those of all rows at once."""
    exact, errors = make(torch.float64, gated=True, bias=False), []
    for parameter in exact.parameters():
        parameter.data.copy_(parameter.data.bfloat16())
    x = rows(torch.bfloat16)
    one_by_one(exact, x.detach().double(), 9).sum().backward()
    for length in (9, 1):
        experts = make(torch.bfloat16, gated=True, bias=False)
        one_by_one(experts, x, length).sum().backward()
        pairs = zip(experts.parameters(), exact.parameters(), strict=True)
        errors.append(sum(float((a.grad.double() - b.grad).norm() / b.grad.norm()) for a, b in pairs))  # type: ignore[union-attr]
    assert errors[1] < 1.2 * errors[0]


def test_a_split_backward_makes_each_weight_once() -> None:
    experts, x = make(torch.float64, gated=True, bias=False), rows(torch.float64)
    wanted = torch.autograd.grad(one_by_one(experts, x, 2).square().sum(), list(experts.parameters()))
    experts.weight_gradients = WeightGradients()
    fired: list[nn.Parameter] = []
    for parameter in experts.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: fired.append(p) if p.grad is not None else None)
    with experts.weight_gradients.keep(0):
        one_by_one(experts, x, 2).square().sum().backward()
    assert not fired
    experts.weight_gradients.run(0)
    assert len(fired) == 2
    for parameter, grad in zip(experts.parameters(), wanted, strict=True):
        assert parameter.grad is not None
        assert torch.allclose(parameter.grad, grad, rtol=0, atol=1e-11)


ROWS = ([3, 0, 5, 8], [16, 0, 0, 0], [0, 0, 0, 16], [4, 4, 4, 4])


def drawn(counts, dtype, width=32, out=24):
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(sum(counts), width, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(len(counts), out, width, generator=generator).to(dtype).requires_grad_()
    upstream = torch.randn(sum(counts), out, generator=generator).to(dtype)
    return rows, weight, upstream


def multiply(function, counts, dtype, width=32, out=24):
    rows, weight, upstream = drawn(counts, dtype, width, out)
    product = function(rows, weight, torch.tensor(counts))
    return product.detach(), *torch.autograd.grad(product, (rows, weight), upstream)


@pytest.mark.parametrize("counts", ROWS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_fused_is_as_near_to_fp64_as_the_loop(dtype, counts):
    rows, weight, upstream = (t.detach().double() for t in drawn(counts, dtype))
    rows.requires_grad_()
    weight.requires_grad_()
    out = grouped_linear_reference(rows, weight, torch.tensor(counts))
    exact = (out.detach(), *torch.autograd.grad(out, (rows, weight), upstream))

    def errors(function):
        pairs = zip(multiply(function, counts, dtype), exact, strict=True)
        return [float((got.double() - want).norm()) for got, want in pairs]

    for fused, plain in zip(errors(grouped_linear_fused), errors(grouped_linear_reference), strict=True):
        assert fused <= 1.2 * plain


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_no_rows_at_all(dtype):
    out, rows_grad, weight_grad = multiply(grouped_linear, [0, 0, 0], dtype)
    assert out.shape == (0, 24)
    assert rows_grad.shape == (0, 32)
    assert weight_grad.abs().max() == 0


@pytest.mark.parametrize(
    ("dtype", "width", "out"),
    [(torch.float64, 32, 24), (torch.float32, 30, 24), (torch.float32, 32, 22), (torch.bfloat16, 32, 20)],
)
def test_what_the_kernel_refuses_takes_the_loop(dtype, width, out):
    counts = [2, 3]
    with pytest.raises(RuntimeError):  # some of it only in the backward
        multiply(grouped_linear_fused, counts, dtype, width, out)
    for got, want in zip(
        multiply(grouped_linear, counts, dtype, width, out),
        multiply(grouped_linear_reference, counts, dtype, width, out),
        strict=True,
    ):
        assert torch.equal(got, want)


def test_an_expanded_gradient_is_taken():
    rows, weight, _ = drawn([2, 3], torch.float32)
    grouped_linear(rows, weight, torch.tensor([2, 3])).sum().backward()
    torch.testing.assert_close(rows.grad[0], weight[0].detach().sum(0))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("counts", [(3, 0, 5), (0, 0, 0), (8, 0, 0)])
def test_the_split_backward_gives_the_gradients_of_the_whole_one(dtype: torch.dtype, counts: tuple[int, ...]) -> None:
    torch.manual_seed(1)
    rows = torch.randn(sum(counts), 16, dtype=dtype)
    weight = nn.Parameter(torch.randn(len(counts), 24, 16, dtype=dtype))

    def gradients(store: WeightGradients | None) -> list[torch.Tensor]:
        x, weight.grad = rows.clone().requires_grad_(), None
        defer_wgrad = None if store is None else store.of(weight)
        loss = grouped_linear(x, weight, torch.tensor(counts), defer_wgrad).sin().sum()
        if store is None:
            loss.backward()
        else:
            with store.keep("here"):
                loss.backward()
            assert weight.grad is None
            store.run("here")
        assert x.grad is not None
        assert weight.grad is not None
        return [x.grad, weight.grad]

    for got, want in zip(gradients(WeightGradients()), gradients(None), strict=True):
        torch.testing.assert_close(got, want)


def test_clamped_experts_are_those_of_gpt_oss() -> None:
    """By the formula, whose limits cut a good part of these hidden features."""
    experts, x = make(torch.float64, gated=True, bias=True, clamped=True), rows(torch.float64)
    weight, bias, down_bias = (experts.get_parameter(name) for name in ("gate_up", "gate_up_bias", "down_bias"))
    with torch.no_grad():
        weight.mul_(4.0)
    leaves, wanted, cut = [x, *experts.parameters()], [], 0
    for e, own in enumerate(x.split(COUNTS)):
        gate, up = (own @ weight[e, i].T + bias[e, i] for i in (0, 1))
        cut += int((gate > 7).sum() + (up.abs() > 7).sum())
        gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
        wanted.append((up + 1) * gate * torch.sigmoid(1.702 * gate) @ experts.down[e].T + down_bias[e])
    assert 5 < cut < 7 * 6
    want = torch.cat(wanted)
    for found in (experts.compute(x, torch.tensor(COUNTS)), one_by_one(experts, x, 2)):
        torch.testing.assert_close(found, want, rtol=1e-13, atol=1e-13)
        for a, b in zip(*(torch.autograd.grad(y.square().sum(), leaves, retain_graph=True) for y in (found, want)),
                        strict=True):  # fmt: skip
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-10)


def test_a_clamped_activation_rounds_once_and_keeps_its_inputs_alone() -> None:
    hidden = (6 * torch.randn(50, 2, 8, generator=torch.Generator().manual_seed(4))).bfloat16().requires_grad_()
    weights = torch.rand(50, 1, generator=torch.Generator().manual_seed(5)).requires_grad_()
    kept: list[torch.Tensor] = []

    def keep(x: torch.Tensor) -> torch.Tensor:
        kept.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        y = clamped_swiglu_reference(hidden, weights)
    assert {x.data_ptr() for x in kept} == {hidden.data_ptr(), weights.data_ptr()}
    wide = hidden.detach().double().requires_grad_()
    exact = clamped_swiglu_reference(wide, weights.double())
    assert torch.equal(y, exact.to(torch.float32).bfloat16())
    found, want = torch.autograd.grad(y.float().sum(), hidden)[0], torch.autograd.grad(exact.sum(), wide)[0]
    torch.testing.assert_close(found.double(), want, rtol=2**-8, atol=1e-6)
    assert (wide.abs() == 7).any()  # a limit's own value is inside of it, which torch's clamp has up to 2.13 only
    plainly = _clamped(wide, None)[0]
    torch.testing.assert_close(torch.autograd.grad(plainly.sum(), wide)[0],
                               torch.autograd.grad(clamped_swiglu_reference(wide).sum(), wide)[0])  # fmt: skip
