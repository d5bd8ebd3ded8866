"""The kernels of NVIDIA apex beside torch's, in turn: norms, sums of weight gradients, AdamW. Skipped without apex.

Shape letters: R rows, H features, F features of the product, P parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from megapar.core.device import apex
from megapar.core.device.dtypes import add_product_wide
from megapar.core.device.layer_ops import rms_norm_fused
from megapar.core.optimizer.update_rule import AdamW, ApexAdamW, Update
from scripts.gpu_day.day import Answer, Day
from scripts.gpu_day.timed import both_ways, median_seconds, normal

EPSILON = 1e-6


def run(day: Day) -> None:
    """Time each kind of kernel, and compare the results."""
    if lacks := apex.apex_lacks():
        day.attempt("apex", lambda: Answer(None, {"lacks": lacks}))
        return
    torch.manual_seed(0)
    R, H, F, P = (64, 32, 48, 1000) if day.small else (16384, 2048, 6144, 100_000_000)
    x, weight, bias = (normal(day, *shape, differentiate=True) for shape in ((R, H), (H,), (H,)))
    for name, torchs, theirs, inputs in (
        ("rms norm", rms_norm_fused, apex.rms_norm_apex, (x, weight)),
        ("layer norm", _layer_norm, apex.layer_norm_apex, (x, weight, bias)),
    ):
        calls = (partial(form, *inputs, EPSILON) for form in (torchs, theirs))
        day.attempt(name, partial(_compared, day, *calls, inputs))
    day.attempt("weight gradient", partial(_products, day, normal(day, R, F), normal(day, R, H)))
    day.attempt("AdamW", partial(_adam, day, P))


def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> Tensor:
    return functional.layer_norm(x, weight.shape, weight, bias, epsilon)


def _answer(difference: float, limit: float, seconds: dict[str, float]) -> Answer:
    figures = {"difference": difference, **seconds, "ratio": seconds["apex"] / seconds["torch"]}
    return Answer(difference <= limit, figures)


def _compared(
    day: Day, torchs: Callable[[], Tensor], theirs: Callable[[], Tensor], inputs: tuple[Tensor, ...]
) -> Answer:
    difference = float((torchs() - theirs()).abs().max())
    calls = {"torch": both_ways(torchs, inputs), "apex": both_ways(theirs, inputs)}
    return _answer(difference, 0.1, {name: median_seconds(day, call) for name, call in calls.items()})


def _products(day: Day, d_output: Tensor, rows: Tensor) -> Answer:
    totals = [torch.zeros(d_output.shape[1], rows.shape[1], device=day.place) for _ in range(2)]
    calls = {
        "torch": lambda: add_product_wide(totals[0], d_output.t(), rows, begins=False),
        "apex": lambda: apex.add_product_apex(totals[1], d_output.t(), rows, begins=False),
    }
    seconds = {name: median_seconds(day, call) for name, call in calls.items()}
    difference = float((totals[0] - totals[1]).abs().max() / totals[0].abs().max())
    return _answer(difference, 1e-4, seconds)


def _adam(day: Day, parameters: int) -> Answer:
    master = torch.randn(parameters, device=day.place)
    masters, seconds = [master.clone(), master], {}
    for target, (name, kind) in zip(masters, (("torch", AdamW), ("apex", ApexAdamW)), strict=True):
        rule, gradient = kind((0.9, 0.95), 1e-8, 0.1), torch.ones_like(target)
        states = [[torch.zeros_like(target)], [torch.zeros_like(target)]]
        update = Update([target], [gradient], states, [torch.zeros((), device=day.place)], 1e-3, 0.1)
        seconds[name] = median_seconds(day, partial(rule.apply, update))
    return _answer(float((masters[0] - masters[1]).abs().max()), 1e-5, seconds)
