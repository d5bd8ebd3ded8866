"""Weight gradients made apart: nothing appears before its time, and the sum is that of a plain backward."""

from __future__ import annotations

import torch
from torch import nn

from megapar.core.comm.axis import Axis
from megapar.core.tensor_parallel.execution import Execution
from megapar.core.tensor_parallel.layers import ColumnLinear, RowLinear
from megapar.core.tensor_parallel.weight_gradients import WeightGradients
from tests.support.ranks import run_ranks


def mlp(mp: Axis, sequence_parallel: bool, store: WeightGradients | None = None) -> nn.Sequential:
    common = {"bias": True, "mp": mp, "sequence_parallel": sequence_parallel, "dtype": torch.float64, "device": "cpu"}
    common["execution"] = Execution(weight_gradients=store)
    model = nn.Sequential(ColumnLinear(8, (2, 6), split=1, **common), nn.Flatten(2), RowLinear(12, 8, **common))
    torch.manual_seed(3 + mp.rank)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    return model


def compare(mp: Axis, sequence_parallel: bool) -> list[str]:
    """What is wrong with two micro-batches whose weights' parts come late, against a plain backward."""
    model, wrong = mlp(mp, sequence_parallel), []
    torch.manual_seed(5 + mp.rank * sequence_parallel)
    inputs = [torch.randn(2, 4, 8, dtype=torch.float64) for _ in range(2)]

    def backward(x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        model(x).sin().sum().backward()
        assert x.grad is not None
        return x.grad

    want_dx = [backward(x) for x in inputs]
    want = [parameter.grad for parameter in model.parameters()]
    store, fired = WeightGradients(), []
    model = mlp(mp, sequence_parallel, store)
    weights = [module.weight for module in (model[0], model[2])]
    for weight in weights:
        weight.register_post_accumulate_grad_hook(lambda w: fired.append(w.grad is not None))
    for number, x in enumerate(inputs):
        with store.keep(number):
            if not torch.equal(backward(x), want_dx[number]):
                wrong.append(f"dx of {number}")
    if any(weight.grad is not None for weight in weights) or any(fired):
        wrong.append("a weight has its gradient too early")
    for number in range(2):
        store.run(number)
    if fired.count(True) != 4:
        wrong.append(f"hooks fired {fired.count(True)} times with a gradient, not 4")
    got = [parameter.grad for parameter in model.parameters()]
    wrong += [f"parameter {n}" for n, (a, b) in enumerate(zip(got, want, strict=True)) if not torch.equal(a, b)]
    backward(inputs[0])  # outside keep all is made at once
    return wrong + ["late without being asked"] * (weights[0].grad is None)


def on_two(rank: int, world_size: int) -> list[str]:
    mp = Axis("mp", world_size, rank, torch.distributed.group.WORLD, tuple(range(world_size)))
    return [f"{text}, {sp}" for sp in (False, True) for text in compare(mp, sp)]


def test_one_rank() -> None:
    assert compare(Axis.single("mp"), False) == []


def test_cut_layers_send_nothing_twice() -> None:
    assert run_ranks(2, on_two) == [[], []]


def test_a_product_that_adds_to_a_sum_has_the_gradients_of_both() -> None:
    """In place where one rank has all of it and no bias, and with weight gradients that are made apart."""
    single = Axis.single("mp")
    common = {"mp": single, "sequence_parallel": False, "dtype": torch.float64, "device": "cpu"}
    for bias, store in ((False, None), (False, WeightGradients()), (True, None)):
        row = RowLinear(6, 4, bias=bias, **common, execution=Execution(weight_gradients=store))
        torch.manual_seed(0)
        for parameter in row.parameters():
            nn.init.normal_(parameter)
        x, before = torch.randn(2, 3, 6).double().requires_grad_(), torch.randn(6, 4).double().requires_grad_()
        upstream, leaves = torch.randn(6, 4).double(), (before, x, *row.parameters())
        want = before.sin() + row(x).flatten(0, -2)
        total = before.sin()
        got = row(x, onto=total)
        assert (got is total) is not bias
        torch.testing.assert_close(got, want)
        gradients = [torch.autograd.grad(y, leaves, upstream) for y in (got, want)]
        for a, b in zip(*gradients, strict=True):
            torch.testing.assert_close(a, b)
