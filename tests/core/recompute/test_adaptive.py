"""The choice of the fewest recomputed layers that fit."""

from __future__ import annotations

import pytest
import torch

from megapar.core.comm.axis import Axis
from megapar.core.recompute.adaptive import Adaptive, choose
from megapar.core.recompute.choice import LayerSpan
from megapar.errors import TrainingError


def test_the_cheapest_layers_are_kept() -> None:
    """10 + 2 + 2 + 5 fits into 20; the next 5 does not. Of equal layers the last are kept."""
    chosen = choose(20, 10, [2, 5, 5, 2])
    assert chosen.layers == (1,)
    assert chosen.needed_bytes == 19


def test_all_or_none() -> None:
    """Everything fits; nothing but the peak fits; not even that."""
    assert choose(24, 10, [2, 5, 5, 2]).layers == ()
    assert choose(11, 10, [2, 5, 5, 2]).layers == (0, 1, 2, 3)
    with pytest.raises(TrainingError, match="adaptive-recompute-device-size"):
        choose(9, 10, [2, 5, 5, 2])


def test_it_measures_two_steps_and_then_chooses_once() -> None:
    """The first step measures layers, the second the peak; a rank may hold fewer layers than the model has."""
    adaptive = Adaptive(20, 6)
    alone, cpu = Axis.single("world"), torch.device("cpu")
    assert adaptive.measuring
    assert adaptive.spans(2) == [LayerSpan(0, 1, True), LayerSpan(1, 2, True)]
    for layer, kept in ((1, 3), (0, 8), (1, 4)):
        adaptive.note(layer, kept)
    assert adaptive.end_step(1000, 1, alone, cpu) is None
    assert not adaptive.measuring
    chosen = adaptive.end_step(10, 1, alone, cpu)
    assert chosen is not None
    assert chosen.layers == (0,)
    assert str(chosen).startswith("adaptive recompute: 1 of 2 layers (0)")
    assert adaptive.spans(2) == [LayerSpan(0, 1, True), LayerSpan(1, 2, False)]
    assert adaptive.end_step(2000, 1, alone, cpu) is None
