"""The tolerances of equivalence: fp64 against one process, bf16 against what bf16 costs one process."""

from __future__ import annotations

import math
from itertools import accumulate
from typing import NamedTuple

import torch

from tests.equivalence.run import Trace, relative

STILL = ("--lr", "1e-30", "--weight-decay", "0")


def still(flags: tuple[str, ...]) -> tuple[str, ...]:
    """The flags of the same run with next to no learning rate, so that each step is of the same model."""
    start = flags.index("--lr")
    return (*flags[:start], *flags[start + 2 :], *STILL)


NUDGED = 100  # times as far as a run whose first weights were a rounding away: layouts round in every operation


class Growth(NamedTuple):
    """How far two runs of one process get from each other that differ by a rounding, relative to the values.

    logged, gradients: per step, at most up to it. parameters: after the last one.
    """

    logged: list[float]
    gradients: list[float]
    parameters: float


def growth_between(nudged: Trace, want: Trace) -> Growth:
    """How far a run is from another whose first weights were a rounding away."""
    logged = [
        max((abs(mine.get(name, b) - b) / max(abs(b), 1e-30) for name, b in theirs.items()), default=0.0)
        for mine, theirs in zip(nudged.logged, want.logged, strict=True)
    ]
    gradients = [
        max(float((mine[name] - b).abs().max()) / max(float(b.abs().max()), 1e-6 * norm) for name, b in theirs.items())
        for mine, theirs, norm in zip(nudged.gradients, want.gradients, want.norms, strict=True)
    ]
    parameters = max(
        float((nudged.parameters[name] - b).abs().max()) / max(float(b.abs().max()), 1e-30)
        for name, b in want.parameters.items()
    )
    return Growth(list(accumulate(logged, max)), list(accumulate(gradients, max)), parameters)


def differences(got: Trace, want: Trace, noise: float = 0.0, growth: Growth | None = None) -> list[str]:
    """Everything in fp64 that is further from one process than rounding explains; empty where nothing is.

    noise: a difference of parameters that is none. Where a gradient is zero but for rounding, Adam makes a step of it,
    and all that a zero-initialised bias then holds is noise. growth: what rounding comes to in this run.
    """
    found = []
    grown = growth or Growth([0.0] * len(want.logged), [0.0] * len(want.gradients), 0.0)
    for step, (logs, wanted) in enumerate(zip(got.logged, want.logged, strict=True)):
        if logs.keys() != wanted.keys():
            found.append(f"logged, step {step}: {sorted(logs.keys() ^ wanted.keys())} on one side only")
        for name, b in wanted.items():
            a = logs.get(name, b)
            if not abs(a - b) <= max(1e-10, NUDGED * grown.logged[step]) * max(abs(b), 1e-20):  # below, rounding
                found.append(f"{name}, step {step}: {a!r} instead of {b!r}")
    for step, (mine, theirs) in enumerate(zip(got.gradients, want.gradients, strict=True)):
        if mine.keys() != theirs.keys():
            found.append(f"gradients, step {step}: of {sorted(mine.keys() ^ theirs.keys())} on one side only")
            continue
        floor = 1e-6 * want.norms[step]
        for name, gradient in theirs.items():
            error, scale = float((mine[name] - gradient).abs().max()), float(gradient.abs().max())
            if not error <= max(1e-9, NUDGED * grown.gradients[step]) * max(scale, floor):
                found.append(f"gradient of {name}, step {step}: off by {error:.3g}, its largest is {scale:.3g}")
    for name, weight in want.parameters.items():
        error, scale = float((got.parameters[name] - weight).abs().max()), float(weight.abs().max())
        if not error <= max(max(1e-9, NUDGED * grown.parameters) * scale, noise):
            found.append(f"parameter {name}: off by {error:.3g}, its largest is {scale:.3g}")
    return found


def bits(got: Trace, want: Trace) -> list[str]:
    """Everything that is not the same to the last bit: all numbers of the log, all gradients and parameters.

    What is logged per second is compared per step, and so rounded once more.
    """
    found = []
    for step, (logs, wanted) in enumerate(zip(got.logged, want.logged, strict=True)):
        for name in sorted(logs.keys() | wanted.keys()):
            a, b = logs.get(name), wanted.get(name)
            close = a is not None and b is not None and name.startswith("speed/") and math.isclose(a, b, rel_tol=1e-12)
            if repr(a) != repr(b) and not close:  # the norm of an overflow is NaN on both sides
                found.append(f"{name}, step {step}: {a!r} instead of {b!r}")
    pairs = zip([*got.gradients, got.parameters], [*want.gradients, want.parameters], strict=True)
    for step, (mine, theirs) in enumerate(pairs):
        what = f"gradient, step {step}, of " if step < len(want.gradients) else "parameter "
        for name, tensor in theirs.items():
            if not torch.equal(mine[name].nan_to_num(), tensor.nan_to_num()):
                found.append(f"{what}{name}: off by {float((mine[name] - tensor).abs().max()):.3g}")
    return found


def farthest(got: Trace, want: Trace) -> tuple[float, float]:
    """The largest difference of a loss, relative to it, and of a gradient, relative to the largest of its tensor.

    A gradient that is zero but for rounding counts relative to a millionth of the norm, as in ``differences``.
    """
    loss = max(abs(a - b) / abs(b) for a, b in zip(got.losses, want.losses, strict=True))
    gradient = 0.0
    for step, (mine, theirs) in enumerate(zip(got.gradients, want.gradients, strict=True)):
        floor = 1e-6 * want.norms[step]
        for name, b in theirs.items():
            gradient = max(gradient, float((mine[name] - b).abs().max()) / max(float(b.abs().max()), floor))
    return loss, gradient


def excess(got: Trace, alone: Trace, exact: Trace) -> list[str]:
    """Where a layout's bf16 gradients are worse than those of one bf16 process, both against fp64.

    Root mean squares over the steps, which all start from the same parameters: how two roundings of one gradient
    compare is chance, and a single step's ratio is off by up to a quarter.
    """
    errors, allowed = (
        {
            name: _rms(
                [relative(step[name], want[name]) for step, want in zip(t.gradients, exact.gradients, strict=True)]
            )
            for name in exact.gradients[0]
        }
        for t in (got, alone)
    )
    found = [
        f"bf16 gradient of {name}: error {error:.3g} against {allowed[name]:.3g} on one process"
        for name, error in errors.items()
        if not error <= 3 * allowed[name]
    ]
    mine, theirs = (_rms(list(values.values())) for values in (errors, allowed))
    if not mine <= 1.2 * theirs:
        found.append(f"bf16 gradients together: error {mine:.3g} against {theirs:.3g} on one process")
    return found


# Half the distance from 1 to the next number.
UNITS = {"bf16": 2.0**-8, "fp16": 2.0**-11, "fp32": 2.0**-24}
TIMES = 4  # what two roundings of one gradient may differ by, and how many of them meet in a sum


def rounding_differences(got: Trace, alone: Trace, exact: Trace, unit: float) -> list[str]:
    """What in a coarser precision is not finite, or further from fp64 than ``TIMES`` one process and the rounding.

    unit: relative error of one rounding. For models so small that ``excess``, a mean over many tensors, is chance.
    """
    found = []
    for step, (mine, single, want) in enumerate(zip(got.losses, alone.losses, exact.losses, strict=True)):
        if not abs(mine - want) <= TIMES * (abs(single - want) + TIMES * unit * abs(want)):
            found.append(f"loss, step {step}: {mine!r}, one process {single!r}, in fp64 {want!r}")
    for step, wanted in enumerate(exact.gradients):
        for name, b in wanted.items():
            error, allowed = (float((t.gradients[step][name].double() - b).norm()) for t in (got, alone))
            # A small gradient is the sum of larger terms, and rounded as these are.
            if not (math.isfinite(allowed) and error <= TIMES * (allowed + unit * exact.norms[step])):
                found.append(f"gradient of {name}, step {step}: error {error:.3g}, of one process {allowed:.3g}")
    return found


def overflows(got: Trace) -> list[int]:
    """The steps with a gradient that is not finite, which fp16 skips to go on with a smaller loss scale."""
    return [
        step for step, grads in enumerate(got.gradients) if not all(bool(g.isfinite().all()) for g in grads.values())
    ]


def _rms(values: list[float]) -> float:
    return (sum(value * value for value in values) / len(values)) ** 0.5
