"""Make torch without CUDA dispatch like a build with CUDA, with entries for the operators that have a CUDA kernel.

torch's list of operators (native_functions.yaml, in every wheel) defines which operators have a CUDA kernel. They get
an entry here, so that torch differentiates and dispatches like a build with CUDA instead of decomposing them. Their
meta kernels compute the results.
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

# Keys of torch's list for operators that run on CUDA because they are composed of other operators.
_COMPOSITE = ("CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional", "CompositeImplicitAutograd")


def stand_in() -> None:
    """Let torch accept tensors on cuda:0. Requires that the library built by scripts/with_fake_cuda.sh is preloaded."""
    ctypes.CDLL(os.environ["MEGAPAR_CUDA_GUARD"]).stand_in()


class Kernels:
    """Operators with a CUDA kernel, from torch's list."""

    def __init__(self) -> None:
        path = Path(torchgen.__file__).parent / "packaged" / "ATen" / "native" / "native_functions.yaml"
        self._dispatch: dict[str, dict[str, str]] = {}
        listed = yaml.load(path.read_text(encoding="utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506
        delegates: dict[str, str] = {}
        for entry in listed:
            name = entry["func"].partition("(")[0]
            keys = {key.strip(): to for keys, to in entry.get("dispatch", {}).items() for key in keys.split(",")}
            if "ufunc_inner_loop" in entry:  # kernels for CPU and CUDA are generated from it
                keys["CUDA"] = name
            delegates[name] = entry.get("structured_delegate", name)
            self._dispatch[name] = (
                keys if keys or "structured_delegate" in entry else {"CompositeImplicitAutograd": name}
            )
        for name, to in delegates.items():
            self._dispatch[name] = {**self._dispatch[to], **self._dispatch[name]}

    def lacks(self, func: Any) -> bool:
        """Return True if a build with CUDA has no kernel for an operator; False if the operator is not in the list."""
        keys = self._dispatch.get(_listed(func))
        return func.namespace == "aten" and keys is not None and not any(key in keys for key in ("CUDA", *_COMPOSITE))

    def own(self) -> list[str]:
        """Return the operators with both a CUDA kernel and a composite implementation."""
        listed = self._dispatch.items()
        return [name for name, keys in listed if "CUDA" in keys and any(key in keys for key in _COMPOSITE)]


def _listed(func: Any) -> str:
    return f"{func._schema.name.partition('::')[2]}.{func._schema.overload_name}".rstrip(".")


@contextmanager
def as_a_build_with_cuda(kernels: Kernels) -> Iterator[None]:
    """Register the dispatcher entries of a build with CUDA."""
    library = torch.library.Library("aten", "IMPL", "CUDA")
    try:
        for name in kernels.own():
            try:
                library.impl(name, _never)
            except RuntimeError:  # the lists of torch releases differ
                continue
        yield
    finally:
        library._destroy()


def _never(*_: Any, **__: Any) -> Any:
    raise AssertionError("a kernel of a GPU was called with a tensor that is not fake")
