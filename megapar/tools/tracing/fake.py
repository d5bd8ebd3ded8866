"""Fake tensor mode with a cache: the result of an operator for given shapes is derived once.

The layers of a model are alike, so nearly every operator of a trace has run before on tensors of the same shapes.
torch's cache inspects more of every argument than a trace needs, and does not cache operators that return a list.
``replaced`` sets attributes of other modules for a while, where torch offers no option.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

# Types of arguments that are identified by type and value.
_PLAIN = frozenset(
    {int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format, complex}
)
# Results of these operators depend on values, or the operator changes the shape of an argument.
_UNFIT_TAGS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view)
_NAMESPACES = ("aten", "fsdp", "prims")
_GROUPED = torch.ops.aten._grouped_mm.default
_WIDE_SUMS = (torch.ops.aten.addmm.dtype, torch.ops.aten.addmm.dtype_out)


class _UnfitError(Exception):
    """An argument or a result that cannot be cached."""


@dataclass(frozen=True)
class _Made:
    """Description of a tensor that an operator returned.

    Attributes:
        like: Index of the argument that it is or whose storage it shares; None for a new tensor.
        same: It is the argument itself.
        offset: Storage offset in elements.
        attributes: Other attributes of the fake tensor.
    """

    like: int | None
    same: bool
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    attributes: dict[str, Any]

    def again(self, tensors: Sequence[FakeTensor]) -> FakeTensor:
        """Create the tensor for these arguments. Modes are off here, so plain meta tensors can be created."""
        if self.same and self.like is not None:
            return tensors[self.like]
        if self.like is None:
            new = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")
        else:
            new = torch.empty(0, dtype=self.dtype, device="meta")
            new.set_(tensors[self.like].untyped_storage(), self.offset, self.shape, self.stride)
        # Like the constructor of FakeTensor, without its checks.
        fake: FakeTensor = Tensor._make_subclass(
            FakeTensor, new, False, dispatch_device=True, device_for_backend_keys=self.device
        )
        torch._C._set_throw_on_mutable_data_ptr(fake)
        vars(fake).update(self.attributes)
        return fake


@dataclass(frozen=True)
class _Result:
    """Description of the result of an operator.

    Attributes:
        kind: Type of the returned sequence; None if the result is not a sequence.
        made: The returned tensors; None for a missing one.
    """

    kind: type | None
    made: tuple[_Made | None, ...]

    def again(self, tensors: Sequence[FakeTensor]) -> Any:
        """Create the result for these arguments."""
        if self.kind is None:
            return None if self.made[0] is None else self.made[0].again(tensors)
        return self.kind(None if made is None else made.again(tensors) for made in self.made)


class RememberingMode(FakeTensorMode):
    """A ``FakeTensorMode`` that derives the result of each operator once per shapes of its arguments."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._known: dict[tuple[Any, ...], _Result | None] = {}
        self._fit: dict[Callable[..., Any], bool] = {}

    def dispatch(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operator, or create its result from the cache."""
        kwargs = kwargs or {}
        fit = self._fit.get(func)
        if fit is None:
            fit = self._fit[func] = self._is_fit(func)
        tensors: list[FakeTensor] = []
        try:
            key = (func, *_signature(args, tensors), *_signature(kwargs.items(), tensors)) if fit else None
        except _UnfitError:
            key = None
        if key is None:
            return super().dispatch(func, types, args, kwargs)
        known = self._known.get(key, _UnfitError)
        if isinstance(known, _Result):
            return known.again(tensors)
        result: Any
        if func is _GROUPED and args[0].dtype != torch.bfloat16:
            result = self._grouped(args, kwargs)
        elif func in _WIDE_SUMS:
            result = self._wide_sum(args, kwargs)
        else:
            result = super().dispatch(func, types, args, kwargs)
        if known is _UnfitError:
            self._known[key] = _learn(result, tensors)
        return result

    def _grouped(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
        """Return the result of a grouped GEMM for dtypes that kernels support but torch's meta function does not."""
        with self:
            pair = [torch.empty_strided(x.shape, x.stride(), dtype=torch.bfloat16, device=x.device) for x in args[:2]]
            like = _GROUPED(*pair, *args[2:], **kwargs)
            return torch.empty_strided(like.shape, like.stride(), dtype=args[0].dtype, device=like.device)

    def _wide_sum(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
        """Return the result of ``addmm`` with a dtype, for which torch 2.11 takes the decomposition of another form."""
        if "out" in kwargs:
            out: Tensor = kwargs["out"]
            return out
        with self:
            rows, columns = args[1].shape[0], args[2].shape[1]
            return torch.empty(rows, columns, dtype=args[3], device=args[0].device)

    def _is_fit(self, func: Any) -> bool:
        if not isinstance(func, torch._ops.OpOverload) or func.namespace not in _NAMESPACES:
            return False
        return not any(tag in func.tags for tag in _UNFIT_TAGS) and func not in self.lift_fns


def _signature(values: Any, tensors: list[FakeTensor]) -> list[Any]:
    """Return everything that determines an operator's result, and append the tensors in order to ``tensors``."""
    signature: list[Any] = []
    for value in values:
        kind = type(value)
        if kind is FakeTensor:
            if value.constant is not None or value.is_neg() or value.is_conj():
                raise _UnfitError
            tensors.append(value)
            signature.append((value.dtype, value.shape, value.stride(), value.storage_offset(), value.fake_device))
        elif kind in _PLAIN:
            signature.append((kind, value))
        elif kind in (list, tuple):
            signature.append((kind, *_signature(value, tensors)))
        else:
            raise _UnfitError
    return signature


def _learn(result: Any, tensors: Sequence[FakeTensor]) -> _Result | None:
    """Return a description of the result; None if it cannot be cached."""
    places = {tensor.untyped_storage()._cdata: number for number, tensor in enumerate(tensors)}
    if len(places) < len(tensors):
        return None  # arguments share a storage: the owner of a result is ambiguous
    several = type(result) in (list, tuple)
    new: set[int] = set()
    try:
        made = tuple(_describe(one, tensors, places, new) for one in (result if several else (result,)))
    except _UnfitError:
        return None
    return _Result(type(result) if several else None, made)


def _describe(one: Any, tensors: Sequence[FakeTensor], places: Mapping[int, int], new: set[int]) -> _Made | None:
    if one is None:
        return None
    if type(one) is not FakeTensor or one.constant is not None or one.is_neg() or one.is_conj() or one.is_sparse:
        raise _UnfitError
    storage = one.untyped_storage()
    like = places.get(storage._cdata)
    if like is None and (storage._cdata in new or storage.nbytes() != _extent(one) or one.storage_offset()):
        raise _UnfitError
    new.add(storage._cdata)
    same = like is not None and one is tensors[like]
    place = tuple(one.shape), one.stride(), int(one.storage_offset())
    return _Made(like, same, *place, one.dtype, one.fake_device, dict(vars(one)))


def _extent(tensor: Tensor) -> int:
    """Return the size in bytes of a new storage for this shape and these strides."""
    if not tensor.numel():
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int(last + 1) * tensor.itemsize


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set ``owner.name`` to ``value`` in the context, for all threads. Raises AttributeError if it does not exist."""
    is_own = name in vars(owner)  # otherwise an attribute of its class, which keeps it
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if is_own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)
