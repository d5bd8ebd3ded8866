"""The observer of a trainer's steps: the one place where tests, traces and budgets look into a run."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch import Tensor, nn

from megapar.core.sharding.master_shard import Sharding


class StepObserver:
    """Sees what a trainer makes of a step while it makes it. Subclasses override the methods that they need.

    The trainer calls every method on the rank where it was built. Collectives are allowed where all ranks observe.
    """

    def model_built(self, model: nn.Module) -> None:
        """Called once, with the initialised model and before any checkpoint is loaded."""

    def forward_begins(self, micro_batch: int) -> None:
        """Called before each forward of a micro-batch. micro_batch: its number, counted over the whole run."""

    def recomputation(self) -> AbstractContextManager[object]:
        """Called as the forward enters a recomputed unit. Returns the context in which the unit will run again.

        Other micro-batches may have begun by then, so this is where an observer notes which one the unit belongs to.
        """
        return nullcontext()

    def experts_chosen(self, layer: int, experts_Tk: Tensor) -> Tensor:
        """Called with each router's choice. Returns the experts to use instead, by default the same ones.

        layer: the global number of the router's layer. experts_Tk: [T, k] int64, best first.
        """
        return experts_Tk

    def gradients_reduced(self, sharding: Sharding) -> None:
        """Called when a step's gradients are summed over all axes, before their norm is taken and they are clipped."""

    def host_waited(self, where: str) -> None:
        """Called after the host waited for values of the device. where: the function that needed them."""
