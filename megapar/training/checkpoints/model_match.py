"""The differences that are allowed between the model of a checkpoint and that of a run.

Does not import torch, so that refusals are fast.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from megapar.model.decoder.sizes import DENSE_BLOCK
from megapar.model.ernie.table import SOP
from megapar.model.parameter import ParameterSpec
from megapar.model.published_tensors import PublishedTensors
from megapar.schema.published import PublishedArchitecture


@dataclass(frozen=True)
class OptionalBlock:
    """A part of a model that its checkpoint may lack.

    Attributes:
        name: Name for messages.
        fact: The fact of the model that is true if it has the block.
        prefixes: Prefixes of its parameters' names.
        kind: The fact that says which of several blocks it is; "" if there is one.
        without: Value of that fact in a model without the block.
    """

    name: str
    fact: str
    prefixes: tuple[str, ...]
    kind: str = ""
    without: str = ""


SENTENCE_ORDER = OptionalBlock("sentence-order head", "sop", SOP)
MTP = OptionalBlock("multi-token prediction block", "mtp_depth", ("mtp.",), "mtp_block", DENSE_BLOCK)
BLOCKS = (SENTENCE_ORDER, MTP)


@dataclass(frozen=True)
class ModelMatch:
    """The comparison of a model with a checkpoint.

    Attributes:
        facts: Facts that the checkpoint must have.
        initial: Blocks that the checkpoint lacks. They keep their initial weights.
        left: Blocks that only the checkpoint has. They are dropped.
    """

    facts: dict[str, Any]
    initial: tuple[OptionalBlock, ...]
    left: tuple[OptionalBlock, ...]


def fitted(stored: Mapping[str, Any], expected: Mapping[str, Any], *, alone: bool) -> ModelMatch:
    """Return the facts that a checkpoint must have to fit a model.

    With rotary positions, which have no tensor, the maximum sample length may differ.

    Args:
        stored: Facts of the checkpoint's model.
        expected: Facts of the run's model.
        alone: Only weights are loaded, as with --finetune and for a converted model. Then a head or block that is on
            one side only is initialized or dropped.
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
            if block.kind:
                facts[block.kind] = stored.get(block.kind, block.without)
    return ModelMatch(facts, tuple(initial), tuple(left))


def fitted_folder(
    weights: PublishedTensors, table: Iterable[ParameterSpec], architecture: PublishedArchitecture
) -> tuple[tuple[OptionalBlock, ...], list[str]]:
    """Return the blocks that a folder lacks, and the names that a model lacks. Raises CheckpointError for others."""
    rows = tuple(table)
    lacking = blocks_lacking(architecture, rows, weights.tensors)
    initial = [spec.name for block in lacking for spec in rows if spec.name.startswith(block.prefixes)]
    return lacking, weights.check(rows, architecture, optional=initial)


def blocks_lacking(
    architecture: PublishedArchitecture, table: Iterable[ParameterSpec], names: Container[str]
) -> tuple[OptionalBlock, ...]:
    """Return the blocks of the table that a published folder with tensors of these names lacks.

    Some classes never have a block. For others it is optional, and their folders often leave all of its tensors out.
    """
    rows, blocks = tuple(table), []
    for block in BLOCKS:
        pieces = [piece for spec in rows if spec.name.startswith(block.prefixes) for piece in spec.pieces]
        if block.fact in architecture.fixed_sizes:
            lacking = bool(pieces)
        else:
            stored = any(architecture.hf_name(piece.hf_name) in names for piece in pieces)
            lacking = bool(pieces) and architecture.sets(block.fact) and not stored
        if lacking:
            blocks.append(block)
    return tuple(blocks)
