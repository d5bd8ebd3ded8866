"""``megapar plan --search``: the fastest legal layout of a model on a cluster that fits, over all knobs.

From coarse to fine. First every combination of degrees (mp, pp, cp, ep) is timed, keeping all activations, with one
sample per micro-batch. The fastest of those that fit, with recompute if they must, are tuned: micro-batch, recompute
and schedule together. From the best of these, one knob after another is set to the value that is fastest and fits,
until no knob has a better one. So the result is never slower than a candidate that differs from it in one knob.

Each candidate passes the command line's rules. Its time is computed before its memory, and its memory only if it is
faster than the best one so far.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import inf
from typing import Any

from megapar.config.config import FLAGS
from megapar.core.context_parallel.positions import GATHERED
from megapar.core.device.kinds import DeviceKind
from megapar.core.units import GIBIBYTE
from megapar.errors import ConfigError
from megapar.planning.assume import Assumed
from megapar.planning.knobs import (
    DEGREES,
    KNOBS,
    MICRO_BATCH,
    NO_RECOMPUTE,
    PAIRED,
    SCHEDULE,
    TRIED_FLAGS,
    Candidate,
    Knob,
    Scope,
)
from megapar.planning.memory import stage_memory
from megapar.planning.plan import Plan
from megapar.planning.planned_run import Shared
from megapar.planning.speed import Speed
from megapar.planning.variation import MISSING, Variations, command_line
from megapar.schema.flag import SCRIPTS
from megapar.schema.rule import divisors

FASTER = 1 - 1e-9  # of two times that differ by less, neither is faster
LARGEST_TUNED = 8  # samples of a micro-batch, before the other knobs are varied
ALIKE = 1.01  # times within this factor are the same: a plan is less exact
NEAR = 1.15  # a layout is slower by at most this factor, so that another knob may make it faster than the best
MEASURED = 20  # layouts of which all stages are computed, if none fits
CLOSEST = 3  # of these, those that are made smaller
TUNED, DESCENDED = 10, 3  # layouts that are tuned, and of these those whose other knobs are varied
LEAST: Mapping[str, Any] = {"recompute_interval": 1}
FORMS: tuple[Mapping[str, Any], ...] = ({}, {"recompute_granularity": "selective"}, LEAST)
SHOWN = 10  # layouts
AS_FAST = "as fast"
MOST_OF_A_FLAG = 2  # values of a flag, next to the fastest layout's
SHORT = {"mp": "mp_degree", "pp": "pp_degree", "cp": "cp_degree", "ep": "ep_degree", "mbs": "micro_batch_size"}


@dataclass
class Result:
    """Result of a candidate.

    Attributes:
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
        fixed: What the command line sets, which no candidate changes.
    """

    def __init__(
        self,
        variations: Variations,
        scope: Scope,
        kind: DeviceKind,
        assumed: Assumed,
        token_budget: float | None = None,
    ) -> None:
        self.scope, self._token_budget = scope, token_budget
        self.results: dict[Candidate, Result] = {}
        self._variations, self._kind, self._assumed, self._shared = variations, kind, assumed, Shared()
        fixed = {name: variations.fixed(name) for name in TRIED_FLAGS}
        self.fixed = {name: value for name, value in fixed.items() if value is not MISSING}

    def run(self) -> None:
        """Search. Without any layout to try, the flags of the command line alone are tried, for their reason."""
        alone = [Candidate.of({"micro_batch_size": 1, **self.fixed})] if self.fixed else []
        timed = _fastest(self.result(candidate) for candidate in [*self.grid()] or alone)
        layouts = [result for result in timed if result.plan is not None]
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
        return _fastest(result for result in self.results.values() if "fits" in vars(result) and result.fits)

    @property
    def offered(self) -> list[Result]:
        """The best results, led by the one to take: of those that are as fast, the one with the fewest flags."""
        best = self.best
        alike = [result for result in best if result.seconds <= best[0].seconds * ALIKE]
        alike.sort(key=lambda result: (len(result.candidate.values), result.reserved))
        return [*alike[:1], *(result for result in best if result is not alike[0])]

    @property
    def closest(self) -> list[Result]:
        """Legal results that do not fit, of those with the smallest first stages the one that needs least first."""
        known = [result for result in self.results.values() if "fits" in vars(result) and not result.fits]
        small = sorted((result for result in known if result.plan is not None), key=lambda result: result.first_stage)
        return sorted(small[:MEASURED], key=lambda result: result.reserved)

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
        choices = [(self.fixed[name],) if name in self.fixed else tried for name, tried in offered.items()]
        seen = set()
        for mp, pp, cp, ep, emp in product(*choices):
            data, rest = divmod(scope.world_size, mp * pp * cp)
            if rest or scope.batch % data or scope.batch // data < pp or data * cp * mp % ep:
                continue
            values: dict[str, Any] = {"mp_degree": mp, "sequence_parallel": mp > 1, "pp_degree": pp, "cp_degree": cp}
            values |= {"context_parallel_algo": GATHERED} if cp > 1 else {}
            values |= {"ep_degree": ep} if ep > 1 else {}
            values |= {"expert_mp_degree": emp} if emp and mp > 1 else {}
            candidate = Candidate.of({**values, "micro_batch_size": 1, **self.fixed})
            if candidate not in seen:
                seen.add(candidate)
                yield candidate

    def result(self, candidate: Candidate) -> Result:
        """Return the result of a candidate, which is tried once."""
        if candidate not in self.results:
            self.results[candidate] = self._try(candidate)
        return self.results[candidate]

    def neighbours(self, candidate: Candidate, knobs: Iterable[Knob] = KNOBS) -> Iterator[Result]:
        """Yield the results of the candidates that differ in one knob; the command line's flags keep their values."""
        seen = {candidate}
        for knob in knobs:
            for other in knob.others(candidate, self.scope):
                changed = other.but(self.fixed)
                if changed not in seen:
                    seen.add(changed)
                    yield self.result(changed)

    def _try(self, candidate: Candidate) -> Result:
        resolved = self._variations.attempt(candidate.flags())
        if isinstance(resolved, list):
            return Result(candidate, None, str(resolved[0]))
        try:
            plan = Plan(resolved, self._kind, self._assumed, self._token_budget, shared=self._shared)
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
            if not self.result(layout.candidate.but({**saving, **LEAST, **self.fixed})).fits:
                continue
            forms = (self.result(layout.candidate.but({**saving, **form, **self.fixed})) for form in FORMS)
            entries.append(next(result for result in _fastest(forms) if result.fits))
        return entries

    def _tuned(self, start: Result) -> Result:
        """Return the fastest result over micro-batches, schedules and forms of recompute together."""
        chunks = {2, 3, *divisors(max(1, self.scope.sizes.num_layers // start.candidate.get("pp_degree")))}
        schedules = [start.candidate, *SCHEDULE.others(start.candidate, self.scope)]
        schedules = [each for each in schedules if each == start.candidate or each.get("vpp_degree") in chunks]
        sizes = [each for schedule in schedules for each in (schedule, *MICRO_BATCH.others(schedule, self.scope))]
        sizes = [each for each in sizes if each.get("micro_batch_size") <= LARGEST_TUNED]
        candidates = (each.but({**NO_RECOMPUTE, **form}).but(self.fixed) for each in sizes for form in FORMS)
        return self._fastest_that_fits(map(self.result, candidates), start)

    def _paired(self, best: Result) -> Result:
        """Return the fastest result with another degree and another micro-batch, recompute, schedule or stage."""
        near = [result for result in self.neighbours(best.candidate, DEGREES) if result.seconds < best.seconds * NEAR]
        pairs = (pair for result in near for pair in self.neighbours(result.candidate, PAIRED))
        return self._fastest_that_fits(pairs, best)

    def _of_files(self) -> Candidate:
        """Return the layout of the files; replicas outside sharding only if their number is given."""
        values = {name: value for name, value in self._variations.of_files.items() if name in TRIED_FLAGS}
        values.pop("sharding_degree", None)
        if "dp_degree" not in values:
            values.pop("hybrid_dp", None)
        return Candidate.of({**values, **self.fixed})

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
        return next((result for result in _fastest(faster) if result.fits), best)


def _unlike(results: Iterable[Result], count: int) -> list[Result]:
    """Return the fastest results, at most one for each pair of mp and pp, so that the starts are far apart."""
    fastest: dict[tuple[int, int], Result] = {}
    for result in _fastest(results):
        fastest.setdefault((result.candidate.get("mp_degree"), result.candidate.get("pp_degree")), result)
    return list(fastest.values())[:count]


def _fastest(results: Iterable[Result], count: int | None = None) -> list[Result]:
    return sorted(results, key=lambda result: result.seconds)[:count]


def describe(search: Search, near: Sequence[Result], command: str) -> str:
    """Format the best layouts, the command of the first, and its neighbours."""
    results, best = search.results.values(), search.offered
    legal = [result.plan for result in results if result.plan is not None]
    lines = [f"{len(results):,} layouts tried, {len(legal):,} legal", ""]
    if not best:
        if not legal:
            return "\n".join([*lines, f"no layout is legal: {_refusal(results)}", ""])
        closest = search.closest[0].plan
        assert closest is not None
        return "\n".join([*lines, f"no layout fits; the closest: {closest.advice()}", ""])
    lines.append(f"{'step s':>9} {'MFU':>6} {'bubble':>7} {'GiB':>6}  layout")
    for result in best[:SHOWN]:
        assert result.plan is not None
        speed, memory = result.plan.speed, result.plan.fullest.reserved / GIBIBYTE
        lines.append(
            f"{speed.step_seconds:9.3f} {speed.mfu:6.1%} {speed.bubble_share:7.1%} {memory:6.1f}  "
            f"{named(result.candidate)}"
        )
    lines += ["", "the command of the first", f"  {command}"]
    lines += ["", "one knob of it changed, and why that is not better", *_reasons(near, best[0])]
    return "\n".join([*lines, ""])


def to_dict(search: Search, near: Sequence[Result], command: str) -> dict[str, Any]:
    """Return the object that ``--json`` prints: the best plans with their flags, the command, and the neighbours."""
    best = search.offered
    shown = [(result.candidate, result.plan) for result in best[:SHOWN] if result.plan is not None]
    plans = [{"flags": candidate.flags(), **plan.to_dict()} for candidate, plan in shown]
    reasons = {_change(result, best[0]): why_not(result, best[0]) for result in near}
    return {"looked_at": len(search.results), "best": plans, "command": command, "neighbours": reasons}


def launch_command(
    candidate: Candidate, variations: Variations, given: Sequence[str], world_size: int, node: int
) -> str:
    """Return the command that starts a candidate, with the files and flags ``given`` for it.

    On several nodes it is run on each: NODE is the node's number, HEAD the address of one of them.
    """
    local = max(ranks for ranks in divisors(world_size) if ranks <= node)  # all nodes have as many
    nodes = world_size // local
    start = f"megapar launch --nproc-per-node {local} "
    start += f"--nnodes {nodes} --node-rank $NODE --rdzv-endpoint $HEAD:29500 " if nodes > 1 else ""
    words = [SCRIPTS[variations.kind], *given, *command_line(variations.unstated(candidate.flags()))]
    if variations.file_world_size not in (None, world_size):
        words += ["--world-size", str(world_size)]
    return start + shlex.join(words)


def why_not(result: Result, best: Result) -> str:
    """Describe why a candidate is not better than the best one."""
    if result.plan is None:
        return result.refusal
    assert best.plan is not None
    if result.seconds * FASTER > best.seconds:
        return f"{result.seconds / best.seconds - 1:.1%} slower: {_slower(result.plan, best.plan)}"
    if not result.fits:
        over = (result.plan.fullest.reserved - result.plan.kind.memory_bytes) / GIBIBYTE
        return f"needs {over:.1f} GiB more than a device has, on stage {result.plan.fullest.stage}"
    return AS_FAST


def why_none(scope: Scope) -> str:
    """Explain why a search has no candidates: the global batch is too small or not divisible."""
    heads = scope.sizes.num_attention_heads
    mps = [degree for degree in scope.degrees if degree <= scope.node and heads % degree == 0]
    used = [mp * cp for mp, cp in product(mps, scope.contexts) if scope.world_size % (mp * cp) == 0]
    least = scope.world_size // max(used)
    return (
        f"no layout of {scope.world_size:,} ranks can share a global batch of {scope.batch:,}: with the highest mp and "
        f"cp that the model allows, one sample for each stage of each data parallel rank is {least:,} samples. Set "
        f"--global-batch-size to a multiple of {least:,}, or use fewer ranks.\n"
    )


def _reasons(near: Sequence[Result], best: Result) -> Iterator[str]:
    """Yield a line for each neighbour, fastest first, and of each flag a few; ``--json`` has all with their reasons.

    The refused ones and those that are as fast are one line.
    """
    refused, equal, shown = [], [], Counter[str]()
    for result in _fastest(near):
        words, reason = _change(result, best), why_not(result, best)
        if result.plan is None:
            refused.append(f"{words} [{result.refusal[1:].partition(']')[0]}]")
        elif reason == AS_FAST:
            equal.append(words)
        else:
            flag = words.split()[0]
            shown[flag] += 1
            if shown[flag] <= MOST_OF_A_FLAG:
                yield f"  {words}: {reason}"
    if more := sum(max(0, count - MOST_OF_A_FLAG) for count in shown.values()):
        yield f"  slower still: {more} more values of these flags"
    if equal:
        yield f"  {AS_FAST}: {'; '.join(equal)}"
    if refused:
        yield f"  refused: {'; '.join(refused)}"


def _change(result: Result, best: Result) -> str:
    """Return the flags in which a candidate differs from the best one, and those that it leaves to the default."""
    changes = result.candidate.differences(best.candidate)
    flags = command_line({name: value for name, value in changes.items() if value is not None})
    unset = [f"without {FLAGS[name].spelling}" for name, value in changes.items() if value is None]
    return " ".join([*flags, *unset])


def named(candidate: Candidate) -> str:
    """Return the degrees and the micro-batch in short, and the other knobs as flags."""
    short = ", ".join(f"{word} {candidate.get(name)}" for word, name in SHORT.items())
    more = {name: value for name, value in candidate.flags().items() if name not in SHORT.values()}
    return f"{short}  {' '.join(command_line(more))}".rstrip()


def _refusal(results: Iterable[Result]) -> str:
    """Return a refusal by the rule that refuses most."""
    refusals = [result.refusal for result in results]
    most, _ = Counter(text.partition("]")[0] for text in refusals).most_common(1)[0]
    return next(text for text in refusals if text.startswith(most))


def _slower(plan: Plan, best: Plan) -> str:
    """Describe the part of the time that grew most."""
    slow, fast = _parts(plan.speed), _parts(best.speed)
    name = max(slow, key=lambda part: slow[part] - fast[part])
    return f"{name} {slow[name]:.3g} s, not {fast[name]:.3g}"


def _parts(speed: Speed) -> dict[str, float]:
    """Return the parts of a step, whose sum it is."""
    parts = {
        "the bubble takes": speed.fill_seconds,
        "messages between stages take": speed.hop_seconds,
        "exposed communication takes": speed.exposed_seconds - speed.hop_seconds,
        "the optimizer takes": speed.optimizer_seconds,
        "waits for slower ranks take": speed.jitter_seconds,
    }
    return {"products and other operators take": speed.step_seconds - sum(parts.values()), **parts}
