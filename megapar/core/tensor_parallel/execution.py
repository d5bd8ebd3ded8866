"""Execution options of the layers of a model, created once before the model and passed to every constructor."""

from __future__ import annotations

from dataclasses import dataclass, field

from megapar.core.comm.in_flight import CommContext
from megapar.core.device.compiled import FunctionRunner, plain
from megapar.core.tensor_parallel.fp8 import Fp8Casts
from megapar.core.tensor_parallel.overlapped_linear import Overlap
from megapar.core.tensor_parallel.weight_gradients import WeightGradients


@dataclass(frozen=True)
class Execution:
    """Options that change neither a layer's parameters nor its results, except for the rounding of fp8.

    Attributes:
        overlap: How finely linear layers cut the collectives that are hidden under their products.
        comm: Tracks the collectives that the layers launch; None to let each layer track its own.
        weight_gradients: Collects the weight gradient products of a split backward; None to compute them at once.
        fp8: Casts of the weights of column and row parallel layers, whose products are then in fp8; None: in the dtype
            of the parameters.
        fp8_experts: The same for the products of routed experts.
        run: Calls the pure functions of layers, compiled or uncompiled.
        attention: Operator of attention over whole samples (``core/device/ops.py``).
        selective: Selective activation checkpointing: recompute activation functions and core attention in the
            backward.
    """

    overlap: Overlap = field(default_factory=Overlap)
    comm: CommContext | None = None
    weight_gradients: WeightGradients | None = None
    fp8: Fp8Casts | None = None
    fp8_experts: Fp8Casts | None = None
    run: FunctionRunner = plain
    attention: str = "attention"
    selective: bool = False


DEFAULT = Execution()
