"""The profiled steps of a run: phases, kernels and messages on a timeline, and the operators that took longest."""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from megapar.tools.run_page.curve_sections import AXIS_COLORS
from megapar.tools.run_page.figures import COLORS, GRAY, Figure, Lane, spans

PHASE = "megapar: "
OUTSIDE = "between the phases"
GLOO, KERNEL = "gloo:", re.compile(r"nccl|hccl|hcom_", re.IGNORECASE)
LONGEST = 12

Event = Mapping[str, Any]


def timeline(trace: Mapping[str, Any]) -> Figure | None:
    """Return the profiled steps: the phases, each stream of kernels, copies, and the messages of each axis."""
    events = _events(trace)
    phases, lanes = _phases(events), _device_lanes(events) + _message_lanes(events)
    colors = {name: COLORS[number] for number, name in enumerate(dict.fromkeys(span[2] for span in phases.spans))}
    if OUTSIDE in colors:
        colors = {name: color for name, color in colors.items() if name != OUTSIDE} | {OUTSIDE: GRAY}
    note = "A bar with '...' in its name is several short ones. Open trace.json in Perfetto for the full trace."
    return spans("Phases, kernels and messages of the profiled steps", [phases, *lanes], colors, note)


def slowest_operators(trace: Mapping[str, Any]) -> list[tuple[str, int, float, float]]:
    """Return rows (name, calls, seconds, share of all), longest first.

    Of a device's kernels these are their durations; without kernels, the operators' own time, without the operators
    that they call.
    """
    events = _events(trace)
    kernels = [(str(event["name"]), event["dur"] / 1e6) for event in events if event.get("cat") == "kernel"]
    seconds: dict[str, float] = defaultdict(float)
    calls: dict[str, int] = defaultdict(int)
    for name, own in kernels or own_times([event for event in events if event.get("cat") == "cpu_op"]):
        seconds[name] += own
        calls[name] += 1
    total = sum(seconds.values()) or 1.0
    longest = sorted(seconds, key=lambda name: -seconds[name])[:LONGEST]
    return [(name, calls[name], seconds[name], seconds[name] / total) for name in longest]


def own_times(events: Sequence[Event]) -> list[tuple[str, float]]:
    """Return (name, seconds) of each operator without those that it calls on the same thread."""
    rows: list[tuple[str, float]] = []
    open_: dict[object, list[tuple[float, int]]] = defaultdict(list)
    for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
        callers, start, seconds = open_[event.get("tid")], event["ts"], event["dur"] / 1e6
        while callers and callers[-1][0] <= start:
            callers.pop()
        if callers:
            name, own = rows[callers[-1][1]]
            rows[callers[-1][1]] = (name, own - seconds)
        callers.append((start + event["dur"], len(rows)))
        rows.append((str(event["name"]), seconds))
    return [(name, max(0.0, own)) for name, own in rows]


def _events(trace: Mapping[str, Any]) -> list[Event]:
    return [event for event in trace.get("traceEvents", []) if event.get("ph") == "X" and "dur" in event]


def _phases(events: Sequence[Event]) -> Lane:
    """Return the phases of the steps on the host, with what lies between them."""
    marked = sorted(
        (*_span(event), str(event["name"]).removeprefix(PHASE))
        for event in events
        if event.get("cat") == "user_annotation" and str(event["name"]).startswith(PHASE)
    )
    between = [(before[1], after[0], OUTSIDE) for before, after in itertools.pairwise(marked) if after[0] > before[1]]
    return Lane("step", sorted([*marked, *between]))


def _device_lanes(events: Sequence[Event]) -> list[Lane]:
    """Return a lane per stream of kernels, and one of copies."""
    lanes: dict[str, Lane] = {}
    for event in events:
        if event.get("cat") == "kernel" and not is_message(event):
            name = f"kernels, stream {event.get('args', {}).get('stream', '?')}"
        elif event.get("cat") in ("gpu_memcpy", "gpu_memset"):
            name = "copies"
        else:
            continue
        lanes.setdefault(name, Lane(name)).spans.append((*_span(event), str(event["name"])[:80]))
    return [lanes[name] for name in sorted(lanes, key=lambda name: (name == "copies", name))]


def _message_lanes(events: Sequence[Event]) -> list[Lane]:
    """Return a lane of messages per axis, or per stream or backend if the trace does not name axes."""
    lanes: dict[str, Lane] = {}
    for event in events:
        if not is_message(event):
            continue
        arguments = event.get("args", {})
        axis = str(arguments.get("Process Group Description") or arguments.get("Process Group Name") or "")
        if not axis:
            axis = f"stream {arguments['stream']}" if "stream" in arguments else "gloo"
        what = str(arguments.get("Collective name") or event["name"])[:80]
        lane = lanes.setdefault(axis, Lane(f"messages, {axis}"))
        lane.spans.append((*_span(event), what))
    return [lanes[axis] for axis in sorted(lanes, key=lambda axis: (axis not in AXIS_COLORS, axis))]


def is_message(event: Event) -> bool:
    """Return True if an event is a message on its way: a kernel of NCCL's or HCCL's, or a work of gloo's threads.

    The host's launches of messages, which a trace has too, are not.
    """
    if event.get("cat") == "kernel":
        return bool(KERNEL.search(str(event["name"]))) or "Collective name" in event.get("args", {})
    return event.get("cat") == "user_annotation" and str(event["name"]).startswith(GLOO)


def _span(event: Event) -> tuple[float, float]:
    return event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6
