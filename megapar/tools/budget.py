"""Budgets of a step, counted on fake tensors: kernel launches per layer, and how often the host waits.

Every operator that is no view and no allocation counts as one launch; the forms are a CPU's, whose norms, for example,
are several operators where a GPU has one. A layer is the difference between two depths. The host waits where it asks
for a value: the norm and the votes of a step, and the rows that experts on other ranks receive.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megapar.arguments import Config
from megapar.moe.expert_parallel import Announced, ExpertParallelDispatcher
from megapar.tools import pretend
from megapar.tools.trace import traceable

# What only makes a tensor or looks at one in another way, beside views.
_NO_KERNEL = frozenset(
    {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "alias", "set_", "resize_"}
    | {"record_stream", "_local_scalar_dense", "device", "_reshape_alias", "_unsafe_view"}
)


@dataclass(frozen=True)
class Budget:
    """Of one optimizer step of one rank. layer: launches that one more layer adds, forward and backward of every
    micro-batch and its share of the optimizer. others: launches of everything else. waits: of the host.
    """

    layer: int
    others: int
    waits: int

    def describe(self) -> str:
        """One line."""
        return f"{self.layer} kernel launches per layer, {self.others} beside them, {self.waits} host waits per step"


class Launches(TorchDispatchMode):
    """Counts operators that a device would launch as kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run it and count it."""
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.partition("::")[2]
        if func.namespace != "prim" and name not in _NO_KERNEL and not func.is_view:
            self.count += any(isinstance(x, FakeTensor) for x in tree_leaves((args, kwargs, result)))
        return result


def budget(config: Config) -> Budget:
    """Of the last rank of the configuration's world. Raises ConfigError for what cannot be traced."""
    layers = config.model.num_layers
    more = replace(config, model=replace(config.model, num_layers=layers + config.parallel.pp_degree))
    few, waits = _count(config)
    many, _ = _count(more)
    layer = many - few
    return Budget(layer, few - layer * (layers // config.parallel.pp_degree), waits)


def _count(config: Config) -> tuple[int, int]:
    rank = config.grid.world_size - 1
    config = traceable(config, rank)
    launches, waits = Launches(), [0]
    with _waits(waits), pretend.pretend(config, rank, launches) as trainer:
        trainer.step()  # buffers are made in the first one
        launches.count, waits[0] = 0, 0
        trainer.step()
        return launches.count, waits[0]


@contextmanager
def _waits(count: list[int]) -> Iterator[None]:
    """Count where the host asks for values."""

    def read(_: ExpertParallelDispatcher, told: Announced) -> Tensor:
        count[0] += 1
        return told.numbers

    def values(x: Tensor) -> list[float]:
        count[0] += 1
        return [0.0] * len(x)

    with patch.object(pretend, "_values", values), patch.object(pretend, "_read", read):
        yield
