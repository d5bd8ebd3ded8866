"""Registry of published architectures by class name, built from the registry of models. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping

from megapar.model.sizes import ModelSizes
from megapar.model.spec import MODELS, ModelSpec, spec_of
from megapar.schema.published import PublishedArchitecture

_SPECS: Mapping[str, ModelSpec] = {one.name: spec for spec in MODELS.values() for one in spec.published.architectures}
ARCHITECTURES: Mapping[str, PublishedArchitecture] = {
    one.name: one for spec in MODELS.values() for one in spec.published.architectures
}


def model_of_architecture(name: str) -> ModelSpec:
    """Return the model that implements the class ``name``."""
    return _SPECS[name]


def own_architecture(sizes: ModelSizes) -> PublishedArchitecture | None:
    """Return the class that a model of these sizes is exported as by default; None if no class fits."""
    published = spec_of(sizes).published
    name = published.own(published.settings(sizes))
    return None if name is None else ARCHITECTURES[name]
