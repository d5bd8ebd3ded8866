"""The learning-rate schedule of a configuration, and how a checkpoint's schedule differs from it. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from types import MappingProxyType
from typing import Any

from megapar.arguments import Config
from megapar.training.step.schedules import LearningRate

# Field of the schedule -> the flag that sets it, most important first.
_FLAGS: Mapping[str, str] = MappingProxyType(
    {
        "style": "--lr-decay-style",
        "peak": "--lr",
        "floor": "--min-lr",
        "warmup_iters": "--lr-warmup-iters",
        "decay_iters": "--lr-decay-iters",
        "wsd_decay_iters": "--lr-wsd-decay-iters",
        "wsd_decay_style": "--lr-wsd-decay-style",
    }
)
# Field of the schedule -> its value in checkpoints that are older than it.
_DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {item.name: item.default for item in fields(LearningRate) if item.default is not MISSING}
)
_OF_WSD = ("wsd_decay_iters", "wsd_decay_style")
_OF_DECAY = ("floor", "decay_iters")


def make_learning_rate(config: Config) -> LearningRate:
    """Return the schedule over optimizer steps."""
    optimizer = config.optimizer
    return LearningRate(
        peak=optimizer.lr,
        floor=optimizer.min_lr,
        style=optimizer.lr_decay_style,
        warmup_iters=config.training.progressive_iters or optimizer.lr_warmup_iters,
        decay_iters=optimizer.lr_decay_iters,
        wsd_decay_iters=optimizer.lr_wsd_decay_iters,
        wsd_decay_style=optimizer.lr_wsd_decay_style,
    )


def another_schedule(saved: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return (the differences of a checkpoint's schedule, what to do), in terms of flags. None if they are equal.

    Both arguments are as ``LearningRate.to_dict`` returns them. A field that an old checkpoint does not contain had its
    default. Fields that the style does not use are not compared.
    """
    before = {**_DEFAULTS, **saved}
    styles = {before.get("style"), now["style"]}
    unused = (*(() if "wsd" in styles else _OF_WSD), *(_OF_DECAY if styles == {"constant"} else ()))
    apart = [name for name in now if name not in unused and before.get(name) != now[name]]
    if not apart:
        return None
    ordered = sorted(apart, key=list(_FLAGS).index)
    differences = "; ".join(f"{_FLAGS[name]} is {before.get(name)} there and {now[name]} here" for name in ordered)
    fix = "Pass the same flags, or --override-opt-param-scheduler to continue with the new ones."
    if apart in (["decay_iters"], ["decay_iters", "wsd_decay_iters"]):  # they follow from --train-iters
        same = " ".join(f"{_FLAGS[name]} {before.get(name)}" for name in apart)
        fix = (
            f"Pass {same} to keep the schedule (the rate stays at --min-lr after its end), or "
            "--override-opt-param-scheduler to stretch it to the new --train-iters."
        )
    return differences, fix
