"""The first module with a non-finite output: found by hooks on the forward while a bad step is run again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megapar.core.comm import json_messages as messages
from megapar.core.comm.axis import Axis


@dataclass
class FirstNonfinite:
    """The first non-finite value that this rank has found.

    Attributes:
        micro_batch: The running one; set by the caller.
        first: ((micro-batch, place in the model, number of modules finished before), description); None if there is
            none.
    """

    micro_batch: int = 0
    first: tuple[tuple[int, int, int], str] | None = None
    _finished: int = field(default=0, repr=False)

    def check(self, name: str, output: Any, place: int) -> None:
        """Check the output of a module that has finished, at this place in the forward of the whole model."""
        self._finished += 1
        if self.first is None and any(not tensor.isfinite().all().item() for tensor in _floats(output)):
            self.first = (self.micro_batch, place, self._finished), f"the output of {name or 'the model'}"

    def over_ranks(self, world: Axis, launched: Sequence[int]) -> str:
        """Return the first one over all ranks, with its ranks as launched, or "" if all outputs were finite."""
        rows: list[Any] = [self.first]
        if world.group is not None:
            rows = messages.all_gather(rows[0] and [list(rows[0][0]), rows[0][1]], world.group)
        by_rank = {rank: row for rank, row in enumerate(rows) if row is not None}
        if not by_rank:
            return ""
        earliest = min(by_rank.values())
        ranks = sorted(launched[rank] for rank, row in by_rank.items() if row == earliest)
        return f"{earliest[1]} on {'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}"


def _floats(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value.detach()
    elif isinstance(value, dict):
        for item in value.values():
            yield from _floats(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _floats(item)


@contextmanager
def watch(model: Any, units: Sequence[str]) -> Iterator[FirstNonfinite]:
    """Check the output of every module inside the block. A non-finite parameter is found at its start.

    Args:
        model: This rank's part of the model, with its modules by ``units()``.
        units: Units of the parameters of the whole model, in forward order.
    """
    nonfinite, order = FirstNonfinite(), {unit: number for number, unit in enumerate(dict.fromkeys(units))}
    own: dict[str, tuple[nn.Module, ...]] = model.units()
    places = {
        module: order[unit] for unit, tops in own.items() if unit in order for top in tops for module in top.modules()
    }
    for name, parameter in model.named_parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        if nonfinite.first is None and not local.detach().isfinite().all().item():
            place = places.get(model.get_submodule(name.rpartition(".")[0]), len(order))
            nonfinite.first = (0, -1, place), f"the parameter {name}"

    def hook(name: str) -> Any:
        return lambda module, inputs, output: nonfinite.check(name, output, places.get(module, len(order)))

    handles = [module.register_forward_hook(hook(name)) for name, module in model.named_modules()]
    try:
        yield nonfinite
    finally:
        for handle in handles:
            handle.remove()
