"""What a step counts: padding is no token."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megapar.arguments import parse
from megapar.trainer import train


def test_padding_is_no_token(tmp_path: Path) -> None:
    """Documents of a few ids, one per sample of 32 positions: tokens, their rate and MFU are of what is not padding."""
    lines = [json.dumps({"text": "a " * (3 + i % 5)}) for i in range(40)]
    (tmp_path / "short.jsonl").write_text("\n".join(lines))
    flags = (
        f"--data-path {tmp_path}/short.jsonl --no-packing --split 100,0 --eval-interval 0 --seq-length 32 "
        "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --num-experts 0 --vocab-size 64 --micro-batch-size 2 "
        "--global-batch-size 8 --train-iters 2 --lr-decay-iters 2"
    )
    outcome = train(parse("moe", flags.split(), {}), f"file://{tmp_path / 'meet'}", keep_records=True)
    first, last = outcome.records
    assert 0 < first.consumed_tokens < 8 * 32 - 8
    assert first.consumed_tokens < last.consumed_tokens < 16 * 32 - 16
    own = last.consumed_tokens - first.consumed_tokens
    assert last.tokens_per_second == pytest.approx(own / last.iteration_seconds)
