"""The page of the museum, docs/museum.md: every exhibit with its report, its place here, and the test that kills it."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from tests.museum.museum import KILLED, ROOT, Exhibit, Found, places_of
from tests.museum.mutator import FATES, TABLE, survivors

PAGE = ROOT / "docs" / "museum.md"
FIRST = (67, 79)  # mutations killed and tried on 2026-11-26
AREAS = {
    "norm": "Norm counting",
    "scaling": "Gradient scaling",
    "tensor": "Tensor parallelism",
    "context": "Context parallelism",
    "pipeline": "Pipeline parallelism",
    "expert": "Experts",
    "sharding": "Sharding",
    "recompute": "Recompute and random numbers",
    "AMPipe": "AMPipe",
    "optimizer": "Optimizers and schedules",
    "precision": "Precision",
    "fp8": "fp8",
    "attention": "Windows and sinks",
    "mla": "Multi-latent attention",
    "mtp": "Multi-token prediction",
    "ernie": "ERNIE 3.0",
    "data": "Data",
    "resume": "Resuming",
    "conversion": "Conversion",
    "evaluation": "Evaluation",
    "metrics": "Metrics",
}

HEAD = """# The museum of silent bugs

Written by `scripts/museum.sh --page` from `tests/museum/exhibits.yaml`; do not edit. Frameworks train on with wrong
numbers: the loss falls, and nothing is printed. Here are {number} such bugs, most of them publicly reported in
Megatron-LM, DeepSpeed, TransformerEngine, transformers and others, each as a change of megapar that recreates its kind
at the place where it would be here: who reported it, what users saw, whether the first loss was right, and the test of
ours that fails with it. The others are megapar's own, found on a GPU, by its fuzzer, or before they happened.

**{number} of {number} are killed, by tests that take {seconds} seconds in all** (two at a time, on two busy cores).
With {right} of them the first loss is right; runs of eleven with and without the change showed what the table says.
Where replicas drift apart, such a run also ends here by itself, with the names of the parameters.

```bash
grep -c "^- name" tests/museum/exhibits.yaml
```

In a clone of the repository:

```bash no-run
python -m tests.museum.museum rope-in-bf16        # one exhibit; scripts/museum.sh makes all of them
scripts/museum.sh --relocate                      # after code has moved: the lines most like those of each exhibit
```

The first command makes the change in a copy of the tree, runs that test alone there, and exits with 1 if it passes,
as a test that cannot see the bug does. `tests/museum/test_museum.py` checks in each run of the suite that every
change still applies to today's code, at one place, and that its test is part of the suite.

## Scores

| when | what | killed |
|---|---|---|
| 2026-11-26 | mutations of a review, by the suite of that day | {first[0]} of {first[1]} |
| 2026-11-28 | {blind} reports drawn before the tests were read, by the first test thought of | {near} of {blind} |
| 2026-11-28 | the same, by the suite of that day | {suite} of {blind} |
| today | all exhibits; for {written} of them a test was written | {number} of {number} |

What survived had this in common: no absolute reference in bf16 or at far positions for what is the same on every
layout; resumes with trivial state only; figures of the log that are compared between layouts and not with their
formula; and data in which all batches are alike, so that a mean of means is the mean.

To add one: the change as lines of context (` `), removed (`-`) and added (`+`) lines, as short as they are unique, and
a test that takes at most 10 seconds alone; ten may take more. `scripts/museum.sh --record NAME` enters its seconds.
"""
MUTANTS = """
## Random mutants

Exhibits are bugs that somebody has met. `scripts/mutants.sh` makes others: comparisons, arithmetic, constants, dropped
statements, swapped arguments, axes and branches, as many of each kind, each a change of one line of core/, moe/,
model/, training/step/ or data/sampling/. The tests that reach the line, in ranks too, run for up to 90 seconds. With
{endless} of these mutants a test did not end, which counts as killed. *Not covered* are lines that only programs
started by tests reach, or none. Left out are `core/device/triton_*`, functions named `..._cuda`, and texts for people.

```bash no-run
scripts/mutants.sh --coverage -n 2              # which tests reach which lines: takes two runs of the suite
scripts/mutants.sh --seed 1 --draws 150         # goes on where it was stopped
```

| draw | killed at first | survived | not covered | killed today | equal programs | survive | not covered |
|---|---|---|---|---|---|---|---|
{scores}
What was not killed at first, and what became of it:

| seed | place | change | became |
|---|---|---|---|
"""
COLUMNS = """| report | what was wrong, and what users saw | first loss | the change here | killed by | s |
|---|---|---|---|---|---|
"""


def page(exhibits: Sequence[Exhibit], modules: Mapping[Path, str]) -> str:
    """Return the page. modules: The text of each module of the package."""
    blind = [one for one in exhibits if one.blind]
    text = HEAD.format(
        number=len(exhibits),
        seconds=round(sum(one.seconds for one in exhibits)),
        right=sum(one.first_loss.startswith("right") for one in exhibits),
        first=FIRST,
        blind=len(blind),
        near=sum(one.blind == KILLED for one in blind),
        suite=sum(not one.written for one in blind),
        written=sum(one.written for one in exhibits),
    )
    for area, title in AREAS.items():
        text += f"\n## {title}\n\n{COLUMNS}"
        text += "".join(_row(one, modules) for one in exhibits if one.area == area)
    return text + mutants()


def mutants() -> str:
    """Return the section of random mutants: the scores of draws, and what became of those that were not killed."""
    scores, rows, lines = yaml.safe_load(TABLE.read_text("utf-8"))["draws"], survivors(), ""
    for score in scores:
        own = [row for row in rows if row["seed"] == score["seed"]]
        killed = score["killed"] + sum("test" in row or "exhibit" in row for row in own)
        equal, left = (sum(name in row for row in own) for name in ("equivalent", "left"))
        uncovered = sum("left" in row and row.get("uncovered", False) for row in own)
        before = f"{score['killed']} | {score['survived']} | {score['not_covered']}"
        lines += f"| {score['draws']} of seed {score['seed']}, {score['when']} | {before} "
        lines += f"| {killed} | {equal} | {left - uncovered} | {uncovered} |\n"
    text = MUTANTS.format(scores=lines, endless=sum(score["endless"] for score in scores))
    for row in rows:
        place, fate = row["place"].removeprefix("megapar/"), next(fate for fate in (*FATES, "left") if fate in row)
        old, new = _differing(row["old"].split(" "), row["new"].split(" "))
        text += f"| {row['seed']} | `{place}` | {old} → {new} | {fate}: {row[fate].removeprefix('tests/')} |\n"
    return text


def _differing(old: Sequence[str], new: Sequence[str]) -> tuple[str, str]:
    """Return the words that differ, with one more on each side, as code."""
    differing = [n for n, pair in enumerate(zip(old, new, strict=False)) if pair[0] != pair[1]]
    behind = [n for n, pair in enumerate(zip(old[::-1], new[::-1], strict=False)) if pair[0] != pair[1]]
    first, after = max(0, differing[0] - 1), max(0, behind[0] - 1)
    parts = (" ".join(words[first : len(words) - after]).replace("|", r"\|") for words in (old, new))
    one, other = (f"`` {part} ``" for part in parts)
    return one, other


def _row(exhibit: Exhibit, modules: Mapping[Path, str]) -> str:
    found = [place for old, _ in exhibit.replacements for place in places_of(old, modules)]
    killer = exhibit.killed_by.removeprefix("tests/").replace("|", r"\|")
    cells = (
        exhibit.source,
        f"**{exhibit.name}**: {exhibit.kind}. *{exhibit.seen}*",
        exhibit.first_loss,
        ", ".join(f"`{name}`" for name in dict.fromkeys(_qualified(place, modules) for place in found)),
        f"`{killer}`" + (", written for it" if exhibit.written else ""),
        f"{exhibit.seconds:.1f}",
    )
    return "| " + " | ".join(cells) + " |\n"


def _qualified(found: Found, modules: Mapping[Path, str]) -> str:
    """Return the names of the module, class and function in which lines begin."""
    path = found.path.with_suffix("").parts
    names = list(path[len(path) - path[::-1].index("megapar") :])
    node: ast.AST = ast.parse(modules[found.path])
    while inside := [
        child
        for child in ast.iter_child_nodes(node)
        if isinstance(child, ast.ClassDef | ast.FunctionDef)
        and child.lineno <= found.line <= (child.end_lineno or child.lineno)
    ]:
        node = inside[0]
        names.append(inside[0].name)
    return ".".join(names)
