"""What each row of the compatibility matrix is for: its example is run without it. scripts/rules_proof.sh calls this.

Rows from published documents and rows that are lifted are not asked; all others end in one of these verdicts:

* ``another number``, ``late error``, ``hang``: what happens without the row;
* ``no effect``: flags that the row refuses leave launches, losses and norms as they are without them;
* ``by argument``: what would go wrong is said in words, where this machine cannot run it or a run would not show it;
* ``nothing``: the row is worth nothing, and should go.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import math
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from transformers import AutoModelForCausalLM

import megapar.arguments
from megapar.arguments import parse, resolved_values
from megapar.compatibility import LIFTED, RULES, SETTLED, Rule, check
from megapar.core.comm.accounts import FlightRecorder
from megapar.errors import ConfigError
from megapar.schema.rule import DOCUMENTS
from megapar.trainer import train
from tests.equivalence.compare import differences
from tests.equivalence.run import Trace, trace
from tests.fuzz.case import Case, case_of
from tests.fuzz.option import spell_all
from tests.fuzz.proofs import PROOFS, SIZES, Proof
from tests.support.ranks import PRELOADED, RanksFailed, run_ranks

ANOTHER, LATE_ERROR, HANG, NO_EFFECT = "another number", "late error", "hang", "no effect"
ARGUMENT, NOTHING, ELSEWHERE = "by argument", "nothing", "refused all the same"
WORTH = (ANOTHER, LATE_ERROR, HANG, NO_EFFECT, ARGUMENT)
HANG_SECONDS = 45.0
START_SECONDS = 120.0
STEPS = 2
Removed = tuple[str, ...]  # ids of the rows that are taken out
FILES = {
    **dict.fromkeys(("a.jsonl", "b.jsonl", "corpus.jsonl", "held_out.jsonl"), '{"text": "one two three four"}\n' * 50),
    "phrases.txt": "one two\n",
    "triples.tsv": "one\tis\ttwo\tone is two\n",
}


@dataclass(frozen=True)
class Verdict:
    """What was seen without a row. case: the line that it refuses. text: the details."""

    rule: str
    case: str
    kind: str
    text: str


def asked() -> list[Rule]:
    """The rows that have to show what they are for."""
    return [
        rule
        for rule in RULES
        if not any(one in rule.source for one in DOCUMENTS) and rule.kind not in (LIFTED, SETTLED)
    ]


def prove(rule: Rule) -> Verdict:
    """Run the row's example without it."""
    proof = PROOFS.get(rule.id, Proof())
    kind, line, ranks = _example(rule, proof)
    spelled = f"{'' if ranks == 1 else f'{ranks} processes: '}{line}"
    if proof.argument:
        return Verdict(rule.id, spelled, ARGUMENT, proof.argument)
    case = case_of(kind, ranks, f"{_sizes(kind, line)} {line}")
    removed = (rule.id, *proof.beside)
    with without(*removed):
        try:
            with _folder():
                config = parse(kind, case.flags(), {"WORLD_SIZE": str(ranks)})
        except ConfigError as error:
            return Verdict(rule.id, spelled, ELSEWHERE, ", ".join(complaint.rule for complaint in error.complaints))
        except Exception as error:  # whatever the parser trips over is what the row is for, but a row that is wrong
            if isinstance(error, AttributeError) and "without declaring it" in str(error):
                raise
            return Verdict(rule.id, spelled, LATE_ERROR, f"the parser: {type(error).__name__}: {error}")
    for size in {1, ranks}:  # what takes long to start is no hang
        run_ranks(size, ready, group=False, timeout=START_SECONDS)
    try:
        found = _run(rule, proof, case, removed, config.training.global_batch_size)
    except RanksFailed as error:
        found = (HANG, str(error).splitlines()[0]) if "did not finish" in str(error) else (LATE_ERROR, _last(error))
    return Verdict(rule.id, spelled, *found)


def _run(rule: Rule, proof: Proof, case: Case, removed: Removed, batch: int) -> tuple[str, str]:
    if proof.same_as:
        return _second_spelling(proof, case, removed)
    if rule.source == NO_EFFECT or proof.idle:
        return _effect(proof.idle or (_idle(rule, case),), case, removed)
    if case.world_size > 1:
        return _difference(case, removed, batch)
    _train(case, removed)
    return NOTHING, "trains"


def _example(rule: Rule, proof: Proof) -> tuple[str, str, int]:
    """(model, flags, processes) of the row's proof, or of its failing example."""
    tokens, ranks = shlex.split(proof.line or rule.failing), proof.ranks
    if not ranks and "--world-size" in tokens:
        at = tokens.index("--world-size")
        ranks = int(tokens[at + 1])
        tokens[at : at + 2] = []
    return rule.models[0], shlex.join(tokens), ranks or 1


def _sizes(kind: str, line: str) -> str:
    """Small sizes, but for what the line says."""
    said = set(shlex.split(line))
    words = SIZES["ernie3" if "ernie3" in said else kind].split()
    return " ".join(f"{name} {value}" for name, value in zip(words[::2], words[1::2], strict=True) if name not in said)


@contextlib.contextmanager
def without(*ids: str) -> Iterator[None]:
    """The matrix without some rows."""
    left = tuple(rule for rule in RULES if rule.id not in ids)
    with patch.object(megapar.arguments, "check", functools.partial(check, rules=left)):
        yield


def _difference(case: Case, removed: Removed, batch: int) -> tuple[str, str]:
    """What differs between the layout and one process."""
    flags = (case.kind, tuple(case.reference_flags(batch)))
    try:
        want = run_ranks(1, trace_without, removed, *flags, group=False, timeout=HANG_SECONDS)[0]
    except RanksFailed as error:
        return LATE_ERROR, f"one process: {_last(error)}"
    layout = (case.kind, case.flags())
    got = run_ranks(case.world_size, trace_without, removed, *layout, group=False, timeout=HANG_SECONDS)[0]
    found = differences(got, want, 1e-12 * max(1.0, *want.norms))
    return (ANOTHER, f"{found[0]} ({len(found)} in all)") if found else (NOTHING, "the numbers of one process")


def _effect(idle: tuple[str, ...], case: Case, removed: Removed) -> tuple[str, str]:
    """Whether the flags that the row refuses change anything but the last digits."""
    bare = Case(case.kind, case.world_size, tuple((n, v) for n, v in case.settings if n not in idle))
    want, got = _train(bare, removed), _train(case, removed)
    spelled = ", ".join("--" + name.replace("_", "-") for name in idle)
    names = ("losses and norms", "launches", "files")
    changed = [
        name for n, name in enumerate(names) if not all(_alike(a[n], b[n]) for a, b in zip(want, got, strict=True))
    ]
    return (NOTHING, f"{spelled} changes {', '.join(changed)}") if changed else (NO_EFFECT, f"of {spelled}")


def _alike(one: list[Any], other: list[Any]) -> bool:
    """Equal, numbers but for roundings of fp64."""
    if not one or not isinstance(one[0], float):
        return one == other
    return len(one) == len(other) and all(math.isclose(a, b, rel_tol=1e-10) for a, b in zip(one, other, strict=True))


def _second_spelling(proof: Proof, case: Case, removed: Removed) -> tuple[str, str]:
    """Whether the run is that of other flags."""
    other = case_of(case.kind, case.world_size, f"{_sizes(case.kind, proof.same_as)} {proof.same_as}")
    if _train(other, removed) == _train(case, removed):
        return NO_EFFECT, f"a second spelling of {proof.same_as}"
    return NOTHING, f"not the run of {proof.same_as}"


def _idle(rule: Rule, case: Case) -> str:
    """The last flag of the example whose absence mends the row."""
    environ = {"WORLD_SIZE": str(case.world_size)}
    for name, _ in reversed(case.settings):
        left = {**case.fixed(), **{n: v for n, v in case.settings if n != name}}
        if not rule.broken(resolved_values(case.kind, spell_all(left), environ)):
            return name
    raise ValueError(f"no flag of {rule.id}'s example mends it alone")


def _train(case: Case, removed: Removed) -> Any:
    """(losses and norms, launches, files written) of a whole short run on every rank."""
    return run_ranks(
        *(case.world_size, train_without, removed, case.kind, case.flags()), group=False, timeout=2 * HANG_SECONDS
    )


def ready(rank: int, world_size: int, rendezvous: str) -> None:
    """Nothing, once this module is imported."""


def trace_without(
    rank: int, world_size: int, rendezvous: str, removed: Removed, kind: str, flags: Sequence[str]
) -> Trace | None:
    """``trace`` of a run that the row refuses."""
    with without(*removed), _folder():
        return trace(rank, world_size, rendezvous, kind, flags, STEPS)


def train_without(
    rank: int, world_size: int, rendezvous: str, removed: Removed, kind: str, flags: Sequence[str]
) -> Any:
    """A whole run that the row refuses: (losses and norms, launches by axis and kind, files it wrote)."""
    launches: list[tuple[str, str]] = []
    note = FlightRecorder.note

    def keep(recorder: FlightRecorder, axis: str, kind: str) -> None:
        launches.append((axis, kind))
        note(recorder, axis, kind)

    place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    with (
        without(*removed),
        patch.dict(os.environ, place),
        patch.object(FlightRecorder, "note", keep),
        _silent(),
        _folder() as folder,
    ):
        config = parse(kind, ["--train-iters", "2", *flags], place)
        outcome = train(config, f"file://{rendezvous}", keep_records=True)
        if outcome.exported is not None:
            AutoModelForCausalLM.from_pretrained(outcome.exported)
        files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    return [number for record in outcome.records for number in (record.loss, record.grad_norm)], launches, files


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    """A working folder with the files that examples name."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as name:
        for file, text in FILES.items():
            (Path(name) / file).write_text(text)
        os.chdir(name)
        try:
            yield Path(name)
        finally:
            os.chdir(before)


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Nothing on standard output, which may have been taken before anybody could replace it."""
    kept = os.dup(1)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def _last(error: RanksFailed) -> str:
    """The last line of the first rank's traceback."""
    rank, text = next(iter(error.failures.items()))
    lines: list[str] = text.strip().splitlines()
    raised = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Interrupt)\b", line)]
    return f"rank {rank}: {(raised or lines)[-1][:200]}"


def page(verdicts: Sequence[Verdict], before: str = "") -> str:
    """docs/rules_proof.md, with the lines that ``before`` has of rows without a verdict."""
    lines = {line.split("`")[1]: line for line in before.splitlines() if line.startswith("| `")}
    for verdict in verdicts:
        cells = (f"`{verdict.rule}`", f"`{verdict.case}`", verdict.kind, verdict.text)
        line = "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"
        lines[verdict.rule] = line
    return "\n".join([HEADER, *(lines[rule.id] for rule in asked() if rule.id in lines)]) + "\n"


HEADER = """# What each rule is for

Generated by `scripts/rules_proof.sh`; do not edit. Every row of the [compatibility matrix](compatibility.md) that is
not from a published document was taken out, and an example that it refuses was run (with small sizes beside the flags
given here). *another number*, *late error*, *hang*: what happened. *no effect*: losses, gradient norms, launches and
files of a run are the same with and without the flags that the row refuses. *by argument*: no run on a CPU shows it;
the reason is given.

```bash
megapar rules --kind refuse     # the rows themselves
```

| row | case | without it | |
|---|---|---|---|"""


def main(argv: list[str]) -> int:
    """Status 1 where a row is worth nothing."""
    parser = argparse.ArgumentParser(prog="scripts/rules_proof.sh", description=__doc__)
    parser.add_argument("rows", nargs="*", help="ids of rows; all without")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the rows to this page, keeping others")
    parser.add_argument("--results", type=Path, metavar="FILE", help="keep every row's result there and go on from it")
    options = parser.parse_args(argv)
    kept = {} if options.results is None or not options.results.exists() else json.loads(options.results.read_text())
    known = {rule.id: Verdict(**kept[key]) for rule in asked() if (key := _key(rule)) in kept}
    PRELOADED.extend(("transformers", "tests.equivalence.run", "tests.fuzz.table"))  # for the pools to come
    wanted = [rule for rule in asked() if not options.rows or rule.id in options.rows]
    for rule in wanted:
        if rule.id not in known:
            known[rule.id] = verdict = prove(rule)
            print(f"{verdict.rule} | {verdict.kind} | {verdict.text} | {verdict.case}", flush=True)
            if options.results is not None:
                kept[_key(rule)] = asdict(verdict)
                options.results.write_text(json.dumps(kept, indent=1))
    verdicts = [known[rule.id] for rule in wanted]
    if options.write is not None:
        before = options.write.read_text(encoding="utf-8") if options.write.exists() else ""
        options.write.write_text(page(verdicts, before), encoding="utf-8")
    worthless = [verdict.rule for verdict in verdicts if verdict.kind not in WORTH]
    print(f"{len(verdicts)} rows, worth nothing: {', '.join(worthless) or 'none'}")
    return 1 if worthless else 0


def _key(rule: Rule) -> str:
    """A row with the case that is run for it: another case is another result."""
    return f"{rule.id}: {_example(rule, PROOFS.get(rule.id, Proof()))}, {PROOFS.get(rule.id)}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
