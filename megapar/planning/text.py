"""Text form of a plan, the page that ``megapar plan`` prints."""

from __future__ import annotations

from collections.abc import Iterator

from megapar.config.compilation import compilation
from megapar.config.report import group_lines
from megapar.config.vocab_size import source_of_rows
from megapar.core.units import GIBIBYTE, billions
from megapar.planning.plan import Plan
from megapar.training.building.attention_backend import attention_kernels

SHOWN_STAGES = 16


def describe(plan: Plan) -> str:
    """Format the page that ``megapar plan`` prints."""
    return "\n".join([*_head(plan), *_ranks(plan), *_memory(plan), *_traffic(plan), *_speed(plan), ""])


def _head(plan: Plan) -> Iterator[str]:
    counts, grid = plan.counts, plan.config.grid
    active = f", {billions(counts.active)} active per token" if counts.active != counts.total else ""
    yield f"megapar plan: {grid.world_size} x {plan.kind.title}, {billions(counts.total)} parameters{active}"
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
    fullest = f"{_gib(plan.fullest.reserved)} of {_gib(plan.kind.memory_bytes)} on stage {plan.fullest.stage}"
    yield f"fits ({fullest})" if plan.fits else f"DOES NOT FIT: {plan.advice()}"


def _ranks(plan: Plan) -> Iterator[str]:
    yield ""
    yield "ranks"
    yield f"  {plan.config.grid.describe()}"
    for line in group_lines(plan.config.grid):
        yield f"  {line}"


def _memory(plan: Plan) -> Iterator[str]:
    names = ("parameters", "gradients", "optimizer", "activations", "buffers", "peak", "groups", "reserved", "host")
    yield ""
    yield "memory of a rank, GiB        " + "".join(f"{name:>12}" for name in names) + "  highest"
    stages = plan.memory
    shown = stages if len(stages) <= SHOWN_STAGES else (*stages[: SHOWN_STAGES - 3], *stages[-3:])
    for memory in shown:
        chunks = plan.run.stages.on(memory.stage)
        layers = sum(len(chunk.layers) for chunk in chunks)
        ends = (" +emb" if any(c.first for c in chunks) else "") + (" +head" if any(c.last for c in chunks) else "")
        label = f"stage {memory.stage}: {layers} layers{ends}"
        cells = "".join(f"{getattr(memory, name) / GIBIBYTE:12.2f}" for name in names)
        yield f"  {label:27}{cells}  in {memory.moment}"
    if len(shown) < len(stages):
        yield f"  ({len(stages) - len(shown)} stages left out)"


def _traffic(plan: Plan) -> Iterator[str]:
    inside, between = plan.crossing
    yield ""
    yield "bytes a rank sends in a step             ranks  nodes     inside nodes    between nodes"
    if not inside:
        yield "  nothing"
    for name in sorted(inside):
        link = plan.link(name.split("/")[0])
        yield f"  {name:38} {link.ranks:6} {link.nodes:6} {_gib(inside[name]):>16} {_gib(between[name]):>16}"
    for name, size in plan.host_traffic.items():
        yield f"  {name:51} {_gib(size):>16}"


def _speed(plan: Plan) -> Iterator[str]:
    speed, world = plan.speed, plan.config.grid.world_size
    yield ""
    yield f"time (predicted; {_accuracy(plan)})"
    yield f"  step           {speed.step_seconds:.3f} s for {plan.tokens_per_step:,} tokens"
    yield f"  bubble         {speed.bubble_share:.1%} of the pipeline"
    yield f"  exposed        {speed.exposed_seconds:.3f} s of communication, optimizer {speed.optimizer_seconds:.3f} s"
    yield f"  model FLOPs    {speed.flops:.4g} per step"
    if speed.extra_flops:
        share = speed.extra_flops / speed.flops
        yield f"  extra FLOPs    {speed.extra_flops:.4g} per step ({share:.1%}): keys and values, made of latents again"
    yield f"  MFU            {speed.mfu:.1%} of {_teraflops(plan.kind.peak(plan.run.dtype))}"
    yield f"  tokens/s       {speed.tokens_per_second:,.0f}, {speed.tokens_per_second / world:,.0f} per device"
    yield f"  whole run      {_time(plan.days)} for {plan.token_budget:.4g} tokens"


def _accuracy(plan: Plan) -> str:
    if plan.compared:
        return "see benchmarks/prediction for the accuracy"
    return f"no run on {plan.kind.name} was compared: it is taken to reach the same share of its peak as an H100"


def _gib(size: float) -> str:
    return f"{size / GIBIBYTE:.3g} GiB"


def _teraflops(rate: float) -> str:
    """Format the FLOP/s of a device; a CPU may have less than 1 TFLOP/s."""
    return f"{rate / 1e12:.0f} TFLOP/s" if rate >= 1e13 else f"{rate / 1e12:.2g} TFLOP/s"


def _time(days: float) -> str:
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
