"""Text forms of a plan: the page that ``megapar plan`` prints, and the drawing of a layer (``--timeline``)."""

from __future__ import annotations

import textwrap
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from megapar.config.compilation import compilation
from megapar.config.report import group_lines
from megapar.config.vocab_size import source_of_rows
from megapar.core.units import GIBIBYTE, billions
from megapar.planning.operator_time import OperatorTime
from megapar.planning.plan import Plan
from megapar.planning.planned_run import PlannedRun
from megapar.planning.speed import beside_receives
from megapar.planning.stage_time import StagePrograms
from megapar.planning.timeline import LINKS, Bar
from megapar.planning.traffic import recompute_messages
from megapar.training.building.attention_backend import attention_kernels

SHOWN_STAGES = 16


def describe(plan: Plan, *, groups: bool = False, width: int = 0) -> str:
    """Format the page that ``megapar plan`` prints: the verdict, what it assumes, ranks, memory, messages, time.

    Args:
        groups: List the ranks of all process groups.
        width: Characters of a line. 0: as many as the tables need.
    """
    parts = (
        _verdict(plan),
        _assumptions(plan),
        _ranks(plan, groups),
        _memory(plan, width),
        _traffic(plan),
        _time(plan),
    )
    return "\n".join([line for part in parts for line in part] + [""])


def verdict(plan: Plan) -> dict[str, str]:
    """Return what a plan says in short: whether it fits, and how fast it is."""
    world, speed = plan.config.grid.world_size, plan.speed
    fullest = f"{_gib(plan.fullest.reserved)} of {_gib(plan.kind.memory_bytes)} on stage {plan.fullest.stage}"
    hours = f"{plan.days * 24 * world:,.0f} device-hours"
    return {
        **({"fits": fullest} if plan.fits else {"DOES NOT FIT": plan.advice()}),
        "step": f"{speed.step_seconds:.3f} s for {plan.tokens_per_step:,} tokens",
        "MFU": f"{speed.mfu:.1%} of {_teraflops(plan.kind.peak(plan.run.dtype))}",
        "tokens/s": f"{speed.tokens_per_second:,.0f}, {speed.tokens_per_second / world:,.0f} per device",
        "whole run": f"{_duration(plan.days)}, {hours}, for {billions(round(plan.token_budget))} tokens",
    }


def _verdict(plan: Plan) -> Iterator[str]:
    counts, world = plan.counts, plan.config.grid.world_size
    active = f", {billions(counts.active)} active per token" if counts.active != counts.total else ""
    yield f"megapar plan: {world} x {plan.kind.title}, {billions(counts.total)} parameters{active}"
    for name, value in verdict(plan).items():
        yield f"  {name:15}{value}"


def _assumptions(plan: Plan) -> Iterator[str]:
    grid = plan.config.grid
    yield ""
    if more := plan.run.training_parameters:
        yield f"multi-token prediction: {billions(more)} parameters more, in training only"
    yield f"vocabulary: {plan.config.model.vocab_size:,} rows ({_source_of_rows(plan)})"
    yield f"compiled functions: {compilation(plan.config, plan.kind.device_class.compiler)}"
    yield f"software: {plan.run.assumed.software}"
    if grid.ep > 1:
        yield f"load of expert ranks: {_load(plan)}"
    yield f"attention: {attention_kernels(plan.config, plan.kind)}"
    if plan.config.grid.ep > 1:
        yield f"dispatch of experts: {plan.run.dispatch.describe()}"
    for word in plan.run.assumed.words:
        yield f"ASSUMED, megapar does not run this: {word}"
    for note in plan.config.notes:
        yield f"note: {note}"
    for warning in plan.config.warnings:
        yield f"warning: {warning}"


def _ranks(plan: Plan, groups: bool) -> Iterator[str]:
    yield ""
    yield "ranks" if groups else "ranks (--ranks lists those of all groups)"
    yield f"  {plan.config.grid.describe()}"
    for line in group_lines(plan.config.grid) if groups else ():
        yield f"  {line}"


_COLUMNS = ("parameters", "gradients", "optimizer", "activations", "buffers", "peak", "groups", "reserved", "host")
_SHORT = ("param", "grad", "optim", "activ", "buffers", "peak", "groups", "reserved", "host")


def _memory(plan: Plan, width: int) -> Iterator[str]:
    """Yield the table of stages. A narrow one has short names and no empty column; below 110, no layers or moments."""
    stages = plan.memory
    shown = stages if len(stages) <= SHOWN_STAGES else (*stages[: SHOWN_STAGES - 3], *stages[-3:])
    narrow, bare = 0 < width < 150, 0 < width < 110
    columns = [
        (name, f"{short if narrow else name:>{max(7, len(short) + 1) if narrow else 12}}")
        for name, short in zip(_COLUMNS, _SHORT, strict=True)
        if not narrow or any(getattr(memory, name) for memory in stages)
    ]
    label_width = 18 if bare else 27
    yield ""
    title = "GiB of a rank" if bare else "memory of a rank, GiB"
    yield f"{title:{label_width + 2}}" + "".join(title for _, title in columns) + ("" if bare else "  highest")
    for memory in shown:
        chunks = plan.run.stages.on(memory.stage)
        layers = "" if bare else f": {sum(len(chunk.layers) for chunk in chunks)} layers"
        ends = (" +emb" if any(c.first for c in chunks) else "") + (" +head" if any(c.last for c in chunks) else "")
        label = f"stage {memory.stage}{layers}{ends}"
        cells = "".join(f"{getattr(memory, name) / GIBIBYTE:{len(title)}.2f}" for name, title in columns)
        yield f"  {label:{label_width}}{cells}" + ("" if bare else f"  in {memory.moment}")
    if len(shown) < len(stages):
        yield f"  ({len(stages) - len(shown)} stages left out)"


def _traffic(plan: Plan) -> Iterator[str]:
    inside, between = plan.crossing
    yield ""
    yield "bytes a rank sends in a step   ranks  nodes    inside nodes   between nodes"
    if not inside:
        yield "  nothing"
    for name in sorted(inside):
        link = plan.link(name.split("/")[0])
        yield f"  {name:28} {link.ranks:6} {link.nodes:6} {_gib(inside[name]):>15} {_gib(between[name]):>15}"
    for name, size in plan.host_traffic.items():
        yield f"  {name:42} {_gib(size):>15}"


def _time(plan: Plan) -> Iterator[str]:
    speed = plan.speed
    yield ""
    yield f"time (predicted; {_accuracy(plan)})"
    yield f"  bubble         {speed.bubble_share:.1%} of the pipeline"
    if (beside := max(beside_receives(plan.run, stage) for stage in range(plan.config.grid.pp))) > 1.0:
        blocks = plan.kind.device_class.queue_blocks
        yield f"  receives       wait on {blocks} multiprocessors each; others take {beside:.2f} times as long"
    yield f"  exposed        {speed.exposed_seconds:.3f} s of communication, optimizer {speed.optimizer_seconds:.3f} s"
    if plan.run.with_matrices:
        iterations, sent = (part / speed.step_seconds for part in (speed.newton_schulz_seconds, speed.matrix_seconds))
        yield (
            f"  Newton-Schulz  {speed.newton_schulz_seconds:.3f} s, {iterations:.2%} of a step; "
            f"its messages take {sent:.2%} of the link's time"
        )
    yield f"  model FLOPs    {speed.flops:.4g} per step"
    if speed.extra_flops:
        share = speed.extra_flops / speed.flops
        yield f"  extra FLOPs    {speed.extra_flops:.4g} per step ({share:.1%}): keys and values, made of latents again"
    if plan.run.config.training.fp8:
        peak, fp8 = plan.kind.peak(plan.run.dtype), plan.kind.peak("fp8")
        yield f"  of fp8's peak  {speed.mfu * peak / fp8:.1%} of {_teraflops(fp8)}"
    for number, (span, steps, seconds) in enumerate(plan.phase_seconds, 1):
        step = f"{span.batch.final:,} x {span.seq_length:,} tokens"
        yield f"  phase {number:<9}{steps:,} steps of {seconds:.3f} s for {step}"


def _accuracy(plan: Plan) -> str:
    if plan.compared:
        return "see benchmarks/prediction for the accuracy"
    return f"no run on {plan.kind.name} was compared: it is taken to reach the same share of its peak as an H100"


def _gib(size: float) -> str:
    return f"{size / GIBIBYTE:.3g} GiB"


def _teraflops(rate: float) -> str:
    """Format the FLOP/s of a device; a CPU may have less than 1 TFLOP/s."""
    return f"{rate / 1e12:.0f} TFLOP/s" if rate >= 1e13 else f"{rate / 1e12:.2g} TFLOP/s"


def _duration(days: float) -> str:
    """Format a duration in days, or in a smaller unit below two days."""
    if days >= 2:
        return f"{days:.2f} days"
    minutes = days * 24 * 60
    if minutes >= 120:
        return f"{minutes / 60:.1f} hours"
    return f"{minutes:.1f} minutes" if minutes >= 2 else f"{minutes * 60:.3g} seconds"


def _load(plan: Plan) -> str:
    factor = plan.run.assumed.expert_imbalance
    return "balanced" if factor == 1 else f"the busiest has {factor:g} times the mean of all"


def _source_of_rows(plan: Plan) -> str:
    config = plan.config
    values = {
        "data_path": config.data.data_path,
        "tokenizer_model": config.data.tokenizer_model,
        "load": config.checkpoint.load,
        "load_hf": config.checkpoint.load_hf,
        "ckpt_step": config.checkpoint.ckpt_step,
    }
    return source_of_rows(config.origins["vocab_size"], values)


WIDTH = 100  # characters of a lane, if the lines of a drawing may be as long as they need
INDENT = 15  # characters before a lane
LANES = ("compute", "wait", *LINKS)
CHAIN = 4  # units that are run where slices pass between layers, the last but one of which is drawn
LEGEND = (
    "D dispatch, C combine, g all-gather, r reduce-scatter, s all-reduce, a all-to-all, k keys and values; "
    "' gradients; slice.piece"
)


@dataclass(frozen=True)
class Drawing:
    """One direction of the layer: what each lane does, from 0."""

    seconds: float
    bars: tuple[Bar, ...]

    @property
    def busy(self) -> dict[str, float]:
        """Share of the time in which each lane is in use."""
        sums: defaultdict[str, float] = defaultdict(float)
        for bar in self.bars:
            sums[bar.lane] += (bar.end - bar.start) / self.seconds
        return {lane: sums[lane] for lane in LANES if sums[lane]}

    def to_dict(self) -> dict[str, Any]:
        """Return the object of ``--json``."""
        events = [{"lane": b.lane, "name": label(b), "start": b.start, "end": b.end} for b in self.bars]
        return {"seconds": self.seconds, "busy_shares": self.busy, "events": events}


@dataclass(frozen=True)
class LayerTimeline:
    """One layer.

    Attributes:
        name: Kind of layer.
        backward: Its backward, with the recomputation of its unit.
    """

    name: str
    forward: Drawing
    backward: Drawing

    def to_dict(self) -> dict[str, Any]:
        """Return the object of ``--json``."""
        return {"layer": self.name, "forward": self.forward.to_dict(), "backward": self.backward.to_dict()}

    def describe(self, width: int = 0) -> str:
        """Draw the layer as text, in lines of ``width`` characters (0: of a good one)."""
        lane_width = min(WIDTH, width - INDENT) if width else WIDTH
        legend = textwrap.wrap(LEGEND, (width or len(LEGEND) + 2) - 2)
        lines = ["", f"timeline of a {self.name} layer and one micro-batch", *(f"  {line}" for line in legend)]
        for title, drawing in (("forward", self.forward), ("backward", self.backward)):
            shares = ", ".join(f"{lane.replace('_', ' ')} {share:.0%}" for lane, share in drawing.busy.items())
            lines.append(f"  {title}: {drawing.seconds * 1e3:.3f} ms; {shares}")
            lines += [f"    {lane.replace('_', ' '):10}{_lane(drawing, lane, lane_width)}" for lane in drawing.busy]
        return "\n".join([*lines, ""])


def layer_timeline(run: PlannedRun) -> LayerTimeline:
    """Run the layer's program and keep what each lane does."""
    programs = StagePrograms(run, OperatorTime(run))
    chunk = run.stages.on(0)[0]
    units = programs.units(chunk, recompute_messages(run, 0))
    with_experts = [unit for unit in units if any(layer.name == "moe" for layer in unit.layers)] or units
    unit = with_experts[len(with_experts) // 2]
    if not programs.passes_slices:
        there, back = programs.draw([unit])
        forward, backward = _cut(there.bars, 0.0, there.now), _cut(back.bars, 0.0, back.now)
    else:  # from the start of one layer to the start of the next
        there, back = programs.draw([unit] * CHAIN)
        forward = _cut(there.bars, _start(there.bars, CHAIN - 2), _start(there.bars, CHAIN - 1))
        backward = _cut(back.bars, _start(back.bars, 1), _start(back.bars, 0))
    return LayerTimeline(unit.layers[-1].name, forward, backward)


def _start(bars: Sequence[Bar], unit: int) -> float:
    """Return the start of a unit's first work."""
    return min(b.start for b in bars if b.lane == "compute" and b.name.partition("|")[2].split(".")[0] == str(unit))


def _cut(bars: Sequence[Bar], start: float, end: float) -> Drawing:
    """Return what lanes do between two times."""
    inside = (bar for bar in bars if bar.start < end and bar.end > start)
    moved = (Bar(b.lane, b.name, max(b.start, start) - start, min(b.end, end) - start) for b in inside)
    return Drawing(end - start, tuple(_merged(sorted(moved, key=lambda bar: (bar.lane, bar.start)))))


def _merged(bars: Sequence[Bar]) -> Iterator[Bar]:
    """Yield the bars, consecutive ones of one label as one."""
    last: Bar | None = None
    for bar in bars:
        if last is not None and (last.lane, last.end, label(last)) == (bar.lane, bar.start, label(bar)):
            last = last._replace(end=bar.end)
            continue
        if last is not None:
            yield last
        last = bar
    if last is not None:
        yield last


def label(bar: Bar) -> str:
    """Return the name without the place of the layer: the slice first; of a message inside an operator, its kind."""
    name, _, place = bar.name.partition("|")
    if " " in place and bar.lane != "compute":
        return place.partition(" ")[2].rstrip("0123456789")
    what, _, number = name.partition(" ")
    return f"{number} {what}".strip()


def _lane(drawing: Drawing, lane: str, characters: int) -> str:
    """Draw one lane."""
    cells = [" "] * characters
    for bar in drawing.bars:
        if bar.lane != lane:
            continue
        first = min(characters - 1, round(bar.start / drawing.seconds * characters))
        width = max(1, min(characters, round(bar.end / drawing.seconds * characters)) - first)
        text = (label(bar) + "-" * width)[: width - 1] + "|" if width > 1 else label(bar)[0]
        cells[first : first + width] = text
    return "".join(cells[:characters]).rstrip()
