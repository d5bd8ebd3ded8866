"""Bytes of live tensor storages where torch has no allocator that counts them: on a CPU, and for fake tensors."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

# Types with a separate storage. Any other subclass dispatches its inner tensors first.
_PLAIN = frozenset((Tensor, nn.Parameter, FakeTensor))
_SEQUENCES = frozenset((tuple, list))
_DEVICE = torch.ops.prim.device.default


class MemoryTracker(TorchDispatchMode):
    """Tracker of the storages that operators allocate in the context, until they are freed, or resized by FSDP2."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        self.peak_bytes = 0
        self._alive: dict[int, tuple[weakref.ref[UntypedStorage], int]] = {}
        self._resize: list[Callable[..., Any]] = []

    def __enter__(self) -> MemoryTracker:
        """Start to track. Resizing a storage is not an operator, so the method is wrapped until the exit."""
        original = UntypedStorage.resize_
        self._resize.append(original)

        def resize(storage: UntypedStorage, size: int) -> Any:
            result = original(storage, size)
            self._resized(storage)
            return result

        UntypedStorage.resize_ = resize  # type: ignore[method-assign, assignment]
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        """Stop tracking."""
        super().__exit__(*raised)
        UntypedStorage.resize_ = self._resize.pop()  # type: ignore[method-assign]

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run the operator and count new storages of its results. Unknown storages of its arguments existed before."""
        if func is _DEVICE and type(args[0]) is FakeTensor:
            return args[0].device  # A fast path: C++ calls this for fake tensors more often than all other operators.
        for kind in types:
            if kind not in _PLAIN:
                return NotImplemented  # A subclass, whose inner operators are dispatched again.
        for tensor in _tensors((args, kwargs), []):
            self._note(tensor.untyped_storage(), 0)
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors((result,), []):
            storage = tensor.untyped_storage()
            if not self._knows(storage):
                self._note(storage, storage.nbytes())
        return result

    def forget(self, tensor: Tensor) -> None:
        """Stop counting this storage, because it represents memory elsewhere, such as the host's."""
        storage = tensor.untyped_storage()
        if self._knows(storage):
            self.bytes -= self._alive[storage._cdata][1]
        self._alive.pop(storage._cdata, None)
        self._note(storage, 0)

    def reset_peak(self) -> None:
        """Reset the peak to the bytes that are live now."""
        self.peak_bytes = self.bytes

    def sizes(self) -> Counter[int]:
        """Return size -> number of live storages of this size."""
        return Counter(size for _, size in list(self._alive.values()) if size)

    def _knows(self, storage: UntypedStorage) -> bool:
        known = self._alive.get(storage._cdata)
        return known is not None and known[0]() is storage

    def _note(self, storage: UntypedStorage, size: int) -> None:
        if self._knows(storage):
            return
        key = storage._cdata

        def freed(reference: weakref.ref[UntypedStorage]) -> None:
            if key in self._alive and self._alive[key][0] is reference:
                self.bytes -= self._alive.pop(key)[1]

        self._alive[key] = weakref.ref(storage, freed), size
        self._grow(size)

    def _resized(self, storage: UntypedStorage) -> None:
        if self._knows(storage):
            reference, before = self._alive[storage._cdata]
            self._alive[storage._cdata] = reference, storage.nbytes()
            self._grow(storage.nbytes() - before)

    def _grow(self, size: int) -> None:
        self.bytes += size
        self.peak_bytes = max(self.peak_bytes, self.bytes)


def _tensors(values: Iterable[Any], tensors: list[Tensor]) -> list[Tensor]:
    """Append the tensors with memory among an operator's arguments or results to ``tensors``, and return it."""
    for value in values:
        kind = type(value)
        if kind in _PLAIN:
            if value.device.type != "meta":
                tensors.append(value)
        elif kind in _SEQUENCES:
            _tensors(value, tensors)
        elif kind is dict:
            _tensors(value.values(), tensors)
    return tensors
