"""Comparison of every entry of the operator table for this device with its fp64 reference, including gradients.

Also compares all of torch's attention kernels, and grouped GEMMs at the limits of their kernel.

Shape letters: B batch, S sequence, N query heads, G key-value heads, D head size, R rows, E experts, k choices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from megapar.core.attention_mask import AttentionMask
from megapar.core.device.accelerators import pick
from megapar.core.device.adamw import AdamWStep
from megapar.core.device.attention.blocks import AttentionBlock, block_backward_reference, block_reference
from megapar.core.device.attention.mask import DeviceMask
from megapar.core.device.attention.sinks import SinkRows
from megapar.core.device.attention.slices import attention_slice_reference
from megapar.core.device.attention.table import CAUSAL, FULL, MASKED
from megapar.core.device.attention.whole import HeadWidths, attention_reference
from megapar.core.device.grouped import input_gradient_by_size, linear_by_size, weight_gradient_by_size
from megapar.core.device.ops import OPS
from megapar.core.device.tensor_piece import ShardPieces, TensorPiece
from megapar.moe.expert_order import sort_by_expert
from megapar.moe.router import Router, gate_weights
from megapar.moe.sizes import SCORES, MoeSizes
from scripts.gpu_day import row_operators
from scripts.gpu_day.day import Answer, Day

# Relative error of norms: a few roundings of the dtype (2^-9, 2^-12, 2^-25) and of the sums that follow.
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 2e-5}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
MOMENTS = {
    "bf16": (torch.bfloat16, torch.bfloat16),
    "bf16 and fp32": (torch.bfloat16, torch.float32),
    "fp32 and bf16": (torch.float32, torch.bfloat16),
}
# Entries that do not return what can be differentiated, or are compared as part of more.
APART = ("adamw", "attention_block", "attention_block_backward", "cross_entropy", "route", *row_operators.ENTRIES)
KERNELS = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)


class Case(NamedTuple):
    """One call.

    Attributes:
        name: Name of the call.
        tensors: Positional arguments; those that require gradients are differentiated.
        more: Keyword arguments.
    """

    name: str
    tensors: tuple[Tensor, ...]
    more: dict[str, Any]


_WITH_SINKS = ("attention_flash", "attention_cudnn", "attention_slice", "packed_attention", "packed_attention_slice")


def run(day: Day) -> None:
    """Compare all entries in all dtypes, the attention kernels, and the blocks of ring attention."""
    torch.manual_seed(0)
    for named, dtype in DTYPES.items():
        for name in OPS:
            if name in APART or name.startswith("fp8"):
                continue  # compared below as a whole, and in the part fp8
            form, reference = _form(name, day, dtype), OPS[name]["reference"]
            if name not in _CASES:
                day.findings.record(day.part, f"{name}: calls", False, error="this entry has no test calls")
                continue
            for case in cases(name, day, dtype):
                work = partial(compare, form, reference, case, TOLERANCE[dtype])
                day.attempt(f"{name}: {case.name}, {named}", work)
                if name in _WITH_SINKS:
                    sinks = torch.linspace(-8, 8, 8, device=day.place).to(dtype).requires_grad_()
                    sunk = Case(case.name, (*case.tensors, sinks), case.more)
                    tolerance = TOLERANCE[dtype]
                    work = partial(compare, _with_sinks(form), _with_sinks(reference), sunk, tolerance, alike=True)
                    day.attempt(f"{name}: {case.name}, sinks, {named}", work)
        day.attempt(f"cross_entropy: {named}", partial(entropy, day, dtype))
        for score in SCORES:
            day.attempt(f"route: {score}, {named}", partial(routes, day, dtype, score))
        for name in row_operators.ENTRIES:
            day.attempt(f"{name}: {named}", partial(row_operators.compare, day, name, dtype))
        for causal, groups in ((True, 8), (False, 8), (True, 2)):
            work = partial(blocks, day, dtype, causal, groups)
            day.attempt(f"attention_block: causal {causal}, 8/{groups} heads, {named}", work)
        if dtype != torch.float32:
            _kernels(day, named, dtype)
    for named, moments in MOMENTS.items():
        day.attempt(f"adamw: moments in {named}", partial(updates, day, moments))


def _form(name: str, day: Day, dtype: torch.dtype) -> Callable[..., Tensor]:
    """Return the table's implementation, or the one per expert if the device has no grouped kernel for this dtype."""
    by_size = _BY_SIZE.get(name)
    if by_size is None or not pick(day.device).grouped_lacks(dtype, ()):
        return day.operator(name)

    def form(left: Tensor, right: Tensor, counts_E: Tensor) -> Tensor:
        return by_size(left, right, counts_E.tolist())

    return form


def _with_sinks(form: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a form of attention that takes sinks after queries, keys and values."""

    def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, **more: Any) -> Tensor:
        return form(q, k, v, rows=SinkRows(sinks), **more)

    return attend


def compare(
    form: Callable[..., Tensor],
    reference: Callable[..., Tensor],
    case: Case,
    tolerance: float,
    *,
    alike: bool = False,
) -> Answer:
    """Compare result and gradients with those of the reference in fp64.

    ``alike``: the upstream gradient has the signs of the result. The gradient of a sink is a sum of their products over
    all rows, which would cancel.
    """
    leaves = [x for x in case.tensors if x.requires_grad]
    wide = [x.detach().double().requires_grad_(x.requires_grad) if x.is_floating_point() else x for x in case.tensors]
    more = {n: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for n, x in case.more.items()}
    got, want = _joined(form(*case.tensors, **case.more)), _joined(reference(*wide, **more))
    found = {"result": relative(got, want)}
    if leaves:
        grad = torch.randn_like(want)
        grad = grad.abs() * want.detach().sign() if alike else grad
        got_grads = torch.autograd.grad(got, leaves, grad.to(got.dtype))
        want_grads = torch.autograd.grad(want, [x for x in wide if x.requires_grad], grad)
        found |= {f"gradient {i}": relative(a, b) for i, (a, b) in enumerate(zip(got_grads, want_grads, strict=True))}
    return Answer(all(error <= tolerance for error in found.values()), {"errors": found, "tolerance": tolerance})


def _joined(results: Tensor | tuple[Tensor, ...]) -> Tensor:
    """Return queries, keys and values as one tensor, features of all heads side by side."""
    return results if isinstance(results, Tensor) else torch.cat([x.flatten(2) for x in results], dim=2)


def relative(got: Tensor, want: Tensor) -> float:
    """Return the norm of the difference relative to ``want``; the norm itself if ``want`` is zero."""
    if got.shape != want.shape:
        raise ValueError(f"{list(got.shape)} instead of {list(want.shape)}")
    if not want.numel():
        return 0.0
    difference, size = (got.double() - want).norm().item(), want.norm().item()
    return difference / size if size else difference


def cases(name: str, day: Day, dtype: torch.dtype) -> Iterator[Case]:
    """Yield the calls of one entry."""
    yield from _CASES[name](day, _drawer(day, dtype))


def _drawer(day: Day, dtype: torch.dtype) -> Callable[..., Tensor]:
    def draw(*sizes: int, differentiate: bool = True) -> Tensor:
        return torch.randn(*sizes, device=day.place, dtype=dtype).requires_grad_(differentiate)

    return draw


def _length(day: Day) -> int:
    return 32 if day.small else 512


def _attention(day: Day, draw: Callable[..., Tensor]) -> Iterator[Case]:
    S = _length(day)
    valid = torch.ones(2, S, dtype=torch.bool, device=day.place)
    valid[1, S // 2 + 3 :] = False
    for groups in (8, 2):
        for length in (S, S - 3):
            qkv = (draw(2, 8, length, 64), draw(2, groups, length, 64), draw(2, groups, length, 64))
            yield Case(f"causal, 8/{groups} heads, {length}", qkv, {"form": CAUSAL})
        yield Case(f"all, 8/{groups} heads, {length}", qkv, {"form": FULL})
        padded = {"form": MASKED, "valid": valid[:, :length]}
        yield Case(f"padded, 8/{groups} heads, {length}", qkv, padded)


def _attention_slice(day: Day, draw: Callable[..., Tensor]) -> Iterator[Case]:
    S = _length(day)
    for groups in (8, 2):
        keys = draw(2, groups, S, 64), draw(2, groups, S, 64)
        for own in (1, S // 4, S // 2 + 1, S - 3, S):
            yield Case(f"last {own} of {S}, 8/{groups} heads", (draw(2, 8, own, 64), *keys), {})


def _documents(day: Day, *, causal: bool = True) -> DeviceMask:
    """Return short and long documents, one of a single token, and one that fills its sample."""
    S = _length(day)
    return DeviceMask.of(AttentionMask.of_documents([1, S // 3, S, 2 * S], 2, causal=causal), day.place)


def _packed_attention(day: Day, draw: Callable[..., Tensor]) -> Iterator[Case]:
    S = _length(day)
    for groups in (8, 2):
        qkv = (draw(2, 8, S, 64), draw(2, groups, S, 64), draw(2, groups, S, 64))
        yield Case(f"documents, 8/{groups} heads", qkv, {"mask": _documents(day)})
        yield Case(f"samples, 8/{groups} heads", qkv, {"mask": _documents(day, causal=False)})


def _packed_attention_slice(day: Day, draw: Callable[..., Tensor]) -> Iterator[Case]:
    S, documents = _length(day), _documents(day)
    for groups in (8, 2):
        for start, stop in ((0, S // 3 + 1), (S // 3 + 1, S - 1), (S - 1, S)):
            qkv = (draw(2, 8, stop - start, 64), draw(2, groups, stop, 64), draw(2, groups, stop, 64))
            more = {"documents": documents.cut(slice(start, stop))}
            yield Case(f"documents, {start} to {stop}, 8/{groups} heads", qkv, more)


def _rms_norm(day: Day, draw: Callable[..., Tensor]) -> Iterator[Case]:
    for width in (64, 100) if day.small else (2048, 2500):
        yield Case(f"rows of {width}", (draw(4, _length(day), width), draw(width)), {"epsilon": 1e-5})


def _swiglu(day: Day, draw: Callable[..., Tensor]) -> Iterator[Case]:
    for rows in (0, 1, 4 * _length(day)):
        yield Case(f"{rows} rows", (draw(rows, 2, 96),), {})
        yield Case(f"{rows} weighed rows", (draw(rows, 2, 96),), {"weights": torch.rand(rows, 1, device=day.place)})


def _rotary(day: Day, draw: Callable[..., Tensor]) -> Iterator[Case]:
    angles = torch.rand(2, _length(day), 32, device=day.place)
    yield Case("pairs", (draw(2, _length(day), 8, 64),), {"cos": angles.cos(), "sin": angles.sin()})


def _rotary_heads(day: Day, draw: Callable[..., Tensor]) -> Iterator[Case]:
    angles = torch.rand(2, _length(day), 32, device=day.place)
    for queries in (1, 4):
        qkv = draw(2, _length(day), 2, queries + 2, 64)
        yield Case(f"{queries} queries per group", (qkv,), {"cos": angles.cos(), "sin": angles.sin()})


def _rotate_last(day: Day, draw: Callable[..., Tensor]) -> Iterator[Case]:
    angles = torch.rand(2, _length(day), 16, device=day.place)
    for width in (96, 128):
        # A device's form changes its argument in place, so it gets a separate product.
        more = {"cos": angles.cos(), "sin": angles.sin(), "factor": 1.25, "width": width}
        yield Case(f"96 features in {width}", (draw(2, _length(day), 4, 96),), more)


def _join_heads(day: Day, draw: Callable[..., Tensor]) -> Iterator[Case]:
    S = _length(day)
    for widths in (HeadWidths(96, 64), HeadWidths(96, 96)):
        tensors = draw(2, S, 4, 64 + 64), draw(2, S, 32)
        yield Case(f"values in {widths.value} features", tensors, {"plain": 64, "widths": widths})


def _wide_product(day: Day, draw: Callable[..., Tensor]) -> Iterator[Case]:
    yield Case("rows", (draw(_length(day), 96, differentiate=False), draw(96, 64, differentiate=False)), {})


def _counts(day: Day) -> Iterator[tuple[int, ...]]:
    """Yield rows per expert for four experts: mixed, all on one expert, and none."""
    S = _length(day)
    yield from ((S, 0, 3 * S, 5), (0, 0, 0, 4 * S + 5), (4 * S + 5, 0, 0, 0), (0, 1, 0, 0), (0, 0, 0, 0))


def _grouped(day: Day, draw: Callable[..., Tensor], which: str) -> Iterator[Case]:
    for inner, out in ((64, 96), (60, 90), (1, 3)):
        for counts in _counts(day):
            rows, weight = draw(sum(counts), inner), draw(4, out, inner)
            tensors = {
                "linear": (rows, weight),
                "input": (draw(sum(counts), out, differentiate=False), weight.detach()),
                "weight": (draw(sum(counts), out, differentiate=False), rows.detach()),
            }[which]
            more = {"counts_E": torch.tensor(counts, device=day.place)}
            yield Case(f"{inner} to {out}, rows {'+'.join(map(str, counts))}", tensors, more)


def _add_product(day: Day, draw: Callable[..., Tensor]) -> Iterator[Case]:
    rows, total = _length(day), torch.randn(96, 64, device=day.place)
    factors = draw(rows, 96, differentiate=False).t(), draw(rows, 64, differentiate=False)
    for begins in (True, False):
        yield Case("begins" if begins else "goes on", (total.clone(), *factors), {"begins": begins})


def _add_gradient(day: Day, draw: Callable[..., Tensor]) -> Iterator[Case]:
    for pieces in (1, 3):
        gradient = draw(pieces, 96, 64, differentiate=False)
        for begins in (True, False):
            total = torch.randn(pieces, 96 * 64 + 8, device=day.place)[:, :-8].unflatten(1, (96, 64))
            yield Case(f"{pieces} pieces, {'begins' if begins else 'goes on'}", (total, gradient), {"begins": begins})


def _small_embedding(day: Day, draw: Callable[..., Tensor]) -> Iterator[Case]:
    for count in (4, 512):
        indices = torch.randint(count, (2, _length(day)), device=day.place)
        yield Case(f"{count} rows", (draw(count, 96),), {"indices": indices})


def _permutation(day: Day, draw: Callable[..., Tensor], back: bool) -> Iterator[Case]:
    T = 4 * _length(day)
    experts = torch.stack([torch.randperm(8, device=day.place)[:2] for _ in range(T)])
    for some in (False, True):
        kept = torch.rand(T, 2, device=day.place) < 0.7 if some else None
        rows = experts.numel() if kept is None else int(kept.sum())
        permutation = sort_by_expert(experts, kept, 8, rows).order
        more: dict[str, Any] = {"row_Tk": permutation.row, "kept_Tk": kept}
        if not back:
            more["pair_R"] = permutation.pair
        yield Case("some pairs" if some else "all pairs", (draw(rows if back else T, 96),), more)


_BY_SIZE: dict[str, Callable[[Tensor, Tensor, list[int]], Tensor]] = {
    "grouped_linear": linear_by_size,
    "grouped_input_gradient": input_gradient_by_size,
    "grouped_weight_gradient": weight_gradient_by_size,
}
_CASES: dict[str, Callable[[Day, Callable[..., Tensor]], Iterator[Case]]] = {
    "attention": _attention,
    "attention_flash": _attention,
    "attention_cudnn": _attention,
    "attention_slice": _attention_slice,
    "packed_attention": _packed_attention,
    "packed_attention_slice": _packed_attention_slice,
    "rms_norm": _rms_norm,
    "swiglu": _swiglu,
    "clamped_swiglu": _swiglu,
    "rotary": _rotary,
    "rotary_heads": _rotary_heads,
    "rotate_last": _rotate_last,
    "join_heads": _join_heads,
    "wide_product": _wide_product,
    "grouped_linear": partial(_grouped, which="linear"),
    "grouped_input_gradient": partial(_grouped, which="input"),
    "grouped_weight_gradient": partial(_grouped, which="weight"),
    "add_gradient": _add_gradient,
    "add_product": _add_product,
    "small_embedding": _small_embedding,
    "permute": partial(_permutation, back=False),
    "unpermute": partial(_permutation, back=True),
}


@torch.no_grad()
def entropy(day: Day, dtype: torch.dtype) -> Answer:
    """Compare cross-entropy and its gradient; the device's form overwrites the logits that it reads."""
    logits = 5 * torch.randn(_length(day), 1003, device=day.place)
    labels = torch.randint(1003, logits.shape[:1], device=day.place)
    want = OPS["cross_entropy"]["reference"](logits.double(), labels, torch.float64)
    got = day.operator("cross_entropy")(logits, labels, dtype)
    found = {name: relative(a, b) for name, a, b in zip(("result", "gradient"), got, want, strict=True)}
    return Answer(all(e <= TOLERANCE[dtype] for e in found.values()), {"errors": found, "tolerance": TOLERANCE[dtype]})


@torch.no_grad()
def updates(day: Day, moments: tuple[torch.dtype, torch.dtype]) -> Answer:
    """Count the numbers of a shard, and of its moments, that differ after AdamW's update: all have the same bits."""
    rows, (first_dtype, second_dtype) = _length(day), moments
    pieces = ShardPieces(
        (
            TensorPiece(7, 0, (700,), (1,), 5, (1,)),
            TensorPiece((1 << 63) - 5, 704, (rows, 96), (100, 1), 1 << 33, (400, 1)),
        )
    )
    master, grad, first, second = torch.randn(4, 704 + 100 * rows, device=day.place)
    before = master, grad, first.to(first_dtype), second.square().to(second_dtype)
    numbers = torch.tensor([1e-2, 0.2, 0.9, 0.1, 0.95, 0.05, 1e-8, 0.99], device=day.place)
    update, scale = torch.tensor(3, device=day.place), torch.tensor(3.0, device=day.place)
    different = {}
    for found_inf in (None, 0.0, 1.0):
        skips = None if found_inf is None else torch.tensor(found_inf, device=day.place)
        here, there = (tuple(tensor.clone() for tensor in before) for _ in range(2))
        for form, tensors in ((day.operator("adamw"), here), (OPS["adamw"]["reference"], there)):
            form((*tensors, None), pieces, AdamWStep(update, numbers, skips, scale))  # masters are whole
        different[f"found_inf {found_inf}"] = sum(int((a != b).sum()) for a, b in zip(here, there, strict=True))
    return Answer(not any(different.values()), {"different": different})


def routes(day: Day, dtype: torch.dtype, score: str) -> Answer:
    """Compare the router with itself in fp64, of the same choices: scores, gate weights, sums, and both gradients."""
    sizes = MoeSizes(256, 64, 64, 6, score=score, groups=8, group_topk=3, scaling=2.5)
    x = torch.randn(4 * _length(day), 256, device=day.place).to(dtype)
    own, exact = (Router(sizes, dtype=which, device=day.place) for which in (dtype, torch.float64))
    torch.nn.init.normal_(own.weight, std=0.1)
    exact.load_state_dict(own.state_dict())
    upstream = [torch.randn(shape, device=day.place) for shape in ((len(x), 6), (64,), ())]
    found: list[tuple[Tensor, ...]] = []
    for router, which in ((own, dtype), (exact, torch.float64)):
        leaf = x.to(which, copy=True).requires_grad_()
        routing = router(leaf)
        exact.top.register_forward_hook(lambda _, inputs, experts, chosen=routing.experts: chosen)
        weights = gate_weights(routing, None, over_kept=False, scaling=sizes.scaling)
        values = weights, routing.sums.probs, routing.sums.squares
        outer = [grad.to(value.dtype) for grad, value in zip(upstream, values, strict=True)]
        found.append((routing.probs, *values, *torch.autograd.grad(values, (router.weight, leaf), outer)))
    names = ("scores", "weights", "sum of shares", "sum of squares", "gradient of the weight", "gradient of x")
    errors = {name: relative(a.detach(), b.detach()) for name, a, b in zip(names, *found, strict=True)}
    tolerances = dict.fromkeys(names, TOLERANCE[torch.float32]) | {names[-1]: TOLERANCE[dtype]}
    return Answer(all(errors[n] <= tolerances[n] for n in names), {"errors": errors, "tolerance": tolerances})


@torch.no_grad()
def blocks(day: Day, dtype: torch.dtype, causal: bool, groups: int) -> Answer:
    """Compare a block of ring attention and its gradients. As in a ring, its rows are a slice of more rows."""
    S, draw = _length(day), _drawer(day, dtype)
    q, grad = (draw(2, 8, S + 3, 64)[:, :, 3:] for _ in range(2))
    k, v = draw(2, groups, S, 64), draw(2, groups, S, 64)
    wide = [x.double() for x in (q, k, v)]
    forward, backward = map(day.operator, ("attention_block", "attention_block_backward"))
    got, want = forward(q, k, v, causal=causal), block_reference(*wide, causal=causal)
    out, lse = F.pad(want.out.to(dtype), (0, 0, 3, 0)), F.pad(want.lse.float(), (3, 0))
    merged = AttentionBlock(out[:, :, 3:], lse[:, :, 3:], got.drawn)
    got_grads = backward(grad, q, k, v, merged, causal=causal)
    want_grads = block_backward_reference(grad.double(), *wide, want, causal=causal)
    found = {"result": relative(got.out, want.out), "lse": relative(got.lse, want.lse)}
    found |= {f"gradient {i}": relative(a, b) for i, (a, b) in enumerate(zip(got_grads, want_grads, strict=True))}
    return Answer(all(e <= TOLERANCE[dtype] for e in found.values()), {"errors": found, "tolerance": TOLERANCE[dtype]})


def _kernels(day: Day, named: str, dtype: torch.dtype) -> None:
    """Compare each of torch's attention kernels, selected by name."""
    S, draw = _length(day), _drawer(day, dtype)
    valid = torch.ones(2, S, dtype=torch.bool, device=day.place)
    valid[1, S // 2 + 3 :] = False
    for groups in (8, 2):
        k, v = draw(2, groups, S, 64), draw(2, groups, S, 64)
        whole, part = (draw(2, 8, S, 64), k, v), (draw(2, 8, S // 2 + 1, 64), k, v)
        forms: Sequence[tuple[str, tuple[Tensor, ...], Callable[..., Tensor], dict[str, Any]]] = (
            ("causal", whole, partial(attention_reference, form=CAUSAL), {"is_causal": True}),
            ("all", whole, partial(attention_reference, form=FULL), {}),
            (
                "padded",
                whole,
                partial(attention_reference, form=MASKED, valid=valid),
                {"attn_mask": valid[:, None, None]},
            ),
            ("last half", part, attention_slice_reference, {"attn_mask": causal_lower_right(S // 2 + 1, S)}),
        )
        for kernel in KERNELS:
            for form, tensors, reference, more in forms:
                case = Case(form, tensors, {})
                work = partial(one_kernel, kernel, {**more, "enable_gqa": groups != 8}, reference, case, dtype)
                day.attempt(f"kernel {kernel.name.lower()}: {form}, 8/{groups} heads, {named}", work)


def one_kernel(
    kernel: SDPBackend, more: dict[str, Any], reference: Callable[..., Tensor], case: Case, dtype: torch.dtype
) -> Answer:
    """Compare one attention kernel; report if it does not support this form."""

    def form(*tensors: Tensor) -> Tensor:
        with sdpa_kernel(kernel):
            return F.scaled_dot_product_attention(*tensors, **more)

    try:
        return compare(form, reference, case, TOLERANCE[dtype])
    except RuntimeError as error:
        if "No available kernel" not in str(error) and "No viable backend" not in str(error):
            raise
        return Answer(None, {"not_to_be_had": str(error)[:200]})
