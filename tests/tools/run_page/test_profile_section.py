"""The profile of a page: lanes of phases, kernels and messages, and operators by their own time."""

from __future__ import annotations

from typing import Any

import pytest

from megapar.tools.run_page.profile_section import slowest_operators, timeline


def event(cat: str, name: str, ts: float, dur: float, **arguments: object) -> dict[str, Any]:
    """A complete event of a trace, in microseconds."""
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": 1, "args": arguments}


SEND = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"
GPU = [
    event("user_annotation", "megapar: forward and backward", 0, 80),
    event("user_annotation", "megapar: optimizer", 90, 10),
    event("user_annotation", "nccl:all_to_all", 5, 1),  # its launch by the host
    event("kernel", "gemm", 0, 50, stream=7),
    event("kernel", "gemm", 50, 30, stream=7),
    event("kernel", SEND, 10, 40, stream=20, **{"Collective name": "all_to_allv", "Process Group Description": "ep"}),
    event("kernel", "ncclDevKernel_AllGather_RING_LL", 60, 20, stream=24, **{"Process Group Description": "shard"}),
    event("gpu_memcpy", "Memcpy HtoD", 95, 5, stream=7),
]


def test_messages_have_lanes_beside_the_kernels() -> None:
    figure = timeline({"traceEvents": GPU})
    assert figure is not None
    assert figure.unit == "µs"
    assert figure.body["lanes"] == ["step", "kernels, stream 7", "copies", "messages, ep", "messages, shard"]
    names = figure.body["names"]
    shown = [(figure.body["lanes"][lane], names[name], start, end) for lane, start, end, name in figure.body["spans"]]
    assert ("messages, ep", "all_to_allv", pytest.approx(10), pytest.approx(50)) in shown
    assert ("step", "between the phases", pytest.approx(80), pytest.approx(90)) in shown
    key = ", ".join(entry["name"] for entry in figure.body["key"])
    assert key == "forward and backward, optimizer, between the phases"


def test_kernels_count_with_their_durations() -> None:
    rows = slowest_operators({"traceEvents": GPU})
    assert rows[0] == ("gemm", 2, pytest.approx(80e-6), pytest.approx(80 / 140))


def test_an_operator_counts_without_those_that_it_calls() -> None:
    events = [
        event("cpu_op", "autograd::addmm", 0, 100),
        event("cpu_op", "aten::addmm", 10, 80),
        event("cpu_op", "aten::copy_", 20, 10),
        event("cpu_op", "aten::addmm", 100, 50),
    ]
    rows = slowest_operators({"traceEvents": events})
    assert [(name, calls, pytest.approx(seconds * 1e6)) for name, calls, seconds, _ in rows] == [
        ("aten::addmm", 2, 120),
        ("autograd::addmm", 1, 20),
        ("aten::copy_", 1, 10),
    ]


def test_a_trace_without_events_has_no_timeline() -> None:
    assert timeline({}) is None
    assert slowest_operators({}) == []
