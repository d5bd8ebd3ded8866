"""Tensors that a backward makes again from smaller ones, in place of keeping them.

    forward    small -> make -> large -> consumer -> y       kept: small, and what the consumer saves except large
    backward   small -> make -> large -> the consumer's own backward

Unlike a recomputed unit, the consumer does not run again: only the tensors that it saved are made again, when its
backward reads the first of them, and freed with the last. Saved views of large tensors are found by their storage.

Latent attention makes its keys and values so, from the latents of DeepSeek-V2 (arXiv 2405.04434).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from megapar.core.recompute.selective import recompute_in_backward
from megapar.core.torch_names import hooks_of_saved_tensors

MakeTensors = Callable[[], Sequence[Tensor]]


def consume(
    consumer: Callable[..., Tensor], x: Tensor, large: Sequence[Tensor], remade: Remade | None, *, selective: bool
) -> Tensor:
    """Return ``consumer(x, *large)``.

    Args:
        consumer: Launches no collectives if it is selective, and draws random numbers only from streams.
        x: Its first argument, which is kept.
        large: Its other arguments.
        remade: Makes them again in the backward; None to keep them.
        selective: Run the consumer again in the backward, and keep only its arguments (``recompute_in_backward``).
    """
    if remade is not None and selective:
        return remade.recomputed(consumer, x, *large)
    if selective:
        return recompute_in_backward(consumer, x, *large)
    with nullcontext() if remade is None else remade.hooks(*large):
        return consumer(x, *large)


class _SavedView(NamedTuple):
    """A saved view of a large tensor, described by its place in the tensor's storage."""

    number: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class _Layout(NamedTuple):
    """Place of a large tensor's elements in its storage, which has room for ``elements``."""

    stride: tuple[int, ...]
    offset: int
    elements: int


class Remade:
    """Large tensors of one forward, which the backward makes again.

    Args:
        make: Returns them, in order, outside autograd. It launches no collectives and draws no random numbers.
    """

    def __init__(self, make: MakeTensors) -> None:
        self._make = make
        self._numbers: dict[int, int] = {}
        self._layouts: dict[int, _Layout] = {}
        self._uses = self._left = 0
        self._made: list[Tensor] = []

    def hooks(self, *large: Tensor) -> saved_tensors_hooks:
        """Return the context of a consumer that shall save no views of the large tensors, given in order.

        Consumers of parts of them, in their storages, come one after another. What else they save goes to the hooks
        outside, which torch alone would not call.
        """
        for number, tensor in enumerate(large):
            storage = tensor.untyped_storage()
            self._numbers[storage._cdata] = number
            elements = storage.nbytes() // tensor.element_size()
            self._layouts[number] = _Layout(tensor.stride(), int(tensor.storage_offset()), elements)
        pack, unpack = hooks_of_saved_tensors()

        def keep(tensor: Tensor) -> _SavedView | tuple[Any]:
            return self._pack(tensor) or (pack(tensor),)

        def find(kept: _SavedView | tuple[Any]) -> Tensor:
            return self._unpack(kept) if isinstance(kept, _SavedView) else unpack(kept[0])

        return saved_tensors_hooks(keep, find)

    def recomputed(self, consumer: Callable[..., Tensor], x: Tensor, *large: Tensor) -> Tensor:
        """Return ``consumer(x, *large)`` and keep x alone: the consumer runs again in the backward."""
        self._uses += 1
        self._left += 1
        given, shapes = [large], [tensor.shape for tensor in large]

        def run(x: Tensor) -> Tensor:
            return consumer(x, *(given.pop() if given else self._leaves(shapes)))

        return recompute_in_backward(run, x)

    def _leaves(self, shapes: list[torch.Size]) -> list[Tensor]:
        made = self._take()
        pieces = (tensor[tuple(map(slice, shape))] for tensor, shape in zip(made, shapes, strict=True))
        return [piece.detach().requires_grad_() for piece in pieces]

    def _pack(self, tensor: Tensor) -> _SavedView | None:
        number = self._numbers.get(tensor.untyped_storage()._cdata)
        if number is None:
            return None
        self._uses += 1
        self._left += 1
        return _SavedView(number, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))

    def _unpack(self, view: _SavedView) -> Tensor:
        return self._take()[view.number].as_strided(view.shape, view.stride, view.offset)

    def _take(self) -> list[Tensor]:
        """Return the tensors for one use; the last use of a backward frees them."""
        made = self._made
        if not made:
            with torch.no_grad():
                made = [self._laid_out(number, tensor) for number, tensor in enumerate(self._make())]
        self._left -= 1
        self._made = made if self._left else []
        self._left = self._left or self._uses
        return made

    def _laid_out(self, number: int, tensor: Tensor) -> Tensor:
        """Return a tensor in whose storage the elements are where the saved views expect them."""
        layout = self._layouts.get(number)
        if layout is None or layout == _Layout(tensor.stride(), int(tensor.storage_offset()), layout.elements):
            return tensor
        storage = tensor.new_empty(layout.elements)
        storage.as_strided(tensor.shape, layout.stride, layout.offset).copy_(tensor)
        return storage
