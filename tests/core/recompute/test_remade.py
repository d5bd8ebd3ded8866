"""Large tensors that a backward makes again: they are not kept, and the consumer does not run again."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megapar.core.recompute.remade import Remade, consume


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
    y = consume(consumer, tensors[0], tensors[1:], Remade(again), selective=selective)
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
    remade, ys, wants = Remade(again), [], []
    for stop in (1, 2, 3):
        parts = [tensor[:, :stop] for tensor in large]
        ys.append(consume(consumer, x, parts, remade, selective=selective))
        wants.append(consumer(x, *parts))
    found, wanted = (gradients(torch.cat([y.flatten() for y in all_]), (x, *large)) for all_ in (ys, wants))
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-14)
    assert again.count == 1
    assert [reference() for reference in again.last] == [None, None]


def test_other_tensors_go_to_the_hooks_outside():
    x, *large = inputs(Made())
    storages: list[set[int]] = []
    for remade in (None, Remade(Made())):
        seen: set[int] = set()

        def note(tensor: Tensor, seen: set[int] = seen) -> Tensor:
            seen.add(tensor.untyped_storage()._cdata)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            y = consume(consumer, x, large, remade, selective=False)
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
        return consume(consumer, x * 1.0, (first, second), Remade(Made()), selective=False)

    y = checkpoint(unit, *tensors, use_reentrant=False)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), tensors), wanted, rtol=0, atol=1e-14)


def test_without_gradients_nothing_is_kept():
    made = Made()
    x, *large = (tensor.detach() for tensor in inputs(made))
    again = Made()
    with torch.no_grad():
        y = consume(consumer, x, large, Remade(again), selective=False)
    torch.testing.assert_close(y, consumer(x, *large))
    assert again.count == 0
