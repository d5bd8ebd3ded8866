"""``megapar plan --search``: the fastest legal layout of a model on a cluster that fits, over all knobs.

From coarse to fine. First every combination of degrees (mp, pp, cp, ep) is timed, keeping all activations, with one
sample per micro-batch. The fastest of those that fit, with recompute if they must, are tuned: micro-batch, recompute
and schedule together. From the best of these, one knob after another is set to the value that is fastest and fits,
until no knob has a better one. So the result is never slower than a candidate that differs from it in one knob.

Each candidate passes the command line's rules. Its time is computed before its memory, and its memory only if it is
faster than the best one so far.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import inf
from typing import Any

from megapar.core.context_parallel.positions import GATHERED
from megapar.core.device.kinds import DeviceKind
from megapar.errors import ConfigError
from megapar.planning.assume import Assumed
from megapar.planning.candidate import Candidate
from megapar.planning.flag_roles import KNOBS as FREE
from megapar.planning.knobs import DEGREES, KNOBS, MICRO_BATCH, PAIRED, SCHEDULE, Knob, Scope
from megapar.planning.memory import stage_memory
from megapar.planning.plan import Plan
from megapar.planning.shared import Shared
from megapar.planning.variations import MISSING, Variations
from megapar.schema.rule import divisors

FASTER = 1 - 1e-9  # of two times that differ by less, neither is faster
LARGEST_TUNED = 8  # samples of a micro-batch, before the other knobs are varied
NEAR = 1.15  # a layout is slower by at most this factor, so that another knob may make it faster than the best
MEASURED, CLOSEST = 20, 3  # layouts whose stages are all computed if none fits, and of these those made smaller
TUNED, DESCENDED = 10, 3  # layouts that are tuned, and of these those whose other knobs are varied
LEAST: Mapping[str, Any] = {"recompute_interval": 1}
FORMS: tuple[Mapping[str, Any], ...] = ({}, {"recompute_granularity": "selective"}, LEAST)


@dataclass
class Result:
    """Result of a candidate.

    Attributes:
        candidate: The layout.
        plan: Its plan; None if it is refused.
        refusal: Reason of the refusal, or "".
    """

    candidate: Candidate
    plan: Plan | None
    refusal: str = ""

    @property
    def seconds(self) -> float:
        """Time of a step; infinite for a refused candidate."""
        return self.plan.speed.step_seconds if self.plan is not None else inf

    @cached_property
    def first_stage(self) -> float:
        """Bytes of the first stage, which is often the fullest; infinite for a refused candidate."""
        return stage_memory(self.plan.run, 0).reserved if self.plan is not None else inf

    @cached_property
    def fits(self) -> bool:
        """The fullest stage fits. The first one is computed before the others."""
        return self.plan is not None and self.first_stage <= self.plan.kind.memory_bytes and self.plan.fits

    @property
    def reserved(self) -> float:
        """Bytes of the fullest stage; infinite for a refused candidate."""
        return self.plan.fullest.reserved if self.plan is not None else inf


class Search:
    """A search, and the results of all candidates that it has tried.

    Attributes:
        scope: Facts about the model and the cluster.
        results: All results so far.

    Args:
        variations: The command line, varied.
        scope: Facts about the model and the cluster.
        kind: Kind of the devices.
        assumed: Techniques that the plan assumes.
    """

    def __init__(self, variations: Variations, scope: Scope, kind: DeviceKind, assumed: Assumed) -> None:
        self.scope = scope
        self.results: dict[Candidate, Result] = {}
        self._variations, self._kind, self._assumed, self._shared = variations, kind, assumed, Shared()
        fixed = {name: variations.fixed(name) for name in FREE}
        self._fixed = {name: value for name, value in fixed.items() if value is not MISSING}

    def run(self) -> None:
        """Search. Without any layout to try, the flags of the command line alone are tried, for their reason."""
        alone = [Candidate.of({"micro_batch_size": 1, **self._fixed})] if self._fixed else []
        layouts = sorted((self.result(each) for each in [*self.grid()] or alone), key=lambda result: result.seconds)
        layouts = [result for result in layouts if result.plan is not None]
        entries = self._entries(layouts, {}) + self._entries(layouts, {"sharding_stage": 3})
        if self.results:
            of_files = self.result(self._of_files())
            entries += [of_files] if of_files.fits else []
        if not entries:
            entries = [result for result in map(self._shrunk, self.closest[:CLOSEST]) if result.fits]
        tuned = [self._tuned(entry) for entry in _fastest(entries, TUNED)]
        for start in _unlike(tuned, DESCENDED):
            self._descended(start)
        while self.best:
            best = self.best[0]
            if self._descended(self._paired(self._tuned(best))) is best:
                break

    @property
    def best(self) -> list[Result]:
        """Results that are known to fit, fastest first; of equally fast ones, the one that was found first."""
        known = [result for result in self.results.values() if "fits" in vars(result) and result.fits]
        return sorted(known, key=lambda result: result.seconds)

    @property
    def closest(self) -> list[Result]:
        """Legal results that do not fit, of those with the smallest first stages the one that needs least first."""
        known = [result for result in self.results.values() if "fits" in vars(result) and not result.fits]
        small = sorted((each for each in known if each.plan is not None), key=lambda each: each.first_stage)
        return sorted(small[:MEASURED], key=lambda each: each.reserved)

    def grid(self) -> Iterator[Candidate]:
        """Yield the combinations of degrees, with one sample per micro-batch and without recompute."""
        scope, heads = self.scope, self.scope.sizes.num_attention_heads
        offered = {
            "mp_degree": [degree for degree in scope.degrees if degree <= scope.node and heads % degree == 0],
            "pp_degree": [degree for degree in scope.degrees if degree <= scope.sizes.num_layers],
            "cp_degree": scope.contexts,
            "ep_degree": scope.expert_degrees,
            "expert_mp_degree": (None, 1) if scope.sizes.routed_experts else (None,),
        }
        choices = [(self._fixed[name],) if name in self._fixed else tried for name, tried in offered.items()]
        seen = set()
        for mp, pp, cp, ep, emp in product(*choices):
            data, rest = divmod(scope.world_size, mp * pp * cp)
            if rest or scope.batch % data or scope.batch // data < pp or data * cp * mp % ep:
                continue
            values: dict[str, Any] = {"mp_degree": mp, "sequence_parallel": mp > 1, "pp_degree": pp, "cp_degree": cp}
            values |= {"context_parallel_algo": GATHERED} if cp > 1 else {}
            values |= {"ep_degree": ep} if ep > 1 else {}
            values |= {"expert_mp_degree": emp} if emp and mp > 1 else {}
            candidate = Candidate.of({**values, "micro_batch_size": 1, **self._fixed})
            if candidate not in seen:
                seen.add(candidate)
                yield candidate

    def result(self, candidate: Candidate) -> Result:
        """Return the result of a candidate, from before if it was tried."""
        if candidate not in self.results:
            self.results[candidate] = self._try(candidate)
        return self.results[candidate]

    def neighbours(self, candidate: Candidate, knobs: Iterable[Knob] = KNOBS) -> Iterator[Result]:
        """Yield the results of the candidates that differ in one knob; the command line's flags keep their values."""
        seen = {candidate}
        for knob in knobs:
            for other in knob.others(candidate, self.scope):
                changed = other.but(self._fixed)
                if changed not in seen:
                    seen.add(changed)
                    yield self.result(changed)

    def _try(self, candidate: Candidate) -> Result:
        resolved = self._variations.attempt(candidate.flags())
        if isinstance(resolved, list):
            return Result(candidate, None, str(resolved[0]))
        try:
            plan = Plan(resolved, self._kind, self._assumed, shared=self._shared)
            _ = plan.speed
        except ConfigError as error:
            return Result(candidate, None, str(error.complaints[0]))
        return Result(candidate, plan)

    def _entries(self, layouts: Sequence[Result], saving: Mapping[str, Any]) -> list[Result]:
        """Return, for the fastest layouts, the fastest form of recompute that fits.

        Stops at a layout that keeps all activations and is still slower than the slowest of the best entries.
        """
        entries: list[Result] = []
        for layout in layouts:
            if len(entries) >= TUNED and layout.seconds > _fastest(entries, TUNED)[-1].seconds:
                break
            if not self.result(layout.candidate.but({**saving, **LEAST})).fits:
                continue
            forms = (self.result(layout.candidate.but({**saving, **form})) for form in FORMS)
            entries.append(next(result for result in sorted(forms, key=lambda each: each.seconds) if result.fits))
        return entries

    def _tuned(self, start: Result) -> Result:
        """Return the fastest result over micro-batches, schedules and forms of recompute together."""
        few = divisors(max(1, self.scope.sizes.num_layers // start.candidate.get("pp_degree")))
        others = SCHEDULE.others(start.candidate, self.scope)
        schedules = [start.candidate, *(each for each in others if each.get("vpp_degree") in (2, 3, *few))]
        sizes = [each for one in schedules for each in (one, *MICRO_BATCH.others(one, self.scope))]
        sizes = [each for each in sizes if each.get("micro_batch_size") <= LARGEST_TUNED]
        keeping = [each.but({**_NO_RECOMPUTE, **form}) for each in sizes for form in FORMS]
        return self._fastest_that_fits((self.result(each.but(self._fixed)) for each in keeping), start)

    def _paired(self, best: Result) -> Result:
        """Return the fastest result with another degree and another micro-batch, recompute, schedule or stage."""
        near = [each for each in self.neighbours(best.candidate, DEGREES) if each.seconds < best.seconds * NEAR]
        pairs = (pair for each in near for pair in self.neighbours(each.candidate, PAIRED))
        return self._fastest_that_fits(pairs, best)

    def _of_files(self) -> Candidate:
        """Return the layout of the files; replicas outside sharding only if their number is given."""
        values = {name: value for name, value in self._variations.of_files.items() if name in FREE}
        values.pop("sharding_degree", None)
        if "dp_degree" not in values:
            values.pop("hybrid_dp", None)
        return Candidate.of({**values, **self._fixed})

    def _shrunk(self, start: Result) -> Result:
        """Return the result of changing one knob after another to save the most memory, until it fits or none does."""
        best, last = start, None
        while best is not last and not best.fits:
            last = best
            best = min([best, *self.neighbours(best.candidate)], key=lambda result: result.reserved)
        return best

    def _descended(self, start: Result) -> Result:
        """Return the result of setting one knob after another to its fastest value, until none is faster."""
        best, last = start, None
        while best is not last:
            last = best
            for knob in KNOBS:
                best = self._fastest_that_fits(self.neighbours(best.candidate, (knob,)), best)
        return best

    @staticmethod
    def _fastest_that_fits(results: Iterable[Result], best: Result) -> Result:
        faster = (result for result in results if result.seconds < best.seconds * FASTER)
        return next((result for result in sorted(faster, key=lambda each: each.seconds) if result.fits), best)


_NO_RECOMPUTE: Mapping[str, Any] = {
    **{"recompute_interval": 0, "recompute_granularity": "full", "recompute_method": None},
    "recompute_num_layers": None,
}


def _unlike(results: Iterable[Result], count: int) -> list[Result]:
    """Return the fastest results, at most one for each pair of mp and pp, so that the starts are far apart."""
    found: dict[tuple[int, int], Result] = {}
    for result in sorted(results, key=lambda each: each.seconds):
        found.setdefault((result.candidate.get("mp_degree"), result.candidate.get("pp_degree")), result)
    return list(found.values())[:count]


def _fastest(results: Iterable[Result], count: int) -> list[Result]:
    return sorted(results, key=lambda result: result.seconds)[:count]
