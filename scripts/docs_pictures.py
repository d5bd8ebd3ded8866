#!/usr/bin/env python3
"""Draw the pictures of docs/ from the code that they explain: schedules, groups, positions, plans and timelines,
and one from what a benchmark measured.

scripts/docs_pictures.py            write docs/pictures/
scripts/docs_pictures.py --check    only report pictures that differ, with exit status 1
scripts/docs_pictures.py --screenshot runs/quickstart    the page of a run in Chromium, which no check draws again
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megapar.arguments import Config, parse  # noqa: E402
from megapar.config.yaml_file import FOLDER  # noqa: E402
from megapar.core.context_parallel.positions import SequenceLayout  # noqa: E402
from megapar.core.grid import Grid  # noqa: E402
from megapar.core.units import GIBIBYTE  # noqa: E402
from megapar.planning.devices import device_kind  # noqa: E402
from megapar.planning.plan import Plan  # noqa: E402
from megapar.planning.text import layer_timeline  # noqa: E402
from megapar.tools.plan import show_schedule  # noqa: E402

COLORS = ("#4c78a8", "#e0803c", "#59a14f", "#b07aa1", "#edc948", "#76b7b2", "#d4605a", "#9c755f")
GREY = "#bbbbbb"
CHARACTER = 6.2  # width of a character at the size of labels
PLACE = ROOT / "docs" / "pictures"
KIND = "h100-80g"
LENGTHS = "2026-11-28-cpu-lengths.json"
PARTS = ("parameters", "gradients", "optimizer", "activations", "buffers")
LANE_COLORS = {"compute": COLORS[0], "wait": GREY, "inside": COLORS[2], "between": COLORS[1]}


class Drawing:
    """An SVG picture on white.

    Args:
        width: Width in pixels.
        height: Height in pixels.
    """

    def __init__(self, width: int, height: int) -> None:
        self.width, self.height = width, height
        self._parts: list[str] = []

    def box(self, x: float, y: float, width: float, height: float, color: str, text: str = "", title: str = "") -> None:
        """Draw a rectangle, with a text inside if it is wide enough, and a title that a pointer shows."""
        tip = f"<title>{escape(title or text)}</title>" if title or text else ""
        self._parts.append(
            f'<g>{tip}<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.5):.1f}" height="{height:.1f}" fill="{color}" '
            f'stroke="white" stroke-width="0.5"/></g>'
        )
        if text and len(text) * CHARACTER <= width:
            self.text(x + width / 2, y + height / 2 + 4, text, anchor="middle", color="white", size=11)

    def text(self, x: float, y: float, text: str, anchor: str = "start", color: str = "#222", size: int = 12) -> None:
        """Write a line of text."""
        place = f'x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{color}" text-anchor="{anchor}"'
        self._parts.append(f"<text {place}>{escape(text)}</text>")

    def frame(self, x: float, y: float, width: float, height: float) -> None:
        """Draw the outline of a rectangle."""
        place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
        self._parts.append(f'<rect {place} fill="none" stroke="#888" rx="4"/>')

    def line(self, points: Sequence[tuple[float, float]], color: str) -> None:
        """Connect points, each with a mark."""
        places = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self._parts.append(f'<polyline points="{places}" fill="none" stroke="{color}" stroke-width="2"/>')
        for x, y in points:
            self.box(x - 3, y - 3, 6, 6, color)

    def inside(self, svg: str, y: float) -> None:
        """Place another picture at this height."""
        self._parts.append(svg.replace("<svg ", f'<svg y="{y:.0f}" ', 1).rstrip())

    def legend(self, y: float, names: Mapping[str, str], x: float = 10) -> None:
        """Explain colors on one line: name -> color."""
        for name, color in names.items():
            self.box(x, y - 10, 12, 12, color)
            self.text(x + 17, y, name)
            x += 34 + len(name) * CHARACTER

    def svg(self) -> str:
        """Return the picture."""
        size = f'width="{self.width}" height="{self.height}" viewBox="0 0 {self.width} {self.height}"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif">'
        return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *self._parts, "</svg>"]) + "\n"


def stacked_bars(rows: Sequence[tuple[str, Mapping[str, float], str]], unit: str, limit: float = 0.0) -> str:
    """Return bars that are stacked from parts.

    Args:
        rows: For each bar its label, its parts (name -> value; the same names in all bars), and a note after it.
        unit: Unit of the values.
        limit: A value to mark with a line; 0 for none.
    """
    left, scale_to, step = 150, 460, 34
    most = max([limit, *(sum(parts.values()) for _, parts, _ in rows)])
    drawing = Drawing(900, 60 + step * len(rows))
    names = list(rows[0][1])
    drawing.legend(20, {name: COLORS[number % len(COLORS)] for number, name in enumerate(names)})
    for place, (label, parts, note) in enumerate(rows):
        y, x = 36 + step * place, float(left)
        drawing.text(left - 8, y + 17, label, anchor="end")
        for number, name in enumerate(names):
            size, color = parts[name], COLORS[number % len(COLORS)]
            width = size / most * scale_to
            drawing.box(x, y, width, step - 8, color, f"{size:.1f}", f"{name} {size:.2f}")
            x += width
        drawing.text(max(x, left + limit / most * scale_to) + 8, y + 17, f"{sum(parts.values()):.1f} {unit}{note}")
    if limit:
        x = left + limit / most * scale_to
        drawing.box(x, 30, 1.5, step * len(rows) + 6, "#222")
        drawing.text(x, step * len(rows) + 52, f"{limit:g} {unit}", anchor="middle", size=11)
    return drawing.svg()


Bars = Sequence[tuple[str, float, float]]
"""Label, start and end of what a lane does."""


def lanes(panels: Sequence[tuple[str, Mapping[str, Bars]]], colors: Mapping[str, str]) -> str:
    """Return timelines below each other, on one scale of time.

    Args:
        panels: For each timeline its title, and lane -> (label, start, end) in seconds.
        colors: Lane -> color.
    """
    left, wide, row = 110, 860, 24
    last = max(end for _, rows in panels for bars in rows.values() for _, _, end in bars)
    heights = [34 + row * len(rows) for _, rows in panels]
    drawing = Drawing(left + wide + 20, sum(heights) + 26)
    top = 0
    for (title, rows), height in zip(panels, heights, strict=True):
        drawing.text(10, top + 20, title)
        for place, (lane, bars) in enumerate(rows.items()):
            y = top + 28 + row * place
            drawing.text(left - 8, y + 15, lane, anchor="end", size=11)
            for label, start, end in bars:
                x, width = left + start / last * wide, (end - start) / last * wide
                drawing.box(x, y, width, row - 4, colors[lane], label, f"{label}: {1e3 * (end - start):.3f} ms")
        top += height
    tick = round_step(1e3 * last)
    for mark in range(int(1e3 * last / tick) + 1):
        x = left + wide * mark * tick / (1e3 * last)
        drawing.text(x, top + 18, f"{mark * tick:g} ms", anchor="middle", size=11)
    return drawing.svg()


def round_step(length: float) -> float:
    """Return a distance of 1, 2 or 5 times a power of ten that divides a length into four to ten parts."""
    power = 10.0 ** math.floor(math.log10(length))
    return next(step * power for step in (0.1, 0.2, 0.5, 1.0) if length / (step * power) < 10)


def config(*flags: str, preset: str = "", ranks: int) -> Config:
    """Return the configuration of a preset and flags on this number of ranks."""
    file = ["--config", str(FOLDER / preset)] if preset else []
    return parse("moe", [*file, *flags, "--rules-only", "--world-size", str(ranks)], {}, planning=True)


def plan(*flags: str, preset: str, ranks: int) -> Plan:
    """Return the plan of a preset and flags on H100."""
    return Plan(config(*flags, preset=preset, ranks=ranks), device_kind(KIND))


def pipeline() -> str:
    """Draw the schedules of four stages."""
    common = ("--pp-degree", "4", "--num-layers", "8", "--gradient-merge-acc-step", "8")
    schedules = {
        "1F1B": ("--pp-schedule", "1f1b"),
        "interleaved, 2 chunks": ("--pp-schedule", "interleaved", "--vpp-degree", "2"),
        "zero bubble": ("--pp-schedule", "zero_bubble"),
        "ZBV": ("--pp-schedule", "zero_bubble", "--vpp-degree", "2"),
    }
    drawn = [show_schedule(config(*common, *flags, ranks=4))[1] for flags in schedules.values()]
    sizes = [tuple(int(svg.split(f'{side}="')[1].split('"')[0]) for side in ("width", "height")) for svg in drawn]
    drawing = Drawing(max(width for width, _ in sizes), sum(height for _, height in sizes))
    top = 0
    for svg, (_, height) in zip(drawn, sizes, strict=True):
        drawing.inside(svg, top)
        top += height
    return drawing.svg()


def ranks() -> str:
    """Draw the groups of 16 ranks on two nodes."""
    grid, node, cell, left = Grid(pp=2, sharding=4, mp=2), 8, 42, 90
    axes = ("mp", "sharding", "pp")
    drawing = Drawing(left + 16 * cell + 40, 60 + 40 * len(axes))
    for place, axis in enumerate(axes):
        groups = sorted({grid.group(axis, rank) for rank in range(grid.world_size)})
        y = 36 + 40 * place
        drawing.text(left - 12, y + 20, axis, anchor="end")
        for number, group in enumerate(groups):
            for rank in group:
                x = left + cell * rank + (20 if rank >= node else 0)
                drawing.box(x, y, cell - 4, 30, COLORS[number % len(COLORS)], str(rank), f"{axis} group {group}")
    for number in range(grid.world_size // node):
        x = left - 6 + number * (cell * node + 20)
        drawing.frame(x, 26, cell * node + 8, 40 * len(axes) + 8)
        drawing.text(x + 4, 18, f"node {number}")
    return drawing.svg()


def sharding() -> str:
    """Draw the memory of a rank at each stage of sharding."""
    flags = ("--mp-degree", "1", "--no-sequence-parallel", "--sharding-stage")
    plans = {f"stage {stage}": plan(*flags, stage, preset="llama-3-8b.yaml", ranks=64) for stage in ("1", "2", "3")}
    return stacked_bars([(name, parts_of(planned), "") for name, planned in plans.items()], "GiB", 80)


def recompute() -> str:
    """Draw the memory and the time of a step by what is recomputed."""
    choices = {
        "nothing": (),
        "selective": ("--recompute-granularity", "selective"),
        "every layer": ("--recompute-interval", "1"),
    }
    rows = []
    for name, flags in choices.items():
        planned = plan(*flags, preset="llama-3-8b.yaml", ranks=64)
        rows.append((name, parts_of(planned), f", {planned.speed.step_seconds:.2f} s per step"))
    return stacked_bars(rows, "GiB")


def step() -> str:
    """Draw the time of a step by the degree of tensor parallelism."""
    rows = []
    for degree in ("1", "2", "4", "8"):
        flags = ("--mp-degree", degree, *(("--no-sequence-parallel",) if degree == "1" else ()))
        planned = plan(*flags, preset="llama-3-8b.yaml", ranks=64)
        speed = planned.speed
        parts = {"exposed communication": speed.exposed_seconds, "optimizer": speed.optimizer_seconds}
        parts = {"computation": speed.step_seconds - sum(parts.values()), **parts}
        note = f", MFU {100 * speed.mfu:.0f} %" + ("" if planned.fits else ", does not fit into memory")
        rows.append((f"mp {degree}", parts, note))
    return stacked_bars(rows, "s")


def parts_of(planned: Plan) -> dict[str, float]:
    """Return the memory of the fullest stage in GiB, by what it is for."""
    return {name: getattr(planned.fullest, name) / GIBIBYTE for name in PARTS}


def context() -> str:
    """Draw which rank computes which part of a causal attention."""
    size, length, cell = 4, 16, 18
    drawing = Drawing(2 * (length * cell + 60), length * cell + 96)
    drawing.legend(20, {f"rank {rank}": COLORS[rank] for rank in range(size)})
    for place, (name, zigzag) in enumerate((("zig-zag", True), ("in order", False))):
        layout, left = SequenceLayout(size, zigzag=zigzag), 20 + place * (length * cell + 60)
        drawing.text(left, 48, name)
        work = []
        for rank in range(size):
            held = layout.positions(length, rank)
            work.append(sum(query + 1 for query in held))
            for query in held:
                title = f"query {query}: rank {rank}"
                drawing.box(left, 56 + query * cell, (query + 1) * cell, cell, COLORS[rank], title=title)
        shares = ", ".join(f"{100 * one / sum(work):.0f} %" for one in work)
        drawing.text(left, 56 + length * cell + 20, f"work of ranks 0 to 3: {shares}")
    return drawing.svg()


def lengths() -> str:
    """Draw a measured step with a window and without by the length of the sequence, a doubling as far on both axes."""
    result = json.loads((ROOT / "benchmarks" / "context_parallel" / "results" / LENGTHS).read_text(encoding="utf-8"))
    measured, cell, top = result["measured"], 44, 52
    colors = {name: COLORS[number] for number, name in enumerate(measured)}
    drawing = Drawing(700, 350)
    drawing.legend(20, colors)
    for left, kind, unit, size in ((70, "seconds", "s", 1.0), (450, "bytes", "MiB", 2.0**20)):
        points = {
            name: [(math.log2(float(length)), math.log2(figure / size)) for length, figure in both[kind].items()]
            for name, both in measured.items()
        }
        columns, rows = ([own[axis] for line in points.values() for own in line] for axis in (0, 1))
        first, last, low, high = min(columns), max(columns), math.floor(min(rows)), math.ceil(max(rows))
        for place in range(low, high + 1):
            y = top + cell * (high - place)
            drawing.box(left, y - 0.75, cell * (last - first), 1.5, GREY)
            drawing.text(left - 8, y + 4, f"{2.0**place:,.4g} {unit}", anchor="end", size=11)
        for place in range(round(first), round(last) + 1):
            below = top + cell * (high - low) + 18
            drawing.text(left + cell * (place - first), below, f"{2**place:,}", anchor="middle", size=10)
        for name, line in points.items():
            drawing.line([(left + cell * (x - first), top + cell * (high - y)) for x, y in line], colors[name])
        slopes = ", ".join(f"{name}: {result['exponents'][name][kind]:.2f}" for name in measured)
        drawing.text(left, 40, f"slope of {kind}: {slopes}", size=11)
    return drawing.svg()


def tensor() -> str:
    """Draw a layer with tensor parallelism."""
    return timelines({"tensor and sequence parallelism, mp 4": plan(preset="llama-3-8b.yaml", ranks=64)})


def expert() -> str:
    """Draw a layer of experts over two nodes, plain and by node."""
    flags = ("--mp-degree", "1", "--no-sequence-parallel", "--ep-degree", "16", "--moe-dispatch")
    ways = {"plain": ("plain",), "by node": ("node", "--ranks-per-node", "8")}
    return timelines({name: plan(*flags, *way, preset="qwen3-30b-a3b.yaml", ranks=64) for name, way in ways.items()})


def ampipe() -> str:
    """Draw a layer of experts in one slice and in two."""
    flags = ("--mp-degree", "1", "--no-sequence-parallel", "--ampipe-degree")
    one, two = (plan(*flags, degree, preset="qwen3-30b-a3b.yaml", ranks=64) for degree in ("1", "2"))
    return timelines({"one slice": one, "two slices": two})


def timelines(plans: Mapping[str, Plan]) -> str:
    """Draw the forward and the backward of a layer of each plan."""
    panels = []
    for name, planned in plans.items():
        layer = layer_timeline(planned.run)
        for direction, drawing in (("forward", layer.forward), ("backward", layer.backward)):
            events = drawing.to_dict()["events"]
            rows = {
                lane: [(one["name"], one["start"], one["end"]) for one in events if one["lane"] == lane]
                for lane in drawing.busy
            }
            panels.append((f"{name}: {direction}, {1e3 * drawing.seconds:.2f} ms", rows))
    used = {lane for _, rows in panels for lane in rows}
    colors = {lane: LANE_COLORS.get(lane, COLORS[3 + number]) for number, lane in enumerate(sorted(used))}
    return lanes(panels, colors)


PICTURES: Mapping[str, Callable[[], str]] = {
    "ampipe.svg": ampipe,
    "context.svg": context,
    "expert.svg": expert,
    "lengths.svg": lengths,
    "pipeline.svg": pipeline,
    "plan.svg": step,
    "ranks.svg": ranks,
    "recompute.svg": recompute,
    "sharding.svg": sharding,
    "tensor.svg": tensor,
}


SCREENSHOT = "report.png"
"""Picture of a measured run: the head of its page, down to where the time of a step went."""
WIDTH, HEIGHT = 1240, 1262


def screenshot(run: Path) -> None:
    """Write the page of a run (``megapar report``), and a picture of its head. Needs Chromium."""
    subprocess.run([sys.executable, "-m", "megapar", "report", str(run)], check=True)
    window = ("--headless", "--no-sandbox", "--hide-scrollbars", "--virtual-time-budget=5000")
    page = (run / "report.html").resolve().as_uri()
    to = (f"--window-size={WIDTH},{HEIGHT}", f"--screenshot={PLACE / SCREENSHOT}")
    subprocess.run(["chromium", *window, *to, page], check=True)


def main() -> int:
    """Write the pictures, or report which differ."""
    parser = argparse.ArgumentParser(description="Draw the pictures of docs/.")
    parser.add_argument("--check", action="store_true", help="write nothing, report pictures that differ")
    parser.add_argument("--only", choices=sorted(PICTURES), help="one picture")
    parser.add_argument("--screenshot", type=Path, metavar="RUN", help=f"only {SCREENSHOT}, of the page of this run")
    options = parser.parse_args()
    PLACE.mkdir(exist_ok=True)
    if options.screenshot:
        screenshot(options.screenshot)
        return 0
    stale = []
    for name, draw in PICTURES.items():
        path = PLACE / name
        if options.only in (None, name) and (not path.exists() or path.read_text(encoding="utf-8") != draw()):
            stale.append(name)
            if not options.check:
                path.write_text(draw(), encoding="utf-8")
                print(f"wrote {path.relative_to(ROOT)}")
    if options.check and stale:
        print(f"stale: {', '.join(stale)}; run scripts/docs_pictures.py", file=sys.stderr)
    return 1 if options.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
