"""Schedules of the learning rate and the weight decay: pure functions of the progress. Does not import torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, asdict, dataclass, fields, replace
from types import MappingProxyType
from typing import Any

from megapar.arguments import Config

# Share of the decay that has passed -> share of (peak - floor) that is left. Source: Megatron-LM's
# optimizer_param_scheduler.
DECAYS: Mapping[str, Callable[[float], float]] = MappingProxyType(
    {
        "linear": lambda share: 1.0 - share,
        "cosine": lambda share: 0.5 * (1.0 + math.cos(math.pi * share)),
        "exponential": lambda share: 2.0 * 0.5**share - 1.0,
        "minus_sqrt": lambda share: 1.0 - math.sqrt(share),
    }
)
INVERSE = "inverse-square-root"
# Share of the steps that has passed -> share of the way from the first weight decay to the last.
INCREMENTS: Mapping[str, Callable[[float], float]] = MappingProxyType(
    {"linear": lambda share: share, "cosine": lambda share: 0.5 * (1.0 - math.cos(math.pi * share))}
)


@dataclass(frozen=True)
class LearningRate:
    """Linear warmup to ``peak``, then a decay to ``floor`` that ends after ``decay_iters`` optimizer steps.

    Attributes:
        style: Constant, linear, cosine, inverse-square-root (of the steps since the start, equal to the peak at the end
            of the warmup) or wsd (warmup, stable, decay: constant until the last ``wsd_decay_iters``).
        decay_iters: Optimizer steps until the end of the decay, including the warmup.
        wsd_decay_style: Shape of the decay of wsd, a key of ``DECAYS``.
        decoupled_peak: Peak of the word embedding and the head; None: that of all others.
        decoupled_floor: Their floor.
        targets: Phases of the data with a learning rate of their own, in order: optimizer steps before each and until
            its end, the rate at its end, and the style in which that is reached from the rate at its beginning.
    """

    peak: float
    floor: float
    style: str
    warmup_iters: int
    decay_iters: int
    wsd_decay_iters: int = 0
    wsd_decay_style: str = "linear"
    decoupled_peak: float | None = None
    decoupled_floor: float | None = None
    targets: tuple[tuple[int, int, float, str], ...] = ()

    def decoupled(self) -> LearningRate | None:
        """Return the schedule of the word embedding and the head, or None if it is this one."""
        if self.decoupled_peak is None:
            return None
        floor = self.floor if self.decoupled_floor is None else self.decoupled_floor
        return replace(self, peak=self.decoupled_peak, floor=floor, decoupled_peak=None, decoupled_floor=None)

    def at(self, iteration: int, step: int | None = None) -> float:
        """Return the learning rate of optimizer step ``iteration``, counted from 0.

        ``step`` also counts skipped updates, as phases do; None if there were none.
        """
        place = iteration if step is None else step
        for number, (first, end, to, style) in enumerate(self.targets):
            if first <= place < end:
                before = self.targets[number - 1] if number else None
                begin = before[2] if before is not None and before[1] == first else self._base(first)
                left = 0.0 if style == "constant" else DECAYS[style]((place - first) / (end - first))
                return to + (begin - to) * left
        return self._base(iteration)

    def _base(self, iteration: int) -> float:
        if iteration < self.warmup_iters:
            return self.peak * (iteration + 1) / self.warmup_iters
        if self.style == "constant":
            return self.peak
        if self.style == INVERSE and iteration <= self.decay_iters:
            return max(self.floor, self.peak * math.sqrt(max(1, self.warmup_iters) / max(1, iteration)))
        if iteration >= self.decay_iters:
            return self.floor
        start = self.decay_iters - self.wsd_decay_iters if self.style == "wsd" else self.warmup_iters
        if iteration < start:
            return self.peak
        share = (iteration - start) / max(1, self.decay_iters - start)
        left = DECAYS[self.wsd_decay_style if self.style == "wsd" else self.style](share)
        return self.floor + (self.peak - self.floor) * left

    def to_dict(self) -> dict[str, Any]:
        """Return the fields for a checkpoint, ``targets`` as a text and only if there are some."""
        values = asdict(self)
        del values["targets"]
        texts = [f"{first}-{end} to {to!r} {style}" for first, end, to, style in self.targets]
        return values | ({"targets": ", ".join(texts)} if texts else {})


@dataclass(frozen=True)
class WeightDecay:
    """Weight decay that changes from ``start`` to ``end`` over ``iters`` optimizer steps, by a style of ``INCREMENTS``.

    Source: Megatron-LM's optimizer_param_scheduler.
    """

    start: float
    end: float
    style: str
    iters: int

    def at(self, iteration: int) -> float:
        """Return the weight decay of optimizer step ``iteration``, counted from 0."""
        share = INCREMENTS[self.style](min(1.0, iteration / self.iters))
        return self.start + share * (self.end - self.start)

    def to_dict(self) -> dict[str, float | int | str]:
        """Return the fields for a checkpoint, besides those of the learning rate."""
        return {f"weight_decay_{name}": value for name, value in asdict(self).items()}


@dataclass(frozen=True)
class Progressive:
    """Progressive training: length, batch, learning rate and dropout grow together, as functions of the iteration.

    Source: ERNIE 3.0 (arXiv 2107.02137), section 3.3.

    Attributes:
        iters: Optimizer steps until the final values.
        length_step: The length is a multiple of this.
        batch_step: The number of samples is a multiple of this.
    """

    iters: int
    length: int
    length_step: int
    batch: int
    batch_step: int

    def share(self, iteration: int) -> float:
        """Return the share of the final learning rate and dropout, in (0, 1]. ``iteration`` is counted from 0."""
        return min(1.0, (iteration + 1) / self.iters)

    def length_at(self, iteration: int) -> int:
        """Return the number of tokens of a sample, at least ``length_step``."""
        return self._grown(self.length, self.length_step, iteration)

    def batch_at(self, iteration: int) -> int:
        """Return the number of samples of the global batch, at least ``batch_step``."""
        return self._grown(self.batch, self.batch_step, iteration)

    def _grown(self, final: int, step: int, iteration: int) -> int:
        if iteration + 1 >= self.iters:
            return final
        return max(step, final * (iteration + 1) // self.iters // step * step)


def make_progressive(config: Config) -> Progressive | None:
    """Return the progressive training of the first steps, or None without it."""
    training = config.training
    if not training.progressive_iters:
        return None
    return Progressive(
        iters=training.progressive_iters,
        length=config.model.seq_length,
        length_step=training.progressive_length_multiple,
        batch=training.global_batch_size,
        batch_step=training.micro_batch_size * training.progressive_batch_multiple,
    )


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
        "decoupled_peak": "--decoupled-lr",
        "decoupled_floor": "--decoupled-min-lr",
        "mup_base_hidden_size": "--mup-base-hidden-size",
        "weight_decay_style": "--weight-decay-incr-style",
        "weight_decay_start": "--start-weight-decay",
        "weight_decay_end": "--end-weight-decay",
        "weight_decay_iters": "--train-iters",
        "targets": "the lr of the phases so far",
    }
)
_DERIVED = {"decay_iters": " (from --train-iters, if not given)", "wsd_decay_iters": " (a tenth of them, if not given)"}
# Field of the schedule -> its value in checkpoints that are older than it.
_DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {
        **{item.name: item.default for item in fields(LearningRate) if item.default is not MISSING},
        **{f"weight_decay_{item.name}": None for item in fields(WeightDecay)},
        "weight_decay_style": "constant",
        "mup_base_hidden_size": 0,
    }
)
_OF_WSD = ("wsd_decay_iters", "wsd_decay_style")
_OF_DECAY = ("floor", "decay_iters")


def make_learning_rate(config: Config) -> LearningRate:
    """Return the schedule over optimizer steps."""
    optimizer, phases = config.optimizer, config.phases.until(config.training.train_iters)
    return LearningRate(
        targets=tuple(
            (span.first_step, end.first_step, span.rate.to, span.rate.style) for span, end in phases if span.rate
        ),
        peak=optimizer.lr,
        floor=optimizer.min_lr,
        style=optimizer.lr_decay_style,
        warmup_iters=config.training.progressive_iters or optimizer.lr_warmup_iters,
        decay_iters=optimizer.lr_decay_iters,
        wsd_decay_iters=optimizer.lr_wsd_decay_iters,
        wsd_decay_style=optimizer.lr_wsd_decay_style,
        decoupled_peak=optimizer.decoupled_lr,
        decoupled_floor=optimizer.decoupled_min_lr,
    )


def make_weight_decay(config: Config) -> WeightDecay | None:
    """Return the weight decay over optimizer steps, or None if it is constant."""
    optimizer = config.optimizer
    start, end = optimizer.start_weight_decay, optimizer.end_weight_decay
    if start is None or end is None:  # the rules require both, or neither
        return None
    return WeightDecay(start, end, optimizer.weight_decay_incr_style, max(1, config.training.train_iters))


def schedule_of(config: Config) -> dict[str, float | int | str | None]:
    """Return the schedule of a run for its checkpoints."""
    decay, base = make_weight_decay(config), config.optimizer.mup_base_hidden_size
    more = {**({} if decay is None else decay.to_dict()), **({"mup_base_hidden_size": base} if base else {})}
    return {**make_learning_rate(config).to_dict(), **more}


def _begun(schedule: Mapping[str, Any], steps: int) -> str:
    """Return the targets of a checkpoint's schedule that begin before ``steps`` steps are done."""
    targets = str(schedule.get("targets") or "none").split(", ")
    begun = [text for text in targets if not (first := text.partition("-")[0]).isdecimal() or int(first[:18]) < steps]
    return ", ".join(begun) or "none"


def another_schedule(saved: Mapping[str, Any], now: Mapping[str, Any], steps: int = 0) -> tuple[str, str] | None:
    """Return (the differences of a checkpoint's schedule, what to do), in terms of flags. None if they are equal.

    Both arguments are as ``schedule_of`` returns them. A field that an old checkpoint does not contain had its
    default. Fields that the style does not use are not compared, nor are phases that begin after the ``steps`` done,
    with those whose update was skipped.
    """
    before, now = ({**side, "targets": _begun(side, steps)} for side in ({**_DEFAULTS, **saved}, {**_DEFAULTS, **now}))
    styles = {before.get("style"), now["style"]}
    unused = (*(() if "wsd" in styles else _OF_WSD), *(_OF_DECAY if styles == {"constant"} else ()))
    changed = [name for name in now if name not in unused and before.get(name) != now[name]]
    if not changed:
        return None
    ordered = sorted(changed, key=list(_FLAGS).index)
    differences = "; ".join(
        f"{_FLAGS[name]} is {before.get(name)} there and {now[name]} here{_DERIVED.get(name, '')}" for name in ordered
    )
    fix = "Pass the same flags, or --override-opt-param-scheduler to continue with the new ones."
    follow = [name for name in ordered if name != "weight_decay_iters"]
    if follow != ordered and not follow:
        fix = (
            "Pass --override-opt-param-scheduler to stretch the increase of the weight decay to the new --train-iters."
        )
    elif ordered in (["decay_iters"], ["decay_iters", "wsd_decay_iters"]):  # they follow from --train-iters
        same = " ".join(f"{_FLAGS[name]} {before.get(name)}" for name in ordered)
        fix = (
            f"Pass {same} to keep the schedule (the rate stays at --min-lr after its end), or "
            "--override-opt-param-scheduler to stretch it to the new --train-iters."
        )
    return differences, fix
