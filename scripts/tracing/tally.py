"""Counter of GPU work per operator: kernels, matrix products, bytes and host waits.

Every count has a label, the name of the innermost megapar function that called the operator ("backward" in code that
torch differentiates by itself), so that a growing number can be located.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from megapar.training.step.observer import StepObserver
from scripts.tracing.kernels import kernels_of

# CUDA stages copies from pageable memory up to this size and returns; the host waits for larger ones.
STAGED_BYTES = 64 * 1024
# torch joins tensors of at most so many dims by one kernel, others by a strided copy of each (native/cuda/Shape.cu).
JOINED_DIMS = 4
# NCCL copies whole words if the part for a peer is aligned to this, single bytes otherwise.
ALIGNMENT_BYTES = 16
# Messages per peer below this size are short, aligned or not.
LARGE_BYTES = 64 * 1024

PRODUCTS = frozenset(
    {"mm", "addmm", "addmm_", "bmm", "baddbmm", "baddbmm_", "_grouped_mm", "_scaled_mm_v2", "_scaled_grouped_mm"}
)
_COPIES = frozenset({"_to_copy", "copy_", "_pin_memory"})
# Operators that read a value or the size of their result from the device.
_READS = frozenset({"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_consecutive", "equal"})
_SHAPE_READERS = frozenset({"new_zeros", "new_ones", "new_full", "zeros_like", "ones_like", "full_like"})
_PICKERS_OF_ONE = frozenset({"index_select", "gather", "index", "embedding"})
_PICKERS = _PICKERS_OF_ONE | {"_embedding_bag", "_embedding_bag_forward_only"}
_BY_PIECES = frozenset({"_allgather_base_", "_reduce_scatter_base_"})
_MESSAGES = frozenset({"c10d", "_c10d_functional"})


class MatrixProduct(NamedTuple):
    """Shape of a matrix product.

    Attributes:
        rows: Rows, summed over all batches; for a weight gradient, the dimension that is summed over.
        inner: The remaining dimension.
    """

    rows: int
    columns: int
    inner: int

    @property
    def work(self) -> int:
        """Number of multiplications."""
        return self.rows * self.columns * self.inner


@dataclass
class Sums:
    """Counts of a tally.

    Attributes:
        kernels: (operator, label) -> launches.
        products: (product, label) -> calls.
        bytes: (operator, label) -> bytes read and written by operators other than products, attention and messages.
        waits: Label -> number of times the host waited for the device.
        copies: (direction, label) -> copies between host and device.
        unaligned: Message -> number of large messages with a part that is not aligned to 16 bytes.
    """

    kernels: Counter[tuple[str, str]] = field(default_factory=Counter)
    products: Counter[tuple[MatrixProduct, str]] = field(default_factory=Counter)
    bytes: Counter[tuple[str, str]] = field(default_factory=Counter)
    waits: Counter[str] = field(default_factory=Counter)
    copies: Counter[tuple[str, str]] = field(default_factory=Counter)
    unaligned: Counter[str] = field(default_factory=Counter)

    def without(self, other: Sums) -> Sums:
        """Return the difference of the counts; counters drop what is not positive."""
        return Sums(*(getattr(self, name) - getattr(other, name) for name in self.__dataclass_fields__))

    @property
    def launches(self) -> int:
        """Number of kernels of all operators."""
        return self.kernels.total()

    @property
    def smallest_product(self) -> MatrixProduct | None:
        """Product with the fewest rows, summed over its batches; None if there are none."""
        return min((product for product, _ in self.products), default=None)

    @property
    def bytes_outside_products(self) -> int:
        """Bytes of all operators."""
        return self.bytes.total()


class Tally(TorchDispatchMode):
    """Mode that counts the operators on tensors of a device. ``sums`` may be replaced at any time.

    Args:
        device: Device type to count. With "cpu", copies between host and device are not visible.
        pinned: Host storages that are page-locked from the start, by address.
    """

    def __init__(self, device: str, pinned: dict[int, StorageWeakRef] | None = None) -> None:
        super().__init__()
        self.sums = Sums()
        self._device = device
        # Fake tensors do not record it themselves. A weak reference keeps the address from being reused.
        self._pinned: dict[int, StorageWeakRef] = {} if pinned is None else pinned

    def wait(self, label: str | None = None) -> None:
        """Count a wait of the host that no operator shows."""
        self.sums.waits[label or caller()] += 1

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run the operator and count it."""
        result = func(*args, **(kwargs or {}))
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        made = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        if (kwargs or {}).get("pin_memory"):
            self._pinned.update((x.untyped_storage()._cdata, StorageWeakRef(x.untyped_storage())) for x in made)
        if any(self._counts(x) for x in (*given, *made)):
            name = func._schema.name
            space, _, operator = name.rpartition("::")
            if not func.is_view:
                self._count(name, operator, args, given, made)
                _check_gaps(func, args)
            if space in _MESSAGES:
                self._message(operator, args)
            elif self._device != "cpu":
                self._host(operator, given, made, _at_once(operator, args, kwargs or {}))
        return result

    def _counts(self, x: Tensor) -> bool:
        return isinstance(x, FakeTensor) and x.device.type == self._device

    def _count(self, name: str, operator: str, args: Any, given: list[Tensor], made: list[Tensor]) -> None:
        launches = kernels_of(name, _longest_list(args))
        if operator == "cat" and made[0].dim() > JOINED_DIMS:
            launches = len(args[0])
        if not launches:
            return
        label = caller()
        self.sums.kernels[operator, label] += launches
        if operator in PRODUCTS:
            first = 1 if "add" in operator else 0
            self.sums.products[product_of(*args[first : first + 2]), label] += 1
        elif "attention" not in name and not name.startswith(tuple(_MESSAGES)):
            self.sums.bytes[operator, label] += _moved(operator, given, made)

    def _host(self, operator: str, given: list[Tensor], made: list[Tensor], at_once: bool) -> None:
        """Count copies between host and device and the waits that they cause."""
        if operator in _READS:
            self.wait()
            return
        to_host = operator in _COPIES and any(map(self._counts, given)) and made and made[0].device.type == "cpu"
        # A number in the arguments of a kernel is not a copy; a number that is written into a tensor is.
        host = [x for x in given if x.device.type == "cpu" and (x.dim() or operator in _COPIES)]
        if to_host:
            self._copied("to host", made[0], at_once)
        elif host and any(map(self._counts, (*given, *made))):
            self._copied("to device", host[0], at_once)

    def _copied(self, way: str, host: Tensor, at_once: bool) -> None:
        label = caller()
        self.sums.copies[way, label] += 1
        staged = way == "to device" and host.nbytes < STAGED_BYTES
        if not at_once or not (staged or self._is_pinned(host)):
            self.sums.waits[label] += 1

    def _is_pinned(self, x: Tensor) -> bool:
        if x.untyped_storage()._cdata in self._pinned:
            return True
        if isinstance(x, FakeTensor):
            return False
        with _disable_current_modes():
            return x.is_pinned()

    def _message(self, operator: str, args: Any) -> None:
        """Count large messages with unaligned parts. Parts that depend on routed tokens may begin at any row."""
        tensors = [x for x in tree_leaves(args) if isinstance(x, Tensor)]
        groups = [x for x in args if isinstance(x, torch.ScriptObject) and "ProcessGroup" in str(x._type())]
        size = dist.ProcessGroup.unbox(groups[0]).size() if groups else 1
        whole = max((x.nbytes for x in tensors), default=0)
        for x in tensors:
            peers, unit = 1, 0
            if operator == "alltoall_base_":
                rows = max(1, x.shape[0]) if args[3] or args[4] else size
                peers, unit = size, x.nbytes // rows
            elif operator in _BY_PIECES:
                peers, unit = (size if x.nbytes == whole else 1), whole // size
            start = x.storage_offset() * x.element_size()
            if x.nbytes // peers > LARGE_BYTES and (start % ALIGNMENT_BYTES or unit % ALIGNMENT_BYTES):
                self.sums.unaligned[f"{operator} from byte {start} in parts of {unit} bytes"] += 1


class WaitTally(StepObserver):
    """Observer that adds host waits that no operator shows to a tally, under the function that waits."""

    def __init__(self, tally: Tally) -> None:
        self._tally = tally

    def host_waited(self, where: str) -> None:
        """Count one wait."""
        self._tally.wait(where)


def _check_gaps(func: Any, args: Sequence[Any]) -> None:
    """Raise ValueError if a kernel would read a slice of log-sum-exps as if it had no gaps.

    The backward of FlashAttention copies an output and its gradient if they have gaps, but passes on only the address
    of the log-sum-exps. Source: mha_bwd in torch's flash_api.cpp.
    """
    for argument, x in zip(func._schema.arguments, args, strict=False):
        if argument.name == "logsumexp" and not x.is_contiguous():
            raise ValueError(f"{func} ignores the strides {x.stride()} of log-sum-exps of shape {tuple(x.shape)}")


def product_of(left: Tensor, right: Tensor) -> MatrixProduct:
    """Return the product [.., M, K] x [.., K, N]; groups are rows of ``left``, or of both if rows are summed over."""
    batches = left.shape[0] if left.dim() == 3 else 1
    rows, inner, columns = batches * left.shape[-2], left.shape[-1], right.shape[-1]
    transposed = left.stride(-1) != 1 and left.stride(-2) == 1
    if transposed and left.dim() == right.dim():  # a weight's gradient
        return MatrixProduct(batches * inner, columns, left.shape[-2])
    return MatrixProduct(rows, columns, inner)


def caller() -> str:
    """Return the innermost megapar function on the stack; "backward" if torch's autograd engine is nearer."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "_engine_run_backward":
        module = frame.f_globals.get("__name__", "")
        if module.startswith("megapar.") and not module.startswith("megapar.tools."):
            return re.sub(r"\.?<\w+>", "", getattr(frame.f_code, "co_qualname", frame.f_code.co_name))
        frame = frame.f_back
    return "backward"


def _moved(operator: str, given: Sequence[Tensor], made: Sequence[Tensor]) -> int:
    """Return the bytes of all input and output tensors, each once; for an expanded tensor, the bytes of its storage.

    An operator that takes only the shape of its input reads nothing. One that picks elements reads only those.
    """
    seen: dict[tuple[Any, ...], int] = {}
    for x in (*(() if operator in _SHAPE_READERS else given), *made):
        storage = x.untyped_storage()
        key = (storage._cdata, tuple(x.shape), x.stride(), x.storage_offset())
        seen[key] = min(x.nbytes, storage.nbytes())
    if operator in _PICKERS:
        source, *more = given
        picked = made[0].nbytes if operator in _PICKERS_OF_ONE else more[0].numel() * (source.nbytes // source.shape[0])
        return sum(seen.values()) - max(0, min(source.nbytes, source.untyped_storage().nbytes()) - picked)
    return sum(seen.values())


def _at_once(operator: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return True if a copy is non-blocking."""
    return bool(kwargs.get("non_blocking") or (operator == "copy_" and len(args) > 2 and args[2]))


def _longest_list(args: Sequence[Any]) -> int:
    """Return the number of elements of the longest list of tensors among the arguments."""
    lists = (x for x in args if isinstance(x, (list, tuple)) and x and isinstance(x[0], Tensor))
    return max((sum(x.numel() for x in tensors) for tensors in lists), default=0)
