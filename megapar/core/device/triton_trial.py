"""Trial of the Triton kernels on a GPU, before a run uses them."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megapar.core.device import expert_rows, fp8
from megapar.core.device import triton_operators as kernels
from megapar.core.device.adamw import AdamWStep, adamw_reference
from megapar.core.device.layer_ops import clamped_swiglu_reference, cross_entropy_reference, swiglu_reference
from megapar.core.device.remainders import split_master
from megapar.core.device.rotary import rotary_heads_reference
from megapar.core.device.tensor_piece import ShardPieces, TensorPiece

CASTS_FP8 = (8, 9)  # compute capability
TOLERANCE = 2e-2  # of a bf16 example, relative to the norm


def triton_failure(device: torch.device) -> str:
    """Return the reason that ``device`` cannot use the kernels; "" if each computes its example right."""
    if find_spec("triton") is None:
        return "Triton is not installed"
    try:
        wrong = [name for name, error in errors(device).items() if not error < TOLERANCE]
    except Exception as error:  # whatever a compiler or a driver raises
        return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"
    return f"wrong results: {', '.join(wrong)}" if wrong else ""


def _of_expert_rows(device: torch.device, random: torch.Generator) -> dict[str, list[tuple[Tensor, Tensor]]]:
    """Return operator -> its results and those of the reference, for rows of three experts and a message of them."""
    experts = torch.tensor([[2, 0], [0, 1], [2, 1], [1, 0], [2, 0]]).to(device)
    kept = torch.tensor([[1, 1], [0, 1], [1, 1], [1, 0], [1, 1]]).bool().to(device)
    order = expert_rows.sort_pairs_reference(experts, kept, 3, 9, fill=True)
    runs, weights = torch.tensor([[[1, 2], [2, 0]]]).to(device), torch.arange(10.0).to(device)
    x, bits = torch.randn(5, 96, generator=random).to(device).bfloat16(), weights.view(torch.bfloat16).view(10, 2)
    message, fp32 = expert_rows.pack_reference(x, weights, 104, order.pair, order.kept, 2), torch.float32
    packed = kernels.pack_rows(x, bits, 104, order.pair, order.kept, 2, sort_weights=True)
    split, back = (message, 96, fp32, torch.arange(8, -1, -1).to(device), 9), (message, 96, fp32, order.row, kept)
    sums, copied = expert_rows.sum_message_reference(*back), kernels.copy_rows(x, order.pair, order.kept, 2)
    results: dict[str, tuple[Sequence[Tensor], Sequence[Any]]] = {
        "sort_pairs": (kernels.sort_pairs(experts, kept, 3, 9, None, fill=True)[:4], order[:4]),
        "spread_pairs": (
            kernels.sort_pairs(experts, kept, 3, 12, 4, fill=False)[:3],
            expert_rows.spread_pairs_reference(experts, kept, 3, 4),
        ),
        "order_runs": (
            kernels.order_runs(runs, (1, 2, 2), 5, 5, 0)[:2],
            expert_rows.order_runs_reference(runs, 5, 5)[:2],
        ),
        "copy_rows": ([copied], [message[:, :96]]),
        "pack_rows": ([packed[:, :98]], [message[:, :98]]),
        "unpack_rows": (
            kernels.unpack_rows(*split, sort_weights=True),
            expert_rows.unpack_reference(*split, sort_weights=True),
        ),
        "sum_rows": ([kernels.sum_rows(message, 96, order.row, kept)], sums[:1]),
        "sum_message": (kernels.sum_message(*back), sums),
    }
    return {name: [*zip(got, wanted, strict=True)] for name, (got, wanted) in results.items()}


def _of_adamw(device: torch.device, random: torch.Generator) -> list[tuple[Tensor, Tensor]]:
    """Return what an update changes of a shard, whose master is split or not, and what the reference does."""
    pieces = ShardPieces(
        (TensorPiece(7, 0, (700,), (1,), 5, (1,)), TensorPiece(9, 704, (3, 60), (64, 1), 1 << 33, (90, 1)))
    )
    master, grad, first, second = torch.randn(4, 900, generator=random).to(device)
    numbers = torch.tensor([1e-2, 0.2, 0.9, 0.1, 0.95, 0.05, 1e-8, 0.99]).to(device)
    step = AdamWStep(torch.tensor(3).to(device), numbers, None, torch.tensor(2.0).to(device))
    results = []
    for by_kernel, splits in product((True, False), repeat=2):
        weights, stored = split_master(master) if splits else (None, master.clone())
        tensors = stored, grad.bfloat16() if splits else grad, first.bfloat16(), second.square().bfloat16(), weights
        if by_kernel:
            kernels.update_adamw(tensors, (step.update, numbers, None, step.grad_scale), pieces.table(device))
        else:
            adamw_reference(tensors, pieces, step)
        results += [stored.float(), *tensors[2:4], *(() if weights is None else (weights,))]
    return list(zip(results[: len(results) // 2], results[len(results) // 2 :], strict=True))


def _of_fp8(device: torch.device, random: torch.Generator) -> dict[str, list[tuple[Tensor, Tensor]]]:
    """Return operator -> its results and those of the reference."""
    x, weight = (torch.randn(rows, 256, generator=random).to(device, torch.bfloat16) for rows in (16, 384))
    wanted, (whole, turned) = fp8.cast_rows_reference(x), fp8.cast_weight_reference(weight)
    values, scale = kernels.cast_rows(x)
    rows = zip(kernels.cast_whole_rows(x), fp8.cast_whole_rows(x), strict=True)
    made = {
        "norm_cast": (kernels.norm_cast(x, x[0], 1e-5), fp8.norm_cast_reference(x.float(), x[0].float(), 1e-5)[0]),
        "swiglu_cast": (kernels.swiglu_cast(x.view(8, 2, 256), False), swiglu_reference(x.view(8, 2, 256))),
        "swiglu_cast_backward": (
            kernels.swiglu_cast_backward(x[:8], x.view(8, 2, 256), True),
            fp8.swiglu_cast_backward_reference(x[:8].float(), x.view(8, 2, 256).float(), True)[0],
        ),
    }
    outputs = {
        name: [
            (y, exact),
            *zip((by_kernel[: len(y)], scale[: len(y)]), fp8.cast_rows_reference(y.flatten(1)), strict=True),
        ]
        for name, ((y, *_, by_kernel, scale), exact) in made.items()
    }
    return outputs | {
        "cast_rows": [(values, wanted.values), (scale.t(), wanted.scale)],
        "cast_whole_rows": list(rows),
        "cast_tensor": list(zip(kernels.cast_tensor(x), fp8.cast_tensor(x), strict=True)),
        "cast_weight": list(zip(kernels.cast_weight(weight), (*whole, *turned), strict=True)),
    }


def _of_router(device: torch.device, random: torch.Generator) -> dict[str, list[tuple[Tensor, Tensor]]]:
    """Return operator -> its results and those of plain operators, for five tokens with two of six experts."""
    ops, logits = torch.ops.megapar, torch.randn(5, 6, generator=random).to(device).requires_grad_()
    with torch.enable_grad():
        chosen = logits.topk(2).indices
        weights = logits.gather(1, chosen).softmax(1)
        (gradient,) = torch.autograd.grad(weights, logits, upstream := torch.rand(5, 2, generator=random).to(device))
    rule, total = [2, 1, 1, 2, 0, 0, 1], torch.stack((logits, 0 * logits, 0 * logits), 1)
    kept, probs = ops.route(total, None, None, None, rule, 1.0), logits.softmax(1)
    wanted = (logits, probs, logits.logsumexp(1), chosen, weights, probs.sum(0))
    parts = ops.route_backward(kept[0], *kept[2:5], None, None, upstream, None, None, rule, 1.0)
    first, narrow = total + gradient.bfloat16()[:, None], gradient.bfloat16()[:, None].expand_as(total).contiguous()
    ops.add_gradient(total, narrow, False)
    return {
        "split_matrix": [(ops.split_matrix(logits)[1:].float().sum(0), logits)],
        "route": [*zip((*kept[:5], kept[5].sum(0)[0, :6]), wanted, strict=True)],
        "route_backward": [(parts[:, :3].float().sum(1), gradient)],
        "add_gradient": [(total, first)],
    }


def _of_columns(device: torch.device, random: torch.Generator) -> dict[str, list[tuple[Tensor, Tensor]]]:
    """Return operator -> its results and those of autograd, for gelu and a norm of 40 rows."""
    ops, (gradient, x) = torch.ops.megapar, torch.randn(2, 40, 96, generator=random).to(device, torch.bfloat16)
    with torch.enable_grad():
        leaf, weight, scale = x.float().requires_grad_(), gradient[0].float(), gradient.float()
        (of_gelu,) = torch.autograd.grad(F.gelu(leaf), leaf, scale)
        (of_norm,) = torch.autograd.grad(F.layer_norm(leaf, (96,), weight), leaf, scale)
    dx, of_bias = ops.gelu_backward(gradient, x)
    statistics = torch.native_layer_norm(x.float(), (96,), weight, None, 1e-5)[1:]
    normed = ops.norm_backward(gradient, x, *statistics, gradient[0], None, 1.0)
    return {
        "gelu_backward": [(dx, of_gelu), (of_bias, dx.float().sum(0))],
        "norm_backward": [(normed[0], of_norm), (normed[2][2], normed[0].float().sum(0))],
    }


@torch.no_grad()
def errors(device: torch.device) -> dict[str, float]:
    """Return operator -> relative error of its example."""
    random = torch.Generator().manual_seed(0)
    qkv = torch.randn(2, 3, 2, 6, 64, generator=random).to(device, torch.bfloat16)
    angles = torch.randn(2, 3, 32, generator=random).to(device)
    cos, sin = angles.cos(), angles.sin()
    heads, wanted = kernels.rotary_heads(qkv, cos, sin), rotary_heads_reference(qkv.float(), cos, sin)
    # The backward rotates back: of the heads it makes qkv again.
    pairs = {"rotary_heads": list(zip(heads, wanted, strict=True))}
    pairs["rotary_heads_backward"] = [(kernels.rotary_heads_backward(*heads, cos, sin), qkv)]
    logits, labels = torch.randn(3, 5000, generator=random).to(device), torch.tensor([7, 0, 4999], device=device)
    forms = (kernels.cross_entropy, cross_entropy_reference)
    got, expected = (form(logits.clone(), labels, torch.bfloat16) for form in forms)
    pairs["cross_entropy"] = list(zip(got, expected, strict=True))
    gate_up = torch.randn(3, 2, 1500, generator=random).to(device, torch.bfloat16)
    weights, gradient = torch.rand(3, 1, generator=random).to(device), gate_up[:, 0]
    inputs = [x.float().requires_grad_() for x in (gate_up, weights)]
    pairs |= {"swiglu": [], "swiglu_backward": []}
    for clamped, form in ((False, swiglu_reference), (True, clamped_swiglu_reference)):
        with torch.enable_grad():
            y = form(*inputs)
            wanted_gradients = torch.autograd.grad(y, inputs, gradient.float())
        pairs["swiglu"].append((kernels.swiglu(gate_up, weights, clamped=clamped), y))
        d_gate_up, d_weights = kernels.swiglu_backward(gradient, gate_up, weights, clamped=clamped)
        assert d_weights is not None
        pairs["swiglu_backward"] += zip((d_gate_up, d_weights), wanted_gradients, strict=True)
    pairs.update(_of_expert_rows(device, random))
    pairs["update_adamw"] = _of_adamw(device, random)
    if device.type != "cuda" or (torch.version.hip is None and torch.cuda.get_device_capability(device) >= CASTS_FP8):
        pairs.update(_of_fp8(device, random))
    pairs.update(_of_router(device, random) | _of_columns(device, random))
    return {
        name: max(float((a.float() - b.float()).norm() / b.float().norm()) for a, b in both)
        for name, both in pairs.items()
    }
