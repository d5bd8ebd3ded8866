"""Load of the busiest expert rank: a factor, or what a run recorded of its experts.

A run writes percentiles of its experts' loads per layer (``metrics.experts.jsonl``). Experts are taken to be placed
without regard to their load, as they are without ``--moe-rebalance-interval``. So the loads of ranks with L experts
each spread by 1 / sqrt(L) of the experts' spread, and the busiest of r ranks is about sqrt(2 ln r) of that above the
mean, as the maximum of r normal variables grows. It is no more than the mean of the L most loaded experts, which with
one expert per rank is the load of the busiest one itself.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from math import log, sqrt
from pathlib import Path
from statistics import fmean

from megapar.errors import Complaint, ConfigError
from megapar.files.regular_file import INDEX_BYTES, read_regular

RECORDED_STEPS = 100  # the last ones that count
KNOTS = ((0.0, "min"), (0.5, "p50"), (0.9, "p90"), (1.0, "max"))


def expert_imbalance(text: str, experts: int, ranks: int) -> float:
    """Return the rows of the busiest expert rank, relative to the mean of all.

    Args:
        text: A number, or the path of a run's ``metrics.experts.jsonl``.
        experts: Number of routed experts; 0 without any.
        ranks: Expert parallel degree.

    Raises ConfigError if it is neither, or if there is only one expert rank to be the busiest.
    """
    factor = as_factor(text)
    if factor is None:
        factor = recorded_imbalance(Path(text), experts, ranks)
    elif factor > 1 and ranks == 1:
        message = "--expert-imbalance: one expert rank (--ep-degree 1) has the rows of all experts."
        raise ConfigError([Complaint("expert-imbalance", message, "Set --ep-degree, or leave it out.")])
    return factor


def imbalance_of_any(text: str) -> float:
    """Return the number that a search of layouts uses for all of them. Raises ConfigError for a record."""
    factor = as_factor(text)
    if factor is None:
        message = "--search tries several --ep-degree, whose busiest ranks a record has at different loads."
        raise ConfigError([Complaint("expert-imbalance", message, "Give --expert-imbalance a number.")])
    return factor


def as_factor(text: str) -> float | None:
    """Return a number of at least 1, or None for a path. Raises ConfigError for a smaller number."""
    try:
        factor = float(text)
    except ValueError:
        return None
    if not 1 <= factor < float("inf"):
        message = f"--expert-imbalance {text}: the busiest of several ranks has at least their mean."
        raise ConfigError([Complaint("expert-imbalance", message, "Use a factor of at least 1.")])
    return factor


def recorded_imbalance(path: Path, experts: int, ranks: int) -> float:
    """Return the mean over layers and the last recorded steps. Raises ConfigError for other files."""
    try:
        lines = read_regular(path, INDEX_BYTES).splitlines()[-RECORDED_STEPS:]
        layers = [layer for line in lines for layer in json.loads(line)["layers"]]
        found = [busiest(layer, experts, ranks) for layer in layers]
    except (OSError, ValueError, LookupError, TypeError, ArithmeticError, RecursionError) as error:
        message = f"--expert-imbalance {path}: neither a number nor a run's metrics.experts.jsonl ({error})."
        raise ConfigError([Complaint("expert-imbalance", message, "Name the file beside the run's metrics.")]) from None
    return fmean(found) if found else 1.0


def busiest(layer: Mapping[str, float], experts: int, ranks: int) -> float:
    """Return the load of the busiest of ``ranks`` ranks, relative to their mean, by the percentiles of a layer."""
    if ranks <= 1 or experts <= 1:
        return 1.0
    loads = _loads([(at, layer[name]) for at, name in KNOTS], experts)
    mean, held = fmean(loads), experts // ranks
    most = fmean(loads[-held:]) / mean
    if held == 1:
        return most
    spread = sqrt(fmean((load / mean - 1) ** 2 for load in loads))
    return min(most, 1 + spread / sqrt(held) * sqrt(2 * log(ranks)))


def _loads(knots: Sequence[tuple[float, float]], experts: int) -> list[float]:
    """Return the loads of all experts, in order, on straight lines between the percentiles."""
    found = []
    for number in range(experts):
        at = number / (experts - 1)
        place = min(len(knots) - 1, bisect_right([one for one, _ in knots], at))
        (left, low), (right, high) = knots[place - 1], knots[place]
        found.append(low + (high - low) * (at - left) / (right - left))
    return found
