"""Registry of models for the trainer, the planner and the command line.

A model is a folder, ``model/<name>/``, in two halves. The description (sizes, table, costs, published form, rules)
needs only the standard library and is imported here. The parts (the layers themselves) need torch; ``ModelSpec.parts``
names them by a dotted path that is imported when a model is built. So refusing, planning and documenting a
configuration works without torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any, NamedTuple

from megapar.model.cost.model_cost import ModelCost
from megapar.model.decoder import rules as decoder
from megapar.model.decoder.costs import DecoderCost
from megapar.model.decoder.published import PUBLISHED as DECODER_PUBLISHED
from megapar.model.decoder.sizes import DecoderSizes
from megapar.model.decoder.table import decoder_table
from megapar.model.ernie import rules as ernie
from megapar.model.ernie.costs import ErnieCost
from megapar.model.ernie.published import PUBLISHED as ERNIE_PUBLISHED
from megapar.model.ernie.sizes import ErnieSizes
from megapar.model.ernie.table import ernie_table
from megapar.model.ernie3 import rules as ernie3
from megapar.model.ernie3.costs import Ernie3Cost
from megapar.model.ernie3.sizes import Ernie3Sizes
from megapar.model.ernie3.table import ernie3_table
from megapar.model.parameter import ParameterSpec
from megapar.model.sizes import ModelSizes
from megapar.schema.published import PublishedForms
from megapar.schema.rule import Rule


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """One model.

    Attributes:
        kind: Trainer that it belongs to, a key of ``schema.flag.SCRIPTS``.
        title: Description for messages.
        table: Function from sizes to the parameter table, in forward order.
        costs: Class of its costs on a rank, built from sizes and a ``RankView``; also computes the FLOPs of a step.
        rules: Its rows of the compatibility matrix.
        parts: ``module:Class`` of the model itself, imported when the model is built.
        has_experts: Layers may have experts and may run in slices, so the class takes the experts' axes.
    """

    name: str
    kind: str
    title: str
    sizes: type[ModelSizes]
    table: Callable[[Any], tuple[ParameterSpec, ...]]
    published: PublishedForms
    costs: type[ModelCost]
    rules: tuple[Rule, ...]
    parts: str
    has_experts: bool = False

    def load_parts(self) -> Any:
        """Import the class of the model, and with it torch."""
        return resolve_name(self.parts)


_MODELS = (
    ModelSpec(
        name="decoder",
        kind="moe",
        title="a decoder, which pretrain_moe.py trains",
        sizes=DecoderSizes,
        table=decoder_table,
        published=DECODER_PUBLISHED,
        costs=DecoderCost,
        rules=decoder.RULES,
        parts="megapar.model.decoder.model:Decoder",
        has_experts=True,
    ),
    ModelSpec(
        name="ernie",
        kind="ernie",
        title="an ERNIE encoder, which pretrain_ernie.py trains",
        sizes=ErnieSizes,
        table=ernie_table,
        published=ERNIE_PUBLISHED,
        costs=ErnieCost,
        rules=ernie.RULES,
        parts="megapar.model.ernie.model:Ernie",
    ),
    ModelSpec(
        name="ernie3",
        kind="ernie",
        title="ERNIE 3.0, which pretrain_ernie.py trains with --ernie-model ernie3",
        sizes=Ernie3Sizes,
        table=ernie3_table,
        published=PublishedForms(),
        costs=Ernie3Cost,
        rules=ernie3.RULES,
        parts="megapar.model.ernie3.model:Ernie3",
    ),
)

MODELS: Mapping[str, ModelSpec] = {spec.name: spec for spec in _MODELS}
STORED: Mapping[str, ModelSpec] = {spec.sizes.stored_kind: spec for spec in _MODELS}
"""Models by their names in ``layout.json``."""
_BY_SIZES: Mapping[type[ModelSizes], ModelSpec] = {spec.sizes: spec for spec in _MODELS}


def spec_of(sizes: ModelSizes) -> ModelSpec:
    """Return the model that has these sizes."""
    return _BY_SIZES[type(sizes)]


def selected_model(kind: str, values: Mapping[str, Any]) -> ModelSpec:
    """Return the model that a trainer's flags select. values: Values of the flags, by name."""
    return MODELS[values["ernie_model"]] if kind == "ernie" else MODELS["decoder"]


def table_of(sizes: ModelSizes) -> tuple[ParameterSpec, ...]:
    """Return the parameter table of the model that has these sizes."""
    return spec_of(sizes).table(sizes)


class ParameterCounts(NamedTuple):
    """Number of parameters of a model, without buffers; ``active``: those that one token uses, top-k of the experts."""

    total: int
    active: int


def parameter_counts(sizes: ModelSizes, table: Sequence[ParameterSpec] | None = None) -> ParameterCounts:
    """Count a model's parameters, or ``table``'s, like published counts without multi-token prediction."""
    counted = sizes.without_training_blocks()
    total = active = 0
    for row in table_of(counted) if table is None else table:
        if row.trainable:
            total += row.numel
            active += row.numel * counted.experts_per_token // counted.routed_experts if row.expert else row.numel
    return ParameterCounts(total, active)
