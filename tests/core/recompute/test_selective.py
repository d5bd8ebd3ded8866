"""Recomputed parts: bit for bit the same, nothing of what they drop is held, and consumers do not run again."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megapar.core.device.memory_tracker import MemoryTracker
from megapar.core.recompute.selective import Rematerialized, consume, recompute_in_backward, without_output

ROWS, WIDTH = 64, 32
KILOBYTES = ROWS * WIDTH * 4


def split(inner: Tensor) -> Tensor:
    """A consumer that saves several views of its input, as experts on a CPU do."""
    weights = [torch.full((WIDTH, WIDTH), 0.1 * n, requires_grad=True) for n in (1, 2, 3)]
    return torch.cat([rows @ weight for rows, weight in zip(inner.split((10, 30, 24)), weights, strict=True)])


def linear(inner: Tensor) -> Tensor:
    """A consumer that flattens its input."""
    weight = torch.full((WIDTH, WIDTH), 0.1, requires_grad=True)
    return F.linear(inner.unflatten(0, (2, -1)), weight).flatten(0, 1)


@pytest.mark.parametrize("consumer", [split, linear])
@pytest.mark.parametrize("times", [1, 2])
def test_forgotten_outputs(consumer: Callable[[Tensor], Tensor], times: int) -> None:
    """The gradient is the same, also by a second backward through the same graph."""
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1)).requires_grad_()
    for number in range(times):
        y = without_output(torch.sigmoid, x, consumer)
        (got,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
        assert torch.equal(got, torch.autograd.grad(y.sum(), x)[0]), number
        (want,) = torch.autograd.grad(consumer(torch.sigmoid(x)).sum(), x)
        assert torch.equal(got, want)


def held(run: Callable[[Tensor], Tensor]) -> int:
    """Bytes beside the output, in activations of one width."""
    x = torch.ones(ROWS, WIDTH, requires_grad=True)
    with MemoryTracker() as tracker:
        y = run(x * 1.0)
        return (tracker.bytes - y.untyped_storage().nbytes()) // KILOBYTES


def test_what_is_held() -> None:
    """Without: what tanh and sigmoid keep, and the product. Then the input and the product; then the input."""

    def activation(h: Tensor) -> Tensor:
        return h.tanh() * h.sigmoid()

    weight = torch.full((WIDTH, WIDTH), 0.1, requires_grad=True)
    assert held(lambda x: F.linear(activation(x), weight)) == 3
    assert held(lambda x: F.linear(recompute_in_backward(activation, x), weight)) == 2
    assert held(lambda x: without_output(activation, x, lambda inner: F.linear(inner, weight))) == 1


def test_without_gradients() -> None:
    """Nothing to drop."""
    with torch.no_grad():
        y = without_output(torch.sigmoid, torch.zeros(2, 3), torch.neg)
    assert y.tolist() == [[-0.5] * 3] * 2


class Made:
    """Two large tensors from a small one, in one order of memory or another."""

    def __init__(self, moved: bool = False) -> None:
        self.moved, self.count = moved, 0
        self.last: list[weakref.ref[Tensor]] = []
        self.small = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def __call__(self) -> tuple[Tensor, Tensor]:
        self.count += 1
        first, second = self.small * 2, (self.small + 1).transpose(0, 1)
        made = first, second.contiguous().transpose(0, 1) if self.moved else second.transpose(0, 1)
        self.last = [weakref.ref(tensor) for tensor in made]
        return made


def inputs(made: Made) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()
    return x, *(tensor.requires_grad_() for tensor in made())


RUNS: list[int] = []


def consumer(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
    RUNS.append(1)
    return ((x @ first.mT).softmax(-1) @ second).sin() * second[:, :1, 1:2]


def gradients(y: Tensor, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(y.sum(), tensors, retain_graph=True)


@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize("selective", [False, True])
def test_the_backward_makes_them_again(selective, moved):
    made, again = Made(), Made(moved)
    tensors = inputs(made)
    wanted = gradients(consumer(*tensors), tensors)
    before = len(RUNS)
    y = consume(consumer, tensors[0], tensors[1:], Rematerialized(again), selective=selective)
    assert again.count == 0
    for count in (1, 2):  # a second backward of the same graph, too
        torch.testing.assert_close(gradients(y, tensors), wanted, rtol=0, atol=1e-14)
        assert again.count == count or selective
        assert [reference() for reference in again.last] == [None, None]
    assert len(RUNS) - before == (3 if selective else 1)


@pytest.mark.parametrize("selective", [False, True])
def test_parts_one_after_another(selective):
    """Consumers of prefixes share what is made."""
    again, made = Made(moved=True), Made()
    x, *large = inputs(made)
    rematerialized, ys, wants = Rematerialized(again), [], []
    for stop in (1, 2, 3):
        parts = [tensor[:, :stop] for tensor in large]
        ys.append(consume(consumer, x, parts, rematerialized, selective=selective))
        wants.append(consumer(x, *parts))
    found, wanted = (gradients(torch.cat([y.flatten() for y in all_]), (x, *large)) for all_ in (ys, wants))
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-14)
    assert again.count == 1
    assert [reference() for reference in again.last] == [None, None]


def test_other_tensors_go_to_the_hooks_outside():
    x, *large = inputs(Made())
    storages: list[set[int]] = []
    for rematerialized in (None, Rematerialized(Made())):
        seen: set[int] = set()

        def note(tensor: Tensor, seen: set[int] = seen) -> Tensor:
            seen.add(tensor.untyped_storage()._cdata)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            y = consume(consumer, x, large, rematerialized, selective=False)
        storages.append(seen)
        y.sum().backward()
    own = {tensor.untyped_storage()._cdata for tensor in large}
    assert own <= storages[0]
    assert not own & storages[1]
    assert x.untyped_storage()._cdata in storages[1]
    assert len(storages[1]) >= 4


def test_inside_a_checkpoint():
    """The checkpoint keeps nothing of the consumer, and counts what it saves as in the forward."""
    made = Made()
    tensors = inputs(made)
    wanted = gradients(consumer(*tensors), tensors)

    def unit(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        return consume(consumer, x * 1.0, (first, second), Rematerialized(Made()), selective=False)

    y = checkpoint(unit, *tensors, use_reentrant=False)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), tensors), wanted, rtol=0, atol=1e-14)


def test_without_gradients_no_input_is_kept():
    made = Made()
    x, *large = (tensor.detach() for tensor in inputs(made))
    again = Made()
    with torch.no_grad():
        y = consume(consumer, x, large, Rematerialized(again), selective=False)
    torch.testing.assert_close(y, consumer(x, *large))
    assert again.count == 0
