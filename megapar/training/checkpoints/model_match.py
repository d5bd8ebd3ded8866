"""How far the model of a checkpoint may be another one than the run's. No torch: a refusal takes no second."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from megapar.model.ernie.table import SOP
from megapar.model.parameter import ParameterSpec
from megapar.schema.published import PublishedArchitecture


@dataclass(frozen=True)
class OptionalBlock:
    """A part that a model may have beside what its checkpoint has. fact: what says so; prefixes: of its parameters."""

    name: str
    fact: str
    prefixes: tuple[str, ...]


SENTENCE_ORDER = OptionalBlock("sentence-order head", "sop", SOP)
MTP = OptionalBlock("multi-token prediction block", "mtp_depth", ("mtp.",))
BLOCKS = (SENTENCE_ORDER, MTP)


@dataclass(frozen=True)
class ModelMatch:
    """facts: to be compared with the checkpoint's. initial: blocks that it lacks; left: those that only it has."""

    facts: dict[str, Any]
    initial: tuple[OptionalBlock, ...]
    left: tuple[OptionalBlock, ...]


def fitted(stored: Mapping[str, Any], expected: Mapping[str, Any], *, alone: bool) -> ModelMatch:
    """What a checkpoint must say to be one of a model with ``expected`` facts, where ``stored`` may differ.

    Rotary positions have no tensor, and longer samples are no other model. alone: of the weights alone, as --finetune
    and a converted model are taken; then a head or block that is on one side only starts anew, or is left out.
    """
    facts = dict(expected)
    initial: list[OptionalBlock] = []
    left: list[OptionalBlock] = []
    if facts.get("position_embedding_type") == "rope":
        facts["max_position_embeddings"] = stored.get("max_position_embeddings")
    for block in BLOCKS if alone else ():
        there, here = stored.get(block.fact), facts.get(block.fact)
        if there is not None and here is not None and bool(there) != bool(here):
            (initial if here else left).append(block)
            facts[block.fact] = there
    return ModelMatch(facts, tuple(initial), tuple(left))


def blocks_lacking(
    architecture: PublishedArchitecture, table: Iterable[ParameterSpec], names: Container[str]
) -> tuple[OptionalBlock, ...]:
    """The blocks of the table that a published folder with tensors of these names does not have.

    Some classes never have a block. Others may have it, and their folders often leave all of its tensors out.
    """
    rows, found = tuple(table), []
    for block in BLOCKS:
        pieces = [piece for spec in rows if spec.name.startswith(block.prefixes) for piece in spec.pieces]
        if block.fact in architecture.fixed_sizes:
            lacking = bool(pieces)
        else:
            stored = any(architecture.hf_name(piece.hf_name) in names for piece in pieces)
            lacking = bool(pieces) and architecture.sets(block.fact) and not stored
        if lacking:
            found.append(block)
    return tuple(found)
