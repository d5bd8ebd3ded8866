"""torch without CUDA as a build with it: which operators have a kernel there, and entries for them in the dispatcher.

torch's own list of operators (native_functions.yaml, in every wheel) says which of them have a kernel on CUDA. Those
get an entry here, so that torch differentiates and dispatches as a build with CUDA does and does not take them apart;
what they return is their Meta form's answer.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torchgen
import yaml

# Keys of torch's list under which a kernel runs on CUDA: its own, and those that are put together from other operators.
_COMPOSITE = ("CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional", "CompositeImplicitAutograd")


def stand_in() -> None:
    """Let torch take tensors of cuda:0. Only where the library that scripts/trace_cuda.sh builds is preloaded."""
    ctypes.CDLL(os.environ["MEGAPAR_CUDA_GUARD"]).stand_in()


class Kernels:
    """What torch's list says of an operator: whether it has a kernel on CUDA."""

    def __init__(self) -> None:
        path = Path(torchgen.__file__).parent / "packaged" / "ATen" / "native" / "native_functions.yaml"
        self._dispatch: dict[str, dict[str, str]] = {}
        listed = yaml.load(path.read_text(encoding="utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506
        delegates: dict[str, str] = {}
        for entry in listed:
            name = entry["func"].partition("(")[0]
            keys = {key.strip(): to for keys, to in entry.get("dispatch", {}).items() for key in keys.split(",")}
            if "ufunc_inner_loop" in entry:  # its kernels are made from this for CPU and CUDA
                keys["CUDA"] = name
            delegates[name] = entry.get("structured_delegate", name)
            self._dispatch[name] = (
                keys if keys or "structured_delegate" in entry else {"CompositeImplicitAutograd": name}
            )
        for name, to in delegates.items():
            self._dispatch[name] = {**self._dispatch[to], **self._dispatch[name]}

    def lacks(self, func: Any) -> bool:
        """Whether a build with CUDA could not run it there. Operators that are not in the list are not judged."""
        keys = self._dispatch.get(_listed(func))
        return func.namespace == "aten" and keys is not None and not any(key in keys for key in ("CUDA", *_COMPOSITE))

    def own(self) -> list[str]:
        """Operators with a kernel of CUDA's own beside a form that is put together from others."""
        listed = self._dispatch.items()
        return [name for name, keys in listed if "CUDA" in keys and any(key in keys for key in _COMPOSITE)]


def _listed(func: Any) -> str:
    return f"{func._schema.name.partition('::')[2]}.{func._schema.overload_name}".rstrip(".")


@contextmanager
def as_a_build_with_cuda(kernels: Kernels) -> Iterator[None]:
    """Give operators their entries of a build with CUDA."""
    library = torch.library.Library("aten", "IMPL", "CUDA")
    try:
        for name in kernels.own():
            try:
                library.impl(name, _never)
            except RuntimeError:  # another release of torch has another list
                continue
        yield
    finally:
        library._destroy()


def _never(*_: Any, **__: Any) -> Any:
    raise AssertionError("a kernel of a GPU was called with a tensor that is not fake")
