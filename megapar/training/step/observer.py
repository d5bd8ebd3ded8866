"""The observer of a trainer's steps: the single hook through which tests, traces and budgets inspect a run."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch import Tensor, nn

from megapar.core.sharding.sharding import Sharding


class StepObserver:
    """Hooks into the steps of a trainer. Subclasses override the methods that they need.

    Every method runs on the rank whose trainer the observer was passed to. A method may launch collectives if all
    ranks have an observer.
    """

    def model_built(self, model: nn.Module) -> None:
        """Run once, after the model is initialized and before a checkpoint is loaded."""

    def forward_begins(self, micro_batch: int) -> None:
        """Run before each forward. ``micro_batch`` is its number, counted over the whole run."""

    def recomputation(self) -> AbstractContextManager[object]:
        """Return the context in which a unit will be recomputed. Called when the forward enters the unit.

        By the time of the recomputation, other micro-batches may have started. Record here which one the unit is from.
        """
        return nullcontext()

    def experts_chosen(self, layer: int, experts_Tk: Tensor) -> Tensor:
        """Return the experts to use instead of a router's choice, by default the choice itself.

        Args:
            layer: Global index of the router's layer.
            experts_Tk: [T, k] int64, highest score first.
        """
        return experts_Tk

    def gradients_reduced(self, sharding: Sharding) -> None:
        """Run after a step's gradients are summed over all axes, before their norm is computed and they are clipped."""

    def host_waited(self, where: str) -> None:
        """Run after the host waited for values from the device. ``where`` names the function that needed them."""
