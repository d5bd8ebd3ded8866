"""Rows on progressive learning."""

from __future__ import annotations

from typing import Any

from megapar.schema.rule import NO_EFFECT, Facts, Rule

ERNIE = ("ernie",)
SOURCE = "ERNIE 3.0"
BASE = "--progressive-iters 10"
_SHAPE = ("progressive_batch_multiple", "progressive_length_multiple")


def _parts(f: Facts) -> int:
    """What every length must be a multiple of."""
    return int(f.generation_segments * f.cp_degree * (f.mp_degree if f.sequence_parallel else 1))


def _row(id: str, reads: tuple[str, ...], failing: str, passing: str = "", **more: Any) -> Rule:
    """A row that applies while something grows. failing, passing: behind BASE."""
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
    Rule(
        id="progressive-unused",
        reads=("progressive_iters", "changed"),
        when=lambda f: f.progressive_iters == 0,
        requires=lambda f: not f.changed & set(_SHAPE),
        message="--progressive-batch-multiple and --progressive-length-multiple would do nothing: nothing grows",
        fix="Give --progressive-iters, or leave them out.",
        source=NO_EFFECT,
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
        message="the batch grows by --micro-batch-size x --progressive-batch-multiple samples, which data ranks share "
        "evenly and --global-batch-size is a multiple of",
        fix=lambda f: f"Choose --progressive-batch-multiple {f.data_ranks}.",
    ),
    _row(
        "progressive-length",
        (
            *("progressive_length_multiple", "seq_length", "generation_segments"),
            *("cp_degree", "mp_degree", "sequence_parallel"),
        ),
        "--seq-length 128 --progressive-length-multiple 192",
        "--seq-length 128 --progressive-length-multiple 48",
        requires=lambda f: (
            f.progressive_length_multiple <= f.seq_length and f.progressive_length_multiple % _parts(f) == 0
        ),
        message="--progressive-length-multiple is the first length: at most --seq-length, and a "
        "multiple of --generation-segments x cp, times mp under sequence parallelism",
        fix=lambda f: f"Choose a multiple of {_parts(f)}, at most {f.seq_length}.",
    ),
    _row(
        "progressive-warmup",
        ("changed",),
        "--lr-warmup-iters 5",
        requires=lambda f: "lr_warmup_iters" not in f.changed,
        message="--progressive-iters is the learning rate's warm-up, too: --lr-warmup-iters would contradict it",
        fix="Leave --lr-warmup-iters out.",
    ),
    _row(
        "progressive-rampup",
        ("rampup_batch_size",),
        "--global-batch-size 8 --micro-batch-size 1 --rampup-batch-size 4 4 16",
        requires=lambda f: f.rampup_batch_size is None,
        message="--progressive-iters and --rampup-batch-size would both set the batch",
        fix="Leave one of them out.",
    ),
    _row(
        "progressive-pipeline",
        ("pp_degree",),
        "--world-size 2 --pp-degree 2 --gradient-merge-acc-step 4",
        requires=lambda f: f.pp_degree == 1,
        message="--progressive-iters and --pp-degree > 1 are not proven together: small batches fill no pipeline",
        fix="Leave one of them out.",
        source="not proven yet",
    ),
)
