"""Rules on the sizes and samples of ERNIE encoders, including ERNIE 3.0."""

from __future__ import annotations

from megapar.schema.flag import ERNIE
from megapar.schema.rule import Rule

SOURCE = "models"

RULES: tuple[Rule, ...] = (
    Rule(
        id="sentence-types",
        reads=("type_vocab_size", "sop_loss_weight"),
        requires=lambda f: f.type_vocab_size >= 2,
        message="a sample has two sentences: --type-vocab-size must be at least 2",
        source=SOURCE,
        passing="--type-vocab-size 4",
        failing="--type-vocab-size 1",
        models=ERNIE,
    ),
    Rule(
        id="sentence-length",
        reads=("seq_length",),
        requires=lambda f: f.seq_length >= 6,
        message="a sample is [CLS], two sentences and two [SEP]: --seq-length must be at least 6",
        fix="Choose --seq-length 6 or more.",
        source=SOURCE,
        passing="--seq-length 6",
        failing="--seq-length 5",
        models=ERNIE,
    ),
)
