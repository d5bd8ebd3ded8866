"""Checkpoints in an object store: requests that fail, deaths around the manifest, two writers, ignored conditions.

Every job saves through a proxy (``tests.support.bucket_proxy``) to moto's server, or to rclone's, which ignores them.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from megapar.checkpoints.format.names import epochs_of
from megapar.checkpoints.save_load import folder as folders
from megapar.files.bucket import MANIFEST, objects_of
from megapar.files.location import Location
from tests.faults.cases_checkpoints import data
from tests.faults.job import Ended, Fault, _environ, ended_as, flags_of, run_job
from tests.faults.outcome import NONE, SHARDING, Outcome, compared, told, uninterrupted, verdict
from tests.support.bucket_proxy import KINDS, Asked, Harm, Proxy, proxied
from tests.support.buckets import KEYS, asked_at, environ_of, moto, new_bucket, rclone
from tests.support.stores import copied

_ALONE = threading.Lock()  # a case is found by variables of this process
SECRET = KEYS["AWS_SECRET_ACCESS_KEY"]
VERBS = ("head", "get", "list", "put", "delete", "uploads")
FOUR_STEPS = ("--train-iters", "4", "--lr-decay-iters", "6")  # of six


@contextlib.contextmanager
def store(folder: Path, conditions: bool = True) -> Iterator[tuple[Proxy, Location, dict[str, str]]]:
    """Yield a proxy, an empty folder in a bucket behind it, and the variables by which a job finds it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "disk").mkdir()
    with _ALONE, contextlib.ExitStack() as stack:
        server = stack.enter_context(moto() if conditions else rclone(folder / "disk"))
        proxy, endpoint = stack.enter_context(proxied(server))
        stack.enter_context(asked_at(server))
        yield proxy, new_bucket(), {**environ_of(endpoint), "MEGAPAR_TEST_IMPATIENT": "1"}


def run_stored(
    folder: Path, save: Location, environ: dict[str, str], *flags: str, restarts: int = 1, fault: Fault = NONE
) -> Ended:
    """Run a job of two ranks that saves into a store."""
    line = [sys.executable, "-m", "megapar.tools.main", "launch", "--nproc-per-node", "2", "--warm-start"]
    line += ["--stop-timeout", "2", "--max-restarts", str(restarts), "tests/faults/faulty.py"]
    folder.mkdir(parents=True, exist_ok=True)
    line += flags_of(folder, *SHARDING, "--save", str(save), "--load", str(save), *flags)
    ended = ended_as(folder, line, {**_environ(folder, fault), **environ})
    written = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    for name in objects_of("s3").walk(str(save.path)):
        with contextlib.suppress(FileNotFoundError):  # of another job, which still runs
            written[Path(name)] = objects_of("s3").get(f"{save.path}/{name}")
    found = [path for path, content in written.items() if SECRET.encode() in content]
    assert SECRET not in ended.output, "the output has the secret"
    assert not found, f"the secret is in {found}"
    return ended


def orphans(save: Location) -> list[str]:
    """Return the objects and uploads of a run that has ended which nothing names."""
    every = objects_of("s3").walk(str(save.path))
    manifests = [name for name in every if name.endswith(MANIFEST)]
    known = {"owner", "latest", "tokenizer", *(folder_of(save / name) for name in manifests)}
    beside = [name for name in every if name not in manifests and name.partition("/")[0] not in known]
    damaged = [f"{name.removesuffix(MANIFEST)}.tmp-" for name in manifests if not folder_of(save / name)]
    left = [name for name in beside if not name.startswith(tuple(damaged))]  # what a damaged one may name is kept
    return [*left, *(name for name, _ in objects_of("s3").unfinished(str(save.path)))]


def folder_of(manifest: Location) -> str:
    """Return the folder that a manifest names, "" if it is damaged."""
    try:
        return str(manifest.json()["folder"])
    except ValueError:
        return ""


def judged(ended: Ended, save: Location, *said: str, want: dict[int, float] | None = None) -> Outcome:
    """Return the outcome of a job that was to go on to its end, to leave its last checkpoint and no orphan."""
    outcome = told(compared(ended, want or uninterrupted(2, *SHARDING)), ended, *said)
    latest, left = folders.latest(save), orphans(save)
    if left or latest is None or folders.iteration_of(latest) != max(ended.losses, default=0):
        outcome.survived, outcome.note = 0, f"left: {left}, latest: {latest}: {ended.output[-2000:]}"
    return outcome


def failing(kind: str, verb: str, times: int = 3) -> Callable[[Path], Outcome]:
    """Requests of a verb in a save fail, so many of them."""

    def case(folder: Path) -> Outcome:
        with store(folder) as (proxy, save, environ):
            everywhere = verb in ("list", "uploads", "delete")
            in_save = lambda asked: asked.verb == verb and (everywhere or "iter_0000004" in asked.key)  # noqa: E731
            proxy.harms = [Harm(kind, in_save, times)]
            outcome = judged(run_stored(folder, save, environ, restarts=0), save)
            outcome.tried = max(len(proxy.passed.struck), 1)
            outcome.survived *= len(proxy.passed.struck)
            return outcome

    return case


def killed_at(when: Callable[[Asked], bool], *, reaches: bool = True) -> Callable[[Path], Outcome]:
    """The rank that writes dies as it asks for something, and is started again. reaches: the store does it before."""

    def case(folder: Path) -> Outcome:
        with store(folder) as (proxy, save, environ):
            struck: list[Asked] = []
            killed: list[int] = []

            def kill(asked: Asked) -> None:
                if not struck and when(asked):
                    struck.append(asked)
                    process = (save / "owner" / f"{max(epochs_of(save))}.json").json()["process"]
                    os.kill(int(process["pid"]), signal.SIGKILL)
                    killed.append(process["pid"])
                    if not reaches:
                        raise ConnectionAbortedError

            proxy.watch = kill
            outcome = judged(run_stored(folder, save, environ), save)
            outcome.survived *= len(killed)
            return outcome

    return case


def stored_again(spoil: Callable[[Location], object], *said: str) -> Callable[[Path], Outcome]:
    """Something of the newest checkpoint is lost between two starts: the one before it is taken."""

    def case(folder: Path) -> Outcome:
        with store(folder) as (_, save, environ):
            first = run_stored(folder, save, environ, *FOUR_STEPS, restarts=0)
            newest = folders.latest(save)
            if first.status or newest is None:
                return verdict(False, first)
            spoil(newest)
            return judged(run_stored(folder, save, environ, restarts=0), save, *said)

    return case


def cut(checkpoint: Location) -> None:
    """Make a manifest half of what it was."""
    key = f"{checkpoint.path}{MANIFEST}"
    objects_of("s3").put(key, objects_of("s3").get(key)[:40])


def unconditional(folder: Path) -> Outcome:
    """The server ignores conditions: the start says whose promise it is, and the run is right."""
    with store(folder, conditions=False) as (_, save, environ):
        said = "the store does not refuse a second writer: that no other run saves there is your promise"
        return judged(run_stored(folder, save, environ, restarts=0), save, said)


def unconditional_elastic(folder: Path) -> Outcome:
    """The server ignores conditions, and the job may go on without a node: refused."""
    with store(folder, conditions=False) as (_, save, environ):
        ended = run_stored(folder, save, {**environ, "MEGAPAR_ELASTIC": "1"}, restarts=0)
        return verdict(ended.status != 0 and "which an elastic job cannot keep" in ended.output, ended)


def written_data(folder: Path) -> tuple[str, ...]:
    """Write text, JSONL in parts, parquet and prepared tokens, and return their names below ``folder``."""
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    (folder / "parts").mkdir(parents=True)
    texts = [f"one two three {number} four five six seven {number % 9}" for number in range(600)]
    records = ["".join(json.dumps({"text": text}) + "\n" for text in texts[first::3]) for first in range(3)]
    for number, part in enumerate(records):
        (folder / "parts" / f"part-{number}.jsonl").write_text(part)
    (folder / "a.txt").write_text("\n\n".join(texts[::-1]))
    parquet.write_table(arrow.table({"text": texts[:500]}), folder / "c.parquet", row_group_size=128)
    text, model, prefix = (str(folder / name) for name in ("a.txt", "t.model", "tokens"))
    data("train-tokenizer", "--input", text, "--vocab-size", "101", "--output", model)
    data("prepare", "--input", text, "--tokenizer-model", model, "--output", prefix)
    return ("a.txt", "parts", "c.parquet", "tokens")


def data_beside(folder: Path) -> Outcome:
    """Data of every kind lies in the store that is saved to, and a rank is killed: the losses of the run on a disk."""
    names = written_data(folder / "data")
    flags = ("--tokenizer-model", str(folder / "data" / "t.model"), "--data-path")
    local = run_job(folder / "disk", 2, NONE, *SHARDING, *flags, *(f"{folder}/data/{name}" for name in names))
    with store(folder / "stored") as (proxy, save, environ):
        copied(folder / "data", save.with_name("data"))
        environ["XDG_CACHE_HOME"] = str(folder / "cache")
        stored = [f"{save.parent}/data/{name}" for name in names]
        fault = Fault("kill in step", rank=1, iteration=5)
        ended = run_stored(folder / "job", save, environ, *flags, *stored, fault=fault)
        outcome = judged(ended, save, want=local.losses)
        read = {asked.key.partition("/data/")[2] for asked in proxy.passed.asked if asked.verb == "get"}
        every = {
            "a.txt",
            "c.parquet",
            "tokens.bin",
            "tokens.idx",
            *(f"parts/part-{number}.jsonl" for number in range(3)),
        }
        outcome.survived *= local.status == 0 and len(ended.strikes) == 1 and every <= read
        return outcome


def clock_far_off(folder: Path) -> Outcome:
    """The clock of the second start is a day behind that of the first: a lease compares none."""
    with store(folder) as (_, save, environ):
        first = run_stored(folder, save, environ, *FOUR_STEPS, restarts=0)
        second = run_stored(folder, save, {**environ, "MEGAPAR_TEST_CLOCK": "-86400"}, restarts=0)
        return judged(second, save) if first.status == 0 else verdict(False, first)


def two_writers(folder: Path) -> Outcome:
    """Two jobs begin at once: one is refused by name, and the other is right."""
    with store(folder) as (_, save, environ), ThreadPoolExecutor(2) as pool:
        begun = [pool.submit(run_stored, folder / name, save, environ, restarts=0) for name in "ab"]
        first, second = sorted((job.result() for job in begun), key=lambda ended: ended.status)
        said = ("belongs to another run, which is alive", "contains checkpoints", "other runs repeatedly")
        refused = second.status != 0 and any(text in second.output for text in said) and not second.losses
        return judged(first, save) if refused else verdict(False, first, second)


def lease_lost(folder: Path) -> Outcome:
    """Another owner takes over in the middle of a save: nothing of it is published, and the run ends by name."""
    with store(folder) as (proxy, save, environ):

        def take(asked: Asked) -> None:
            if asked.verb == "put" and "iter_0000004" in asked.key:
                objects_of("s3").put(f"{save.path}/owner/9.json", b"{}")

        proxy.watch = take
        ended = run_stored(folder, save, environ, restarts=0)
        alone = list(folders.checkpoints(save)) == [2]
        return verdict(ended.status != 0 and "has another owner by now" in ended.output and alone, ended)


def unreachable(folder: Path) -> Outcome:
    """The store never answers: the start ends with its name, and no secret."""
    with store(folder) as (proxy, save, environ):
        proxy.harms = [Harm("503", lambda asked: True, times=10**6)]
        ended = run_stored(folder, save, environ, restarts=0)
        named = f"{save}/tokenizer: cannot be read: " in ended.output and "(9 attempts)" in ended.output
        return verdict(ended.status != 0 and named, ended)


def cases() -> Iterator[tuple[str, Callable[[Path], Outcome]]]:
    """Name and function of every case."""
    for kind in KINDS[:4]:
        for verb in VERBS:
            yield f"store: {kind} of {verb}", failing(kind, verb)
    yield "store: 412 after success of put", failing("412 after success", "put")
    yield "store: old listing", failing("old listing", "list", times=40)

    def of(verb: str, part: str) -> Callable[[Asked], bool]:
        return lambda asked: asked.verb == verb and part in asked.key and "iter_0000002" not in asked.key

    yield "store: kill at a shard", killed_at(of("put", "shard-00000"))
    yield "store: kill at the layout", killed_at(of("put", "layout.json"))
    yield "store: kill at the names of a folder", killed_at(of("put", ".published"))
    yield "store: kill before the manifest", killed_at(of("put", f"0004{MANIFEST}"), reaches=False)
    yield "store: kill at the manifest", killed_at(of("put", f"0004{MANIFEST}"))
    yield "store: kill at latest", killed_at(of("put", "latest"))
    yield "store: manifest cut", stored_again(cut, "the manifest is damaged", "taking iter_0000002 instead")
    yield (
        "store: part vanished",
        stored_again(
            lambda newest: (newest / "shard-00001.safetensors").remove(), "shard-00001.safetensors is missing"
        ),
    )
    yield "store: conditions ignored", unconditional
    yield "store: conditions ignored by an elastic job's store", unconditional_elastic
    yield "store: two writers at once", two_writers
    yield "store: lease lost in a save", lease_lost
    yield "store: clock far off", clock_far_off
    yield "store: kill in a step, with data in the store", data_beside
    yield "store: no answer", unreachable
