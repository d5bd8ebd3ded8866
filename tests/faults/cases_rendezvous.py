"""Others who reach the place where the ranks or the nodes of a job meet: nothing they write there ever runs."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from torch.distributed import Store

from megapar.tools.launcher.meeting import meet_at
from megapar.tools.launcher.stopper import children
from tests.faults.job import ROOT, _ended, _environ, flags_of, run_job
from tests.faults.outcome import NONE, SHARDING, Outcome, compared, uninterrupted, verdict

JOB = "attacked"
KEY = f"megapar.rendezvous.{JOB}"
PATIENCE_SECONDS = 120
END_SECONDS = 40
FAR = "100000"  # steps: the job is still there when it is attacked
FIRST_SECRET, OTHER_SECRET = "first secret of a job", "another secret of a job"


class Nodes:
    """Launchers of one job on this machine, one for each list of options. environs: what each of them gets besides."""

    def __init__(
        self, folder: Path, options: Sequence[Sequence[str]], flags: Sequence[str], environs: Sequence[dict[str, str]]
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._nodes = []
        for number, (own, environ) in enumerate(zip(options, environs, strict=True)):
            line = [sys.executable, "-m", "megapar.tools.main", "launch", "--stop-timeout", "2", *own]
            with (folder / f"node-{number}.log").open("w") as log:
                node = subprocess.Popen(
                    [*line, "tests/faults/faulty.py", *flags],
                    env={**_environ(folder, NONE), **environ},
                    cwd=ROOT,
                    stdout=log,
                    stderr=log,
                )
            self._nodes.append(node)

    @classmethod
    def meeting(cls, folder: Path, endpoint: str, flags: Sequence[str], secrets: Sequence[str]) -> Nodes:
        """Two of one rank, each with its secret, or none."""
        options = ["--nnodes", "2", "--rdzv-id", JOB, "--rdzv-endpoint", endpoint]
        return cls(folder, [options] * 2, flags, [{"MEGAPAR_SECRET": secret} if secret else {} for secret in secrets])

    def wait_until(self, holds: Callable[[], bool]) -> bool:
        """Whether it came to hold while all were running."""
        until = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < until and all(node.poll() is None for node in self._nodes):
            if holds():
                return True
            time.sleep(0.05)
        return False

    def wait_for_one(self, seconds: float) -> bool:
        """Whether one of them has ended in time. Others may wait minutes for it, for torch's agents end together."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and all(node.poll() is None for node in self._nodes):
            time.sleep(0.05)
        return any(node.poll() is not None for node in self._nodes)

    def kill(self) -> None:
        """End what is left, the ranks first."""
        for node in self._nodes:
            if node.poll() is None:
                for rank in children(node.pid):
                    os.kill(rank, signal.SIGKILL)
                node.kill()
                node.wait()

    def statuses(self) -> list[int]:
        """Of those that have ended."""
        return [node.returncode for node in self._nodes if node.returncode is not None]

    def output(self) -> str:
        """Of all of them."""
        return "".join(path.read_text() for path in sorted(self._folder.glob("node-*.log")))


def intruding(*words: str) -> subprocess.Popen[str]:
    """Another user of this machine, who says what came of his attempts."""
    line = [sys.executable, "-m", "tests.support.intruder", *words]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(line, env=environ, cwd=ROOT, text=True, stdout=subprocess.PIPE)


def attacked(
    act: Callable[[Store, str, Path], str], told: str, *, secrets: Sequence[str] = ("", "")
) -> Callable[[Path], Outcome]:
    """Two nodes of one rank train, somebody acts on their store in the third step: they end, and say why.

    act: gets the store, its endpoint and the path of a file that must not appear; what it says is noted.
    """

    def case(folder: Path) -> Outcome:
        folder.mkdir(parents=True)
        ran, metrics = folder / "ran", folder / "metrics.jsonl"
        place = meet_at("localhost:0")
        flags = (*SHARDING, "--train-iters", FAR, "--lr-decay-iters", FAR, "--save-interval", "0")
        nodes = Nodes.meeting(folder, place.endpoint, flags_of(folder, *flags), secrets)
        said, ended = "", False
        try:
            if nodes.wait_until(lambda: metrics.exists() and metrics.read_text().count("\n") >= 3):
                said = act(place.store, place.endpoint, ran)
                ended = nodes.wait_for_one(END_SECONDS)
        finally:
            nodes.kill()
        output = nodes.output()
        good = ended and told in output and not ran.exists() and "Traceback" not in output
        note = "" if good else f"statuses {nodes.statuses()}, ran: {ran.exists()}, {said}: {output[-3000:]}"
        return Outcome(1, int(good), [0], note=note)

    return case


def overwritten(store: Store, endpoint: str, ran: Path) -> str:
    """Every key, again and again, as another user."""
    with intruding(*endpoint.split(":"), str(ran)) as intruder:
        return intruder.communicate(timeout=PATIENCE_SECONDS)[0]


def garbage(text: str) -> Callable[[Store, str, Path], str]:
    """A state that is none."""

    def act(store: Store, endpoint: str, ran: Path) -> str:
        store.set(KEY, text)
        return text

    return act


def replayed(store: Store, endpoint: str, ran: Path) -> str:
    """A state of this job, rightly signed, that was true before."""
    old = store.get(KEY)
    until = time.monotonic() + 60
    while store.get(KEY) == old and time.monotonic() < until:  # nodes sign their heartbeats
        time.sleep(0.1)
    time.sleep(2.0)  # both nodes have seen a newer one
    store.set(KEY, old.decode())
    return old.decode()


def wrong_secret(folder: Path) -> Outcome:
    """Two nodes with different secrets never train together."""
    folder.mkdir(parents=True)
    place = meet_at("localhost:0")
    nodes = Nodes.meeting(folder, place.endpoint, flags_of(folder, *SHARDING), (FIRST_SECRET, OTHER_SECRET))
    try:
        nodes.wait_for_one(PATIENCE_SECONDS)
    finally:
        nodes.kill()
    output = nodes.output()
    good = "was not written with this job's secret" in output and not (folder / "metrics.jsonl").exists()
    return Outcome(1, int(good), [0], note="" if good else output[-2500:])


def no_secret(folder: Path) -> Outcome:
    """--require-secret refuses before any rank."""
    launcher = ("--nnodes", "2", "--rdzv-endpoint", "localhost:0", "--require-secret")
    ended = run_job(folder, 1, NONE, launcher=launcher)
    good = ended.status == 2 and "--require-secret is set, but there is no secret" in ended.output and not ended.losses
    return verdict(good, ended)


def one_node(folder: Path) -> Outcome:
    """On one node there is no store to reach, and the ranks' file is closed to others."""
    want, said = uninterrupted(2, *SHARDING), ""
    with tempfile.TemporaryDirectory(dir=tempfile.gettempdir()) as place:
        os.chmod(place, 0o1777)  # as /tmp is
        with intruding(place) as intruder:
            assert intruder.stdout is not None
            intruder.stdout.readline()  # it is ready
            nodes = Nodes(folder, [["--nproc-per-node", "2"]], flags_of(folder, *SHARDING), [{"TMPDIR": place}])
            try:
                nodes.wait_for_one(PATIENCE_SECONDS)
                said = intruder.communicate(timeout=PATIENCE_SECONDS)[0]
            finally:
                nodes.kill()
        left = [name for name in os.listdir(place) if name.startswith("megapar-")]
    outcome = compared(_ended(folder, max(nodes.statuses()), nodes.output()), want)
    outcome.lost_steps = [0]
    kept_out = re.search(r"kept out of ([1-9]\d*) of \1 folders", said) is not None or os.geteuid() != 0
    if not kept_out or left:
        outcome.survived, outcome.note = 0, f"{said}; left: {left}"
    return outcome


def cases() -> Iterator[tuple[str, Callable[[Path], Outcome]]]:
    """Name and function of every case."""
    failed = "megapar launch: the nodes' rendezvous failed: the rendezvous of job attacked"
    yield "another user in the store, one node", one_node
    yield "another user in the store, two nodes", attacked(overwritten, failed)
    both = (FIRST_SECRET, FIRST_SECRET)
    yield "another user in the store, two nodes with a secret", attacked(overwritten, failed, secrets=both)
    yield "rendezvous state that is none, no JSON", attacked(garbage("unsigned {"), f"{failed} is invalid")
    yield "rendezvous state that is none, unsigned", attacked(garbage("unsigned {}"), f"{failed} is not", secrets=both)
    yield "rendezvous state that is old", attacked(replayed, f"{failed} is number", secrets=both)
    yield "a node with another secret", wrong_secret
    yield "no secret where one is required", no_secret
