"""Maps of the load of each expert: which steps, layers and experts they show, and what a letter stands for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megapar.tools.run_page.expert_section import CELLS, COLUMNS, EACH, EXPERTS, LEAST_COLUMNS, expert_figures, spaced
from megapar.tools.run_page.figures import Figure
from megapar.tools.run_page.run_folder import RunFolder


def of_loads(iteration: int, loads: Sequence[Sequence[float]]) -> dict[str, Any]:
    """The line of a step with all loads, as a run writes it."""
    layers = [{"min": min(layer), "max": max(layer)} for layer in loads]
    return {"iteration": iteration, "layers": layers, "loads": loads}


def each(records: Sequence[Mapping[str, Any]]) -> Figure:
    """The maps of experts."""
    (found,) = (one for one in expert_figures([RunFolder("run", [], {}, records, {})]) if one.title == EACH)
    return found


def decoded(figure: Figure, layer: int) -> list[list[float]]:
    """The loads of a map, as the page's script reads them."""
    body, across = figure.body, len(figure.body["columns"])
    loads = [2 ** (body["letters"].index(one) / body["levels"] - body["octaves"]) for one in body["maps"][layer]]
    return [loads[first : first + across] for first in range(0, len(loads), across)]


def test_a_map_has_a_row_for_each_expert_and_begins_with_the_layer_of_the_busiest() -> None:
    loads = [[[1.0, 1.0, 0.0, 2.0], [0.5, 3.0, 0.25, 0.25]], [[1.0, 1.0, 1.0, 1.0], [0.5, 2.0, 0.5, 1.0]]]
    figure = each([of_loads(10 * number, one) for number, one in enumerate(loads, 1)])
    assert (figure.choices, figure.chosen, figure.wide) == (["layer 0", "layer 1"], 1, True)
    assert figure.body["names"] == ["expert 0", "expert 1", "expert 2", "expert 3"]
    assert figure.body["columns"] == [10, 20]
    for layer in range(2):
        shown = decoded(figure, layer)
        for expert in range(4):
            for step in range(2):
                load = max(loads[step][layer][expert], 1 / 32)
                assert 0.95 < shown[expert][step] / load < 1.05


def test_steps_without_all_loads_are_left_out_of_these_maps() -> None:
    records = [of_loads(1, [[1.0, 1.0]]), {"iteration": 2, "layers": [{"min": 1.0, "max": 1.0}]}]
    assert each(records).body["columns"] == [1]
    assert [one.title for one in expert_figures([RunFolder("run", [], {}, records[1:], {})])] == [
        "Most loaded expert of each layer",
        "Least loaded expert of each layer",
        "Busiest expert over the mean",
    ]


def test_maps_of_many_layers_and_experts_stay_small_and_keep_the_extremes() -> None:
    layers, experts = 61, 384
    loads = [[1.0] * experts for _ in range(layers)]
    loads[7][100] = 16.0
    figure = each([of_loads(iteration, loads) for iteration in range(1, 101)])
    assert sum(map(len, figure.body["maps"])) <= CELLS
    assert len(figure.choices) == layers
    assert LEAST_COLUMNS <= len(figure.body["columns"]) <= COLUMNS
    assert len(figure.body["names"]) == EXPERTS
    assert "3 experts with neighbouring numbers" in figure.note
    assert figure.chosen == 7
    assert max(decoded(figure, 7)[33]) == 16.0  # of experts 99 to 101


def test_of_many_steps_those_at_even_distances_are_shown_and_the_last() -> None:
    records = [{"iteration": iteration} for iteration in (*range(1, 100), *range(100, 1001, 10))]
    shown = [record["iteration"] for record in spaced(records, 10)]
    assert shown == [100 * number for number in range(1, 11)]
    assert spaced(records[:3], 10) == records[:3]
