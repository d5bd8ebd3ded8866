"""Rows on progressive learning (ERNIE 3.0)."""

from __future__ import annotations

from typing import Any

from megapar.schema.flag import ERNIE
from megapar.schema.rule import Facts, Rule, unused

SOURCE = "ERNIE 3.0"
BASE = "--progressive-iters 10"
_LANES = ("generation_segments", "cp_degree", "mp_degree", "sequence_parallel")


def _parts(f: Facts) -> int:
    """Return the number that every length must be a multiple of."""
    return int(f.generation_segments * f.cp_degree * (f.mp_degree if f.sequence_parallel else 1))


def _row(id: str, reads: tuple[str, ...], failing: str, passing: str = "", **more: Any) -> Rule:
    """Build a row that applies to progressive learning; ``failing`` and ``passing`` are appended to BASE."""
    return Rule(
        id=id,
        reads=("progressive_iters", *reads),
        when=lambda f: f.progressive_iters > 0,
        passing=f"{BASE} {passing}".strip(),
        failing=f"{BASE} {failing}",
        models=ERNIE,
        **{"source": SOURCE, **more},
    )


RULES: tuple[Rule, ...] = (
    unused(
        "progressive-unused",
        ("progressive_batch_multiple", "progressive_length_multiple"),
        ("progressive_iters",),
        lambda f: f.progressive_iters == 0,
        "without --progressive-iters",
        fix="Set --progressive-iters, or leave them out.",
        passing="",
        failing="--progressive-batch-multiple 2",
        models=ERNIE,
    ),
    _row(
        "progressive-batch",
        ("progressive_batch_multiple", "micro_batch_size", "global_batch_size", "data_ranks"),
        "--world-size 2 --micro-batch-size 1 --global-batch-size 4",
        "--world-size 2 --micro-batch-size 1 --global-batch-size 4 --progressive-batch-multiple 2",
        requires=lambda f: (
            f.progressive_batch_multiple % f.data_ranks == 0
            and f.global_batch_size % (f.micro_batch_size * f.progressive_batch_multiple) == 0
        ),
        message="the batch grows by --micro-batch-size x --progressive-batch-multiple samples, which must divide "
        "--global-batch-size and be divisible among the data ranks",
        fix=lambda f: f"Choose --progressive-batch-multiple {f.data_ranks}.",
    ),
    _row(
        "progressive-length",
        ("progressive_length_multiple", "seq_length", *_LANES),
        "--seq-length 128 --progressive-length-multiple 192",
        "--seq-length 128 --progressive-length-multiple 48",
        requires=lambda f: (
            f.progressive_length_multiple <= f.seq_length and f.progressive_length_multiple % _parts(f) == 0
        ),
        message="--progressive-length-multiple is the first length: it must be at most --seq-length, and a multiple of "
        "--generation-segments x cp (x mp with --sequence-parallel)",
        fix=lambda f: f"Choose a multiple of {_parts(f)}, at most {f.seq_length}.",
    ),
    _row(
        "progressive-warmup",
        ("not_default",),
        "--lr-warmup-iters 5",
        requires=lambda f: "lr_warmup_iters" not in f.not_default,
        message="--progressive-iters is also the learning rate warmup: --lr-warmup-iters would contradict it",
        fix="Leave --lr-warmup-iters out.",
    ),
    _row(
        "progressive-rampup",
        ("rampup_batch_size",),
        "--global-batch-size 8 --micro-batch-size 1 --rampup-batch-size 4 4 16",
        requires=lambda f: f.rampup_batch_size is None,
        message="--progressive-iters and --rampup-batch-size would both set the batch size",
        fix="Leave one of them out.",
    ),
)
