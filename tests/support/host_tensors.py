"""Finds on a CPU the waits that only an accelerator has for tensors made from Python values.

A list used as an index and a number written into a 0-dim view become tensors in pageable host memory, which the device
has to be waited for to copy; so does a tensor made of a list that is sent to another device. On a CPU they are tensors
like any other, so they are recognized by their birth: torch lifts them (``aten.lift_fresh``). A 0-dim one may be filled
with, or enter arithmetic: its value travels with the kernel.
"""

from __future__ import annotations

import collections
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import megapar

PACKAGE = Path(megapar.__file__).parent
COPIES = ("aten.copy_", "aten.index_put_", "aten._index_put_impl_")


class HostTensors(TorchDispatchMode):
    """Mode that finds such waits.

    Attributes:
        waits: ``operator at file:line`` of a read of such a tensor -> number of reads.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waits: collections.Counter[str] = collections.Counter()
        self._lifted: dict[int, Tensor] = {}  # held, so that no other storage gets the number

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """Run the operator, then look at what it has read."""
        result = func(*args, **(kwargs or {}))
        name = str(func)
        if name.startswith("aten.lift_fresh"):
            self._lifted[result.untyped_storage()._cdata] = result
        elif not func.is_view:
            read = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
            beside = any(not self._is_lifted(x) for x in read) or _moved(read, result)
            if beside and any(self._waits(name, x) for x in read):
                self.waits[f"{name} at {_where()}"] += 1
        return result

    def _is_lifted(self, x: Tensor) -> bool:
        return x.untyped_storage()._cdata in self._lifted

    def _waits(self, name: str, x: Tensor) -> bool:
        return self._is_lifted(x) and (x.dim() > 0 or name.startswith(COPIES))


def _moved(read: list[Tensor], result: Any) -> bool:
    return any(x.device != y.device for x in read for y in tree_leaves(result) if isinstance(y, Tensor))


def _where() -> str:
    """Return the innermost line of the package on the stack."""
    frame = sys._getframe(2)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(PACKAGE):
            return f"{path.relative_to(PACKAGE)}:{frame.f_lineno}"
        frame = frame.f_back
    return "the backward"
