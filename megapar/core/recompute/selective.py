"""Selective recompute: parts of a layer that are cheap to compute and large to keep.

``recompute_in_backward`` drops the tensors that a function saves for its backward: the attention core. The function's
output is saved by the next layer as its input. ``without_output`` drops that too: the activations of an MLP and of
experts. ``Rematerialized`` are inputs that the backward computes again from smaller tensors: the keys and values of
latent attention, from the latents of DeepSeek-V2 (arXiv 2405.04434).

    forward    small -> compute -> inputs -> consumer -> y    kept: small, and what the consumer saves except its inputs
    backward   small -> compute -> inputs -> the consumer's backward

Unlike a recomputed unit, the consumer does not run again: only the tensors that it saved are computed again, when its
backward reads the first of them, and freed with the last. Saved views of the inputs are recognized by their storage.

Source: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", section 5.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from megapar.core.torch_names import hooks_of_saved_tensors


def recompute_in_backward(function: Callable[..., Tensor], *inputs: Any) -> Tensor:
    """Return ``function(*inputs)``, keeping only the inputs. It launches no collectives and draws only from streams."""
    return checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)


def without_output(function: Callable[[Tensor], Tensor], x: Tensor, consumer: Callable[[Tensor], Tensor]) -> Tensor:
    """Return ``consumer(function(x))`` without keeping ``function(x)``, as Megatron's ``CheckpointWithoutOutput``."""
    if not torch.is_grad_enabled():
        return consumer(function(x))
    y = recompute_in_backward(function, x)
    if not y.is_contiguous():
        return consumer(y)
    x = x.detach()
    with Rematerialized(lambda: (function(x).contiguous(),)).hooks(y):
        return consumer(y)


def consume(
    consumer: Callable[..., Tensor],
    x: Tensor,
    inputs: Sequence[Tensor],
    rematerialized: Rematerialized | None,
    *,
    selective: bool,
) -> Tensor:
    """Return ``consumer(x, *inputs)``.

    Args:
        consumer: Launches no collectives if it is selective, and draws random numbers only from streams.
        x: Its first argument, which is kept.
        rematerialized: Computes the other arguments again in the backward; None to keep them.
        selective: Run the consumer again in the backward, and keep only its arguments (``recompute_in_backward``).
    """
    if rematerialized is not None and selective:
        return rematerialized.recomputed(consumer, x, *inputs)
    if selective:
        return recompute_in_backward(consumer, x, *inputs)
    with nullcontext() if rematerialized is None else rematerialized.hooks(*inputs):
        return consumer(x, *inputs)


class _SavedView(NamedTuple):
    """A saved view of an input, described by its place in the input's storage."""

    number: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class _Layout(NamedTuple):
    """Place of an input's elements in its storage, which has room for ``elements``."""

    stride: tuple[int, ...]
    offset: int
    elements: int


class Rematerialized:
    """Inputs of consumers in one forward, which the backward computes again.

    ``compute`` returns them, in order, outside autograd. It launches no collectives and draws no random numbers.
    """

    def __init__(self, compute: Callable[[], Sequence[Tensor]]) -> None:
        self._compute = compute
        self._numbers: dict[int, int] = {}
        self._layouts: dict[int, _Layout] = {}
        self._uses = self._left = 0
        self._computed: list[Tensor] = []

    def hooks(self, *inputs: Tensor) -> saved_tensors_hooks:
        """Return the context of a consumer that must not save views of the inputs, given in order.

        Consumers of parts of the inputs, in their storages, follow each other. What else they save goes to the hooks
        outside, which torch alone would not call.
        """
        for number, tensor in enumerate(inputs):
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

    def recomputed(self, consumer: Callable[..., Tensor], x: Tensor, *inputs: Tensor) -> Tensor:
        """Return ``consumer(x, *inputs)`` and keep x alone: the consumer runs again in the backward."""
        self._uses += 1
        self._left += 1
        given, shapes = [inputs], [tensor.shape for tensor in inputs]

        def run(x: Tensor) -> Tensor:
            return consumer(x, *(given.pop() if given else self._leaves(shapes)))

        return recompute_in_backward(run, x)

    def _leaves(self, shapes: list[torch.Size]) -> list[Tensor]:
        pieces = (tensor[tuple(map(slice, shape))] for tensor, shape in zip(self._use(), shapes, strict=True))
        return [piece.detach().requires_grad_() for piece in pieces]

    def _pack(self, tensor: Tensor) -> _SavedView | None:
        number = self._numbers.get(tensor.untyped_storage()._cdata)
        if number is None:
            return None
        self._uses += 1
        self._left += 1
        return _SavedView(number, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))

    def _unpack(self, view: _SavedView) -> Tensor:
        return self._use()[view.number].as_strided(view.shape, view.stride, view.offset)

    def _use(self) -> list[Tensor]:
        """Return the inputs for one use; the last use of a backward frees them."""
        computed = self._computed
        if not computed:
            with torch.no_grad():
                computed = [self._laid_out(number, tensor) for number, tensor in enumerate(self._compute())]
        self._left -= 1
        self._computed = computed if self._left else []
        self._left = self._left or self._uses
        return computed

    def _laid_out(self, number: int, tensor: Tensor) -> Tensor:
        """Return a tensor in whose storage the elements are where the saved views expect them."""
        layout = self._layouts.get(number)
        if layout is None or layout == _Layout(tensor.stride(), int(tensor.storage_offset()), layout.elements):
            return tensor
        storage = tensor.new_empty(layout.elements)
        storage.as_strided(tensor.shape, layout.stride, layout.offset).copy_(tensor)
        return storage
