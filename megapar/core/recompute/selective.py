"""Selective recompute: parts of a layer that are cheap to compute and large to keep (attention core, activations).

``recompute_in_backward`` drops the tensors that a function saves for its backward: the attention core. The function's
output is saved by the next layer as its input. ``without_output`` drops that too, and recomputes the output for the
next layer's backward: the activations of an MLP and of experts.

Source: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", section 5.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint


def recompute_in_backward(function: Callable[..., Tensor], *inputs: Any) -> Tensor:
    """Return ``function(*inputs)``, keeping only the inputs for its backward.

    The function must launch no collectives and draw random numbers only from streams (``core.random``).
    """
    y: Tensor = checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)
    return y


def without_output(function: Callable[[Tensor], Tensor], x: Tensor, consumer: Callable[[Tensor], Tensor]) -> Tensor:
    """Return ``consumer(function(x))``, keeping ``x`` and what the consumer saves except its input.

    Megatron's ``CheckpointWithoutOutput``.
    """
    if not torch.is_grad_enabled():
        return consumer(function(x))
    y = recompute_in_backward(function, x)
    if not y.is_contiguous():
        return consumer(y)
    with _DroppedOutput(function, x.detach(), y.untyped_storage()._cdata).hooks():
        return consumer(y)


class _View(NamedTuple):
    """A saved view of the output, described by its place in the output's storage."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class _DroppedOutput:
    """An output that is recomputed and kept only while the consumer's backward reads its views."""

    def __init__(self, function: Callable[[Tensor], Tensor], x: Tensor, storage: int) -> None:
        self._function, self._x, self._storage = function, x, storage
        self._views = self._left = 0
        self._output: Tensor | None = None

    def hooks(self) -> saved_tensors_hooks:
        return saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: Tensor) -> Tensor | _View:
        if tensor.untyped_storage()._cdata != self._storage:
            return tensor
        self._views += 1
        self._left = self._views
        return _View(tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))

    def _unpack(self, kept: Tensor | _View) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        output = self._output
        if output is None:
            with torch.no_grad():
                output = self._function(self._x).contiguous()
        self._left -= 1
        self._output = output if self._left else None
        self._left = self._left or self._views
        return output.as_strided(kept.shape, kept.stride, kept.offset)
