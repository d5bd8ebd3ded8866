"""How far the model of a checkpoint may be another one than the run's. No torch: a refusal takes no second."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megapar.model.ernie.table import SOP


@dataclass(frozen=True)
class Block:
    """A part that a model may have beside what its checkpoint has. fact: what says so; prefixes: of its parameters."""

    name: str
    fact: str
    prefixes: tuple[str, ...]


SENTENCE_ORDER = Block("sentence-order head", "sop", SOP)
MTP = Block("multi-token prediction block", "mtp_depth", ("mtp.",))
BLOCKS = (SENTENCE_ORDER, MTP)


@dataclass(frozen=True)
class Fitted:
    """facts: to be compared with the checkpoint's. initial: blocks that it lacks; left: those that only it has."""

    facts: dict[str, Any]
    initial: tuple[Block, ...]
    left: tuple[Block, ...]


def fitted(stored: Mapping[str, Any], expected: Mapping[str, Any], *, alone: bool) -> Fitted:
    """What a checkpoint must say to be one of a model with ``expected`` facts, where ``stored`` may differ.

    Rotary positions have no tensor, and longer samples are no other model. alone: of the weights alone, as --finetune
    and a converted model are taken; then a head or block that is on one side only starts anew, or is left out.
    """
    facts = dict(expected)
    initial: list[Block] = []
    left: list[Block] = []
    if facts.get("position_embedding_type") == "rope":
        facts["max_position_embeddings"] = stored.get("max_position_embeddings")
    for block in BLOCKS if alone else ():
        there, here = stored.get(block.fact), facts.get(block.fact)
        if there is not None and here is not None and bool(there) != bool(here):
            (initial if here else left).append(block)
            facts[block.fact] = there
    return Fitted(facts, tuple(initial), tuple(left))
