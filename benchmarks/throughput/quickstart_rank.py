"""One rank of the quickstart; a turn is one optimizer step. ``revisions.steps`` calls that of any revision."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import megapar
from benchmarks.support.contest import serve
from benchmarks.support.steps import make_trainer, timed
from megapar.arguments import parse


def main() -> None:
    """Build the trainer and serve turns."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rendezvous")
    parser.add_argument("--config")
    parser.add_argument("--expect", type=Path, help="the tree that megapar must be from")
    options = parser.parse_args()
    found = Path(megapar.__file__).resolve().parents[1]
    if found != options.expect:
        raise SystemExit(f"megapar is {found}, not {options.expect}")
    # Enough steps that it never ends by itself, and no files.
    flags = ["--config", options.config, "--train-iters", "100000", "--log-interval", "100000", "--eval-interval", "0"]
    serve(timed(make_trainer(parse("moe", flags, dict(os.environ)), options.rendezvous)))


if __name__ == "__main__":
    main()
