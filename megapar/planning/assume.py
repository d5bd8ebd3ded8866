"""Techniques of published runs that megapar does not implement. A plan may assume them, and marks them in its output.

fp8                       matrix products of all linear layers in fp8
fp8-mlp                   matrix products of feed-forward layers and experts in fp8
fp8-activations           inputs that matrix products keep are stored in one byte per element
fp8-swiglu                so are the inputs of the activations of experts, shared ones included (DeepSeek-V3)
operator-recompute:A+B    recompute the outputs of these operators instead of keeping them: norm, qkv, up,
                          activation, core; or combine (rows are weighted before the all-to-all back, so that none
                          are kept). A@4-8,10 applies to these layers only
cuda-graphs               no kernel waits for its launch by the host
fused-experts             one kernel for an expert layer's products, its activation and its casts, which reads the
                          rows per expert on the device
hybrid-ep                 a token travels to a node and to a rank once, permuted on its way (HybridEP, DeepEP)
expert-overlap            all-to-alls of experts hide under the products of another micro-batch (1F1B pairing)
dualpipe                  run the pipeline in both directions: all-to-alls hide under the other direction's
                          computation, and each rank has two copies of the parameters
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any

from megapar.errors import Complaint, ConfigError

# Techniques without a value.
SWITCHES = ("fp8-activations", "fp8-swiglu", "cuda-graphs", "fused-experts", "hybrid-ep", "expert-overlap", "dualpipe")
NAMES = ("fp8", "fp8-mlp", "operator-recompute", *SWITCHES)
OPERATORS = ("norm", "qkv", "up", "activation", "core", "combine")


@dataclass(frozen=True)
class Assumed:
    """Assumptions of a plan beyond its configuration: techniques, by default none; the software; the experts' load.

    Attributes:
        fp8: Matrix products in fp8: ``all``, ``mlp``, or "" for none.
        fp8_activations: Inputs that matrix products keep are stored in one byte per element.
        fp8_swiglu: Inputs of experts' activations are stored in one byte per element.
        operators: Operators that are recomputed, each with its layers; None for all layers.
        dualpipe: Micro-batches pass the pipeline in both directions.
        fused_experts: One kernel for an expert layer's products, its activation and its casts.
        hybrid_ep: A token travels to a node and to a rank once, and is permuted on its way.
        expert_overlap: All-to-alls of experts hide under the products of another micro-batch.
        cuda_graphs: No kernel waits for its launch by the host.
        words: The values of ``--assume``.
        software: Whose operators' costs: a name of ``calibration.py``.
        expert_imbalance: Rows of the busiest expert rank, relative to the mean of all.
    """

    fp8: str = ""
    fp8_activations: bool = False
    fp8_swiglu: bool = False
    operators: tuple[tuple[str, frozenset[int] | None], ...] = ()
    dualpipe: bool = False
    fused_experts: bool = False
    hybrid_ep: bool = False
    expert_overlap: bool = False
    cuda_graphs: bool = False
    words: tuple[str, ...] = ()
    software: str = "megapar"
    expert_imbalance: float = 1.0

    @property
    def pairs_micro_batches(self) -> bool:
        """All-to-alls of experts hide under the products of another micro-batch."""
        return self.dualpipe or self.expert_overlap


def assumed(words: Sequence[str]) -> Assumed:
    """Parse the values of ``--assume``. Raises ConfigError for unknown techniques."""
    result, complaints = Assumed(words=tuple(words)), []
    for word in words:
        name, _, value = word.partition(":")
        try:
            result = _with(result, name, value)
        except ValueError as error:
            near = get_close_matches(name, NAMES, 2)
            hint = f"Did you mean {' or '.join(near)}?" if near and name not in NAMES else ""
            complaints.append(Complaint("assume", f"--assume {word}: {error}.", hint))
    if complaints:
        raise ConfigError(complaints)
    return result


def check_assumed(assumption: Assumed, pp: int) -> None:
    """Raise ConfigError if a technique needs a pipeline and there is only one stage."""
    if assumption.dualpipe and pp == 1:
        message = "--assume dualpipe: one stage (--pp-degree 1) has no pipeline to run in both directions."
        raise ConfigError([Complaint("assume", message, "Set --pp-degree, or leave out dualpipe.")])


def _with(assumption: Assumed, name: str, value: str) -> Assumed:
    if name in ("fp8", "fp8-mlp") and not value:
        return replace(assumption, fp8="mlp" if name == "fp8-mlp" else "all")
    if name in SWITCHES and not value:
        switched: dict[str, Any] = {name.replace("-", "_"): True}
        return replace(assumption, **switched)
    if name == "operator-recompute":
        parts = [word.partition("@") for word in value.split("+")]
        wrong = [operator for operator, _, _ in parts if operator not in OPERATORS]
        if wrong:
            raise ValueError(f"{', '.join(wrong) or 'nothing'} is not one of {', '.join(OPERATORS)}")
        return replace(assumption, operators=tuple((name, _layers(text) if at else None) for name, at, text in parts))
    raise ValueError(f"choose one of {', '.join(NAMES)}")


def _layers(text: str) -> frozenset[int]:
    """Parse ``4-8,10`` to layer numbers. Raises ValueError for malformed text."""
    numbers: set[int] = set()
    for word in text.split(","):
        first, _, last = word.partition("-")
        if not first.isdigit() or not (last or first).isdigit():
            raise ValueError("layers are numbers and ranges, as in up@4-8,10")
        numbers.update(range(int(first), int(last or first) + 1))
    return frozenset(numbers)
