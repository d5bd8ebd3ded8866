"""Processes that no signal ends, on a disk that does not answer; others are ended as they should be."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from megapar.tools.launcher import unkillable


@dataclass
class Handler:
    """As torch has one of each rank."""

    proc: subprocess.Popen[bytes]

    def close(self, death_sig: signal.Signals) -> None:
        os.killpg(self.proc.pid, death_sig)


def handler(body: str, *arguments: str) -> Handler:
    return Handler(
        subprocess.Popen(
            [sys.executable, "-c", f"import os, signal, sys, threading, time\n{body}", *arguments],
            start_new_session=True,
            stdout=subprocess.PIPE,
        )
    )


def test_what_does_not_listen_is_killed() -> None:
    polite = handler("print('here', flush=True); time.sleep(100)")
    deaf = handler("signal.signal(signal.SIGTERM, signal.SIG_IGN); print('here', flush=True); time.sleep(100)")
    for one in (polite, deaf):
        assert one.proc.stdout is not None
        assert one.proc.stdout.readline() == b"here\n"
    dying = unkillable.Dying()
    assert dying.stuck({0: polite.proc.pid, 1: deaf.proc.pid}) == []
    assert unkillable.end({0: polite, 1: deaf}, signal.SIGTERM, 0.5) == []
    assert [one.proc.returncode for one in (polite, deaf)] == [-signal.SIGTERM, -signal.SIGKILL]


@contextlib.contextmanager
def frozen(folder: Path) -> Iterator[Path]:
    image, disk = folder / "image", folder / "disk"
    disk.mkdir()
    with image.open("wb") as file:
        file.truncate(16 << 20)
    steps = (["mkfs.ext4", "-q", str(image)], ["mount", "-o", "loop", str(image), str(disk)])
    try:
        for step in (*steps, ["fsfreeze", "-f", str(disk)]):
            if subprocess.run(step, capture_output=True).returncode:
                pytest.skip("no right to mount and freeze a disk here")
        yield disk
    finally:
        subprocess.run(["fsfreeze", "-u", str(disk)], capture_output=True)
        subprocess.run(["umount", "--lazy", str(disk)], capture_output=True)


@pytest.mark.skipif(sys.platform != "linux" or os.getuid() != 0, reason="needs a disk of its own")
def test_a_process_that_waits_for_a_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its main thread has ended the process, which a thread that writes keeps alive."""
    monkeypatch.setattr(unkillable, "KILL_SECONDS", 0.2)
    body = (
        "def write():\n"
        "    print('here', flush=True); open(sys.argv[1], 'w')\n"
        "threading.Thread(target=write).start()\n"
        "time.sleep(0.3); os._exit(1)"
    )
    with frozen(tmp_path) as disk:
        stuck = handler(body, str(disk / "file"))
        assert stuck.proc.stdout is not None
        assert stuck.proc.stdout.readline() == b"here\n"
        dying, found = unkillable.Dying(), []
        for _ in range(200):
            found = found or dying.stuck({0: stuck.proc.pid})
            with contextlib.suppress(subprocess.TimeoutExpired):
                stuck.proc.wait(0.1 if not found else 0)
        assert found == [0]
        assert unkillable.end({3: stuck}, signal.SIGTERM, 0.1) == [3]
        told = unkillable.describe(3, stuck.proc.pid)
    assert f"process {stuck.proc.pid} of rank 3 cannot be ended: no signal reaches it, in " in told
    assert stuck.proc.wait(60) == 1
