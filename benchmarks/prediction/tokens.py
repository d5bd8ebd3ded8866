"""Tokens per second that ``megapar plan`` predicts of the runs in ``rows.yaml``, against what was published.

python -m benchmarks.prediction.tokens                 the table
python -m benchmarks.prediction.tokens --rows FILE     the table of another file of this form, as blind-2026.yaml
python -m benchmarks.prediction.tokens --json FILE     the same, a line of JSON per row
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.prediction.rows import PublishedRow, published_rows


def result(row: PublishedRow) -> dict[str, Any]:
    """Return the result of a row: what was published and predicted, or why it is not planned."""
    found = {"row": row.name, "table": row.table, "use": row.use, "published": row.tokens}
    if row.left_out:
        return {**found, "left_out": row.left_out}
    predicted = row.predicted()
    found |= {"predicted": round(predicted, 1), "error": round(predicted / row.tokens - 1, 4), "fits": row.plan.fits}
    return {**found, "unscored": row.unscored} if row.unscored else found


def summary(results: Iterable[dict[str, Any]], use: str) -> dict[str, Any]:
    """Return the number of scored rows of one use, their median and largest error, and how many are above 20 %."""
    errors = [abs(row["error"]) for row in results if row["use"] == use and "error" in row and "unscored" not in row]
    return {
        "use": use,
        "rows": len(errors),
        "median_error": round(statistics.median(errors), 4),
        "largest_error": max(errors),
        "above_20_percent": sum(error > 0.2 for error in errors),
    }


def main() -> None:
    """Print the table, or write its rows to a file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write a line of JSON per row to this file")
    parser.add_argument("--rows", default="rows.yaml", metavar="FILE", help="file with the rows (default: %(default)s)")
    parser.add_argument("--again", action="store_true", help="as the sources were read again")
    args = parser.parse_args()
    results = [result(row) for row in published_rows(args.rows, again=args.again)]
    if args.json:
        args.json.write_text("".join(json.dumps(row) + "\n" for row in results), encoding="utf-8")
    print("| run | table | use | published | predicted | error |")
    print("|---|---|---|---|---|---|")
    for row in results:
        why = row.get("left_out") or row.get("unscored")
        use = f"no: {why}" if why else row["use"]
        error = f"{row['predicted']:.0f} | {row['error']:+.1%}" if "error" in row else "|"
        print(f"| {row['row']} | {row['table']} | {use} | {row['published']:.0f} | {error} |")
    for use in sorted({row["use"] for row in results}):
        print(json.dumps(summary(results, use)))


if __name__ == "__main__":
    main()
