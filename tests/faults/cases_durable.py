"""Caches, exports and prepared data after a power failure or with damaged files: whole, or made again and reported."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from megapar.files.manifest import Manifest
from tests.faults.cases_identity import TEXT, write_text
from tests.faults.cases_watching import NO_RIGHT, make_ext4, mounted
from tests.faults.job import Ended, _environ, ended_as, flags_of
from tests.faults.outcome import NONE, Outcome, compared

ANEW = "it is made again"


class Disk:
    """An ext4 that brings nothing to disk by itself for a minute, and data behind their names."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        self.path, self._image, self._folder = folder / "disk", folder / "image", folder
        make_ext4(self._image)

    @contextmanager
    def used(self) -> Iterator[bool]:
        """Whether it could be mounted."""
        options = "loop,data=writeback,commit=60"
        with mounted(self.path, "-o", options, str(self._image)) as there:
            yield there

    @contextmanager
    def after_power_loss(self) -> Iterator[Path]:
        """What another start of the machine finds, if the power fails now."""
        image, path = self._folder / "copy", self._folder / "found"
        shutil.copyfile(self._image, image)
        with mounted(path, "-o", "loop", str(image)) as there:
            assert there
            yield path


def trained(folder: Path, cache: Path, data: str, *flags: str) -> Ended:
    """Two steps of one process on text, with this cache."""
    folder.mkdir(parents=True, exist_ok=True)
    line = flags_of(folder, "--train-iters", "2", "--lr-decay-iters", "2", *TEXT, "--data-path", data, *flags)
    environ = {**_environ(folder, NONE), "XDG_CACHE_HOME": str(cache)}
    return ended_as(folder, [sys.executable, "tests/faults/faulty.py", *line], environ)


def _outcome(good: bool, *said: str) -> Outcome:
    return Outcome(1, int(good), [0], note="" if good else "\n".join(text[-2000:] for text in said))


def cache_after_power_loss(folder: Path) -> Outcome:
    """Two corpora were encoded just before: each run has its own tokens afterwards."""
    disk = Disk(folder)
    a, b = write_text(folder, "a.jsonl"), write_text(folder, "b.jsonl")
    with disk.used() as there:
        if not there:
            return NO_RIGHT
        want = {name: trained(folder / f"first-{Path(name).stem}", disk.path, name) for name in (a, b)}
        with disk.after_power_loss() as found:
            got = {name: trained(folder / f"then-{Path(name).stem}", found, name) for name in (b, a)}
    outcomes = [compared(got[name], want[name].losses) for name in (a, b)]
    differ = want[a].losses != want[b].losses
    good = differ and all(outcome.survived for outcome in outcomes)
    return _outcome(good, *(ended.output for ended in (*want.values(), *got.values())))


def damaged(kind: str, told: bool = True) -> Callable[[Path], Outcome]:
    """Tokens in the cache are damaged under their name: encoded again, told in a line, and the losses are the same."""

    def case(folder: Path) -> Outcome:
        a, b = write_text(folder, "a.jsonl"), write_text(folder, "b.jsonl")
        want = trained(folder / "first", folder / "cache", a)
        entry = next((folder / "cache").glob("megapar/tokens/*/corpus.bin")).parent
        if "another" in kind:
            trained(folder / "other", folder / "other-cache", b)
            other = next((folder / "other-cache").glob("megapar/tokens/*/corpus.bin")).parent
            shutil.rmtree(entry)
            shutil.copytree(other, entry)
        else:
            _damage(next(entry.glob("corpus.bin")), kind)
        ended = trained(folder / "then", folder / "cache", a)
        outcome = compared(ended, want.losses)
        if told and ended.output.count(ANEW) != 1:
            return _outcome(False, "not told in one line: " + ended.output)
        return outcome

    return case


def _damage(path: Path, kind: str) -> None:
    size = path.stat().st_size
    kept = {"zeros": 0, "cut": size // 2, "empty": 0}[kind]
    os.truncate(path, kept)
    if kind == "zeros":
        os.truncate(path, size)


def hashes_alike(kind: str) -> Callable[[Path], Outcome]:
    """What the cache remembers of two corpora is the same, or nothing: each run still has its own tokens."""

    def case(folder: Path) -> Outcome:
        a, b = write_text(folder, "a.jsonl"), write_text(folder, "b.jsonl")
        cache = folder / "cache"
        want = {name: trained(folder / f"first-{Path(name).stem}", cache, name) for name in (a, b)}
        entries = [path for path in sorted((cache / "megapar/hashes").iterdir()) if not path.name.startswith(".")]
        for entry in entries:
            entry.write_text("" if kind == "empty" else "0" * 64)
        got = {name: trained(folder / f"then-{Path(name).stem}", cache, name) for name in (a, b)}
        good = all(compared(got[name], want[name].losses).survived for name in (a, b))
        good = good and len(entries) >= 2 and want[a].losses != want[b].losses
        return _outcome(good, *(ended.output for ended in got.values()))

    return case


def export_after_power_loss(before: bool) -> Callable[[Path], Outcome]:
    """The folder of --save-hf has every byte that it had. before: an older export lay there, of another length."""

    def case(folder: Path) -> Outcome:
        disk, a = Disk(folder), write_text(folder, "a.jsonl")
        with disk.used() as there:
            if not there:
                return NO_RIGHT
            hf = disk.path / "hf"
            if before:
                trained(folder / "older", folder / "cache", a, "--save-hf", str(hf), "--train-iters", "1")
                (hf / "model-00001-of-00002.safetensors").write_bytes(b"older")
                (hf / "notes.txt").write_text("stays")
                os.sync()
            ended = trained(folder / "first", folder / "cache", a, "--save-hf", str(hf))
            want = Manifest.of("hf", hf)
            with disk.after_power_loss() as found:
                wrong = want.wrong_content(found / "hf") if (found / "hf").is_dir() else "there is no folder"
        names = {"config.json", "model.safetensors", "tokenizer.json", *(("notes.txt",) if before else ())}
        good = ended.status == 0 and not wrong and names <= want.files.keys()
        return _outcome(good and "model-00001-of-00002.safetensors" not in want.files, ended.output, wrong)

    return case


def prepared_after_power_loss(folder: Path) -> Outcome:
    """The files of ``megapar data prepare`` have every byte that they had; at most its finished parts are left."""
    disk, a = Disk(folder), write_text(folder, "a.jsonl")
    environ = {**_environ(folder, NONE), "XDG_CACHE_HOME": str(folder / "cache")}
    command = [sys.executable, "-m", "megapar.tools.main", "data"]
    model = str(folder / "t.model")
    inputs = ["--input", a]
    ended_as(folder, [*command, "train-tokenizer", *inputs, "--output", model, "--vocab-size", "101"], environ)
    with disk.used() as there:
        if not there:
            return NO_RIGHT
        line = [*command, "prepare", *inputs, "--output", str(disk.path / "p"), "--tokenizer-model", model]
        ended = ended_as(folder, line, environ)
        want = Manifest.of("p", disk.path)
        with disk.after_power_loss() as found:
            shutil.rmtree(found / "p.parts", ignore_errors=True)  # removed last: the next run would remove it
            wrong = want.wrong_content(found)
    good = ended.status == 0 and not wrong and {"p.bin", "p.idx", "p.hashes"} <= want.files.keys()
    return _outcome(good, ended.output, wrong)


def cases() -> Iterator[tuple[str, Callable[[Path], Outcome]]]:
    """Name and function of every case."""
    yield "power lost after the token cache was made", cache_after_power_loss
    yield "power lost after --save-hf", export_after_power_loss(False)
    yield "power lost after --save-hf, over an older export", export_after_power_loss(True)
    yield "power lost after data prepare", prepared_after_power_loss
    for kind in ("zeros", "cut", "empty", "those of another corpus"):
        yield f"cached tokens damaged, {kind}", damaged(kind)
    for kind in ("empty", "the same"):
        yield f"remembered hashes damaged, {kind}", hashes_alike(kind)
