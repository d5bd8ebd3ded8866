"""One kind of self-attention: its rows, its costs, and the name of its layer. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any

from megapar.core.attention_mask import AttentionMask
from megapar.model.attention_sizes import AttentionSizes
from megapar.model.cost.model_cost import OpCost
from megapar.model.cost.operators import Operators
from megapar.model.parameter import ParameterSpec

HfNames = Callable[[str], str]
"""Function from a part of an attention (q, k, v, o, or what a kind adds) to the name of its Hugging Face tensor, which
lacks only ``.weight`` or ``.bias``."""


@dataclass(frozen=True)
class AttentionShape:
    """One layer's attention and the inputs that its costs depend on.

    Attributes:
        masks: Mask of a sample, or of each of its segments, all of one length.
        rotary: Queries and keys are rotated by their positions.
    """

    sizes: AttentionSizes
    masks: tuple[AttentionMask, ...]
    rotary: bool = False

    @property
    def windowed(self) -> bool:
        """True if positions attend to a window of keys."""
        return self.masks[-1].window is not None

    @property
    def mean_keys(self) -> float:
        """Keys per position whose scores are computed, over all segments."""
        return sum(mask.mean_keys for mask in self.masks) / len(self.masks)


@dataclass(frozen=True, kw_only=True)
class AttentionKind:
    """One kind of attention.

    Attributes:
        name: Name of the kind, in ``AttentionSizes``.
        rows: Returns its rows of the parameter table, given its sizes, its name in the model, its Hugging Face names
            and its unit.
        widths: Returns the features that its products before the core make and that its output takes, in the whole
            model.
        costs: Returns its operators on a rank, the norm before it included.
        parts: ``module:Class`` of its layer, imported when the layer is built.
    """

    name: str
    rows: Callable[[AttentionSizes, str, HfNames, str], list[ParameterSpec]]
    widths: Callable[[AttentionSizes], tuple[int, int]]
    costs: Callable[[Operators, AttentionShape], list[OpCost]]
    parts: str

    def load_parts(self) -> Any:
        """Import the class of the layer, and with it torch."""
        return resolve_name(self.parts)
