"""Plan of a configuration on a kind of device: memory, traffic, time."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import cached_property, partial
from typing import Any

from megapar.arguments import Config
from megapar.config.config import FLAGS, NOT_BUILT_NOTE
from megapar.config.draft import is_given
from megapar.core.device.kinds import DeviceKind, fp8_needs
from megapar.core.units import GIBIBYTE
from megapar.errors import Complaint, ConfigError
from megapar.model.spec import ParameterCounts
from megapar.planning.assume import NO_FORMULA, Assumed
from megapar.planning.calibration import COMPARED
from megapar.planning.memory import StageMemory, stage_memory
from megapar.planning.planned_run import PlannedRun, Shared
from megapar.planning.speed import Speed, predict
from megapar.planning.traffic import Link, host_traffic, link, stage_traffic
from megapar.planning.variation import LEFT_OPEN, changed, differing, widened
from megapar.schema.phase_plan import PhaseSpan
from megapar.schema.rule import divisors
from megapar.training.building.device_choices import with_figures

SECONDS_PER_DAY = 86400
MOST_DOUBLED = 10
_AXES = ("dp", "pp", "sharding", "cp", "mp", "ep", "emp")
_WHOLE = dict.fromkeys(("recompute_method", "recompute_num_layers")) | {"recompute_granularity": "full"}
_FULL: Mapping[str, Any] = {**_WHOLE, "recompute_interval": 1}
_STAGE_2, _STAGE_3 = ({"sharding_stage": stage, "gradient_merge_mode": "micro_batch"} for stage in (2, 3))
_SAVINGS: Mapping[str, Mapping[str, Any]] = {
    "--recompute-granularity selective": {"recompute_granularity": "selective"},
    "--recompute-interval 1": _FULL,
    "--sharding-stage 2": _STAGE_2,
    "--sharding-stage 3": _STAGE_3,
    "--optimizer-offload": {"optimizer_offload": True},
    "--recompute-interval 1 --optimizer-offload": {**_FULL, "optimizer_offload": True},
}
"""Settings that need less memory, by their flags."""


class Plan:
    """Memory, traffic and time of a configuration. Raises ConfigError for an assumed technique without its pipeline,
    and for settings whose cost no formula gives.

    Attributes:
        kind: Kind of the devices, with the figures that flags replace.
        run: Input of the formulas; of several phases of the data, that with the longest samples.

    Args:
        token_budget: Tokens of the whole run; None for those of ``--train-iters``.
        shared: Parts that it has in common with other plans of a search.
    """

    def __init__(
        self,
        config: Config,
        kind: DeviceKind,
        assumed: Assumed | None = None,
        token_budget: float | None = None,
        shared: Shared | None = None,
    ) -> None:
        kind, assumed = with_figures(kind, config), assumed or Assumed()
        if complaints := [*assumed.complaints(config, kind), *_unpriced(config, kind)]:
            raise ConfigError(complaints)
        self.config = config
        self.kind = kind
        self._reached = [span for span, _ in config.phases.until(config.training.train_iters)]
        self.run = PlannedRun(config.longest, kind, assumed, shared or Shared())
        self._token_budget = token_budget

    @cached_property
    def memory(self) -> tuple[StageMemory, ...]:
        """Memory of each pipeline stage, in the phase of the data that needs most there."""
        runs = [self.run]
        if self.config.data.data_phases:
            runs = [PlannedRun(self.config.of_phase(span), self.kind, self.run.assumed) for span in self._reached]
        stages = range(self.config.grid.pp)
        return tuple(max((stage_memory(run, stage) for run in runs), key=lambda held: held.peak) for stage in stages)

    @cached_property
    def traffic(self) -> tuple[dict[str, float], ...]:
        """Traffic of each pipeline stage: bytes that a rank sends in a step, by "axis/kind"."""
        return tuple(stage_traffic(self.run, stage) for stage in range(self.config.grid.pp))

    @cached_property
    def host_traffic(self) -> dict[str, float]:
        """Bytes per step between host and device of the rank that copies most, by "host/kind"."""
        copied: dict[str, float] = {}
        for stage in range(self.config.grid.pp):
            for name, size in host_traffic(self.run, stage).items():
                copied[name] = max(copied.get(name, 0.0), size)
        return copied

    @cached_property
    def speed(self) -> Speed:
        """Time of a step."""
        return predict(self.run)

    @cached_property
    def fullest(self) -> StageMemory:
        """Memory of the stage that needs most."""
        return max(self.memory, key=lambda stage: stage.reserved)

    @property
    def compared(self) -> bool:
        """True if plans for this kind of device are compared with published runs; others take those devices' shares."""
        return self.kind.name in COMPARED

    @property
    def fits(self) -> bool:
        """True if the fullest stage fits into a device's memory."""
        return self.fullest.reserved <= self.kind.memory_bytes

    @cached_property
    def counts(self) -> ParameterCounts:
        """Number of parameters of the model, including assumed techniques."""
        return self.run.parameter_counts

    @property
    def tokens_per_step(self) -> int:
        """Tokens of the global batch."""
        return self.run.config.training.global_batch_size * self.run.sizes.seq_length

    @property
    def token_budget(self) -> float:
        """Tokens of the whole run."""
        return self._token_budget or self.config.phases.after(self.config.training.train_iters).first_position

    @cached_property
    def phase_seconds(self) -> tuple[tuple[PhaseSpan, int, float], ...]:
        """(Phase, its steps, the time of each) of the phases of the data that the run reaches; () without phases."""
        reached = self.config.phases.until(self.config.training.train_iters) if self.config.data.data_phases else ()
        found = []
        for span, end in reached:
            run = PlannedRun(self.config.of_phase(span), self.kind, self.run.assumed)
            found.append((span, end.first_step - span.first_step, predict(run).step_seconds))
        return tuple(found)

    @property
    def days(self) -> float:
        """Days of the whole run, without interruptions."""
        seconds = self.token_budget / self.speed.tokens_per_second
        if self.phase_seconds and not self._token_budget:
            seconds = sum(steps * each for _, steps, each in self.phase_seconds)
        return seconds / SECONDS_PER_DAY

    def link(self, axis: str) -> Link:
        """Return the placement of a group's ranks on nodes."""
        return link(self.config.grid, axis, self.run.node)

    @cached_property
    def crossing(self) -> tuple[dict[str, float], dict[str, float]]:
        """Bytes per step of the rank that sends most, by "axis/kind": (inside a node, between nodes)."""
        inside: dict[str, float] = {}
        between: dict[str, float] = {}
        for stage in self.traffic:
            for name, size in stage.items():
                axis, kind = name.split("/")
                outside = self.link(axis).outside(kind)
                inside[name] = max(inside.get(name, 0.0), size * (1 - outside))
                between[name] = max(between.get(name, 0.0), size * outside)
        return inside, between

    def advice(self) -> str:
        """Describe how much memory is missing, and settings that would fit; "" if the plan fits."""
        if self.fits:
            return ""
        over = self.fullest.reserved - self.kind.memory_bytes
        text = (
            f"stage {self.fullest.stage} needs {_gib(self.fullest.reserved)}, {_gib(over)} more than the "
            f"{_gib(self.kind.memory_bytes)} of {self.kind.title}"
        )
        options = [f"{flags}: {_gib(plan.fullest.reserved)}" for flags, plan in self._with_savings() if plan.fits]
        if options:
            return f"{text}; it would fit with {', or '.join(options[:4])}"
        wider = self._wider()
        text += "; full recompute, sharded parameters and offloaded optimizer state are not enough on this many ranks: "
        text += f"it would fit on {wider}, or " if wider else "use more ranks, or "
        return text + "split more (--mp-degree, --pp-degree, --ep-degree); --search finds layouts"

    def _wider(self) -> str:
        """Describe the smallest doubling of the ranks on which the model fits, with the flags; "" if there is none."""
        worlds = [self.config.grid.world_size << doubled for doubled in range(1, MOST_DOUBLED + 1)]
        sharded = {**_FULL, **_STAGE_3}
        ways = {"--recompute-interval 1": _FULL, "--recompute-interval 1 --sharding-stage 3": sharded}
        if mp := self._largest_mp(sharded, worlds):
            text = f"--recompute-interval 1 --sharding-stage 3 --mp-degree {mp} --sequence-parallel"
            ways[text] = {**sharded, "mp_degree": mp, "sequence_parallel": True}
        options = []
        for text, flags in ways.items():
            legal = [ranks for ranks in worlds if widened(self.config, flags, ranks) is not None]
            place = bisect_left(legal, True, key=partial(self._fits_on, flags))
            if place < len(legal):
                options.append((legal[place], self._worded(text)))
        given = [FLAGS[name] for name in LEFT_OPEN if is_given(self.config.origins.get(name))]
        words = [one.negation if self.config.value(one.name) in (False, "off") else one.spelling for one in given]
        without = f", without {' and '.join(words)}" if words else ""
        return "{} ranks with {}".format(*min(options)) + without if options else ""

    def _worded(self, text: str) -> str:
        """Return flags that have the effect of ``text`` behind the run's own."""
        now, more = self.config.recompute, "--recompute-interval 1"
        more += " --recompute-granularity full" * (now.recompute_granularity != "full")
        more += " --recompute-method None --recompute-num-layers None" * (now.recompute_method is not None)
        mode = self.config.sharding.gradient_merge_mode if "--sharding-stage" in text else "micro_batch"
        return text.replace("--recompute-interval 1", more) + " --gradient-merge-mode micro_batch" * (mode == "step")

    def _largest_mp(self, flags: Mapping[str, Any], worlds: Sequence[int]) -> int:
        """Return the largest degree of mp inside a node that the rules accept on some world; 0 if there is none.

        A node may have any number of devices, 72 in an NVL72, which rarely divides heads, widths and positions.
        """
        for mp in reversed([degree for degree in divisors(worlds[-1]) if 1 < degree <= self.kind.node]):
            more = {**flags, "mp_degree": mp, "sequence_parallel": True}
            if any(widened(self.config, more, ranks) is not None for ranks in worlds):
                return mp
        return 0

    def _fits_on(self, flags: Mapping[str, Any], ranks: int) -> bool:
        config = widened(self.config, flags, ranks)
        try:
            return config is not None and Plan(config, self.kind, self.run.assumed).fits
        except ConfigError:  # nodes that do not fit a requested dispatch
            return False

    def _with_savings(self) -> Iterator[tuple[str, Plan]]:
        """Yield the legal plans of this run with settings that need less memory, and the flags of these."""
        tried = []
        for text, flags in _SAVINGS.items():
            config, new = changed(self.config, flags), differing(self.config, flags)
            if config is not None and new not in tried:
                tried.append(new)
                yield self._worded(text), Plan(config, self.kind, self.run.assumed)

    def to_dict(self) -> dict[str, Any]:
        """Return the object that ``--json`` prints, in bytes, seconds and shares."""
        inside, between = self.crossing
        world = self.config.grid.world_size
        return {
            "device_kind": self.kind.name,
            "device_figures": list(self.kind.replaced),
            "device_compared": self.compared,
            "world_size": world,
            "layout": {axis: self.config.grid.size(axis) for axis in _AXES},
            "software": self.run.assumed.software,
            "assumed": list(self.run.assumed.words),
            "expert_imbalance": self.run.assumed.expert_imbalance,
            "dispatch": self.run.dispatch.name,
            "fits": self.fits,
            "advice": self.advice(),
            "memory_limit_bytes": self.kind.memory_bytes,
            "memory_bytes": [asdict(stage) for stage in self.memory],
            "vocab_size": self.config.model.vocab_size,
            "parameters": self.counts.total,
            "active_parameters": self.counts.active,
            "training_parameters": self.run.training_parameters,
            "model_flops_per_step": self.speed.flops,
            "extra_flops_per_step": self.speed.extra_flops,
            "mfu": self.speed.mfu,
            "step_seconds": self.speed.step_seconds,
            "tokens_per_second_per_device": self.speed.tokens_per_second / world,
            "bubble_share": self.speed.bubble_share,
            "exposed_communication_seconds": self.speed.exposed_seconds,
            "newton_schulz_seconds": self.speed.newton_schulz_seconds,
            "matrix_message_seconds": self.speed.matrix_seconds,
            "traffic_bytes": {
                name: {
                    "sent": max(stage.get(name, 0.0) for stage in self.traffic),
                    "inside_nodes": inside[name],
                    "between_nodes": between[name],
                    "ranks": self.link(name.split("/")[0]).ranks,
                    "nodes": self.link(name.split("/")[0]).nodes,
                }
                for name in sorted(inside)
            },
            "host_bytes": self.host_traffic,
            "tokens_per_step": self.tokens_per_step,
            "token_budget": self.token_budget,
            "days": self.days,
            "phases": [
                {"first_step": span.first_step, "steps": steps, "seq_length": span.seq_length, "step_seconds": seconds}
                for span, steps, seconds in self.phase_seconds
            ],
        }


def _gib(size: float) -> str:
    return f"{size / GIBIBYTE:.1f} GiB"


def _unpriced(config: Config, kind: DeviceKind) -> Iterator[Complaint]:
    """Yield the settings whose cost no formula gives."""
    for note in config.notes:
        if note.startswith(NOT_BUILT_NOTE):
            missing = note.removeprefix(NOT_BUILT_NOTE)
            yield Complaint(NO_FORMULA, f"A plan has no formula for what megapar does not run: {missing}")
    if config.recompute.adaptive_recompute_device_size > 0:
        yield Complaint(
            NO_FORMULA,
            "--adaptive-recompute-device-size chooses the layers by what the run measures, which a plan does not know.",
            "Plan --recompute-interval 1, which needs the least memory, and no recompute, which is the fastest.",
        )
    if config.ampipe.ampipe_degree == 0:
        yield Complaint(
            NO_FORMULA,
            "--ampipe-degree auto chooses the degree by what the run measures, which a plan does not know.",
            "Plan --ampipe-degree 1, 2 and 4, which are what it chooses from.",
        )
    recipe = config.training.fp8_recipe
    if config.training.fp8 and (needed := fp8_needs(kind.capability, recipe)):
        yield Complaint(
            NO_FORMULA,
            f"--fp8-recipe {recipe} is for GPUs of {needed}, and {kind.title} is another kind.",
            "Leave --fp8 out, choose another recipe or --device-kind, or plan fp8 of any form: --assume fp8.",
        )
