import pytest
import torch
from torch import nn

from megapar.core.device.grouped import grouped_linear_fused, grouped_linear_reference
from megapar.core.tensor_parallel.weight_gradients import WeightGradients
from megapar.moe.expert_linear import grouped_linear

COUNTS = ([3, 0, 5, 8], [16, 0, 0, 0], [0, 0, 0, 16], [4, 4, 4, 4])


def made(counts, dtype, width=32, out=24):
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(sum(counts), width, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(len(counts), out, width, generator=generator).to(dtype).requires_grad_()
    upstream = torch.randn(sum(counts), out, generator=generator).to(dtype)
    return rows, weight, upstream


def run(function, counts, dtype, width=32, out=24):
    rows, weight, upstream = made(counts, dtype, width, out)
    product = function(rows, weight, torch.tensor(counts))
    return product.detach(), *torch.autograd.grad(product, (rows, weight), upstream)


@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)])
def test_fused_equals_the_loop(counts, dtype, tolerance):
    for fused, plain in zip(
        run(grouped_linear_fused, counts, dtype), run(grouped_linear_reference, counts, dtype), strict=True
    ):
        torch.testing.assert_close(fused, plain, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_bf16_is_as_near_to_fp64_as_the_loop(counts):
    rows, weight, upstream = (t.detach().double() for t in made(counts, torch.bfloat16))
    rows.requires_grad_()
    weight.requires_grad_()
    out = grouped_linear_reference(rows, weight, torch.tensor(counts))
    exact = (out.detach(), *torch.autograd.grad(out, (rows, weight), upstream))

    def errors(function):
        pairs = zip(run(function, counts, torch.bfloat16), exact, strict=True)
        return [float((got.double() - want).norm()) for got, want in pairs]

    for fused, plain in zip(errors(grouped_linear_fused), errors(grouped_linear_reference), strict=True):
        assert fused <= 1.2 * plain


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_no_rows_at_all(dtype):
    out, rows_grad, weight_grad = run(grouped_linear, [0, 0, 0], dtype)
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
        run(grouped_linear_fused, counts, dtype, width, out)
    for got, want in zip(
        run(grouped_linear, counts, dtype, width, out),
        run(grouped_linear_reference, counts, dtype, width, out),
        strict=True,
    ):
        assert torch.equal(got, want)


def test_an_expanded_gradient_is_taken():
    rows, weight, _ = made([2, 3], torch.float32)
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
