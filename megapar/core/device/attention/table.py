"""Table of the kernels of attention: what each takes, by device, form, head sizes and dtype, and which one is chosen.

``--attention-backend auto`` takes the first row that takes a call: rows that are confirmed by measurement, then today's
choice. Other rows are candidates, which only their name selects. To confirm a row, write the date and the device that
``scripts/gpu_day.sh`` prints into ``standing``.

Imports no torch: the planner and the rules read the same rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from megapar.core.attention_mask import AttentionMask

# Forms of a call.
CAUSAL, FULL = "causal", "full"  # whole samples; position i attends to 0..i, or to all
LOWER_RIGHT = "lower-right"  # causal, the last positions of the keys (AMPipe)
DOCUMENTS = "documents"  # sequences of unequal lengths one after another: packed documents, samples without padding
WINDOW = "window"  # causal samples or documents, whose positions attend to the last keys up to their own
MASKED = "masked"  # whole samples without the keys at padding, or with a memory: the mask is a tensor
BLOCKS = "blocks"  # a block of queries and keys with its log-sum-exp (ring attention)
FORMS = (CAUSAL, FULL, LOWER_RIGHT, DOCUMENTS, WINDOW, MASKED, BLOCKS)

FLASH, VARLEN, CUDNN, FLASH3, EFFICIENT, MATH = "flash", "varlen", "cudnn", "flash3", "efficient", "math"
TODAY, CANDIDATE = "today", ""
LSE, MAXIMUM = "lse", "max"  # statistics of the scores of a row that a kernel gives (``row_statistic``)
AUTO = "auto"
BACKENDS = (AUTO, FLASH, CUDNN, FLASH3)  # values of --attention-backend
LARGEST_GROUP = 4096  # elements of a group's heads that the kernel before attention, which rotates them, takes

Capability = tuple[int, int]
HALF = ("bfloat16", "float16")
_EVERY: tuple[Capability, Capability] = ((0, 0), (99, 9))


class AttentionCall(NamedTuple):
    """A call of attention on a GPU, of one of ``FORMS``.

    Attributes:
        dtype: Name of the dtype, as torch writes it.
        capability: Compute capability of the GPU, (major, minor).
        dropout: Attention weights are dropped.
        repeats: The result must repeat to the last bit (--deterministic).
        statistic: Statistic of each row's scores that the call must give; "" for none.
    """

    form: str
    key_dim: int
    value_dim: int
    dtype: str
    capability: Capability
    dropout: bool = False
    repeats: bool = False
    statistic: str = ""


class KernelRow(NamedTuple):
    """The calls that one kernel takes, and its standing.

    Attributes:
        capabilities: Smallest and largest compute capability of NVIDIA's GPUs.
        multiple: Head sizes are a multiple of it.
        largest: Largest head size.
        dropout: The kernel drops attention weights.
        repeats: Forward and backward repeat to the last bit under torch's deterministic algorithms.
        standing: ``TODAY`` for today's choice, ``CANDIDATE``, or date and device of the measurement that confirmed it.
        grouped: The kernel takes fewer heads of keys than of queries; otherwise they are repeated before the call.
        statistics: Statistics of a row's scores that its forward gives.
    """

    kernel: str
    forms: tuple[str, ...]
    capabilities: tuple[Capability, Capability]
    source: str
    dtypes: tuple[str, ...] = HALF
    multiple: int = 8
    largest: int = 256
    dropout: bool = True
    repeats: bool = True
    standing: str = TODAY
    grouped: bool = True
    statistics: tuple[str, ...] = (LSE,)

    @property
    def confirmed(self) -> bool:
        """True if a measurement has confirmed the row."""
        return self.standing not in (TODAY, CANDIDATE)

    def lacks(self, call: AttentionCall) -> str:
        """Return the reason why the kernel does not take the call; "" if it does."""
        size = max(call.key_dim, call.value_dim)
        first, last = self.capabilities
        for wrong, reason in (
            (call.form not in self.forms, f"it has no form for {call.form} attention"),
            (
                not first <= call.capability <= last,
                f"it is for compute capability {_dotted(first)} to {_dotted(last)}, not {_dotted(call.capability)}",
            ),
            (call.dtype not in self.dtypes, f"it takes {' and '.join(self.dtypes)}, not {call.dtype}"),
            (size > self.largest, f"it takes heads of at most {self.largest} features, not {size}"),
            (size % self.multiple > 0, f"it takes heads of a multiple of {self.multiple} features, not {size}"),
            (
                self.kernel == CUDNN and call.key_dim != call.value_dim,
                "its heads of keys and values are not padded to one size",
            ),
            (
                self.kernel in (FLASH, VARLEN) and _narrow_backward(call, size),
                "its backward takes no heads of 193 to 224 features, and larger ones only without dropout, on compute "
                f"capability {_dotted(call.capability)}",
            ),
            (call.dropout and not self.dropout, "it drops no attention weights"),
            (
                call.statistic not in ("", *self.statistics),
                f"its forward does not give the {call.statistic} of a row's scores",
            ),
            (call.repeats and not self.repeats, "its backward is not known to repeat to the last bit"),
        ):
            if wrong:
                return reason
        return ""


_SDP_UTILS = "torch's aten/src/ATen/native/transformers/cuda/sdp_utils.cpp"
_AMPERE_ON: tuple[Capability, Capability] = ((8, 0), (12, 1))
_HOPPER: tuple[Capability, Capability] = ((9, 0), (9, 0))
_BLACKWELL: tuple[Capability, Capability] = ((10, 0), (10, 3))
_SMALL_MEMORY: tuple[tuple[Capability, Capability], ...] = (((8, 6), (8, 9)), ((12, 0), (12, 1)))
_FLASH_API = "torch's aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp"
_WHOLE = (CAUSAL, FULL)
_SINGLE = (*_WHOLE, LOWER_RIGHT, DOCUMENTS)  # forms that are calls of torch's scaled_dot_product_attention

_CUDNN = KernelRow(
    CUDNN, _WHOLE, _HOPPER, f"{_SDP_UTILS}, check_prefer_cudnn_attention; cuDNN 9.15.1 on", dropout=False, repeats=False
)
_EFFICIENT = KernelRow(
    EFFICIENT, (*_SINGLE, MASKED), _AMPERE_ON, _SDP_UTILS, largest=65536, grouped=False, statistics=()
)

ROWS: tuple[KernelRow, ...] = (
    _CUDNN,
    _CUDNN._replace(capabilities=_BLACKWELL, largest=128),
    _CUDNN._replace(capabilities=_AMPERE_ON, largest=128, standing=CANDIDATE, source=_SDP_UTILS),
    KernelRow(
        FLASH3,
        (*_WHOLE, LOWER_RIGHT, DOCUMENTS, WINDOW, BLOCKS),
        _HOPPER,
        "torch/nn/attention/_fa3.py; its deterministic backward has not been measured",
        dropout=False,
        repeats=False,
        standing=CANDIDATE,
    ),
    KernelRow(VARLEN, (DOCUMENTS, WINDOW), _AMPERE_ON, _FLASH_API),
    KernelRow(FLASH, (BLOCKS,), _AMPERE_ON, _FLASH_API),
    KernelRow(
        FLASH,
        _SINGLE,
        _AMPERE_ON,
        f"{_SDP_UTILS}; heads are padded to a multiple of 8; one call per length of documents",
        multiple=1,
    ),
    _EFFICIENT._replace(dtypes=(*HALF, "float32")),
    _EFFICIENT._replace(dtypes=("float16", "float32"), capabilities=((5, 0), (7, 5))),
    KernelRow(
        MATH,
        FORMS,
        _EVERY,
        "plain products",
        (*HALF, "float32", "float64"),
        multiple=1,
        largest=65536,
        statistics=(LSE, MAXIMUM),
    ),
)


def form_of(mask: AttentionMask) -> str:
    """Return the form of a call over whole samples."""
    if mask.window is not None:
        return WINDOW
    if mask.ends is not None:
        return DOCUMENTS
    if mask.memory or mask.padded:
        return MASKED
    return CAUSAL if mask.causal else FULL


def _kernels_of(backend: str) -> tuple[str, ...]:
    """Return the kernels that a value of --attention-backend names: FlashAttention has two calls."""
    return (FLASH, VARLEN) if backend == FLASH else (backend,)


def rows_of(backend: str, rows: tuple[KernelRow, ...] = ROWS) -> Iterator[KernelRow]:
    """Yield the rows that a value of --attention-backend selects, in the order in which they are tried."""
    if backend == AUTO:
        yield from (row for row in rows if row.confirmed)
    else:
        yield from (row for row in rows if row.kernel in _kernels_of(backend))
    yield from (row for row in rows if row.standing == TODAY)


@lru_cache(maxsize=256)
def repeats_heads(call: AttentionCall) -> bool:
    """Return True if torch's choice for the call takes only as many heads of keys as of queries. Kept, as ``takes``."""
    return not choose(AUTO, call).grouped


def choose(backend: str, call: AttentionCall, rows: tuple[KernelRow, ...] = ROWS) -> KernelRow:
    """Return the first row of ``rows_of`` that takes the call. Plain products take every call."""
    return next(row for row in rows_of(backend, rows) if not row.lacks(call))


@lru_cache(maxsize=256)
def takes(kernel: str, call: AttentionCall) -> bool:
    """Return True if a row of this kernel takes the call. The result is kept, because every layer asks."""
    return any(row.kernel == kernel and not row.lacks(call) for row in ROWS)


def lacks(backend: str, calls: tuple[AttentionCall, ...]) -> str:
    """Return the reason why the kernel of ``backend`` takes none of the calls of a run; "" if it takes one.

    The other calls run by today's choice. The reason is that of a row with the form of a call, if there is one.
    """
    if backend == AUTO:
        return ""
    rows = [(row, call) for call in calls for row in ROWS if row.kernel in _kernels_of(backend)]
    reasons = [row.lacks(call) for row, call in sorted(rows, key=lambda pair: pair[1].form not in pair[0].forms)]
    return "" if "" in reasons else reasons[0]


def _narrow_backward(call: AttentionCall, size: int) -> bool:
    """Return True if FlashAttention-2's backward needs more shared memory for the call than its GPU has.

    GPUs of capability 8.6 to 8.9 and 12.x have 100 KiB in a multiprocessor, 8.0 has 164 and 9.0 has 228. Source:
    check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89_or_120 in torch's sdp_utils.cpp.
    """
    small = any(first <= call.capability <= last for first, last in _SMALL_MEMORY)
    return small and (192 < size <= 224 or (size > 224 and call.dropout))


def _dotted(capability: Capability) -> str:
    return ".".join(map(str, capability))
