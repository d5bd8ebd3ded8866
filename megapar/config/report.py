"""Texts for the terminal: --help, a refusal, and of --validate-only the configuration with origins, ranks, groups."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from itertools import islice, product
from typing import Any

from megapar.config.config import FLAGS, GROUPS, Config
from megapar.core.grid import DENSE_AXES, EXPERT_AXES, Grid
from megapar.errors import Complaint
from megapar.files.uri import masked
from megapar.schema.flag import SCRIPTS, Flag, normal
from megapar.schema.rule import either

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
    off = f"; off: {flag.negation}" if negates else ""
    also = "; also " + ", ".join("--" + alias.name for alias in flag.aliases) if flag.aliases else ""
    return f"{flag.help}{unit} (default: {default_text(flag, kind)}{off}{also})"


EXAMPLES = {
    "moe": (
        ("megapar pretrain moe --config tiny --save runs/tiny", "a preset; megapar configs lists them"),
        ("megapar pretrain moe --config tiny --data-path my.jsonl --train-iters 100", "on your own text"),
        (
            "megapar pretrain moe --config tiny --sharding-degree 4 --world-size 4 --validate-only",
            "check, start nothing",
        ),
        ("megapar launch --nproc-per-node 4 pretrain moe --config tiny --sharding-degree 4", "four processes"),
    ),
    "ernie": (
        ("megapar pretrain ernie --config ernie-quickstart --save runs/ernie", "a preset; megapar configs lists them"),
        ("megapar pretrain ernie --data-path my.jsonl --train-iters 100", "on your own text"),
        ("megapar pretrain ernie --config sharding-32 --data-path my.jsonl --validate-only", "check, start nothing"),
        (
            "megapar launch --nproc-per-node 4 pretrain ernie --config ernie-quickstart --sharding-degree 4",
            "four processes",
        ),
    ),
}
"""Commands of ``--help``, each with what it does, by trainer."""
ALL = "all"


def help_text(kind: str, topic: str = "") -> str:
    """Return the help of one trainer: examples and the groups of flags.

    ``topic`` is a group or a flag, of which all is shown, or ``all``. Raises LookupError for another, with near names.
    """
    groups: dict[str, list[Flag]] = {}
    for flag in FLAGS.values():
        if kind in flag.models:
            groups.setdefault(flag.group, []).append(flag)
    if not topic:
        return _overview(kind, groups)
    word = normal(topic.lstrip("-"))
    if word in groups or word == ALL:
        shown = groups if word == ALL else {word: groups[word]}
        parts = [f"{name}: {GROUPS[name].title}\n{_lines_of(flags, kind)}" for name, flags in shown.items()]
        return "\n\n".join(parts) + "\n"
    known = {normal(flag.spelling[2:]): flag for flags in groups.values() for flag in flags}
    aliases = {normal(alias.name): flag for flags in groups.values() for flag in flags for alias in flag.aliases}
    named = known.get(word) or aliases.get(word) or known.get(word.removeprefix("no-"))  # of a switch
    if named is not None:
        return f"{_lines_of([named], kind)}\n"
    names = list(dict.fromkeys([*groups, *known]))
    near = [name for name in names if word in name][:NEAR] or get_close_matches(word, names, NEAR, 0.6)
    hint = f" Did you mean {either(near)}?" if near else ""
    every = f"Groups: {', '.join(groups)}, {ALL}."
    raise LookupError(f"--help {topic}: no group or flag of {SCRIPTS[kind]} has this name.{hint} {every}")


def _overview(kind: str, groups: Mapping[str, Sequence[Flag]]) -> str:
    lines = [line for command, does in EXAMPLES[kind] for line in (f"  {command}", f"      {does}")]
    listed = [
        f"  {name:12} {len(flags):3}  {GROUPS[name].title.split('. ')[0].rstrip('.')}" for name, flags in groups.items()
    ]
    lines = [
        "examples:",
        *lines,
        "",
        f"usage: megapar pretrain {kind} [--config NAME|FILE.yaml] [FLAGS]     in a checkout: python {SCRIPTS[kind]}",
        "The last of repeated flags wins, and the command line overrides YAML files. --no-FLAG turns a switch off.",
        "",
        f"groups of flags; --help GROUP lists those of one, --help FLAG shows a flag, --help {ALL} every flag:",
        *listed,
    ]
    return "\n".join(lines) + "\n"


def _lines_of(flags: Sequence[Flag], kind: str) -> str:
    wrap = textwrap.TextWrapper(
        WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6, break_long_words=False, break_on_hyphens=False
    )
    return "\n".join(line for flag in flags for line in (f"  {signature(flag)}", *wrap.wrap(describe(flag, kind))))


WHOLE_WORLD = 64
FEW_GROUPS = 3
FEW_RANKS = 4
NEAR = 4


def refusal(complaints: Sequence[Complaint]) -> str:
    """Return the report of all complaints."""
    count = len(complaints)
    lines = [f"megapar: the configuration is refused ({count} complaint{'s' if count > 1 else ''}):"]
    return "\n".join([*lines, *(f"  {complaint}" for complaint in complaints)]) + "\n"


def effective(config: Config) -> str:
    """Return the values that are not defaults, with their origins, the batch, the ranks and the groups.

    With ``--log-start full``, all values.
    """
    ranks = f"{config.grid.world_size} rank{'s' if config.grid.world_size > 1 else ''}"
    result = f"is accepted for {ranks}"
    if config.runtime.rules_only:
        result = f"satisfies the rules for {ranks}; files were only read for the model's sizes"
    lines = [f"megapar: {SCRIPTS[config.kind]} {result}"]
    values, origins = config.values(), config.origins
    known = [flag for flag in FLAGS.values() if config.kind in flag.models]
    shown = [flag for flag in known if origins[flag.name] != "default" or config.logging.log_start == "full"]
    for group in GROUPS:
        flags = [flag for flag in shown if flag.group == group]
        lines += ["", group] if flags else []
        for flag in flags:
            lines.append(f"  {flag.spelling:40} {written(values[flag.name], flag):32} {origins[flag.name]}")
    if hidden := len(known) - len(shown):
        lines += ["", f"{hidden} values are defaults; --log-start full prints them as well"]
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
            sizes = [span.batch.at(span.batch.after(span.first_sample, done)) for done in (0, max(0, steps - 1))]
            batch = " to ".join(f"{one:,}" for one in dict.fromkeys(sizes))  # two inside a ramp
            size = f"{steps:,} steps of {batch} x {span.seq_length:,}, {count:,} positions"
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
