"""Assumptions of a plan beyond its configuration: techniques that megapar does not implement, and the load of experts.

fp8                       matrix products of all linear layers in fp8
fp8-mlp                   matrix products of feed-forward layers and experts in fp8
fp8-activations           inputs that matrix products keep are stored in one byte per element
fp8-swiglu                so are the inputs of the activations of experts, shared ones included (DeepSeek-V3)
operator-recompute:A+B    recompute the outputs of these operators instead of keeping them: norm, qkv, up,
                          activation, core; or combine (rows are weighted before the all-to-all back, so that none
                          are kept). A@4-8,10 applies to these layers only
cuda-graphs               no kernel waits for its launch by the host
fused-experts             one kernel for an expert layer's products, its activation and its casts, which reads the
                          rows per expert on the device
hybrid-ep                 a token travels to a node and to a rank once, permuted on its way (HybridEP that fuses it)
deepep                    it travels as often, and kernels of their own permute the rows (DeepEP, other HybridEP)
expert-overlap            all-to-alls of experts hide under the products of another micro-batch (1F1B pairing)
dualpipe                  run the pipeline in both directions: all-to-alls hide under the other direction's
                          computation, and each rank has two copies of the parameters

Published runs used them (``benchmarks/prediction``). A plan marks them in its output. All that they change is here.

The load of the busiest expert rank is a factor, or is estimated from what a run recorded. A run writes percentiles of
its experts' loads per layer (``metrics.experts.jsonl``). Experts are taken to be placed without regard to their load,
as they are without ``--moe-rebalance-interval``. So the loads of ranks with L experts each spread by 1 / sqrt(L) of the
experts' spread, and the busiest of r ranks is about sqrt(2 ln r) of that above the mean, as the maximum of r normal
variables grows. It is no more than the mean of the L most loaded experts, which with one expert per rank is the load of
the busiest one itself.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from math import log, sqrt
from pathlib import Path
from statistics import fmean

from megapar.arguments import Config
from megapar.core.device.kinds import DeviceKind
from megapar.errors import Complaint, ConfigError
from megapar.files.regular_file import INDEX_BYTES, read_regular
from megapar.model.cost.model_cost import Product
from megapar.model.cost.rank_view import RankView
from megapar.model.ernie3.sizes import Ernie3Sizes
from megapar.planning.calibration import Calibration

NO_FORMULA = "plan-no-formula"
ACTIVATIONS, SWIGLU, GRAPHS = "fp8-activations", "fp8-swiglu", "cuda-graphs"
FUSED, HYBRID, DEEPEP, OVERLAP, DUALPIPE = "fused-experts", "hybrid-ep", "deepep", "expert-overlap", "dualpipe"
FP8 = {"fp8": "all", "fp8-mlp": "mlp"}
SWITCHES = (ACTIVATIONS, SWIGLU, GRAPHS, FUSED, HYBRID, DEEPEP, OVERLAP, DUALPIPE)
NAMES = (*FP8, "operator-recompute", *SWITCHES)
OPERATORS = ("norm", "qkv", "up", "activation", "core", "combine")
RECORDED_STEPS = 100  # the last ones that count
KNOTS = ((0.0, "min"), (0.5, "p50"), (0.9, "p90"), (1.0, "max"))


@dataclass(frozen=True)
class Assumed:
    """Assumptions of a plan, by default none.

    Attributes:
        words: The values of ``--assume``.
        switches: Techniques without a value.
        fp8: Matrix products in fp8: ``all``, ``mlp``, or "" for none.
        operators: Operators that are recomputed, each with its layers; None for all layers.
        software: Whose operators' costs: a name of ``calibration.py``.
        expert_imbalance: Rows of the busiest expert rank, relative to the mean of all.
    """

    words: tuple[str, ...] = ()
    switches: frozenset[str] = frozenset()
    fp8: str = ""
    operators: tuple[tuple[str, frozenset[int] | None], ...] = ()
    software: str = "megapar"
    expert_imbalance: float = 1.0

    @property
    def both_directions(self) -> bool:
        """Micro-batches pass the pipeline in both directions."""
        return DUALPIPE in self.switches

    @property
    def pairs_micro_batches(self) -> bool:
        """All-to-alls of experts hide under the products of another micro-batch."""
        return not self.switches.isdisjoint((DUALPIPE, OVERLAP))

    @property
    def sends_tokens_once(self) -> bool:
        """A token travels to a node and to a rank once, instead of once for each of its experts there."""
        return not self.switches.isdisjoint((HYBRID, DEEPEP))

    def narrow(self, product: Product) -> bool:
        """Return True if a matrix product is in fp8."""
        return not product.wide and (self.fp8 == "all" or (self.fp8 == "mlp" and product.mlp))

    def rank_view(self, view: RankView) -> RankView:
        """Return a rank that stores narrow inputs and recomputes operators."""
        return replace(
            view,
            stored_item_bytes=1 if ACTIVATIONS in self.switches else view.stored_item_bytes,
            expert_item_bytes=1 if SWIGLU in self.switches else view.expert_item_bytes,
            recomputed_operators=self.operators,
        )

    def calibration(self, base: Calibration, *, experts: bool) -> Calibration:
        """Return the calibration with the costs that techniques take away. experts: The model has experts."""
        software = base.software
        if GRAPHS in self.switches:
            software = replace(software, launch=0.0)
        if experts and FUSED in self.switches:
            costs = {**software.bytes, "activation": 0.0}
            software = replace(software, bytes=costs, grouped=1.0, wait=0.0, launches_per_expert=0.0)
            software = replace(software, fp8_launches_per_expert=0.0, casts_groups=False, expert_bias=0.0)
        if experts and HYBRID in self.switches:
            software = replace(software, bytes={**software.bytes, "dispatch": 0.0})
        return base if software is base.software else replace(base, software=software)

    def complaints(self, config: Config, kind: DeviceKind) -> list[Complaint]:
        """Return what is wrong with techniques in a configuration on a kind of device."""
        found = []
        if self.both_directions and config.grid.pp == 1:
            message = "--assume dualpipe: one stage (--pp-degree 1) has no pipeline to run in both directions."
            found.append(Complaint("assume", message, "Set --pp-degree, or leave out dualpipe."))
        if self.fp8 and "fp8" not in kind.flops:
            message = f"{kind.title} has no fp8 products (--assume fp8)."
            found.append(Complaint(NO_FORMULA, message, "Leave it out, or choose another --device-kind."))
        if self.operators and isinstance(config.model, Ernie3Sizes):
            message = "A plan has no formula for --assume operator-recompute with --ernie-model ernie3."
            found.append(Complaint(NO_FORMULA, message, "Leave it out, or use --recompute-granularity selective."))
        return found


def assumed(words: Sequence[str]) -> Assumed:
    """Parse the values of ``--assume``. Raises ConfigError for unknown techniques."""
    result, complaints = Assumed(words=tuple(words)), []
    for word in words:
        name, _, value = word.partition(":")
        try:
            result = _with(result, name, value)
        except ValueError as error:
            near = get_close_matches(name, NAMES, 2)
            hint = f"Did you mean {' or '.join(near)}?" if near and name not in NAMES else ""
            complaints.append(Complaint("assume", f"--assume {word}: {error}.", hint))
    if complaints:
        raise ConfigError(complaints)
    return result


def _with(assumption: Assumed, name: str, value: str) -> Assumed:
    if name in FP8 and not value:
        return replace(assumption, fp8="all" if assumption.fp8 == "all" else FP8[name])
    if name in SWITCHES and not value:
        return replace(assumption, switches=assumption.switches | {name})
    if name == "operator-recompute":
        parts = [word.partition("@") for word in value.split("+")]
        wrong = [operator for operator, _, _ in parts if operator not in OPERATORS]
        if wrong:
            raise ValueError(f"{', '.join(wrong) or 'nothing'} is not one of {', '.join(OPERATORS)}")
        more = tuple((name, _layers(text) if at else None) for name, at, text in parts)
        return replace(assumption, operators=assumption.operators + more)
    raise ValueError(f"choose one of {', '.join(NAMES)}")


def _layers(text: str) -> frozenset[int]:
    """Parse ``4-8,10`` to layer numbers. Raises ValueError for malformed text."""
    numbers: set[int] = set()
    for word in text.split(","):
        first, _, last = word.partition("-")
        if not first.isdigit() or not (last or first).isdigit():
            raise ValueError("layers are numbers and ranges, as in up@4-8,10")
        if int(last or first) < int(first):
            raise ValueError("a range of layers goes up, as in up@4-8")
        numbers.update(range(int(first), int(last or first) + 1))
    return frozenset(numbers)


def expert_imbalance(text: str, experts: int, ranks: int) -> float:
    """Return the rows of the busiest expert rank over the mean of all: a number, or of a ``metrics.experts.jsonl``.

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
        loads = [busiest(layer, experts, ranks) for layer in layers]
    except (OSError, ValueError, LookupError, TypeError, ArithmeticError, RecursionError) as error:
        message = f"--expert-imbalance {path}: neither a number nor a run's metrics.experts.jsonl ({error})."
        raise ConfigError([Complaint("expert-imbalance", message, "Name the file beside the run's metrics.")]) from None
    return fmean(loads) if loads else 1.0


def busiest(layer: Mapping[str, float], experts: int, ranks: int) -> float:
    """Return the load of the busiest of ``ranks`` ranks, relative to their mean, by the percentiles of a layer."""
    if ranks <= 1 or experts <= 1:
        return 1.0
    loads = _loads([(at, layer[name]) for at, name in KNOTS], experts)
    mean, per_rank = fmean(loads), experts // ranks
    most = fmean(loads[-per_rank:]) / mean
    if per_rank == 1:
        return most
    spread = sqrt(fmean((load / mean - 1) ** 2 for load in loads))
    return min(most, 1 + spread / sqrt(per_rank) * sqrt(2 * log(ranks)))


def _loads(knots: Sequence[tuple[float, float]], experts: int) -> list[float]:
    """Return the loads of all experts, in order, on straight lines between the percentiles."""
    found = []
    for number in range(experts):
        at = number / (experts - 1)
        place = min(len(knots) - 1, bisect_right([share for share, _ in knots], at))
        (left, low), (right, high) = knots[place - 1], knots[place]
        found.append(low + (high - low) * (at - left) / (right - left))
    return found
