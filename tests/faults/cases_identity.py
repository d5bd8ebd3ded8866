"""Runs that go on with something else than they were trained on: refused by name, or gone on with as asked."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.faults.job import Ended, Fault, run_job
from tests.faults.outcome import NONE, Outcome, compared, told, verdict

WORDS = ("red", "green", "blue", "river", "stone", "ancient", "quickly", "walks", "sees", "under", "mountain", "paper")
TEXT = ("--vocab-size", "280")


def write_text(folder: Path, name: str, documents: int = 100) -> str:
    """A file of documents; more documents are the same ones and others behind them."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(name)
    lines = (json.dumps({"text": " ".join(draw.choices(WORDS, k=30)) + "."}) for _ in range(documents))
    (folder / name).write_text("".join(f"{line}\n" for line in lines))
    return str(folder / name)


def job(folder: Path, steps: int, data: list[str], *flags: str, fault: Fault = NONE, restarts: int = 0) -> Ended:
    """A job of one process on text."""
    line = ("--lr-decay-iters", "8", "--train-iters", str(steps), *TEXT, *flags)
    return run_job(folder, 1, fault, *line, "--data-path", *data, restarts=restarts)


def changed(*words: str, flags: tuple[str, ...] = (), data: Callable[[Path], list[str]]) -> Callable[[Path], Outcome]:
    """A run on a and b goes on with something else: refused with all that is otherwise, and nothing is trained."""

    def case(folder: Path) -> Outcome:
        a, b = write_text(folder, "a.jsonl"), write_text(folder, "b.jsonl")
        first = job(folder, 2, ["1", a, "1", b])
        if first.status:
            return Outcome(1, 0, note=first.output[-2000:])
        ended = job(folder, 4, data(folder), *flags)
        good = ended.status == 2 and max(ended.losses) == 2 and all(word in ended.output for word in words)
        return verdict(good, ended)

    return case


def appended(folder: Path) -> Outcome:
    """Documents are added and gone on with: the tokenizer stays, where one trained anew would change every id."""
    a = write_text(folder, "a.jsonl")
    kept = folder / "c" / "tokenizer" / "megapar.json"
    job(folder, 2, [a])
    before = kept.read_bytes()
    write_text(folder, "a.jsonl", documents=130)
    refused = job(folder, 4, [a])
    ended = job(folder, 4, [a], "--override-data", "sources")
    good = refused.status == 2 and "has different content here" in refused.output and ended.status == 0
    good = good and max(ended.losses) == 4 and kept.read_bytes() == before
    return verdict(good, refused, ended)


def overridden(iteration: int) -> Callable[[Path], Outcome]:
    """Weights and sources change under an override and the rank is killed, before or after its first own checkpoint."""

    def go_on(folder: Path, fault: Fault = NONE, restarts: int = 0) -> Ended:
        a, b, c = (write_text(folder, f"{name}.jsonl") for name in "abc")
        job(folder, 2, ["1", a, "1", b])
        fields = ("--override-data", "sources,weights")
        return job(folder, 8, ["3", a, "1", b, "2", c], *fields, fault=fault, restarts=restarts)

    def case(folder: Path) -> Outcome:
        want = go_on(folder / "straight")
        if want.status:
            return Outcome(1, 0, note=want.output[-2000:])
        ended = go_on(folder / "killed", Fault("kill in step", 0, iteration), restarts=1)
        if len(ended.strikes) != 1:
            return Outcome(1, 0, note=f"{len(ended.strikes)} ranks were killed: {ended.output[-2000:]}")
        return told(compared(ended, want.losses), ended, "other data from sample 16 on")

    return case


def cases() -> Iterator[tuple[str, Callable[[Path], Outcome]]]:
    """Name and function of every case."""

    def mixed(folder: Path, weight: str = "1") -> list[str]:
        return [weight, str(folder / "a.jsonl"), "1", str(folder / "b.jsonl")]

    def other(folder: Path) -> list[str]:
        return [write_text(folder, "c.jsonl")]

    def grown(folder: Path) -> list[str]:
        write_text(folder, "a.jsonl", documents=130)
        return mixed(folder)

    kind = "resumed with other data"
    yield f"{kind}, another file", changed("c.jsonl is read here only", data=other)
    yield f"{kind}, an appended file", changed("a.jsonl has different content here", data=grown)
    yield f"{kind}, random tokens", changed("mock is read here only", data=lambda folder: ["mock"])
    yield f"{kind}, another seed", changed("--seed is 1234 there and 7 here", flags=("--seed", "7"), data=mixed)
    length = ("--seq-length", "32")
    yield f"{kind}, another length", changed("--seq-length is 16 there and 32 here", flags=length, data=mixed)
    split = ("--split", "90,10")
    yield f"{kind}, another split", changed("--split 95,5 there and by --split 90,10", flags=split, data=mixed)
    yield (
        f"{kind}, all at once",
        changed(
            *("weights are", "--seed is", "--seq-length is", "--split 95,5", "weights,split,seed,seq-length"),
            flags=("--seed", "7", *length, *split),
            data=lambda folder: mixed(folder, "3"),
        ),
    )
    yield "documents appended, the kept tokenizer stays", appended
    yield "kill -9 after other data was asked for, before a checkpoint of it", overridden(3)
    yield "kill -9 after other data was asked for, behind a checkpoint of it", overridden(6)
