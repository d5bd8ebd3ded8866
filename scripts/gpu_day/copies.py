"""Copies that change dtype or order, and the router: what a step spends beside products.

Shape letters: T tokens, H hidden, E experts, k choices per token, B batch, S sequence, N heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megapar.moe.router import Router, gate_weights
from megapar.moe.sizes import MoeSizes
from scripts.gpu_day.day import Answer, Day
from scripts.gpu_day.timed import NO_GPU, median_seconds, moved, normal

WEIGHTS = {"dense": (6144, 2048), "experts": (16, 3072, 2048)}
SMALL_WEIGHTS = {"dense": (96, 64)}
EXPERTS = {16: 4, 64: 8, 256: 8}  # E -> k


def run(day: Day) -> None:
    """Time the copies to a bucket, those around attention, and the router."""
    torch.manual_seed(0)
    for name, shape in (SMALL_WEIGHTS if day.small else WEIGHTS).items():
        day.attempt(f"bf16 gradient of {name} into an fp32 bucket", partial(bucket, day, shape), least=1.0)
    day.attempt("order of heads", partial(heads, day), least=1.0)
    for experts, topk in EXPERTS.items():
        day.attempt(f"router of {experts} experts", partial(router, day, experts, topk), least=1.0)


def _speeds(day: Day, works: Mapping[str, tuple[int, Callable[[], object]]], size: int) -> Answer:
    """Time copies, of which each moves a multiple of a size."""
    found = {name: moved(times * size, median_seconds(day, work)) for name, (times, work) in works.items()}
    return day.figures(found, NO_GPU)


def bucket(day: Day, shape: tuple[int, ...]) -> Answer:
    """Time the two ways in which a bucket takes a gradient (``Bucket._accumulate``): copy the first, add the others.

    Torch's operators for them, the opposite direction, and copies without a change of dtype, are beside them.
    """
    gradient = normal(day, *shape)
    flat = torch.zeros(1, gradient.numel() + 64, device=day.place)
    target = flat[:, : gradient.numel()].unflatten(1, shape)
    rows, wide, narrow = gradient[None], target.clone(), torch.empty_like(gradient)
    number = gradient.numel()
    add_gradient = day.operator("add_gradient")
    works: dict[str, tuple[int, Callable[[], object]]] = {  # bytes per element
        "copy of the package": (2 + 4, lambda: add_gradient(target, rows, begins=True)),
        "add of the package": (2 + 4 + 4, lambda: add_gradient(target, rows, begins=False)),
        "copy": (2 + 4, lambda: target.copy_(rows)),
        "add": (2 + 4 + 4, lambda: target.add_(rows)),
        "foreach copy": (2 + 4, lambda: torch._foreach_copy_([target], [rows])),
        "to fp32": (2 + 4, gradient.float),
        "add fp32": (4 + 4 + 4, lambda: target.add_(wide)),
        "to bf16": (4 + 2, lambda: narrow.copy_(target[0])),
        "copy bf16": (2 + 2, lambda: narrow.copy_(gradient)),
    }
    return day.figures(
        {name: moved(nbytes * number, median_seconds(day, work)) for name, (nbytes, work) in works.items()}, NO_GPU
    )


def heads(day: Day) -> Answer:
    """Time the copies that change the order of heads and positions around attention."""
    B, S, N, D = (2, 32, 4, 16) if day.small else (4, 4096, 16, 128)
    by_head, by_position = normal(day, B, N, S, D), normal(day, B, S, N, D)
    qkv = normal(day, B, S, 3, N, D)
    q_first = torch.empty(3, B, N, S, D, device=day.place, dtype=qkv.dtype)
    gradient = torch.empty_like(qkv)
    works: dict[str, tuple[int, Callable[[], object]]] = {  # multiples of the bytes of one of q, k, v
        "heads to features": (2, lambda: by_head.transpose(1, 2).contiguous()),
        "features to heads": (2, lambda: by_position.transpose(1, 2).contiguous()),
        "split q, k, v by head": (6, lambda: q_first.copy_(qkv.permute(2, 0, 3, 1, 4))),
        "split q, k, v by position": (6, lambda: [x.contiguous() for x in qkv.unbind(2)]),
        "join q, k, v": (6, lambda: gradient.copy_(q_first.permute(1, 3, 0, 2, 4))),
        "plain": (2, by_head.clone),
    }
    size = by_head.numel() * by_head.element_size()
    return day.figures(
        {name: moved(times * size, median_seconds(day, work)) for name, (times, work) in works.items()}, NO_GPU
    )


def router(day: Day, experts: int, topk: int) -> Answer:
    """Time the router's forward and backward: the package's module, plain operators, and its product alone."""
    T, H = (64, 32) if day.small else (16384, 2048)
    sizes = MoeSizes(H, 64, experts, topk)
    module = Router(sizes, dtype=torch.bfloat16, device=day.place)
    torch.nn.init.normal_(module.weight, std=H**-0.5)
    x, upstream = normal(day, T, H, differentiate=True), normal(day, T, topk, dtype=torch.float32)
    outer = normal(day, T, H)

    def of_package() -> object:
        routing = module(x)
        of_dispatch, _ = routing.passed or (x, x)
        weights = gate_weights(routing, None, over_kept=False)
        return torch.autograd.grad((weights, of_dispatch), (x, module.weight), (upstream, outer))

    def plain(dtype: torch.dtype) -> object:
        weights = _plain_weights(x, module.weight.to(dtype), topk)
        return torch.autograd.grad((weights, x.view_as(x)), (x, module.weight), (upstream, outer))

    wide = x.detach().float()
    works: dict[str, Callable[[], object]] = {
        "one reading of the tokens": wide.bfloat16().sum,
        "package": of_package,
        "plain, fp32": lambda: plain(torch.float32),
        "plain, bf16 product": lambda: plain(torch.bfloat16),
        "product alone, fp32": lambda: F.linear(wide, module.weight.detach()),
        "top k alone": partial(torch.topk, torch.rand(T, experts, device=day.place), topk, dim=1),
    }
    found: dict[str, Any] = {name: 1e3 * median_seconds(day, work) for name, work in works.items()}
    return day.figures({"milliseconds": found}, NO_GPU)


def _plain_weights(x: Tensor, weight: Tensor, topk: int) -> Tensor:
    """Return the renormalized gate weights [T, k] of a softmax in fp32."""
    probs = F.linear(x.to(weight.dtype), weight).float().softmax(1)
    chosen, _ = probs.topk(topk, dim=1)
    return chosen / chosen.sum(1, keepdim=True)
