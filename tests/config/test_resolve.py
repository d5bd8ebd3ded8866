"""What follows from flags that others are left out of."""

from __future__ import annotations

import pytest

from megapar.arguments import parse
from megapar.errors import ConfigError
from megapar.training.building.partition import make_segments

MODEL = ["--num-layers", "12", "--hidden-size", "512", "--num-attention-heads", "8", "--ffn-hidden-size", "1344"]
BY_BYTES, AT_ANCHORS = "segment_broadcast_MB", "segment_anchors"


@pytest.mark.parametrize(
    ("line", "strategy", "origin"),
    [
        ("", None, "default"),
        ("--segment-broadcast-MB 1", BY_BYTES, "derived"),
        ("--segment-broadcast-MB 32", BY_BYTES, "derived"),
        ("--fuse-broadcast-MB 64", BY_BYTES, "derived"),
        ("--segment-anchors layers.4 layers.8", AT_ANCHORS, "derived"),
        ("--sharding-segment-strategy segment_broadcast_MB", BY_BYTES, "flag"),
    ],
)
def test_a_size_or_anchors_alone_choose_their_strategy(line: str, strategy: str | None, origin: str) -> None:
    config = parse("moe", line.split(), {})
    assert config.sharding.sharding_segment_strategy == strategy
    assert config.origins["sharding_segment_strategy"] == origin


def test_the_size_changes_the_segments() -> None:
    def segments(line: str) -> int:
        config = parse("moe", [*MODEL, *line.split()], {})
        return len(make_segments(config, config.model))

    alone = [segments(f"--segment-broadcast-MB {size}") for size in (1, 32, 10000)]
    assert alone == sorted(alone, reverse=True)
    assert len(set(alone)) == 3
    assert alone[2] == 1
    assert segments("--sharding-segment-strategy segment_broadcast_MB --segment-broadcast-MB 1") == alone[0]
    assert segments("--segment-anchors layers.4 layers.8") == 3


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        ("--segment-anchors layers.4 --segment-broadcast-MB 8", "segment-anchors"),
        ("--sharding-segment-strategy segment_broadcast_MB --segment-anchors layers.4", "segment-anchors"),
        (
            "--sharding-segment-strategy segment_anchors --segment-anchors layers.4 --segment-broadcast-MB 8",
            "segment-size-unused",
        ),
    ],
)
def test_both_are_refused(line: str, rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        parse("moe", line.split(), {})
