"""Texts for the terminal: --help, a refusal, and of --validate-only the configuration with origins, ranks, groups."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice, product
from typing import Any

from megapar.config.config import FLAGS, GROUPS, Config
from megapar.core.grid import DENSE_AXES, EXPERT_AXES, Grid
from megapar.errors import Complaint
from megapar.files.uri import masked
from megapar.schema.flag import SCRIPTS, Flag

WIDTH = 100


def signature(flag: Flag) -> str:
    """Return the flag as it is written, with a placeholder for its value."""
    if flag.type == "bool":
        return flag.spelling
    if flag.type == "switch":
        return f"{flag.spelling} [{'|'.join(flag.choices)}]"
    if flag.choices:
        return f"{flag.spelling} {{{','.join(str(choice) for choice in flag.choices)}}}"
    if flag.each:
        return f"{flag.spelling} VALUE"
    if flag.takes_list:
        return f"{flag.spelling} {'A,B,...' if flag.comma else 'VALUE ...'}"
    return f"{flag.spelling} {flag.type.upper()}"


def default_text(flag: Flag, kind: str) -> str:
    """Return the default as it is written, or the source that it is derived from."""
    value: Any = flag.defaults[kind]
    if value is None:
        return f"from {flag.derived}" if flag.derived else "none"
    return written(value, flag) + (f" ({flag.derived})" if flag.derived and not flag.name.endswith("_size") else "")


def written(value: Any, flag: Flag | None = None) -> str:
    """Return a value as it is written on a command line or in a file, without the secrets of URIs."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return ("," if flag is not None and flag.comma else " ").join(masked(str(item)) for item in value) or "none"
    if value is None:
        return "none"
    for word, number in flag.words.items() if flag is not None else ():
        if value == number:
            return word
    return f"{value:g}" if isinstance(value, float) else masked(str(value))


def describe(flag: Flag, kind: str) -> str:
    """Return help, unit, default and other spellings on one line."""
    unit = f" [{flag.unit}]" if flag.unit else ""
    negates = not flag.takes_value and not flag.spelling.startswith("--no-")
    off = f"; off: --no-{flag.spelling[2:]}" if negates else ""
    also = "; also " + ", ".join("--" + alias.name for alias in flag.aliases) if flag.aliases else ""
    return f"{flag.help}{unit} (default: {default_text(flag, kind)}{off}{also})"


def help_text(kind: str) -> str:
    """Return the complete help page of one trainer."""
    lines = [
        f"usage: python {SCRIPTS[kind]} [--config NAME|FILE.yaml] [FLAGS]",
        f"       megapar launch --nproc-per-node N {SCRIPTS[kind]} [FLAGS]",
        f"       or, without a checkout, pretrain {kind} in place of the script: megapar pretrain {kind} [FLAGS]",
        "",
        "megapar configs lists the names of configurations.",
        "The last of repeated flags wins, and the command line overrides YAML files. --no-FLAG turns a switch off.",
    ]
    for group, listed in GROUPS.items():
        flags = [flag for flag in FLAGS.values() if flag.group == group and kind in flag.models]
        if not flags:
            continue
        lines += ["", f"{group}: {listed.title}"]
        for flag in flags:
            lines.append(f"  {signature(flag)}")
            lines += textwrap.wrap(
                describe(flag, kind),
                WIDTH,
                initial_indent=" " * 6,
                subsequent_indent=" " * 6,
                break_long_words=False,
                break_on_hyphens=False,
            )
    return "\n".join(lines) + "\n"


WHOLE_WORLD = 64
FEW_GROUPS = 3
FEW_RANKS = 4


def refusal(complaints: Sequence[Complaint]) -> str:
    """Return the report of all complaints."""
    count = len(complaints)
    lines = [f"megapar: the configuration is refused ({count} complaint{'s' if count > 1 else ''}):"]
    return "\n".join([*lines, *(f"  {complaint}" for complaint in complaints)]) + "\n"


def effective(config: Config) -> str:
    """Return every value with its origin, the batch, the ranks and the groups."""
    ranks = f"{config.grid.world_size} rank{'s' if config.grid.world_size > 1 else ''}"
    result = f"is accepted for {ranks}"
    if config.runtime.rules_only:
        result = f"satisfies the rules for {ranks}; files were only read for the model's sizes"
    lines = [f"megapar: {SCRIPTS[config.kind]} {result}"]
    values = config.values()
    for group in GROUPS:
        flags = [flag for flag in FLAGS.values() if flag.group == group and config.kind in flag.models]
        lines += ["", group] if flags else []
        for flag in flags:
            value = written(values[flag.name], flag)
            lines.append(f"  {flag.spelling:40} {value:32} {config.origins[flag.name]}")
    training, data_ranks = config.training, config.grid.data_ranks
    lines += [
        "",
        "batch",
        f"  {training.global_batch_size} sequences = micro-batch {training.micro_batch_size} x "
        f"{config.sharding.gradient_merge_acc_step} micro-batches x {data_ranks} data ranks; "
        f"{training.global_batch_size * config.model.seq_length} tokens per step",
        *("", "phases") * bool(config.data.data_phases),
        *(f"  {line}" for line in phase_lines(config)),
        "",
        "ranks",
        f"  {config.grid.describe()}",
        *(f"  {line}" for line in group_lines(config.grid)),
    ]
    return "\n".join(lines) + "\n"


def phase_lines(config: Config) -> Iterator[str]:
    """Yield a line for each phase of the data that the run reaches, and for each that it does not."""
    if not config.data.data_phases:
        return
    reached = list(config.phases.until(config.training.train_iters))
    for number, span in enumerate(config.phases.spans):
        weights = ", ".join(f"{name} {float(weight):g}" for name, weight in span.weights)
        rate = "" if span.rate is None else f", lr to {span.rate.to:g} ({span.rate.style})"
        place = f"after {span.first_step:,} steps, {span.first_sample:,} samples and {span.first_position:,} positions"
        size = "not reached"
        if number < len(reached):
            end = reached[number][1]
            steps, count = end.first_step - span.first_step, end.first_position - span.first_position
            size = f"{steps:,} steps of {span.batch.final:,} x {span.seq_length:,}, {count:,} positions"
        yield f"{place if number else 'from the start'}: {weights}; {size}{rate}"


def remarks(config: Config) -> str:
    """Return warnings and notes, which are printed last so that they are not overlooked."""
    lines: list[str] = []
    for title, texts in (("warnings", config.warnings), ("notes", (*config.notes, *config.reminders))):
        lines += ["", title, *(f"  {text}" for text in texts)] if texts else []
    return "\n".join(lines) + "\n" if lines else ""


def group_lines(grid: Grid) -> Iterator[str]:
    """Yield a line per axis larger than 1: number and size of its groups, and their ranks (a few if there are many)."""
    for axis in (*DENSE_AXES, *EXPERT_AXES[1:]):
        size = grid.size(axis)
        if size == 1:
            continue
        whole = grid.world_size <= WHOLE_WORLD
        count = grid.world_size // size
        shown = list(_groups(grid, axis, count if whole else FEW_GROUPS, size if whole else FEW_RANKS))
        more = [] if len(shown) == count else ["..."]
        yield f"{axis} {size}: {count} group{'s' if count > 1 else ''}: {' | '.join([*shown, *more])}"


def _groups(grid: Grid, axis: str, count: int, ranks: int) -> Iterator[str]:
    """Yield the first groups along an axis as text, by arithmetic whose cost does not depend on the world size."""
    view = EXPERT_AXES if axis in EXPERT_AXES[1:] else grid.order
    others = [name for name in view if name != axis]
    for values in islice(product(*(range(min(grid.size(name), count)) for name in others)), count):
        at = dict(zip(others, values, strict=True))
        size = grid.size(axis)
        members: Iterable[int] = range(size) if size <= ranks else range(ranks - 1)
        texts = [str(_rank(grid, {**at, axis: place})) for place in members]
        yield " ".join(texts if size <= ranks else [*texts, "...", str(_rank(grid, {**at, axis: size - 1}))])


def _rank(grid: Grid, at: dict[str, int]) -> int:
    """Return the global rank at coordinates of the dense or the expert mesh."""
    if "edp" not in at:
        return grid.rank(**at)
    flat = (at["edp"] * grid.ep + at["ep"]) * grid.emp + at["emp"]
    dense = {"pp": at["pp"]}
    for axis in ("mp", "cp", "sharding", "dp"):
        flat, dense[axis] = divmod(flat, grid.size(axis))
    return grid.rank(**dense)
