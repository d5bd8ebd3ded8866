"""Options of how the layers of a model run, made once before the model and passed to every constructor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from megapar.core.comm.in_flight import CommContext
from megapar.core.device.compiled import FunctionRunner, plain
from megapar.core.tensor_parallel.overlapped_linear import Overlap
from megapar.core.tensor_parallel.weight_gradients import WeightGradients

LinearProduct = Callable[[Tensor, Tensor, Tensor | None], Tensor]


@dataclass(frozen=True)
class Execution:
    """Options that change neither a layer's parameters nor what it computes, apart from the rounding of fp8.

    overlap: how finely linear layers cut collectives that travel under their products.
    comm: tracks the collectives that layers launch; None: each layer tracks its own.
    weight_gradients: collects the weight-gradient products of a split backward; None: they are computed at once.
    fp8: x [.., I] @ w [O, I]^T + b of the linear layers in fp8; None: in the dtype of the parameters.
    run: calls the pure functions of layers, compiled or as they are.
    selective: recompute activation functions and the core of attention in the backward instead of keeping them.
    """

    overlap: Overlap = field(default_factory=Overlap)
    comm: CommContext | None = None
    weight_gradients: WeightGradients | None = None
    fp8: LinearProduct | None = None
    run: FunctionRunner = plain
    selective: bool = False


DEFAULT = Execution()
