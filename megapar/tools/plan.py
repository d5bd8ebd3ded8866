"""``megapar plan``: what a configuration will do, from its flags alone; nothing is started.

megapar plan --show-schedule [--svg FILE] [--chunk-costs] pretrain_moe.py --world-size 4 --pp-degree 4 ...
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from megapar.arguments import SCRIPTS, Config, parse
from megapar.config.report import refusal
from megapar.core.pipeline import draw
from megapar.core.pipeline.schedule import Schedule, make_schedule
from megapar.core.pipeline.simulate import Costs, Simulation, bubble_formula, check, simulate
from megapar.errors import ConfigError
from megapar.training.sizes import make_sizes
from megapar.training.stages import effective_schedule, make_stages, outline, pipeline_layers


def main(argv: Sequence[str]) -> int:
    """0 drawn, 2 refused."""
    parser = argparse.ArgumentParser(prog="megapar plan", description="Show what a configuration will do.")
    parser.add_argument("--show-schedule", action="store_true", required=True, help="draw the pipeline schedule")
    parser.add_argument("--svg", type=Path, help="write the drawing to this file, too")
    parser.add_argument(
        "--chunk-costs", action="store_true", help="let every chunk take the time of its FLOPs, not all the same"
    )
    parser.add_argument("script", choices=sorted(SCRIPTS.values()), help="whose flags follow")
    parser.add_argument("flags", nargs=argparse.REMAINDER)
    asked = parser.parse_args(list(argv))
    kind = next(kind for kind, script in SCRIPTS.items() if script == asked.script)
    try:
        config = parse(kind, [*asked.flags, "--validate-only"], {})
        text, svg = show_schedule(config, chunk_costs=asked.chunk_costs)
    except ConfigError as error:
        sys.stderr.write(refusal(error.complaints))
        return ConfigError.exit_status
    sys.stdout.write(text)
    if asked.svg is not None:
        asked.svg.write_text(svg)
        sys.stdout.write(f"wrote {asked.svg}\n")
    return 0


def show_schedule(config: Config, *, chunk_costs: bool = False) -> tuple[str, str]:
    """(text, SVG) of the schedule of one step. Raises ConfigError where the model cannot be cut."""
    sizes = make_sizes(config)
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
    simulation = simulate(schedule, costs)
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
