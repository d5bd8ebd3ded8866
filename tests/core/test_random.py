"""Streams: the same numbers wherever a place is drawn, others for other places, ranks and micro-batches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from megapar.core.comm.axis import Axis
from megapar.core.random import Streams, seed_micro_batch
from tests.model.small import DENSE, ERNIE, batch_for, build
from tests.support.ranks import run_ranks

CPU = torch.device("cpu")


def mask(streams: Streams, place: str, rank: int = 0) -> list[bool]:
    """64 elements of the place's dropout mask."""
    return streams.dropout(torch.ones(64), 0.5, place, rank).bool().tolist()


def test_a_place_repeats_whatever_was_drawn_before() -> None:
    """Streams are functions, not states."""
    seed_micro_batch(1, 5, CPU)
    streams = Streams.current()
    first = mask(streams, "layers.0.mlp")
    mask(streams, "layers.1.mlp")
    seed_micro_batch(1, 6, CPU)
    assert mask(streams, "layers.0.mlp") == first
    seed_micro_batch(1, 5, CPU)
    assert mask(Streams.current(), "layers.0.mlp") == first


def test_places_ranks_and_micro_batches_differ() -> None:
    """No two of them share a mask."""
    drawn = []
    for seed, number in ((1, 5), (1, 6), (2, 5)):
        seed_micro_batch(seed, number, CPU)
        streams = Streams.current()
        drawn += [mask(streams, place, rank) for place in ("a", "b") for rank in (0, 1)]
    assert len({tuple(bits) for bits in drawn}) == len(drawn)


def test_drawing_leaves_the_micro_batch_current() -> None:
    """Whoever asks between two places gets the same streams."""
    seed_micro_batch(1, 5, CPU)
    streams = Streams.current()
    with pytest.raises(RuntimeError, match="inside"), streams.drawing(CPU, "a"):
        raise RuntimeError("inside")
    assert Streams.current() == streams


def draws(rank: int, world_size: int, kind: str, sequence_parallel: bool) -> dict[str, Any]:
    """(seed of the stream) of every place that a forward draws from on this rank, by place."""
    sizes: Any = replace(ERNIE if kind == "ernie" else DENSE, attention_dropout=0.1, hidden_dropout=0.1)
    mp = Axis("mp", world_size, rank, dist.group.WORLD, tuple(range(world_size)))
    model = build(sizes, mp=mp, sequence_parallel=sequence_parallel).train()
    seen: dict[str, Any] = {}
    drawing = Streams.drawing

    def noted(streams: Streams, device: torch.device, place: str, rank: int = 0) -> Any:
        with drawing(streams, device, place, rank):
            seen[place] = torch.rand(4).tolist()
        return drawing(streams, device, place, rank)

    seed_micro_batch(1, 0, CPU)
    with patch.object(Streams, "drawing", noted):
        model(batch_for(sizes))
    return seen


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("kind", ["moe", "ernie"])
def test_mp_ranks(kind: str, sequence_parallel: bool) -> None:
    """Heads are other ones on every rank; hidden activations only under sequence parallelism."""
    first, second = run_ranks(2, draws, kind, sequence_parallel)
    assert first.keys() == second.keys()
    assert len(first) == 1 + 3 * 2  # the embedding, and three places in each of two layers
    differing = {place for place in first if first[place] != second[place]}
    assert differing == (set(first) if sequence_parallel else {p for p in first if p.endswith("weights")})
