"""Schedules without processes: none hangs, their bubbles are the published ones, drawings look like the papers'."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megapar.core.pipeline.draw import as_svg, as_text
from megapar.core.pipeline.lookahead import post_later
from megapar.core.pipeline.schedule import (
    BACKWARD,
    COMPUTE,
    FORWARD,
    INPUT,
    RECV_B,
    RECV_F,
    Schedule,
    make_schedule,
    min_micro_batches,
)
from megapar.core.pipeline.simulate import (
    FREE,
    RUNNERS,
    Costs,
    DeadlockError,
    Wiring,
    bubble_formula,
    check,
    simulate,
)
from tests.support.pairwise import pairwise

KINDS = [
    *(("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3)),
    *(("zero_bubble", 1), ("zero_bubble", 2), ("zero_bubble", 3)),
]
SIZES = [(p, m) for p in (2, 3, 4, 8) for m in (p, 2 * p, 4 * p)]


@pytest.mark.parametrize(("name", "chunks"), KINDS)
def test_no_schedule_hangs_and_every_bubble_is_the_formula_s(name: str, chunks: int) -> None:
    for ranks, micro_batches in SIZES:
        schedule = make_schedule(name, ranks, chunks, micro_batches)
        check(schedule)
        formula = bubble_formula(name, ranks, chunks, micro_batches)
        if formula is None:
            assert (name, chunks) == ("zero_bubble", 2)
            assert micro_batches < 2 * ranks - 1
        else:
            assert simulate(schedule).bubble_share == pytest.approx(formula, abs=1e-12)


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_any_number_of_micro_batches_that_suffices_works(name: str) -> None:
    for micro_batches in range(min_micro_batches(name, 4), 12):
        schedule = make_schedule(name, 4, 1, micro_batches)
        check(schedule)
        assert simulate(schedule).bubble_share == pytest.approx(bubble_formula(name, 4, 1, micro_batches))


def test_one_forward_one_backward_keeps_no_more_than_the_stages_that_follow() -> None:
    assert simulate(make_schedule("1f1b", 4, 1, 16)).in_flight == (4, 3, 2, 1)
    assert simulate(make_schedule("gpipe", 4, 1, 16)).in_flight == (16, 16, 16, 16)


def test_slow_messages_and_a_heavy_head_show() -> None:
    schedule = make_schedule("1f1b", 4, 1, 8)
    assert simulate(schedule, Costs(send=0.5)).end > simulate(schedule).end
    heavy = simulate(schedule, Costs(chunks=(1, 1, 1, 2)))
    assert heavy.end == 8 * 6 + 3 + 6  # the last stage never rests; before it three forwards, behind it three backwards
    assert heavy.bubble_share == pytest.approx(1 - 8 * 3 * 5 / (4 * heavy.end))


def slower(schedule: Schedule, message: float, wiring: Wiring) -> float:
    """Percent over messages that share no queue. message: its time, in forwards of a whole stage."""
    part = schedule.num_ranks / schedule.num_chunks
    costs = Costs(part, part, part, message)
    return 100 * (simulate(schedule, costs, wiring).end / simulate(schedule, costs, FREE).end - 1)


ONE_QUEUE = Wiring(lambda sender, receiver: "pp", separate_receives=False)
PER_PAIR = Wiring(lambda sender, receiver: frozenset((sender, receiver)), separate_receives=False)
QUEUED = {
    # one communicator for all ranks; one for each two neighbours; percent at messages of 2 and 10 % of a forward
    ("1f1b", 8, 1, 32): ((0.1, 0.5), (0.1, 0.5)),
    ("gpipe", 4, 1, 8): ((1.7, 8.3), (0.8, 4.2)),
    ("interleaved", 4, 2, 16): ((10.5, 14.1), (0.0, 0.0)),
    ("interleaved", 8, 4, 32): ((39.8, 79.2), (0.0, 0.0)),
    ("zero_bubble", 4, 2, 16): ((4.2, 4.9), (0.0, 0.0)),
    ("interleaved", 2, 4, 2): ((3.1, 13.5), (3.1, 13.5)),
}


@pytest.mark.parametrize("case", QUEUED, ids=str)
def test_messages_that_share_a_queue_hold_each_other_up(case: tuple[str, int, int, int]) -> None:
    for wiring, percent in zip((ONE_QUEUE, PER_PAIR), QUEUED[case], strict=True):
        found = [round(slower(make_schedule(*case), message, wiring), 1) for message in (0.02, 0.1)]
        assert found == list(percent), wiring


@pytest.mark.parametrize(("name", "chunks"), [*KINDS, ("interleaved", 4)])
def test_what_the_runner_has_costs_nothing_over_free_messages(name: str, chunks: int) -> None:
    """Half a percent at most, for 2 to 8 ranks and messages of 2 and 10 % of a forward, each with each other."""
    found = {
        (ranks, times, message): slower(make_schedule(name, ranks, chunks, times * ranks), message, RUNNERS)
        for ranks, times, message in pairwise((range(2, 9), (1, 2, 4), (0.02, 0.1)))
    }
    worst = max(found, key=lambda case: found[case])
    assert found[worst] <= 0.5, worst


@pytest.mark.parametrize(("name", "chunks"), KINDS)
def test_no_lookahead_hangs_whatever_the_time_of_a_message(name: str, chunks: int) -> None:
    for ranks, times, ahead in product((2, 3, 4, 8), (1, 2, 3), (0, 1, 2, 3, 7, 99)):
        schedule = make_schedule(name, ranks, chunks, times * ranks)
        later = post_later(schedule, ahead)
        check(later)
        simulate(later, Costs(send=0.3), RUNNERS)
        for before, program in zip(schedule.programs, later.programs, strict=True):
            assert sorted(program) == sorted(before)
            computed, was = ([a for a in one if a.kind in COMPUTE] for one in (program, before))
            assert computed == was, "only messages move"
    assert post_later(schedule, None) is schedule


@pytest.mark.parametrize(("name", "chunks"), KINDS)
def test_no_receive_is_posted_further_ahead_than_allowed(name: str, chunks: int) -> None:
    """Unless its message has no other place in the order of all ranks, it is exactly so many computations ahead."""
    for ahead in (0, 1, 2):
        later = post_later(make_schedule(name, 4, chunks, 8), ahead)
        for program in later.programs:
            computed = [action for action in program if action.kind in COMPUTE]
            for place, action in enumerate(program):
                if action.kind in (RECV_F, RECV_B):
                    kinds = (FORWARD,) if action.kind == RECV_F else (BACKWARD, INPUT)
                    needs = next(a for a in computed if a in [action._replace(kind=kind) for kind in kinds])
                    posted = sum(a.kind in COMPUTE for a in program[:place])
                    assert computed.index(needs) - posted <= ahead


@given(kind=st.sampled_from(KINDS), ranks=st.integers(2, 6), times=st.integers(1, 3), ahead=st.integers(0, 12))
def test_every_schedule_with_every_lookahead_ends(kind: tuple[str, int], ranks: int, times: int, ahead: int) -> None:
    later = post_later(make_schedule(kind[0], ranks, kind[1], times * ranks), ahead)
    check(later)
    assert later.receives_ahead == ahead


@pytest.mark.parametrize(("send", "without", "limited"), [(0.02, 1.16, 1.01), (0.1, 1.2, 1.06)])
def test_a_limit_of_receives_gains_what_the_page_says(send: float, without: float, limited: float) -> None:
    """Of 1F1B with 8 stages and 32 micro-batches, by what an H100's products took beside blocks (docs/pipeline.md)."""
    schedule, held = make_schedule("1f1b", 8, 1, 32), Costs(send=send, beside=(1.0, 1.15, 1.16))
    free = simulate(schedule, Costs(send=0.0), RUNNERS).end
    for receives, took in ((schedule, without), (post_later(schedule, 0), limited)):
        assert simulate(receives, held, RUNNERS).end / free == pytest.approx(took, abs=0.005)


def test_receives_that_wait_slow_computations_and_late_ones_expose_messages() -> None:
    schedule = make_schedule("1f1b", 4, 1, 16)
    held = Costs(send=0.02, beside=(1.0, 1.15, 1.16))
    alone = simulate(schedule, replace(held, beside=()), RUNNERS).end
    early, late = (simulate(post_later(schedule, ahead), held, RUNNERS).end for ahead in (None, 0))
    assert 1.1 * alone < early <= 1.16 * alone
    bare = simulate(post_later(schedule, 0), replace(held, beside=()), RUNNERS).end
    assert alone < bare <= late < early, "messages of 2 % cost less than multiprocessors"
    far = Costs(send=0.5)
    assert simulate(post_later(schedule, 0), far, RUNNERS).end > simulate(schedule, far, RUNNERS).end


def test_receipts_have_to_be_launched_aside() -> None:
    """A queue per direction alone leaves GPipe where two neighbours' common queue leaves it."""
    behind = replace(RUNNERS, separate_receives=False)
    schedule = make_schedule("gpipe", 8, 1, 32)
    assert slower(schedule, 0.1, behind) == pytest.approx(5.2, abs=0.05)
    assert slower(schedule, 0.1, RUNNERS) == pytest.approx(0.0, abs=1e-9)


def test_a_queue_whose_ends_have_another_order_never_ends() -> None:
    schedule = changed(make_schedule("1f1b", 2, 1, 4), 1, "1RECV_F0", "1RECV_F1")
    simulate(schedule)  # free messages find their way
    with pytest.raises(DeadlockError, match=r"never ends: rank 0 before .* rank 1 before"):
        simulate(schedule, wiring=RUNNERS)


@pytest.mark.parametrize(
    ("name", "ranks", "chunks", "micro_batches"), [("1f1b", 4, 1, 3), ("zero_bubble", 4, 1, 2), ("gpipe", 2, 2, 4)]
)
def test_what_a_schedule_cannot_do_is_an_error(name: str, ranks: int, chunks: int, micro_batches: int) -> None:
    with pytest.raises(ValueError, match=r"needs|has one chunk"):
        make_schedule(name, ranks, chunks, micro_batches)


def changed(schedule: Schedule, rank: int, first: str, second: str) -> Schedule:
    """With two actions of a rank in each other's place."""
    program = list(schedule.programs[rank])
    names = list(map(str, program))
    i, j = names.index(first), names.index(second)
    program[i], program[j] = program[j], program[i]
    programs = [*schedule.programs[:rank], tuple(program), *schedule.programs[rank + 1 :]]
    return replace(schedule, programs=tuple(programs))


@pytest.mark.parametrize(
    ("rank", "first", "second"),
    [
        (1, "1RECV_F0", "1RECV_F1"),  # not the order of the sends
        (0, "0SEND_F1", "0RECV_B0"),  # each side waits for the other's message
        (1, "1RECV_F0", "1F0"),  # computed before it is there
    ],
)
def test_the_proof_can_fail(rank: int, first: str, second: str) -> None:
    schedule = make_schedule("1f1b", 2, 1, 4)
    check(schedule)
    with pytest.raises(DeadlockError, match=r"hangs: rank 0 before .* rank 1 before"):
        check(changed(schedule, rank, first, second))


def test_a_backward_waits_for_that_of_the_next_chunk_on_the_same_rank() -> None:
    schedule = make_schedule("zero_bubble", 2, 2, 4)
    check(schedule)
    with pytest.raises(DeadlockError, match="rank 1 before 1I0"):
        check(changed(schedule, 1, "1I0", "2I0"))


def test_work_left_out_or_done_twice_is_found() -> None:
    schedule = make_schedule("zero_bubble", 2, 1, 2)
    without = tuple(tuple(a for a in program if str(a) != "1W1") for program in schedule.programs)
    with pytest.raises(DeadlockError, match="leaves out 1W1"):
        check(replace(schedule, programs=without))
    last = schedule.programs[1][-1]
    with pytest.raises(DeadlockError, match="1W1 is done twice"):
        check(replace(schedule, programs=(schedule.programs[0], (*schedule.programs[1], last))))


DRAWN = {
    ("gpipe", 1, 3): """
stage 0 | F0 F1 F2  .  .  . B0  = B1  = B2  =
stage 1 |  . F0 F1 F2 B0  = B1  = B2  =  .  .
""",
    ("1f1b", 1, 3): """
stage 0 | F0 F1  .  . B0  = F2 B1  =  . B2  =
stage 1 |  . F0 B0  = F1 B1  = F2 B2  =  .  .
""",
    ("zero_bubble", 1, 2): """
stage 0 | F0 F1  . I0 W0 I1 W1
stage 1 |  . F0 I0 F1 I1 W0 W1
""",
    ("interleaved", 2, 2): """
stage 0 | 0F0 0F1 2F0 2F1   .   . 2B0   =   . 2B1   = 0B0   = 0B1   =
stage 1 |   . 1F0 1F1 3F0 3B0   = 3F1 3B1   = 1B0   = 1B1   =   .   .
""",
}


@pytest.mark.parametrize(("case", "picture"), DRAWN.items(), ids=lambda value: str(value)[:30])
def test_drawings(case: tuple[str, int, int], picture: str) -> None:
    name, chunks, micro_batches = case
    schedule = make_schedule(name, 2, chunks, micro_batches)
    assert as_text(schedule, simulate(schedule)).strip() == picture.strip()


def test_a_picture_has_a_box_for_every_computation() -> None:
    schedule = make_schedule("zero_bubble", 2, 2, 4)
    svg = as_svg(schedule, simulate(schedule), "1 < 2")
    assert svg.count("<g>") == 2 * 2 * 4 * 3
    assert "1 &lt; 2" in svg


@pytest.mark.parametrize(("ranks", "chunks", "count", "share"), [(4, 2, 8, 3.9), (4, 2, 16, 2.1), (8, 4, 64, 0.7)])
def test_recomputing_in_advance_would_save_what_its_row_says(ranks: int, chunks: int, count: int, share: float) -> None:
    """At most the recomputations that ranks wait for each other's: no less than plain recompute's work is left."""
    schedule = make_schedule("interleaved", ranks, chunks, count)
    late = simulate(schedule, Costs(input=2.0)).end  # a backward of two forwards, and the recomputation
    least = simulate(schedule, Costs()).end + count * chunks
    assert round(100 * (1 - least / late), 1) == share
