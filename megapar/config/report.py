"""Output of --validate-only: the effective configuration with origins, the ranks and their groups."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice, product

from megapar.config.config import FLAGS, GROUPS, Config
from megapar.config.help import written
from megapar.core.grid import DENSE_AXES, EXPERT_AXES, Grid
from megapar.errors import Complaint
from megapar.schema.flag import SCRIPTS

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
        "",
        "ranks",
        f"  {config.grid.describe()}",
        *(f"  {line}" for line in group_lines(config.grid)),
    ]
    return "\n".join(lines) + "\n"


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
