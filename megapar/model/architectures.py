"""Registry of published architectures by class name, built from the registry of models."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace

from megapar.model.sizes import ModelSizes
from megapar.model.spec import MODELS, ModelSpec, spec_of
from megapar.schema.published import PublishedArchitecture, Settings
from megapar.schema.rule import show

_SPECS: Mapping[str, ModelSpec] = {
    architecture.name: spec for spec in MODELS.values() for architecture in spec.published.architectures
}
ARCHITECTURES: Mapping[str, PublishedArchitecture] = {
    architecture.name: architecture for spec in MODELS.values() for architecture in spec.published.architectures
}


def model_of_architecture(name: str) -> ModelSpec:
    """Return the model that implements the class ``name``."""
    return _SPECS[name]


def own_architecture(sizes: ModelSizes) -> PublishedArchitecture | None:
    """Return the class that a model of these sizes is exported as by default; None if no class fits."""
    published = spec_of(sizes).published
    name = published.own(published.settings(sizes))
    return None if name is None else ARCHITECTURES[name]


def not_exportable(sizes: ModelSizes, architecture: PublishedArchitecture | None = None) -> str | None:
    """Return the reason why the class, by default the model's own one, cannot represent this model; None if it can."""
    default = own_architecture(sizes)
    if default is None:
        return f"{spec_of(sizes).title} has no Hugging Face format"
    architecture = architecture or default
    if model_of_architecture(architecture.name) is not spec_of(sizes):
        return f"{architecture.name} is not {spec_of(sizes).title}"
    settings = spec_of(sizes).published.settings(sizes)
    if not (reasons := _exceeded(architecture, settings)):
        return None
    other = "No supported class can represent it"
    if architecture.name != default.name and not _exceeded(default, settings):
        other = f"{default.name} can, and is written if no published folder is stored next to the checkpoint"
    return f"{architecture.name} cannot represent this model: {'; '.join(reasons)}. {other}"


def _exceeded(architecture: PublishedArchitecture, settings: Settings) -> list[str]:
    """Return the limits of the class that a model with these settings violates, with the settings."""
    reasons = []
    for limit in architecture.limits:
        # A model without experts has no expert settings.
        if any(read not in settings for read in limit.reads) or limit.within(SimpleNamespace(**settings)):
            continue
        values = ", ".join(f"{read} {show(settings[read])}" for read in limit.reads)
        reasons.append(f"{limit.message} ({values}){': ' + limit.way.rstrip('.') if limit.way else ''}")
    return reasons
