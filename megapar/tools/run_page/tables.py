"""Tables of a page, as HTML: the runs side by side, their starts, ranks, operators, configuration and environment."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

from megapar.arguments import FLAGS
from megapar.core.grid import DENSE_AXES, Grid
from megapar.core.units import GIBIBYTE
from megapar.schema import role as roles
from megapar.tools.run_page.figures import COLORS, scale
from megapar.tools.run_page.plan_comparison import median_of
from megapar.tools.run_page.run_folder import RunFolder

SHOWN_RANKS = 512
STEPS_DIFFER, LOSSES_DIFFER = 0.02, 0.001  # relative: steps of one machine, and losses of two seeds, differ by as much
_LOADS = ("load", "load_hf", "finetune", "ckpt_step", "no_load_optim", "no_load_rng")  # other than what a run saves
_FLAG_ROW = '<tr class="flag">'


class MainFigure(NamedTuple):
    """A main figure of a run.

    Attributes:
        text: Its value, as the page shows it.
        value: The same as a number, with which runs are compared; 0 if no value is better than another.
        better: -1 if less is better, 1 if more is.
        matters: Relative difference from which on it matters.
    """

    text: str
    value: float = 0.0
    better: int = 0
    matters: float = 0.0


def summary(run: RunFolder) -> dict[str, MainFigure]:
    """Return the main figures of a run by name."""
    last, facts = run.records[-1], run.facts
    parts = {
        "iterations": MainFigure(f"{last['iteration']:,}"),
        "tokens": MainFigure(_count(float(last["consumed_tokens"]))),
        "loss": MainFigure(f"{last['loss']:.4f}", last["loss"], -1, LOSSES_DIFFER),
    }
    evaluated = [record["eval_loss"] for record in run.records if record.get("eval_loss") is not None]
    if evaluated:
        parts["evaluation loss"] = MainFigure(f"{evaluated[-1]:.4f}", evaluated[-1], -1, LOSSES_DIFFER)
    if (speed := median_of(run, "tokens_per_second")) is not None:
        parts["tokens per second"] = MainFigure(f"{speed:,.0f}", speed, 1, STEPS_DIFFER)
    if (seconds := median_of(run, "iteration_seconds")) is not None:
        size, unit = scale("seconds", [seconds])
        parts["time per step"] = MainFigure(f"{seconds / size:.3g} {unit}", seconds, -1, STEPS_DIFFER)
    if (share := median_of(run, "mfu")) is not None and last.get("mfu_peak") != "measured":  # one short one: a guess
        text = f"{share:.1%}" if share >= 0.01 else f"{share:.2%}"
        parts["MFU"] = MainFigure(text, share, 1, STEPS_DIFFER)
    if peak := max((record.get("peak_memory_bytes") or 0 for record in run.records), default=0):
        parts["peak memory"] = MainFigure(f"{peak / GIBIBYTE:.2f} GiB", peak, -1, STEPS_DIFFER)
    if facts:
        parts["parameters"] = MainFigure(_count(facts["parameters"]))
        parts["ranks"] = MainFigure(f"{facts['world_size']:,}")
        parts["device"] = MainFigure(str(facts["device"]["name"]))
    return parts


def tiles(run: RunFolder) -> str:
    """Return the summary of one run."""
    cells = "".join(
        f"<div{' class=long' if len(one.text) > 12 else ''}><b>{escape(one.text)}</b><span>{escape(name)}</span></div>"
        for name, one in summary(run).items()
    )
    return f'<div class="tiles">{cells}</div>'


def side_by_side(runs: Sequence[RunFolder]) -> str:
    """Return the summaries of several runs with the best values marked, and the flags in which they differ.

    Rows without a difference that matters, and flags that change no step, are folded.
    """
    summaries = [summary(run) for run in runs]
    names = list(dict.fromkeys(name for one in summaries for name in one))
    head = "".join(
        f'<th><i style="background:{COLORS[number % len(COLORS)]}"></i>{escape(run.name)}</th>'
        for number, run in enumerate(runs)
    )
    rows = {name: [one.get(name, MainFigure("")) for one in summaries] for name in names}
    table = _folded(head, rows, [name for name, row in rows.items() if _differ(row)], "alike in all runs")
    values = [run.facts.get("configuration", {}) for run in runs]
    entries = {name: entry for one in values for name, entry in one.items()}
    flags = {
        entry["flag"]: [MainFigure(_text(one[name]["value"]) if name in one else "") for one in values]
        for name, entry in entries.items()
    }
    apart = {flag: row for flag, row in flags.items() if _differ(row)}
    kept = [n for n in entries if n in _LOADS or n not in FLAGS or FLAGS[n].role not in (roles.LOGS, roles.SAVES)]
    shown = [entries[name]["flag"] for name in kept if entries[name]["flag"] in apart]
    more = _folded(head, apart, shown, "of files and logs")
    return f"{table}<h2>Flags that differ</h2>{more}" if apart else table


def _differ(row: Sequence[MainFigure]) -> bool:
    """Return True if the figures of the runs differ by what matters."""
    if not all(one.better for one in row):
        return len({one.text for one in row}) > 1
    sizes = [one.value for one in row]
    return not max(sizes) - min(sizes) <= row[0].matters * max(map(abs, sizes))


def _folded(head: str, rows: Mapping[str, Sequence[MainFigure]], shown: Sequence[str], what: str) -> str:
    """Return a table of the rows that are shown, and the others below it."""
    rest = [name for name in rows if name not in shown]
    table, below = (_rows_of_runs(head, {name: rows[name] for name in names}) for names in (shown, rest))
    summary = f"{len(rest)} row{'s' if len(rest) > 1 else ''} {what}: {escape(', '.join(rest))}"
    return f"{table}<details class=rest><summary>{summary}</summary>{below}</details>" if rest else table


def _rows_of_runs(head: str, rows: Mapping[str, Sequence[MainFigure]]) -> str:
    body = "".join(
        f"<tr><th>{escape(name)}</th>{''.join(f'<td{_best(one, row)}>{escape(one.text)}</td>' for one in row)}</tr>"
        for name, row in rows.items()
    )
    return f'<div class="wide"><table class="runs"><tr><th></th>{head}</tr>{body}</table></div>' if rows else ""


def _best(figure: MainFigure, row: Sequence[MainFigure]) -> str:
    rivals = [one for one in row if one.better]
    if figure not in rivals or not _differ(rivals):
        return ""
    of_all = max(one.value * one.better for one in rivals)
    best = figure.value * figure.better >= of_all - figure.matters * abs(of_all)
    return ' class="best" title="the best"' if best else ""


def restarts(run: RunFolder) -> str:
    """Return the list of a run's starts after the first one; "" without any."""
    rows = "".join(
        f'<tr><td><i class="{"layout" if start.changed else "resume"}"></i>{start.iteration:,}</td>'
        f"<td>{escape(start.time[:19].replace('T', ' '))}</td><td>{escape(start.layout)}</td>"
        f"<td>{'another layout' if start.changed else ''}</td></tr>"
        for start in run.restarts
    )
    head = "<tr><th>from iteration</th><th>time (UTC)</th><th>ranks</th><th></th></tr>"
    said = "<p>Vertical lines in the figures mark where the run was resumed, orange ones where on another layout.</p>"
    return f"{said}<table>{head}{rows}</table>" if rows else ""


def phases(run: RunFolder) -> str:
    """Return where the phases of a run's data begin; "" with a single one."""
    places = ", ".join(f"{span.first_step + 1:,}" for span in run.phases)
    return f"<p>Violet lines mark where a phase of the data begins: iteration {places}.</p>" if places else ""


def ranks(facts: Mapping[str, Any]) -> str:
    """Return a table of all ranks: rows are replicas and pipeline stages, columns the axes within a stage."""
    if not facts or facts["world_size"] == 1:
        return ""
    sizes = {axis: facts["grid"][axis] for axis in (*DENSE_AXES, "ep", "emp")}
    order = tuple(facts["configuration"]["rank_order"]["value"])
    grid = Grid(**sizes, order=order)
    if grid.world_size > SHOWN_RANKS:
        return f"<p>{escape(grid.describe())}</p>"
    across = [(s, c, m) for s in range(grid.sharding) for c in range(grid.cp) for m in range(grid.mp)]
    head = "".join(f"<th>{_place(grid, s, c, m)}</th>" for s, c, m in across)
    rows = []
    for dp in range(grid.dp):
        for pp in range(grid.pp):
            cells = []
            for s, c, m in across:
                rank = grid.rank(dp=dp, pp=pp, sharding=s, cp=c, mp=m)
                at = grid.expert(rank)
                color = COLORS[at["ep"] % len(COLORS)]
                cells.append(f'<td style="background:{color}22" title="ep {at["ep"]}, edp {at["edp"]}">{rank}</td>')
            rows.append(f"<tr><th>dp {dp}, pp {pp}</th>{''.join(cells)}</tr>")
    legend = "" if grid.ep == 1 else " Colors: index on the ep axis."
    table = f'<div class="wide"><table class="ranks"><tr><th></th>{head}</tr>{"".join(rows)}</table></div>'
    return f"<p>{escape(grid.describe())}.{legend}</p>{table}"


def _place(grid: Grid, sharding: int, cp: int, mp: int) -> str:
    """Return the indices on the axes of more than one rank."""
    places = (("sharding", sharding, grid.sharding), ("cp", cp, grid.cp), ("mp", mp, grid.mp))
    return "<br>".join(f"{axis} {index}" for axis, index, size in places if size > 1) or "rank"


def operators(rows: Sequence[tuple[str, int, float, float]]) -> str:
    """Return the operators of a profile that took longest: (name, calls, seconds, share)."""
    if not rows:
        return ""
    body = "".join(
        f'<tr><td>{escape(name[:90])}</td><td class="number">{calls:,}</td><td class="number">{1e3 * seconds:.2f}</td>'
        f'<td class="share"><i style="width:{100 * share:.0f}px"></i>{share:.1%}</td></tr>'
        for name, calls, seconds, share in rows
    )
    head = "<tr><th>operator</th><th>calls</th><th>ms</th><th>share</th></tr>"
    said = "<h3>Operators that took longest</h3><p>Own time, without the operators that they call.</p>"
    return f"{said}<table>{head}{body}</table>"


def configuration(facts: Mapping[str, Any]) -> str:
    """Return every value with its origin, a group each."""
    if not facts:
        return "<p>run.json is missing.</p>"
    groups: dict[str, list[str]] = defaultdict(list)
    for entry in facts["configuration"].values():
        origin = entry["origin"]
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in (entry["flag"], _text(entry["value"]), origin))
        groups[entry["group"]].append(f'<tr class="{escape(origin.split()[0])}">{cells}</tr>')
    return "".join(
        f"<details{' open' if any(_FLAG_ROW in row for row in rows) else ''}><summary>{escape(group)}</summary>"
        f"<table>{''.join(rows)}</table></details>"
        for group, rows in groups.items()
    )


def environment(facts: Mapping[str, Any]) -> str:
    """Return device, versions and variables."""
    if not facts:
        return ""
    rows = {**{f"device {name}": value for name, value in facts["device"].items()}, **facts["environment"]}
    cells = "".join(
        f"<tr><td>{escape(str(name))}</td><td>{escape(str(value))}</td></tr>" for name, value in rows.items()
    )
    return f"<table>{cells}</table>"


def _text(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _count(count: float) -> str:
    for size, letter in ((1e12, " T"), (1e9, " B"), (1e6, " M")):
        if count >= size:
            return f"{count / size:.4g}{letter}"
    return f"{count:,.0f}"
