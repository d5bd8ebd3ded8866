"""Which module made the first number that is not finite: the forward is watched while a step is run again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megapar.core.comm import json_messages as messages
from megapar.core.comm.axis import Axis


@dataclass
class FirstNonfinite:
    """What this rank has found. micro_batch: the one that runs, set by whoever runs it.

    found: (micro-batch, place on pp, number of modules finished before), and the module's name; None: nothing.
    """

    stage: int = 0
    micro_batch: int = 0
    found: tuple[tuple[int, int, int], str] | None = None
    _finished: int = field(default=0, repr=False)

    def look(self, name: str, output: Any) -> None:
        """A module has finished."""
        self._finished += 1
        if self.found is None and any(not tensor.isfinite().all().item() for tensor in _floats(output)):
            self.found = (self.micro_batch, self.stage, self._finished), f"the output of {name or 'the model'}"

    def agree(self, world: Axis) -> str:
        """The first one over all ranks, and on which; "" where the forward was clean everywhere."""
        rows: list[Any] = [self.found]
        if world.group is not None:
            rows = messages.all_gather(rows[0] and [list(rows[0][0]), rows[0][1]], world.group)
        held = {rank: row for rank, row in enumerate(rows) if row is not None}
        if not held:
            return ""
        first = min(held.values())
        ranks = [rank for rank, row in held.items() if row == first]
        return f"{first[1]} on {'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}"


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
def watch(model: nn.Module, stage: int) -> Iterator[FirstNonfinite]:
    """Look at the output of every module while the block runs. A parameter that is bad already is found at once."""
    found = FirstNonfinite(stage)
    for name, parameter in model.named_parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        if found.found is None and not local.detach().isfinite().all().item():
            found.found = (0, stage, -1), f"the parameter {name}"

    def hook(name: str) -> Any:
        return lambda module, inputs, output: found.look(name, output)

    handles = [module.register_forward_hook(hook(name)) for name, module in model.named_modules()]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
