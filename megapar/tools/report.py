"""``megapar report RUN_DIR``: writes one self-contained HTML page about a run.

It reads the files that a run writes with ``--metrics-jsonl RUN_DIR/metrics.jsonl``: the metrics, ``run.json``, the
experts' load, and ``trace.json`` if ``--profile`` was set.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from megapar.config.draft import is_given
from megapar.config.report import refusal
from megapar.core.grid import DENSE_AXES, Grid
from megapar.core.units import GIBIBYTE
from megapar.errors import Complaint, ConfigError
from megapar.files.regular_file import read_regular
from megapar.planning.change import line_of
from megapar.tools import chart
from megapar.tools.parser import Parser

COLUMNS = 80
_MAX_JSON_BYTES = 1 << 30  # enough for a trace
_FLAG_ROW = '<tr class="flag">'
SHOWN_RANKS = 512
STYLE = """body{font:14px system-ui,sans-serif;margin:24px auto;max-width:1180px;color:#111}h1{font-size:22px}
h2{font-size:17px;border-bottom:1px solid #ddd;margin-top:28px}
.grid{display:grid;grid-template-columns:1fr 1fr;gap:14px}
figure{margin:0}figcaption{font-weight:600;margin-bottom:4px}svg{width:100%;background:#fff;border:1px solid #eee}
svg text{font-size:11px;fill:#444}svg .end{text-anchor:end}svg .middle{text-anchor:middle}
table{border-collapse:collapse;font-size:12px}td,th{border:1px solid #ddd;padding:2px 6px;text-align:left}
.ranks td{text-align:center;min-width:22px}
.default{color:#888}.file{color:#059669}.flag{color:#2563eb}.derived{color:#d97706}
@media(max-width:800px){.grid{grid-template-columns:1fr}}"""


def make_parser() -> Parser:
    """Return the parser of the command."""
    parser = Parser(prog="megapar report", description="Write one HTML page about a run.")
    parser.add_argument("run", type=Path, help="folder of --metrics-jsonl FOLDER/metrics.jsonl")
    parser.add_argument("--output", type=Path, help="file to write (default: RUN/report.html)")
    return parser


def main(argv: Sequence[str]) -> int:
    """Write the page. Return 0, or 2 if the folder does not contain a run."""
    options = make_parser().parse_args(list(argv))
    try:
        page = report(options.run)
    except ConfigError as error:
        sys.stderr.write(refusal(error.complaints))
        return ConfigError.exit_status
    output = options.output or options.run / "report.html"
    output.write_text(page, encoding="utf-8")
    print(f"wrote {output}")
    return 0


def report(folder: Path) -> str:
    """Return the page. Raises ConfigError if the folder has no metrics or contains files that no run has written."""
    try:
        return _page(folder)
    except OSError as error:
        raise ConfigError([Complaint("run-folder", f"{folder} cannot be read: {error}.")]) from error
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
        # The page reads hundreds of values. If one has the wrong type, the files were not written by a run.
        message = f"{folder} contains data that no run has written: {type(error).__name__}, {str(error)[:200]}."
        raise ConfigError([Complaint("run-folder", message, "Pass the unchanged folder of a run.")]) from error


def _page(folder: Path) -> str:
    path, records = _metrics(folder)
    facts = _object(folder / "run.json")
    experts = _lines(path.with_name(path.stem + ".experts.jsonl"))
    trace = _object(folder / "trace.json")
    sections = [
        ("Losses", _curves(_losses(records))),
        ("Speed", _curves(_speed(records))),
        ("Memory", _memory(records, facts)),
        ("Communication", _curves(_communication(records))),
        ("Experts", _experts(experts)),
        ("Ranks", _ranks(facts)),
        ("Timeline of the profiled steps", _timeline(trace)),
        ("Configuration", _configuration(facts)),
        ("Environment", _environment(facts)),
    ]
    body = "".join(f"<h2>{title}</h2>{inside}" for title, inside in sections if inside)
    title = f"megapar: {folder.resolve().name}"
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{STYLE}</style></head><body><h1>{escape(title)}</h1>{_summary(records, facts)}{body}</body></html>\n"
    )


def _metrics(folder: Path) -> tuple[Path, list[dict[str, Any]]]:
    if not folder.is_dir():
        raise ConfigError([Complaint("run-folder", f"{folder} is not a folder.")])
    named = folder / "metrics.jsonl"
    files = [named] if named.is_file() else sorted(p for p in folder.glob("*.jsonl") if ".experts." not in p.name)
    for path in files:
        records = [record for record in _lines(path) if "iteration" in record]
        if records:
            return path, records
    message = f"{folder} contains no metrics: it has no .jsonl file with iterations."
    raise ConfigError([Complaint("run-folder", message, "Train with --metrics-jsonl FOLDER/metrics.jsonl.")])


def _lines(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    records = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):  # the incomplete last line of a killed run
            continue
        if isinstance(record, dict):
            records.append(record)
    return records


def _object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(read_regular(path, _MAX_JSON_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _series(records: Sequence[Mapping[str, Any]], *names: str) -> dict[str, chart.Points]:
    series: dict[str, chart.Points] = {}
    for name in names:
        points = [(r["iteration"], float(r[name])) for r in records if r.get(name) is not None]
        if any(y for _, y in points):
            series[name.replace("_", " ")] = points
    return series


def _curves(figures: Sequence[str]) -> str:
    drawn = "".join(figures)
    return f'<div class="grid">{drawn}</div>' if drawn else ""


def _losses(records: list[dict[str, Any]]) -> list[str]:
    losses = _series(records, "loss", "lm_loss", "sop_loss", "mtp_loss", "eval_loss")
    return [
        chart.lines("Loss", losses, "nats per token"),
        chart.lines("Router losses", _series(records, "aux_loss", "z_loss", "sequence_loss", "orthogonal_loss")),
        chart.lines("Gradient norm", _series(records, "grad_norm")),
        chart.lines("Learning rate", _series(records, "lr"), smoothed=False),
        chart.lines(
            "Loss scale", _series([r for r in records if r.get("loss_scale") != 1], "loss_scale"), smoothed=False
        ),
        chart.lines("Dropped (token, choice) pairs", _series(records, "dropped_tokens")),
    ]


def _speed(records: list[dict[str, Any]]) -> list[str]:
    return [
        chart.lines("Throughput", _series(records, "tokens_per_second"), "tokens per second"),
        chart.lines("Model FLOPs utilization", _series(records, "mfu"), "fraction of the peak"),
        chart.lines("Time per step", _series(records, "iteration_seconds"), "seconds"),
    ]


def _memory(records: list[dict[str, Any]], facts: Mapping[str, Any]) -> str:
    points = [(r["iteration"], r["peak_memory_bytes"] / GIBIBYTE) for r in records if r.get("peak_memory_bytes")]
    marks, note = {}, ""
    plan = _plan(facts)
    if plan is not None:
        first = plan.memory[0]
        marks["plan: peak of stage 0"] = first.peak / GIBIBYTE
        parts = ("parameters", "gradients", "optimizer", "activations", "buffers", "peak")
        cells = "".join(f"<td>{getattr(first, part) / GIBIBYTE:.3f}</td>" for part in parts)
        head = "".join(f"<th>{part}</th>" for part in parts)
        what = f"the formulas of {plan.kind.name}"
        if plan.kind.kernels == "cpu":
            what += "; on a CPU, the curve is the memory of the whole process with the interpreter and its libraries"
        note = f"<p>GiB of tensors on stage 0, by {escape(what)}:</p><table><tr>{head}</tr><tr>{cells}</tr></table>"
    return _curves([chart.lines("Peak memory so far", {"measured": points}, "GiB", marks)]) + note


def _plan(facts: Mapping[str, Any]) -> Any:
    """Return the plan of ``megapar plan`` for the run; None if the device or the configuration is unknown to it."""
    if not facts:
        return None
    from megapar.arguments import parse
    from megapar.core.device.kinds import kind_called
    from megapar.planning.devices import device_kind
    from megapar.planning.plan import Plan

    given = {
        name: tuple(entry["value"]) if isinstance(entry["value"], list) else entry["value"]
        for name, entry in facts["configuration"].items()
        if is_given(entry["origin"]) and name not in ("load", "load_hf", "profile", "world_size")
    }
    line = [*line_of(given), "--rules-only", "--world-size", str(facts["world_size"])]
    device = facts["device"]
    kind = device_kind("cpu") if device["type"] == "cpu" else kind_called(device["name"])
    try:
        return None if kind is None else Plan(parse(facts["kind"], line, {}), kind)
    except ConfigError:
        return None


def _communication(records: list[dict[str, Any]]) -> list[str]:
    exposed: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for record in records:
        for name, seconds in (record.get("exposed_seconds") or {}).items():
            exposed[name].append((record["iteration"], seconds))
    sent: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for record in records:
        for name, size in (record.get("sent_bytes") or {}).items():
            sent[name].append((record["iteration"], size))
    total = _series(records, "exposed_communication_seconds")
    return [
        chart.lines("Exposed communication", total, "seconds per step"),
        chart.lines("Exposed communication by axis and collective", exposed, "seconds per step"),
        chart.lines("Bytes sent by the reporting rank", sent, "bytes per step"),
    ]


_LOADS = (
    ("busiest_rank", "Busiest expert parallel rank of each layer"),
    ("max", "Most loaded expert of each layer"),
    ("min", "Least loaded expert of each layer"),
)


def _experts(load: list[dict[str, Any]]) -> str:
    if not load:
        return ""
    every = max(1, -(-len(load) // COLUMNS))
    shown = load[::every]
    columns = [f"iteration {record['iteration']}" for record in shown]
    layers = len(shown[0]["layers"])
    names = [f"layer {n}" for n in range(layers)]
    figures = []
    for which, title in _LOADS:
        if which not in shown[0]["layers"][0]:
            continue
        rows = [[record["layers"][layer][which] for record in shown] for layer in range(layers)]
        figures.append(chart.heat(f"{title}, relative to a balanced load", rows, names, columns))
    return _curves(figures)


def _ranks(facts: Mapping[str, Any]) -> str:
    """Return a table of all ranks: rows are replicas and pipeline stages, columns the axes within a stage."""
    if not facts or facts["world_size"] == 1:
        return ""
    sizes = {axis: facts["grid"][axis] for axis in (*DENSE_AXES, "ep", "emp")}
    order = tuple(facts["configuration"]["rank_order"]["value"])
    grid = Grid(**sizes, order=order)
    if grid.world_size > SHOWN_RANKS:
        return f"<p>{escape(grid.describe())}</p>"
    across = [(s, c, m) for s in range(grid.sharding) for c in range(grid.cp) for m in range(grid.mp)]
    head = "".join(f"<th>sharding {s}<br>cp {c}<br>mp {m}</th>" for s, c, m in across)
    rows = []
    for dp in range(grid.dp):
        for pp in range(grid.pp):
            cells = []
            for s, c, m in across:
                rank = grid.rank(dp=dp, pp=pp, sharding=s, cp=c, mp=m)
                at = grid.expert(rank)
                color = chart.COLORS[at["ep"] % len(chart.COLORS)]
                cells.append(f'<td style="background:{color}22" title="ep {at["ep"]}, edp {at["edp"]}">{rank}</td>')
            rows.append(f"<tr><th>dp {dp}, pp {pp}</th>{''.join(cells)}</tr>")
    legend = "" if grid.ep == 1 else " Colors: index on the ep axis."
    table = f'<table class="ranks"><tr><th></th>{head}</tr>{"".join(rows)}</table>'
    return f"<p>{escape(grid.describe())}.{legend}</p>{table}"


def _timeline(trace: Mapping[str, Any]) -> str:
    events = [e for e in trace.get("traceEvents", []) if e.get("ph") == "X" and "dur" in e]
    if not events:
        return ""
    phases: dict[str, list[tuple[float, float, str]]] = defaultdict(list)
    kinds: dict[str, float] = defaultdict(float)
    for event in events:
        start, length = event["ts"] / 1e6, event["dur"] / 1e6
        name = str(event["name"])
        if event.get("cat") == "user_annotation" and name.startswith("megapar: "):
            phases[name.removeprefix("megapar: ")].append((start, length, name))
        elif event.get("cat") == "kernel":
            phases["kernels"].append((start, length, name))
            kinds[name] += length
        elif event.get("cat") == "cpu_op":
            kinds[name] += length
    longest = sorted(kinds.items(), key=lambda item: -item[1])[:12]
    rows = "".join(f"<tr><td>{escape(name[:90])}</td><td>{1e3 * seconds:.2f}</td></tr>" for name, seconds in longest)
    head = "<p>Slowest operators (the time of an operator includes the operators that it calls)</p>"
    table = f"{head}<table><tr><th>operator</th><th>ms</th></tr>{rows}</table>"
    return _curves([chart.spans("Phases", phases)]) + table + "<p>Open trace.json in Perfetto for the full trace.</p>"


def _configuration(facts: Mapping[str, Any]) -> str:
    if not facts:
        return "<p>run.json is missing.</p>"
    groups: dict[str, list[str]] = defaultdict(list)
    for entry in facts["configuration"].values():
        value = entry["value"]
        text = " ".join(map(str, value)) if isinstance(value, list) else str(value)
        origin = entry["origin"]
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in (entry["flag"], text, origin))
        groups[entry["group"]].append(f'<tr class="{escape(origin)}">{cells}</tr>')
    return "".join(
        f"<details{' open' if any(_FLAG_ROW in row for row in rows) else ''}><summary>{escape(group)}</summary>"
        f"<table>{''.join(rows)}</table></details>"
        for group, rows in groups.items()
    )


def _environment(facts: Mapping[str, Any]) -> str:
    if not facts:
        return ""
    rows = {**{f"device {name}": value for name, value in facts["device"].items()}, **facts["environment"]}
    cells = "".join(
        f"<tr><td>{escape(str(name))}</td><td>{escape(str(value))}</td></tr>" for name, value in rows.items()
    )
    return f"<table>{cells}</table>"


def _summary(records: list[dict[str, Any]], facts: Mapping[str, Any]) -> str:
    last = records[-1]
    half = records[len(records) // 2 :]
    speed = sorted(r["tokens_per_second"] for r in half if r.get("tokens_per_second"))
    parts = [f"{len(records)} iterations to {last['iteration']}", f"loss {last['loss']:.4f}"]
    parts += [f"{speed[len(speed) // 2]:,.0f} tokens/s"] if speed else []
    parts += [f"{last['consumed_tokens']:,} tokens"]
    if facts:
        parts += [f"{facts['parameters']:,} parameters", f"{facts['world_size']} ranks on {facts['device']['name']}"]
    return f"<p>{escape(' | '.join(parts))}</p>"
