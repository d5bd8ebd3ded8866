"""``megapar plan``: legality, ranks, memory, traffic and time of a configuration, from its flags; nothing is started.

megapar plan --config configs/gpt-117m.yaml --device-kind v100-32g [--world-size N] [FLAGS]
megapar plan --show-schedule [--svg FILE] [--chunk-costs] pretrain_moe.py --world-size 4 --pp-degree 4 ...
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megapar.arguments import FLAGS, SCRIPTS, Config, parse, resolved_values
from megapar.config.read import about
from megapar.config.report import refusal
from megapar.core.device.kinds import DeviceKind
from megapar.core.pipeline.schedule import Schedule
from megapar.core.pipeline.simulate import Simulation
from megapar.errors import Complaint, ConfigError, MegaparError
from megapar.files.disk import write_file
from megapar.planning.assume import Assumed
from megapar.tools.parser import Parser, count

if TYPE_CHECKING:
    from megapar.planning.plan import Plan
    from megapar.planning.search import Result, Search
    from megapar.planning.variation import Variations

MODELS = {"moe": ("moe", ()), "ernie": ("ernie", ()), "ernie3": ("ernie", ("--ernie-model", "ernie3"))}
DEFAULT_KIND = "h100-80g"
DOES_NOT_FIT = 3
REFUSED = 2


class OutputError(MegaparError):
    """A file that was asked for cannot be written."""


def main(argv: Sequence[str]) -> int:
    """Run the plan. Return the exit status: 0 planned, 3 planned but does not fit, 2 refused, 1 anything else."""
    args, flags = make_parser().parse_known_args(list(argv))
    try:
        return _run(args, flags)
    except ConfigError as error:
        sys.stderr.write(refusal(error.complaints))
        return ConfigError.exit_status
    except MegaparError as error:
        sys.stderr.write(f"megapar plan: {error}\n")
        return error.exit_status


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command's own options. It leaves the flags of the trainer unparsed."""
    parser = Parser(
        prog="megapar plan",
        description="Plan a configuration: legality, ranks, memory, traffic, time. Flags that are not listed here are "
        "those of the trainer: megapar pretrain moe --help.",
        examples=(
            "--config mixtral-8x7b --world-size 64",
            "--config mixtral-8x7b --world-size 64 --search --write fastest.yaml",
            "--config llama-3-8b --device-kind h200 --html plan.html",
        ),
        epilog="Exit status: 0 planned, 3 planned but does not fit (--search: no layout fits), 2 refused (--search: no "
        "layout is legal), 1 if a trace fails or a file cannot be written.",
    )
    add = parser.add_argument
    add("--model", choices=sorted(MODELS), help="the model of the flags that follow (default: the file's, else moe)")
    add(
        "--config",
        action="append",
        default=[],
        help="a YAML file of flags, which may also set script, world_size, device_kind and assume; later files "
        "override earlier ones",
    )
    add("--world-size", type=count, help="number of ranks (default: the file's, else 1)")
    add("--device-kind", default=None, help=f"a row of the device table (default: the file's, else {DEFAULT_KIND})")
    help_text = "techniques that only the plan supports (docs/plan.md); may be repeated"
    add("--assume", action="extend", nargs="+", type=str.split, default=[], metavar="TECHNIQUE", help=help_text)
    add(
        "--software",
        choices=("megapar", "megatron"),
        default="megapar",
        help="whose costs of operators: this package's, or Megatron-LM's with its fused kernels, which published runs "
        "are predicted with",
    )
    add(
        "--expert-imbalance",
        default="1",
        metavar="FACTOR|FILE",
        help="rows of the busiest expert rank, relative to the mean of all; or a run's metrics.experts.jsonl, from "
        "which they are estimated (default: 1, balanced)",
    )
    add("--token-budget", type=_tokens, metavar="TOKENS", help="tokens of the whole run (default: from --train-iters)")
    _add_outputs(parser)
    return parser


def _tokens(text: str) -> float:
    """Parse a number of tokens. Raises ArgumentTypeError unless it is finite and above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of tokens")
    return value


def _add_outputs(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose what is computed beyond the plan, and how it is printed."""
    add = parser.add_argument
    add("--json", action="store_true", help="print one JSON object")
    add("--trace", action="store_true", help="also run a step of the real trainer as one rank, on fake tensors (torch)")
    add("--trace-rank", type=int, default=0, metavar="RANK", help="with --trace: the rank to run (default: 0)")
    add("--ranks", action="store_true", help="also list the ranks of all process groups")
    add("--timeline", action="store_true", help="also draw one layer: its work, and its messages on each link")
    add(
        "--search",
        action="store_true",
        help="find the fastest layouts of this model, batch and number of ranks; flags on the command line are kept",
    )
    add(
        "--html",
        type=Path,
        metavar="FILE",
        help="also write a page: memory, step, a layer, ranks, with --search all layouts",
    )
    add(
        "--write", type=Path, metavar="FILE.yaml", help="with --search: write the fastest layout as a file for --config"
    )
    add("--show-schedule", action="store_true", help="draw the pipeline schedule instead")
    add("--svg", type=Path, help="with --show-schedule: also write the drawing to this file")
    add(
        "--chunk-costs",
        action="store_true",
        help="with --show-schedule: derive the time of each chunk from its FLOPs, instead of equal times",
    )


def _refuse_unused(args: argparse.Namespace) -> None:
    """Raise ConfigError for options that say nothing of what is printed."""
    schedule, search = args.show_schedule, args.search
    unused = [("--write", args.write, not search), ("--html", args.html, schedule), ("--ranks", args.ranks, schedule)]
    unused += [("--ranks", args.ranks, search), ("--ranks", args.ranks, args.json), ("--svg", args.svg, not schedule)]
    drawn = [("--timeline", args.timeline), ("--trace", args.trace), ("--token-budget", args.token_budget and schedule)]
    unused += [(name, given, schedule or search) for name, given in drawn]
    unused += [("--chunk-costs", args.chunk_costs, not schedule), ("--trace-rank", args.trace_rank, not args.trace)]
    unused += [("--json", args.json, schedule), ("--search", search, schedule)]
    names = dict.fromkeys(name for name, given, without in unused if given and without)
    if names:
        message = f"{', '.join(names)}: no effect here."
        fix = (
            "--write is for --search; --svg and --chunk-costs are for --show-schedule, which takes none of the others; "
            "--timeline, --trace and --ranks are for a plan, --ranks not as JSON, --trace-rank with --trace."
        )
        raise ConfigError([Complaint("plan-unused", message, fix)])


def _run(args: argparse.Namespace, flags: list[str]) -> int:
    _refuse_unused(args)
    header = about(args.config)
    model, flags = _model(args.model, flags, header.script)
    kind, more = MODELS[model]
    # A plan reads no data or checkpoint, even if a pasted command line has --validate-only.
    files = [part for path in args.config for part in ("--config", path)]
    line = [*files, *more, *flags, "--no-validate-only"]
    world = args.world_size or resolved_values(kind, line, {}).get("world_size", 1)
    from megapar.planning.assume import assumed, expert_imbalance, imbalance_of_any
    from megapar.planning.devices import check_named, device_kind

    named = args.device_kind or header.device_kind
    device = device_kind(named or DEFAULT_KIND)
    words = [word for several in args.assume for word in several]
    assumption = replace(assumed(words or header.assume), software=args.software)
    if args.search:
        assumption = replace(assumption, expert_imbalance=imbalance_of_any(args.expert_imbalance))
        return _search(kind, line, world, device, assumption, named, args)
    from megapar.training.building.epochs import with_known_epochs

    config = with_known_epochs(_parsed(kind, line, world))
    if args.show_schedule:
        return _show(config, args, device)
    check_named(config, named)
    from megapar.planning.plan import Plan

    load = expert_imbalance(args.expert_imbalance, config.model.routed_experts, config.grid.ep)
    plan = Plan(config, device, replace(assumption, expert_imbalance=load), args.token_budget)
    record, text = _described(plan, args)
    sys.stdout.write(json.dumps(record) + "\n" if args.json else text)
    if args.html is not None:
        from megapar.tools.run_page.plan_page import plan_page

        _write(args.html, plan_page(plan))
    return 0 if plan.fits else DOES_NOT_FIT


def _described(plan: Plan, args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """Return the object of --json and the text, with what else was asked for."""
    from megapar.planning.devices import device_kind
    from megapar.planning.text import describe

    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
    record = plan.to_dict() if args.json else {}
    text = "" if args.json else describe(plan, groups=args.ranks, width=width)
    if args.timeline:
        from megapar.planning.text import layer_timeline

        drawn = layer_timeline(plan.run)
        record["timeline"] = drawn.to_dict()
        text += drawn.describe(width)
    if args.trace:
        from megapar.tools.tracing.trace import trace

        traced = trace(plan.run.settled, args.trace_rank)
        same = type(plan)(traced.config, device_kind("cpu"))
        record["trace"] = traced.to_dict()
        text += "\n" + traced.describe(same.memory[traced.stage].peak, same.traffic[traced.stage])
    return record, text


def _write(path: Path, text: str) -> None:
    """Write an output file, complete or not at all. Raises MegaparError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path if path.exists() and not path.is_file() else path.resolve(), text.encode(errors="replace"))
    except OSError as error:
        raise OutputError(f"{path} cannot be written: {error.strerror or error}") from error
    sys.stderr.write(f"wrote {path}\n")


def _search(
    kind: str, line: list[str], world: int, device: DeviceKind, assumed: Assumed, named: str, args: argparse.Namespace
) -> int:
    """Print the best layouts for this number of ranks. Knobs of files are searched, those of the line are kept."""
    from megapar.planning.devices import check_named
    from megapar.planning.knobs import DROPPED, Scope
    from megapar.planning.search import Search, describe, launch_command, to_dict, why_none
    from megapar.planning.variation import Variations
    from megapar.training.building.device_choices import assumed_node

    config = _without_layout(kind, line)
    check_named(config, named)
    variations = Variations(kind, line, world, free=[name for name in DROPPED if kind in FLAGS[name].models])
    latent = variations.setting("multi_latent_attention") is True
    node = config.parallel.ranks_per_node or device.node
    scope = Scope(kind, config.model, world, node, config.training.global_batch_size, latent)
    search = Search(variations, scope, device, assumed, args.token_budget)
    search.run()
    if not search.results:
        sys.stderr.write(why_none(scope))
        return REFUSED
    near, command = [], ""
    if search.best:
        best = search.offered[0]
        near = list(search.neighbours(best.candidate))
        local = config.parallel.ranks_per_node or assumed_node(device, world)
        command = launch_command(best.candidate, variations, line[:-1], world, local)
    text = json.dumps(to_dict(search, near, command)) + "\n" if args.json else describe(search, near, command)
    sys.stdout.write(text)
    if search.best:
        _write_best(search, best, variations, command, args)
        return 0
    return DOES_NOT_FIT if any(result.plan is not None for result in search.results.values()) else REFUSED


def _write_best(search: Search, best: Result, variations: Variations, command: str, args: argparse.Namespace) -> None:
    """Write the page of a search and the file of its fastest layout, if they were asked for."""
    if args.html is not None and best.plan is not None:
        from megapar.tools.run_page.plan_page import plan_page

        _write(args.html, plan_page(best.plan, search, command))
    if args.write is not None:
        from megapar.tools.configs import yaml_of

        world = search.scope.world_size
        header = f"# The fastest layout of megapar plan --search on {world:,} ranks; pass it after your own --config.\n"
        settings = {"world_size": world, **search.fixed, **variations.unstated(best.candidate.flags())}
        unset = "".join(f"{name}: null\n" for name, value in settings.items() if value is None)
        _write(args.write, f"{header}script: {SCRIPTS[variations.kind]}\n" + yaml_of(settings) + unset)


def _without_layout(kind: str, line: list[str]) -> Config:
    """Return the configuration on one rank with default knobs. Raises ConfigError for flags wrong in any layout."""
    from megapar.planning.knobs import DROPPED
    from megapar.planning.variation import command_line

    values = resolved_values(kind, [*line, "--rules-only"], {})
    if not values["requested"].get("global_batch_size"):
        message = "--search compares layouts of one global batch size, which is not set."
        raise ConfigError([Complaint("search", message, "Set --global-batch-size.")])
    knobs = {name: FLAGS[name].defaults[kind] for name in DROPPED if kind in FLAGS[name].models}
    one_rank = command_line({**knobs, "micro_batch_size": 1, "world_size": 1})
    return parse(kind, [*line, *one_rank, "--rules-only"], {}, planning=True)


def _model(requested: str | None, flags: list[str], file_script: str) -> tuple[str, list[str]]:
    """Return the model kind, from --model, a script's name among the flags, or the file; and the other flags."""
    scripts = {script: kind for kind, script in SCRIPTS.items()}
    named = [flag for flag in flags if flag in scripts]
    rest = [flag for flag in flags if flag not in scripts]
    if requested:
        return requested, rest
    script = named[0] if named else file_script
    return scripts.get(script, "moe"), rest


def _parsed(kind: str, line: list[str], world: int) -> Config:
    """Return the configuration. Raises ConfigError with every complaint and the nearest legal layouts."""
    try:
        return parse(kind, [*line, "--rules-only", "--world-size", str(world)], {}, planning=True)
    except ConfigError as error:
        from megapar.planning.variation import hints

        near = hints(kind, line, world)
        if not near:
            raise
        text = "Nearest legal layouts: " + "; ".join(near) + "."
        raise ConfigError([*error.complaints, Complaint("nearest", text)]) from None


def _show(config: Config, args: argparse.Namespace, device: DeviceKind) -> int:
    text, svg = show_schedule(config, chunk_costs=args.chunk_costs, device=device)
    sys.stdout.write(text)
    if args.svg is not None and svg:  # a single stage has no drawing
        _write(args.svg, svg)
    return 0


def show_schedule(config: Config, *, chunk_costs: bool = False, device: DeviceKind | None = None) -> tuple[str, str]:
    """Return the schedule of one step as text and as SVG. Raises ConfigError if the model cannot be cut into stages.

    device: Its waiting receives slow computations down. None: they do not.
    """
    # The orders of the schedules need torch, unlike the rest of this module.
    from megapar.core.pipeline import draw
    from megapar.core.pipeline.lookahead import schedule_ahead
    from megapar.core.pipeline.simulate import RUNNERS, Costs, bubble_formula, check, simulate
    from megapar.training.building.partition import effective_schedule, make_stages, pipeline_layers, pipeline_outline

    sizes = config.model
    if config.grid.pp == 1:
        return "one stage: no pipeline, no bubble\n", ""
    stages, layers = make_stages(config, sizes), pipeline_layers(sizes)
    name, vpp = effective_schedule(config), config.pipeline.vpp_degree
    ahead = None if device is None else device.device_class.receives_ahead
    schedule = schedule_ahead(name, config.grid.pp, vpp, config.sharding.gradient_merge_acc_step, ahead)
    check(schedule)
    costs = Costs()
    if chunk_costs:
        flops = [layers.cost(chunk) for chunk in stages.chunks]
        costs = Costs(chunks=tuple(cost * len(flops) / sum(flops) for cost in flops))
    simulation = simulate(schedule, costs, RUNNERS)
    formula = None if chunk_costs else bubble_formula(name, config.grid.pp, vpp, schedule.num_micro_batches)
    facts = _facts(schedule, simulation, formula)
    if device is not None and max(device.device_class.beside_queues) > 1.0:
        slower = simulate(schedule, replace(costs, beside=device.device_class.beside_queues), RUNNERS)
        facts += _held(device, slower.end / simulation.end)
    title = f"{name}, {config.grid.pp} stages x {vpp} chunks, {schedule.num_micro_batches} micro-batches"
    svg = draw.as_svg(schedule, simulation, f"{title}: bubble {simulation.bubble_share:.1%}")
    return f"{pipeline_outline(config, sizes)}{title}\n{draw.as_text(schedule, simulation)}{facts}", svg


def _held(device: DeviceKind, slower: float) -> str:
    shared = device.device_class
    posted = "at once" if shared.receives_ahead is None else f"{shared.receives_ahead} computations ahead"
    return (
        f"receives are posted {posted}; beside kernels that wait for or move messages, {shared.queue_blocks} "
        f"multiprocessors each, a step takes {slower:.2f} of this time ({device.name})\n"
    )


def _facts(schedule: Schedule, simulation: Simulation, formula: float | None) -> str:
    split = "input gradients 1, weight gradients 1" if schedule.splits_backward else "a backward 2"
    expected = "" if formula is None else f" (formula: {formula:.1%})"
    in_flight = ", ".join(map(str, simulation.in_flight))
    return (
        f"time: {simulation.end:g} units; a forward takes 1, {split}\n"
        f"bubble: {simulation.bubble_share:.1%}{expected}\n"
        f"micro-batches (of a chunk) in flight, maximum per stage: {in_flight}\n"
        "no deadlock: every message can wait for its receiver\n"
    )
