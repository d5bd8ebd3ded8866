"""Standard output that breaks: no call raises, what a full disk refuses comes later, what nobody reads is counted."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megapar.training.reports import streams
from megapar.training.reports.streams import GuardedStream


def test_a_reader_that_goes_away_costs_lines_and_nothing_else() -> None:
    reader, writer = os.pipe()
    stream = GuardedStream(writer)
    stream.write("one\n")
    assert os.read(reader, 100) == b"one\n"
    os.close(reader)
    assert stream.write("two\nthree\n") == 10
    stream.flush()
    print("four", file=stream)
    assert (stream.failures, stream.dropped) == (1, 3)
    os.close(writer)
    stream.close()


def test_a_script_may_ask_for_whole_lines_and_another_encoding() -> None:
    reader, writer = os.pipe()
    stream = GuardedStream(writer)
    stream.write("a")
    stream.reconfigure(encoding="latin-1", line_buffering=True, write_through=False)
    assert os.read(reader, 100) == b"a"
    print("one", end=" ", file=stream)
    stream.write("two ")
    os.set_blocking(reader, False)
    with pytest.raises(BlockingIOError):
        os.read(reader, 100)
    print("caf\xe9", file=stream)
    assert os.read(reader, 100) == b"one two caf\xe9\n"
    stream.reconfigure(line_buffering=False)
    stream.write("b")
    assert os.read(reader, 100) == b"b"
    os.close(reader)
    os.close(writer)


def test_what_a_full_disk_refuses_is_written_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, full = os.write, [True]

    def write(descriptor: int, data: bytes) -> int:
        if full[0]:
            raise OSError(28, "No space left on device")
        return kept(descriptor, data[:3])  # a disk may take a part

    monkeypatch.setattr(streams.os, "write", write)
    monkeypatch.setattr(streams, "MOST_BYTES", 20)
    with (tmp_path / "log").open("wb") as file:
        stream = GuardedStream(file.fileno())
        for number in range(6):
            stream.write(f"line {number}\n")
        full[0] = False
        stream.flush()
    assert (tmp_path / "log").read_text() == "line 4\nline 5\n"
    assert (stream.failures, stream.dropped) == (6, 4)


def test_a_signal_whose_handler_writes_in_the_middle_of_a_write(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    stream, kept, inside = GuardedStream(writer), os.write, [True]

    def write(descriptor: int, data: bytes) -> int:
        with memoryview(data):  # as the call itself holds it
            if inside:
                inside.clear()
                stream.write("told by the handler\n")
            return kept(descriptor, data)

    monkeypatch.setattr(streams.os, "write", write)
    stream.write("one\n")
    stream.write("two\n")
    assert b"told by the handler\n" in os.read(reader, 100)
    assert stream.failures == 0
    os.close(reader)
    os.close(writer)


@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_a_process_without_standard_output_writes_into_no_file_of_its_own(tmp_path: Path, name: str) -> None:
    body = (
        "import os, sys; from megapar.training.reports.streams import guard_streams\n"
        f"guard_streams(); file = open({str(tmp_path / 'file')!r}, 'wb')\n"
        f"print('said', file=sys.{name}, flush=True); os.system('echo said; echo said >&2')\n"
        "from megapar.health.stop.signal_listener import write_stderr; write_stderr('told')\n"
    )
    number = {"stdout": 1, "stderr": 2}[name]
    line = f'exec {sys.executable} -c "$0" {number}>&-'
    job = subprocess.run(["sh", "-c", line, body], cwd=Path(__file__).parents[3], capture_output=True, timeout=60)
    assert (job.returncode, (tmp_path / "file").read_bytes()) == (0, b"")
    assert b"Traceback" not in job.stderr


def test_what_failed_before_does_not_keep_a_stream_from_being_patient() -> None:
    body = (
        "import sys; from contextlib import suppress; from megapar.training.reports.streams import guard_streams\n"
        "with suppress(OSError): print('early', file=sys.stderr, flush=True)\n"
        "guard_streams(); print('late', file=sys.stderr, flush=True)\n"
        "print(sys.stderr.failures)"
    )
    with open("/dev/full", "wb") as full:
        job = subprocess.run(
            [sys.executable, "-c", body], cwd=Path(__file__).parents[3], stdout=subprocess.PIPE, stderr=full, timeout=60
        )
    assert job.returncode == 0
    assert int(job.stdout) > 0


def test_a_process_ends_well_whose_reader_is_gone() -> None:
    body = (
        "import sys; from megapar.training.reports.streams import guard_streams, stream_failures; guard_streams()\n"
        "sys.stdin.read()\n"
        "for i in range(5): print('line', i)\n"
        "sys.stdout.flush()\n"
        "sys.stderr.write(str(stream_failures()))"
    )
    job = subprocess.Popen(
        [sys.executable, "-c", body],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=Path(__file__).parents[3],
    )
    job.stdout.close()
    job.stdin.close()
    assert job.stderr.read() == b"1"
    assert job.wait(60) == 0
    job.stderr.close()
