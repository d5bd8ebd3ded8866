"""The full product of the table's layouts and options, beyond the covering set that the suite runs.

python -m tests.equivalence.product --all           every row, fp64, with seconds per row
python -m tests.equivalence.product --match ernie   only rows whose name has this in it
python -m tests.equivalence.product --sharding      every stage, segment plan, replica count, merge mode and mp
python -m tests.equivalence.product --pipeline      every number of stages, schedule, axis beside, stage, model and tie
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time

from megapar.arguments import parse
from megapar.errors import ConfigError
from tests.equivalence.compare import differences
from tests.equivalence.run import Trace, trace
from tests.equivalence.table import (
    BIASED,
    CLIPPED,
    DROPS,
    MANY,
    MERGED_AT_1,
    PIPELINE_FACTORS,
    QK_NORM,
    ROWS,
    SHARDING_FACTORS,
    STEP,
    UNTIED,
    Row,
    pipeline_legal,
    pipeline_row,
    sharding_row,
)
from tests.support.ranks import run_ranks

STEPS = 2
OPTIONS: dict[str, tuple[tuple[str, ...], ...]] = {
    "moe": ((), CLIPPED, UNTIED, DROPS, BIASED, QK_NORM, (*DROPS, *BIASED, *UNTIED)),
    "gpt": ((), CLIPPED, UNTIED),
    "ernie": ((), CLIPPED),
}
MORE_LAYOUT = ((), MANY, STEP, (*MANY, *STEP))


def all_rows() -> list[Row]:
    """Every layout of the table with every option, micro-batch size and way to cut segments that the rules allow."""
    layouts = {(row.model, row.world_size, row.layout) for row in ROWS}
    found = dict.fromkeys(ROWS)
    for (model, world_size, layout), more in itertools.product(sorted(layouts), MORE_LAYOUT):
        if set(layout) & set(more):
            continue
        for options, micro_batch in itertools.product(OPTIONS[model], (1, 2)):
            row = Row(model, world_size, (*layout, *more), options, micro_batch)
            if _legal(row):
                found[row] = None
    return list(found)


def sharding_rows() -> list[Row]:
    """The full product of sharding's factors."""
    return [
        sharding_row(*factors, CLIPPED if number % 2 else ())
        for number, factors in enumerate(itertools.product(*SHARDING_FACTORS))
        if (factors[1], factors[4]) != MERGED_AT_1
    ]


def pipeline_rows() -> list[Row]:
    """The full product of pipelines' factors."""
    return [pipeline_row(*factors) for factors in itertools.product(*PIPELINE_FACTORS) if pipeline_legal(factors)]


def _legal(row: Row) -> bool:
    try:
        parse(row.kind, row.flags(), {"WORLD_SIZE": str(row.world_size)})
    except ConfigError:
        return False
    return True


def train(row: Row, world_size: int, flags: tuple[str, ...], backend: str) -> Trace:
    """Train a row's model with these flags in fp64."""
    result = run_ranks(
        world_size, trace, row.kind, (*flags, "--dtype", "fp64"), STEPS, None, backend, group=False, timeout=300
    )[0]
    assert isinstance(result, Trace)
    return result


def main() -> int:
    """Run rows and print one line each; 1 where a row differs from one process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="the full product; without it the rows of the suite")
    parser.add_argument("--sharding", action="store_true", help="the full product of sharding's factors")
    parser.add_argument("--match", default="", help="only rows whose name contains this")
    parser.add_argument("--pipeline", action="store_true", help="the full product of pipelines' factors")
    asked = parser.parse_args()
    products = {"all": all_rows, "sharding": sharding_rows, "pipeline": pipeline_rows}
    chosen = [product for name, product in products.items() if getattr(asked, name)]
    rows = [row for product in chosen for row in product()] if chosen else list(ROWS)
    rows = [row for row in rows if asked.match in row.name]
    references: dict[tuple[str, tuple[str, ...]], Trace] = {}
    failed = 0
    for number, row in enumerate(rows, 1):
        start = time.perf_counter()
        key = (row.kind, row.reference_flags())
        if key not in references:
            references[key] = train(row, 1, row.reference_flags(), "gloo")
        wrong = differences(train(row, row.world_size, row.flags(), "gloo"), references[key])
        failed += bool(wrong)
        verdict = f"DIFFERS: {wrong[0]}" if wrong else "equal"
        print(f"{number}/{len(rows)} {time.perf_counter() - start:.2f} s {row.name}: {verdict}", flush=True)
    print(f"{len(rows) - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
