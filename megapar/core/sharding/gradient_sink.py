"""Sinks of weight gradients: a bucket adds the product of a gradient to its buffer, instead of copying the gradient.

A layer asks for the sink of its weight and calls it, in its backward, with the product. Autograd then gets no gradient
for this use of the weight, and the weight's hooks fire as always. Megatron calls this gradient accumulation fusion.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

_NAME = "gradient_sink"

# Takes the function that computes a gradient; returns the gradient, or None if the bucket has added it.
GradientSink = Callable[[Callable[[], Tensor]], Tensor | None]


def set_gradient_sink(parameter: Tensor, sink: GradientSink) -> None:
    """Offer ``sink`` to the layer of a parameter."""
    setattr(parameter, _NAME, sink)


def gradient_sink(parameter: Tensor) -> GradientSink | None:
    """Return the sink of a parameter, or None if autograd must compute its gradient."""
    return getattr(parameter, _NAME, None)
