"""The first non-finite value of a step: by its place in the model, whichever rank has found it."""

from __future__ import annotations

import math

import torch
from torch import nn

from megapar.health.corruption.first_nonfinite import FirstNonfinite, watch

UNITS = [f"layers.{number}" for number in range(12)]


class Stage(nn.Module):
    """One rank's part of a model: some of its layers."""

    def __init__(self, *numbers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(number): nn.Linear(2, 2) for number in numbers})

    def units(self) -> dict[str, tuple[nn.Module, ...]]:
        return {f"layers.{number}": (layer,) for number, layer in self.layers.items()}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            x = layer(x)
        return x


def found(stage: Stage, x: float = 1.0) -> FirstNonfinite:
    with torch.no_grad(), watch(stage, UNITS) as nonfinite:
        stage(torch.full((1, 2), x))
    return nonfinite


def broken(*numbers: int) -> Stage:
    stage = Stage(*numbers)
    nn.init.constant_(stage.layers[str(numbers[-1])].weight, math.nan)
    return stage


def test_parameters_of_several_stages_are_named_in_the_order_of_the_model() -> None:
    first, second = found(broken(3, 4)).first, found(broken(9, 10)).first
    assert first is not None
    assert second is not None
    assert min(first, second)[1] == "the parameter layers.4.weight"  # "layers.10" comes first by its letters


def test_a_parameter_is_named_before_the_outputs_that_it_makes() -> None:
    parameter, output = found(broken(10)).first, found(Stage(4), math.inf).first
    assert parameter is not None
    assert output is not None
    assert output[1] == "the output of layers.4"
    assert min(parameter, output)[1] == "the parameter layers.10.weight"
    assert found(Stage(4)).first is None
