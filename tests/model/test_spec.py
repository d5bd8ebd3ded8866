"""The registry of models: what it names is there, and each half of a model is on its floor."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from importlinter.api import read_configuration

from megapar.model.sizes import ModelSizes
from megapar.model.spec import MODELS, STORED, ModelSpec, spec_of
from tests.model.small import DENSE, ERNIE

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("spec", MODELS.values(), ids=MODELS)
def test_the_layers_are_where_the_registry_says(spec: ModelSpec) -> None:
    made = spec.load_parts()
    assert made.__module__ == f"megapar.model.{spec.name}.model"
    assert STORED[spec.sizes.stored_kind] is spec


def test_the_model_of_sizes() -> None:
    assert (spec_of(DENSE).name, spec_of(ERNIE).name) == ("decoder", "ernie")


@pytest.mark.parametrize("sizes", [DENSE, ERNIE])
def test_facts_of_a_checkpoint_give_the_weights_of_the_model(sizes: ModelSizes) -> None:
    assert type(sizes).from_facts(sizes.facts()).facts() == sizes.facts()


def test_every_module_of_a_model_is_in_exactly_one_layer() -> None:
    contract = next(one for one in read_configuration()["contracts_options"] if one["type"] == "layers")
    layers = [name for layer in contract["layers"] for name in re.split(r"[\s:|\\]+", layer) if name]
    paths = (path.relative_to(ROOT).with_suffix("") for path in (ROOT / "megapar/model").rglob("*.py"))
    modules = [".".join(path.parts) for path in paths if path.name != "__init__"]
    above = {name: [layer for layer in layers if f"{name}.".startswith(f"{layer}.")] for name in modules}
    assert {name: found for name, found in above.items() if len(found) != 1} == {}
