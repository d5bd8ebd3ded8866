"""The watchdog: who is late, in which collective and line, and that a step which hangs ends the run."""

from __future__ import annotations

import gc
import os
import select
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megapar.core.comm.accounts import FlightRecorder
from megapar.core.comm.axis import Axis
from megapar.files.disk import DiskWriting
from megapar.health.hangs import rank_reports
from megapar.health.hangs import watchdog as watchdog_module
from megapar.health.hangs.gathering import Survey
from megapar.health.hangs.rank_reports import explain, late_ranks, line_of
from megapar.health.hangs.sections import Overdue, Sections
from megapar.health.hangs.stragglers import Pace, Stragglers, pace, summary
from megapar.health.hangs.watchdog import Watchdog
from megapar.training.loop.callbacks import connect
from tests.support.ranks import run_ranks

OVERDUE = Overdue("step", "7", 31.0, 30.0, True)
AXES = {"mp": {0: [0, 1], 1: [0, 1], 2: [2, 3], 3: [2, 3]}, "data": {0: [0, 2], 2: [0, 2], 1: [1, 3], 3: [1, 3]}}


def report(rank: int, mp: int, data: int) -> dict[str, Any]:
    return {
        "iteration": 7,
        "section": "step",
        "detail": "7",
        "seconds": 31.0,
        "file": "",
        "waits": False,
        "beside": [],
        "counts": {"mp": mp, "data": data},
        "axes": {name: ranks[rank] for name, ranks in AXES.items()},
        "last": f"all_reduce {mp} on mp, launched 30.0 s ago",
        "recent": [f"all_reduce {mp} on mp"],
        "line": f"model.py:{mp} in forward: x = y",
    }


def test_the_late_rank_is_the_one_that_waits_for_nobody() -> None:
    # Rank 3 stands in front of its 10th mp collective; 2 waits for it there, 0 for 2 on data, 1 for 0.
    reports = {0: report(0, 12, 5), 1: report(1, 13, 4), 2: report(2, 10, 4), 3: report(3, 9, 4)}
    assert late_ranks(reports, 4) == [3]
    printed = explain(reports, 4, OVERDUE, "--step-timeout-seconds is 30")
    assert "step 7 has taken 31.0 s" in printed
    assert "late: rank 3 in step 7, at model.py:9 in forward: x = y; last collective: all_reduce 9 on mp" in printed
    assert "waiting: ranks 0 " in printed


def test_a_rank_that_does_not_answer_is_late_before_all_others() -> None:
    reports = {rank: report(rank, 12, 5) for rank in (0, 1, 3)}
    assert late_ranks(reports, 4) == [2]
    assert "rank 2 does not answer: stopped, dead, or off the network" in explain(
        reports, 4, OVERDUE, "--step-timeout-seconds is 30"
    )


def test_where_nobody_is_behind_the_network_is_suspected() -> None:
    reports = {rank: report(rank, 12, 5) for rank in range(4)}
    assert late_ranks(reports, 4) == []
    assert "no rank is behind" in explain(reports, 4, OVERDUE, "--step-timeout-seconds is 30")


@pytest.fixture(autouse=True)
def _records_go_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # of a watchdog without a folder


def test_a_long_step_of_one_process_ends_it_and_names_the_line() -> None:
    printed: list[str] = []
    ended = threading.Event()
    statuses: list[int] = []
    recorder = FlightRecorder()
    recorder.note("mp", "all_reduce")

    def end(status: int) -> None:
        statuses.append(status)
        ended.set()

    watchdog = Watchdog(Sections({"first-step": 0.3}), print_report=printed.append, end=end)
    watchdog.connect(0, 1, None, recorder, dict)
    watchdog.start()
    watchdog.before_step(3)
    assert ended.wait(30)  # the line that hangs
    watchdog.close()
    assert statuses == [1]
    assert "first-step 3 has taken" in printed[0]
    assert "assert ended.wait(30)  # the line that hangs" in printed[0]
    assert "all_reduce 1 on mp" in printed[0]


def test_steps_in_time_and_what_is_between_them_are_left_alone() -> None:
    ended: list[int] = []
    limits = {"first-step": 0.2, "step": 0.2}
    watchdog = Watchdog(Sections(limits), print_report=lambda text: None, end=ended.append)
    watchdog.start()
    for step in range(8):
        watchdog.before_step(step)
        time.monotonic()
        watchdog.after_step(step)
        threading.Event().wait(0.05)
    watchdog.close()
    assert ended == []


def hang(rank: int, world_size: int, rendezvous: str, records: Path) -> tuple[list[str], bool]:
    """Rank 1 never comes to the second collective; what the watchdog says on each rank."""
    os.environ["TORCH_FR_BUFFER_SIZE"] = "20"
    store = dist.FileStore(f"{rendezvous}-watchdog", world_size)
    axis = Axis("data", world_size, rank, None, tuple(range(world_size)))
    printed: list[str] = []
    ended = threading.Event()
    watchdog = Watchdog(
        Sections({"first-step": 0.5}),
        record_folder=records,
        print_report=printed.append,
        end=lambda status: ended.set(),
    )
    connection = dist.PrefixStore("watchdog", store)
    watchdog.connect(rank, world_size, connection, axis.recorder, lambda: {"data": axis.ranks})
    watchdog.start()
    watchdog.before_step(1)
    axis.note("all_reduce")
    if rank != 1:
        axis.note("all_gather")
    ended.wait(30)
    watchdog.close()
    return printed, ended.is_set()


def test_ranks_tell_each_other_where_they_are_through_the_store(tmp_path: Path) -> None:
    results = run_ranks(3, hang, tmp_path, group=False)
    assert all(ended for _, ended in results)
    first = [lines[0] for lines, _ in results]
    (printed,) = [
        text for text in first if text.startswith("megapar watchdog: ")
    ]  # of whichever was the first to answer
    assert "late: rank 1 in first-step 1" in printed
    assert "ended.wait(30)" in printed
    assert "waiting: ranks 0, 2 " in printed.replace(" ...", "") or "all_gather 2 on data" in printed
    others = [text for text in first if text != printed]
    assert [text.partition(";")[0] for text in others] == [
        f"rank {rank}: ended by the watchdog" for rank, text in enumerate(first) if text != printed
    ]


def test_a_rank_that_writes_is_late_and_those_that_wait_for_it_are_not() -> None:
    """The save goes on beside the steps, in a thread of its own."""

    def saving(rank: int, waits: bool) -> dict[str, Any]:
        at = {"section": "save", "detail": "of iteration 6", "seconds": 40.0, "line": "file.py:9 in write: x"}
        return {**report(rank, 12, 5), "beside": [{**at, "file": "" if waits else "/disk/shard", "waits": waits}]}

    overdue = Overdue("save", "of iteration 6", 40.0, 30.0, True)
    printed = explain({0: saving(0, True), 1: saving(1, False)}, 2, overdue, "--section-timeouts has save=30")
    assert "save of iteration 6 has taken 40.0 s, --section-timeouts has save=30." in printed
    assert "late: rank 1 in save of iteration 6, at file.py:9 in write: x; file /disk/shard" in printed
    assert "waiting: ranks 0 in save of iteration 6" in printed
    assert late_ranks({0: saving(0, False)}, 1, "save") == [0]


def test_the_file_that_a_thread_is_at_is_known(tmp_path: Path) -> None:
    entered, leave = threading.Event(), threading.Event()

    def write(path: Path) -> None:
        entered.set()
        while not leave.is_set():
            pass

    thread = threading.Thread(target=write, args=(tmp_path / "file",), daemon=True)
    thread.start()
    assert entered.wait(30)
    line, file, waits = line_of(thread.ident or 0)
    leave.set()
    assert "in write: " in line
    if not waits:  # a moment inside of the event's own code
        assert file == str(tmp_path / "file")


def test_the_file_of_a_store_that_hangs_in_a_write_is_known(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    pipe = os.open(tmp_path / "pipe", os.O_RDWR)
    writing = DiskWriting(tmp_path / "file")
    writing._file.close()
    writing._file = os.fdopen(os.dup(pipe), "wb", buffering=0)
    content = memoryview(bytes(1 << 20))  # more than a pipe has room for
    thread = threading.Thread(target=writing.write, args=(content,), daemon=True)
    thread.start()
    while not select.select([pipe], [], [], 30)[0]:  # it has begun
        pass
    line, file, waits = line_of(thread.ident or 0)
    left = len(content)
    while left:
        left -= len(os.read(pipe, left))
    thread.join(30)
    os.close(pipe)
    assert "in write: " in line
    assert (file, waits) == (str(tmp_path / "file"), False)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_section_without_a_limit_is_told_by_what_it_took_before() -> None:
    clock, compiled = Clock(), [0]
    sections = Sections({"save": 5.0}, clock=clock, compiled=lambda: compiled[0])
    with sections.inside("evaluation"):
        clock.now += 100
    sections.begin("evaluation", "after step 4")
    clock.now += 999
    assert sections.overdue() is None
    clock.now += 2
    assert sections.overdue() == Overdue("evaluation", "after step 4", 1001.0, 1000.0, False)
    assert sections.overdue() is None
    clock.now += 1002
    assert sections.overdue() == Overdue("evaluation", "after step 4", 2003.0, 2002.0, False)
    with sections.inside("save"):
        clock.now += 6
        assert sections.overdue() == Overdue("save", "", 6.0, 5.0, True)
    assert sections.seconds(sections.open()[0]) == 2003.0  # what lies inside is not counted
    sections.end_all()
    assert sections.open() == []


def test_a_step_that_compiles_is_a_first_one() -> None:
    clock, compiled = Clock(), [0]
    sections = Sections({"step": 5.0}, clock=clock, compiled=lambda: compiled[0])
    sections.begin("step", "9")
    compiled[0] += 1
    clock.now += 60
    assert sections.overdue() is None
    clock.now += 600
    assert sections.overdue() == Overdue("first-step", "9", 660.0, 600.0, False)


def slow(rank: int, world_size: int, rendezvous: str) -> list[str]:
    """Rank 1 is unusually long in an evaluation, which is printed once and ends nothing."""
    store = dist.PrefixStore("watchdog", dist.FileStore(f"{rendezvous}-watchdog", world_size))
    printed: list[str] = []
    heard = threading.Event()
    ended: list[int] = []

    def tell(text: str) -> None:
        printed.append(text)
        heard.set()

    watchdog = Watchdog(Sections({}, least_seconds=0.5 if rank else 60.0), print_report=tell, end=ended.append)
    watchdog.connect(rank, world_size, store, FlightRecorder(), dict)
    with watchdog.section("evaluation", "after step 3"):
        watchdog.start()
        if rank == 1:
            assert heard.wait(60)
            store.set("done", "1")
        store.wait(["done"])
    watchdog.close()
    assert ended == []
    return printed


def test_what_is_unusually_slow_is_told_by_the_rank_that_found_it() -> None:
    silent, (printed,) = run_ranks(2, slow, group=False)
    assert "evaluation after step 3 has taken" in printed
    assert "s is unusual" in printed
    assert silent == []


class Silent:
    """A store whose holder stands still: it takes a question and never answers."""

    def check(self, keys: list[str]) -> bool:
        threading.Event().wait()
        return False

    def add(self, key: str, amount: int) -> int:
        threading.Event().wait()
        return 0

    def set(self, key: str, value: str) -> None:
        threading.Event().wait()


def test_a_store_that_never_answers_keeps_no_limit_from_being_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog_module, "MOST_SECONDS", 0.3)
    ended, printed = threading.Event(), list[str]()
    watchdog = Watchdog(Sections({"save": 0.3}), print_report=printed.append, end=lambda status: ended.set())
    silent: Any = Silent()
    watchdog.connect(0, 2, silent, FlightRecorder(), dict)
    watchdog.start()
    threading.Event().wait(0.2)  # it listens
    with watchdog.section("save"):
        assert ended.wait(30)
    watchdog.close()
    assert "save has taken" in printed[0]


def test_the_listener_of_a_watchdog_that_nobody_closes_ends_with_it() -> None:
    before = set(threading.enumerate())
    watchdog = Watchdog(Sections({"step": 0.5}))
    watchdog.connect(0, 2, dist.HashStore(), FlightRecorder(), dict)
    (listening,) = set(threading.enumerate()) - before
    del watchdog
    gc.collect()
    listening.join(30)
    assert not listening.is_alive()


def at_once(rank: int, world_size: int, rendezvous: str) -> list[str]:
    """Rank 0 is unusually long in its log, and rank 1, which waits for it in a step, gives the alarm meanwhile."""
    store = dist.PrefixStore("watchdog", dist.FileStore(f"{rendezvous}-watchdog", world_size))
    printed: list[str] = []
    ended = threading.Event()
    sections = Sections({}, least_seconds=0.5) if rank == 0 else Sections({"first-step": 0.7})
    records = Path(f"{rendezvous}-records")  # torch's flight recorder may be on in this process
    watchdog = Watchdog(sections, record_folder=records, print_report=printed.append, end=lambda status: ended.set())
    axis = Axis("data", world_size, rank, None, tuple(range(world_size)))
    watchdog.connect(rank, world_size, store, axis.recorder, lambda: {"data": axis.ranks})
    watchdog.start()
    if rank == 0:
        with watchdog.section("log", "after step 3"):
            assert ended.wait(60)
    else:
        axis.note("all_reduce")
        watchdog.before_step(4)
        assert ended.wait(60)
    watchdog.close()
    return printed


def test_a_warning_keeps_no_rank_from_answering_an_alarm() -> None:
    printed = [line for lines in run_ranks(2, at_once, group=False) for line in lines]
    assert any("late: rank 0 in log after step 3" in text for text in printed)
    assert not [text for text in printed if "does not answer" in text]


def test_a_reader_that_stands_still_does_not_hold_the_watchdog(monkeypatch: pytest.MonkeyPatch) -> None:
    """A warning that is never read does not keep a section with a limit from ending the run."""
    monkeypatch.setattr(watchdog_module, "GRACE_SECONDS", 0.1)
    printed, read, ended = threading.Event(), threading.Event(), threading.Event()

    def tell(text: str) -> None:
        printed.set()
        read.wait(60)

    watchdog = Watchdog(Sections({"save": 0.2}, least_seconds=0.1), print_report=tell, end=lambda status: ended.set())
    watchdog.start()
    with watchdog.section("evaluation"):
        assert printed.wait(60)
    with watchdog.section("save"):
        assert ended.wait(30)
    read.set()
    watchdog.close()


def test_the_slowest_rank_is_named_against_the_median() -> None:
    pace = summary([1.0, 1.1, 0.9, 2.5])
    assert pace == Pace(p50=1.0, p90=2.5, max=2.5, slowest_rank=3)
    stragglers = Stragglers(1.5)
    said = [stragglers.update(pace, 4) for _ in range(4)]
    assert said[:2] == ["", ""]
    assert "rank 3 is slow: 2.500 s of own work in a step, 1.000 s in the median rank" in said[2]
    assert said[3] == ""  # once
    for factor in (3.0, 0.0):
        assert not pace.stands_out(factor)


def test_one_busy_moment_makes_no_slow_rank() -> None:
    stragglers = Stragglers(1.5)
    slow, other, even = summary([1.0, 2.0]), summary([2.0, 1.0]), summary([1.0, 1.01])
    assert [stragglers.update(pace, 10) for pace in (slow, slow, other, other, even, slow, slow)] == [""] * 7
    assert "rank 1 is slow" in stragglers.update(slow, 10)
    assert [Stragglers(1.5).update(slow, 1) for _ in range(9)] == [""] * 9  # few steps


@pytest.mark.parametrize(("late", "waited"), [([1], 1), ([0], 0), ([], 0)])
def test_a_rank_that_waited_for_a_late_one_records_that(late: list[int], waited: int) -> None:
    noted: list[int] = []
    watchdog = Watchdog(
        Sections({}), rank=0, print_report=lambda text: None, note_wait=lambda: noted.append(len(noted))
    )
    watchdog._final_report(watchdog.report(), Survey({}, late, OVERDUE, False))
    assert len(noted) == waited


def test_an_installed_package_is_its_own_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_reports, "_OWN", "/v/lib/python3.12/site-packages/megapar/")
    names: dict[str, Any] = {"released": [], "entered": threading.Event()}
    text = "def write(path):\n    entered.set()\n    while not released:\n        pass\n"
    exec(compile(text, f"{rank_reports._OWN}files/w.py", "exec"), names)
    thread = threading.Thread(target=names["write"], args=(tmp_path / "shard",), daemon=True)
    thread.start()
    try:
        assert names["entered"].wait(10)
        assert thread.ident is not None
        seen = {line_of(thread.ident)[1:] for _ in range(200)}
    finally:
        names["released"].append(True)
        thread.join(10)
    assert (str(tmp_path / "shard"), False) in seen


def test_the_time_of_sections_inside_counts_for_none_around_them() -> None:
    now = 0.0
    sections = Sections({}, clock=lambda: now)
    for name in ("outer", "middle", "inner"):
        sections.begin(name)
    for _ in range(3):
        now += 100.0
        sections.end()
    assert [sections._longest[name] for name in ("inner", "middle", "outer")] == [100.0] * 3


def test_ranks_have_the_numbers_with_which_they_were_launched() -> None:
    axis = SimpleNamespace(communicator="pp", ranks=(0, 1), size=2)
    facts = {"rank": 1, "launched": (0, 2, 1, 3), "grid": SimpleNamespace(world_size=4), "recorder": FlightRecorder()}
    world: Any = SimpleNamespace(**facts, spare_store=lambda name: None, axes=lambda: [axis], queues=[])
    told: list[Any] = []
    connect(SimpleNamespace(connect=lambda *asked: told.extend(asked)), world)  # type: ignore[arg-type]
    assert told[0] == 2
    assert told[4]() == {"pp": [0, 2]}
    assert pace([1.0], Axis.single("world"), torch.device("cpu"), (7,)).slowest_rank == 7
