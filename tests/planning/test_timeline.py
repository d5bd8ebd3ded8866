"""A rank that runs programs: links that messages share, messages in sequence, and the mirror of a program."""

from __future__ import annotations

import pytest

from megapar.planning.timeline import (
    BETWEEN,
    INSIDE,
    Bar,
    Flight,
    ProgramPart,
    Send,
    Span,
    Timeline,
    Wait,
    Work,
    backward_of,
    forward_of,
)


def flight(stream: str, inside: float = 0.0, between: float = 0.0, latency: float = 0.0) -> Flight:
    loads = ((INSIDE, inside), (BETWEEN, between))
    return Flight(stream, tuple(load for load in loads if load[1]), latency)


def test_work_hides_a_message_that_is_waited_for_later() -> None:
    span = Timeline().run([Send("a", flight("ep", 2.0)), Work("w", 3.0), Wait("a")])
    assert (span.seconds, span.waited) == (3.0, 0.0)
    span = Timeline().run([Send("a", flight("ep", 2.0, latency=2.0)), Work("w", 3.0), Wait("a")])
    assert (span.seconds, span.waited, span.busy[0]) == (4.0, 1.0, 2.0)


def test_messages_of_two_axes_share_a_link_and_use_others_at_once() -> None:
    both = [Send("a", flight("ep", 2.0, 3.0)), Send("b", flight("mp", 2.0)), Wait("b"), Wait("a")]
    assert Timeline().run(both[:3]).seconds == 4.0  # after the first one's part inside the node
    assert Timeline().run(both).seconds == 4.0
    one_axis = [Send("a", flight("ep", 2.0, 3.0)), Send("b", flight("ep", 2.0)), Wait("b")]
    assert Timeline().run(one_axis).seconds == 5.0


def test_a_second_hop_needs_the_first() -> None:
    hops = [Send("a", flight("nodes", between=3.0)), Send("b", flight("ranks", 2.0), after="a"), Wait("b")]
    assert Timeline().run(hops).seconds == 5.0


def test_messages_in_flight_slow_the_work_above_them() -> None:
    span = Timeline(shown=0.1).run([Send("a", flight("ep", 2.0)), Work("w", 1.0), Wait("a")])
    assert span.slowed == pytest.approx(0.1)
    assert span.seconds == pytest.approx(2.1)
    assert span.exposed == pytest.approx(1.1)


def test_nothing_waits_for_what_travels_aside() -> None:
    span = Timeline(aside=frozenset({"ep"})).run([Send("a", flight("ep", 2.0)), Work("w", 1.0), Wait("a")])
    assert (span.seconds, span.waited, span.busy[0]) == (1.0, 0.0, 2.0)


def test_a_backward_is_the_mirror_and_a_recomputed_unit_runs_again_under_its_last_gradients() -> None:
    program = [
        ProgramPart((Work("a", 1.0),), (Work("a'", 2.0),)),
        ProgramPart((Send("C", flight("ep", 1.0)),), (Wait("C'"),), again=()),
        ProgramPart((Wait("C"),), (Send("C'", flight("ep", 1.0)),), again=(), leads=True),
    ]
    assert [type(event).__name__ for event in forward_of(program)] == ["Work", "Send", "Wait"]
    assert [event.name for event in backward_of(program, recomputed=False)] == ["C'", "C'", "a'"]
    assert [event.name for event in backward_of(program, recomputed=True)] == ["C'", "a", "C'", "a'"]
    assert Timeline().run(backward_of(program, recomputed=True)).waited == 0.0


def test_sums_and_bars() -> None:
    timeline = Timeline(drawn=True)
    span = timeline.run([Send("a", flight("ep", 2.0)), Work("w", 1.0), Wait("a")])
    assert timeline.bars == [Bar(INSIDE, "a", 0.0, 2.0), Bar("compute", "w", 0.0, 1.0), Bar("wait", "a", 1.0, 2.0)]
    assert span.plus(span, 2).seconds == 6.0
    assert span.plus(span, -1) == Span()
