"""``megapar plan``: what a configuration will do, from its flags alone; nothing is started.

megapar plan --config configs/gpt-117m.yaml --device-kind v100-32g [--world-size N] [FLAGS]
megapar plan --show-schedule [--svg FILE] [--chunk-costs] pretrain_moe.py --world-size 4 --pp-degree 4 ...
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from megapar.arguments import SCRIPTS, Config, parse, resolved_values
from megapar.config.read import about
from megapar.config.report import refusal
from megapar.core.device.kinds import DeviceKind
from megapar.core.pipeline.schedule import Schedule
from megapar.core.pipeline.simulate import Simulation
from megapar.errors import Complaint, ConfigError, MegaparError
from megapar.planning.assume import Assumed
from megapar.tools.parser import Parser, count

MODELS = {"moe": ("moe", ()), "ernie": ("ernie", ()), "ernie3": ("ernie", ("--ernie-model", "ernie3"))}
DEFAULT_KIND = "h100-80g"
DOES_NOT_FIT = 3


def main(argv: Sequence[str]) -> int:
    """0 planned, 3 planned and does not fit, 2 refused, 1 where a trace fails."""
    asked, flags = _parser().parse_known_args(list(argv))
    try:
        return _run(asked, flags)
    except ConfigError as error:
        sys.stderr.write(refusal(error.complaints))
        return ConfigError.exit_status
    except MegaparError as error:
        sys.stderr.write(f"megapar plan: {error}\n")
        return error.exit_status


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="megapar plan",
        description="Say what a configuration will take: legality, ranks, memory, traffic, time. Flags that are not "
        "listed here are the trainers'.",
        epilog="Exit status: 0 planned, 3 planned and does not fit, 2 refused, 1 where a trace fails.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--model", choices=sorted(MODELS), help="whose flags follow (default: what the file says, else moe)")
    add(
        "--config",
        action="append",
        default=[],
        help="a YAML file of flags; it may say script, world_size, device_kind and assume, too; a later one wins",
    )
    add("--world-size", type=count, help="ranks (default: what the file says, else 1)")
    add("--device-kind", default=None, help=f"a row of the device table (default: the file's, else {DEFAULT_KIND})")
    add("--assume", action="append", default=[], metavar="TECHNIQUE", help="a technique that only the plan knows")
    add("--token-budget", type=float, metavar="TOKENS", help="of the whole run (default: that of --train-iters)")
    add("--json", action="store_true", help="print one JSON object")
    add("--trace", action="store_true", help="also run a step of the real trainer as one rank, on fake tensors (torch)")
    add("--trace-rank", type=int, default=0, metavar="RANK", help="with --trace: which rank (default: 0)")
    add(
        "--launches",
        action="store_true",
        help="also count a GPU's kernels, products and bytes per layer, and host waits (torch)",
    )
    add("--search", action="store_true", help="find the best layouts of this model, batch and number of ranks")
    add("--show-schedule", action="store_true", help="draw the pipeline schedule instead")
    add("--svg", type=Path, help="with --show-schedule: write the drawing to this file, too")
    add(
        "--chunk-costs",
        action="store_true",
        help="with --show-schedule: let every chunk take the time of its FLOPs, not all the same",
    )
    return parser


def _run(asked: argparse.Namespace, flags: list[str]) -> int:
    said_of = about(asked.config)
    model, flags = _model(asked.model, flags, said_of.script)
    kind, more = MODELS[model]
    # A plan looks at no file, whatever a pasted line asks for.
    files = [part for path in asked.config for part in ("--config", path)]
    line = [*files, *more, *flags, "--no-validate-only"]
    world = asked.world_size or resolved_values(kind, line, {}).get("world_size", 1)
    from megapar.planning.assume import assumed
    from megapar.planning.devices import device_kind

    device = device_kind(asked.device_kind or said_of.device_kind or DEFAULT_KIND)
    words = asked.assume or said_of.assume
    if asked.search:
        return _search(kind, line, world, device, assumed(words), as_json=asked.json)
    config = _parsed(kind, line, world)
    if asked.show_schedule:
        return _show(config, asked)
    from megapar.planning.plan import Plan
    from megapar.planning.text import describe

    plan = Plan(config, device, assumed(words), asked.token_budget)
    said, text = plan.to_dict() if asked.json else {}, "" if asked.json else describe(plan)
    if asked.trace:
        from megapar.tools.tracing.trace import trace

        found = trace(config, asked.trace_rank)
        same = Plan(found.config, device_kind("cpu"))
        said["trace"] = found.to_dict()
        text += "\n" + found.describe(same.memory[found.stage].peak, same.traffic[found.stage])
    if asked.launches:
        from megapar.tools.tracing.budget import budget

        counted = budget(config)
        said |= counted.to_dict()
        text += counted.describe() + "\n"
    sys.stdout.write(json.dumps(said) + "\n" if asked.json else text)
    return 0 if plan.fits else DOES_NOT_FIT


def _search(kind: str, line: list[str], world: int, device: DeviceKind, assumed: Assumed, *, as_json: bool) -> int:
    """The layouts of this many ranks; what the flags ask for is not looked at."""
    from megapar.planning.search import describe, neighbours, search, to_dict, why_none

    config = _without_layout(kind, line)
    found = search(config, device, assumed, world)
    if not found.results:
        sys.stderr.write(why_none(config, device, world))
        return 2
    near = neighbours(found, config, device, assumed, world)
    sys.stdout.write(json.dumps(to_dict(found, near)) + "\n" if as_json else describe(found, near, device))
    return 0


def _without_layout(kind: str, line: list[str]) -> Config:
    """The model and the batch, as one process would have them; raises for what is wrong beside the layout."""
    alone = [
        "--mp-degree",
        "1",
        "--pp-degree",
        "1",
        "--sharding-degree",
        "1",
        "--no-hybrid-dp",
        "--dp-degree",
        "1",
        "--no-sequence-parallel",
    ]
    alone += ["--cp-degree", "1", "--context-parallel-algo", "megatron_cp_algo"]
    alone += ["--vpp-degree", "1", "--pp-schedule", "1f1b", "--pp-seg-method", "uniform", "--micro-batch-size", "1"]
    if kind == "moe":
        alone += ["--ep-degree", "1", "--expert-mp-degree", "1"]
    asked = resolved_values(kind, [*line, "--rules-only"], {})
    batch = asked["asked"].get("global_batch_size")
    if not batch:
        message = "--search compares layouts of one global batch, and none is given."
        raise ConfigError([Complaint("search", message, "Give --global-batch-size.")])
    alone += ["--gradient-merge-acc-step", str(batch)]
    alone += ["--world-size", "1"]
    return parse(kind, [*line, *alone, "--rules-only"], {}, planning=True)


def _model(asked: str | None, flags: list[str], said: str) -> tuple[str, list[str]]:
    """The model kind, from the flag, a script's name among the flags, or what the file says; and the other flags."""
    scripts = {script: kind for kind, script in SCRIPTS.items()}
    named = [flag for flag in flags if flag in scripts]
    rest = [flag for flag in flags if flag not in scripts]
    if asked:
        return asked, rest
    script = named[0] if named else said
    return scripts.get(script, "moe"), rest


def _parsed(kind: str, line: list[str], world: int) -> Config:
    """The configuration, or every complaint with the nearest legal layouts."""
    try:
        return parse(kind, [*line, "--rules-only", "--world-size", str(world)], {}, planning=True)
    except ConfigError as error:
        from megapar.planning.nearest import hints

        near = hints(kind, line, world)
        if not near:
            raise
        text = "Nearest legal layouts: " + "; ".join(near) + "."
        raise ConfigError([*error.complaints, Complaint("nearest", text)]) from None


def _show(config: Config, asked: argparse.Namespace) -> int:
    text, svg = show_schedule(config, chunk_costs=asked.chunk_costs)
    sys.stdout.write(text)
    if asked.svg is not None:
        asked.svg.write_text(svg)
        sys.stdout.write(f"wrote {asked.svg}\n")
    return 0


def show_schedule(config: Config, *, chunk_costs: bool = False) -> tuple[str, str]:
    """(text, SVG) of the schedule of one step. Raises ConfigError where the model cannot be cut."""
    # The schedules' orders come from torch, which nothing else here needs.
    from megapar.core.pipeline import draw
    from megapar.core.pipeline.schedule import make_schedule
    from megapar.core.pipeline.simulate import RUNNERS, Costs, bubble_formula, check, simulate
    from megapar.training.building.stages import effective_schedule, make_stages, outline, pipeline_layers

    sizes = config.model
    if config.grid.pp == 1:
        return "one stage: no pipeline, no bubble\n", ""
    stages, layers = make_stages(config, sizes), pipeline_layers(sizes)
    name, vpp = effective_schedule(config), config.pipeline.vpp_degree
    schedule = make_schedule(name, config.grid.pp, vpp, config.sharding.gradient_merge_acc_step)
    check(schedule)
    costs = Costs()
    if chunk_costs:
        own = [layers.cost(chunk) for chunk in stages.chunks]
        costs = Costs(chunks=tuple(cost * len(own) / sum(own) for cost in own))
    simulation = simulate(schedule, costs, RUNNERS)
    formula = None if chunk_costs else bubble_formula(name, config.grid.pp, vpp, schedule.num_micro_batches)
    facts = _facts(schedule, simulation, formula)
    title = f"{name}, {config.grid.pp} stages x {vpp} chunks, {schedule.num_micro_batches} micro-batches"
    svg = draw.as_svg(schedule, simulation, f"{title}: bubble {simulation.bubble_share:.1%}")
    return f"{outline(config, sizes)}{title}\n{draw.as_text(schedule, simulation)}{facts}", svg


def _facts(schedule: Schedule, simulation: Simulation, formula: float | None) -> str:
    split = "input gradients 1, weight gradients 1" if schedule.splits_backward else "a backward 2"
    said = "" if formula is None else f" (formula: {formula:.1%})"
    kept = ", ".join(map(str, simulation.in_flight))
    return (
        f"time: {simulation.end:g} units; a forward takes 1, {split}\n"
        f"bubble: {simulation.bubble_share:.1%}{said}\n"
        f"micro-batches (of a chunk) kept at once, per stage: {kept}\n"
        "no deadlock: every message can wait for its receiver\n"
    )
