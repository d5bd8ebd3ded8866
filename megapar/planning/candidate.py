"""One candidate of a search: the values of the knobs that differ from their defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megapar.config.config import FLAGS
from megapar.planning.change import line_of

# Flags that have no effect, and are refused, without another one: (needed flag, its values without effect, flags).
_NEEDS: tuple[tuple[str, tuple[Any, ...], tuple[str, ...]], ...] = (
    (
        "mp_degree",
        (1,),
        (
            *("sequence_parallel", "tp_comm_overlap", "expert_mp_degree", "recompute_partition"),
            "ampipe_tp_sp_comm_overlap",
        ),
    ),
    ("sequence_parallel", (False,), ("expert_mp_degree", "pipe_experts_multi_stream")),
    ("pp_degree", (1,), ("pp_schedule", "vpp_degree", "pp_seg_method")),
    ("cp_degree", (1,), ("context_parallel_algo", "mla_cp_exchange")),
    (
        "ep_degree",
        (1,),
        (
            *("ampipe_degree", "ampipe_slicing", "ampipe_cross_layer", "ampipe_tp_sp_comm_overlap"),
            "moe_dispatch",
        ),
    ),
    ("ampipe_degree", (1,), ("ampipe_slicing", "ampipe_cross_layer", "ampipe_tp_sp_comm_overlap")),
    ("use_pipe_experts", (False,), ("pipe_experts_multi_data", "pipe_experts_multi_stream")),
)


@dataclass(frozen=True)
class Candidate:
    """Values of knobs.

    Attributes:
        values: (field name, value) of the knobs that differ from their defaults, by name.
    """

    values: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Candidate:
        """Return the candidate with these values, without those that have no effect beside the others."""
        kept = {name: value for name, value in values.items() if value != default(name)}
        for needed, idle, flags in _NEEDS:
            if kept.get(needed, default(needed)) in idle:
                for name in flags:
                    kept.pop(name, None)
        if "recompute_interval" not in kept and "recompute_method" not in kept:
            for name in ("recompute_offload", "recompute_partition"):
                kept.pop(name, None)
        return cls(tuple(sorted(kept.items())))

    def get(self, name: str) -> Any:
        """Return the value of a knob."""
        return dict(self.values).get(name, default(name))

    def flags(self) -> dict[str, Any]:
        """Return the values that differ from their defaults, by field name."""
        return dict(self.values)

    def but(self, changes: Mapping[str, Any]) -> Candidate:
        """Return the candidate with other values of some knobs."""
        return Candidate.of({**dict(self.values), **changes})

    def differences(self, other: Candidate) -> dict[str, Any]:
        """Return the values of this candidate, defaults included, that the other one has not."""
        names = [name for name, _ in (*self.values, *other.values)]
        return {name: self.get(name) for name in dict.fromkeys(names) if self.get(name) != other.get(name)}

    def __str__(self) -> str:
        return " ".join(spelled(self.flags())) or "the defaults of all flags"


def default(name: str) -> Any:
    """Return the default of a knob, which is the same for both trainers."""
    return FLAGS[name].defaults["moe"]


def spelled(values: Mapping[str, Any]) -> list[str]:
    """Return the words of a command line that sets these values; ``None`` takes a flag's value away."""
    words = []
    for name, value in values.items():
        spelling = FLAGS[name].spelling
        if isinstance(value, bool):
            words.append(spelling if value else f"--no-{spelling[2:]}")
        else:
            words += line_of({name: value}) if value is not None else [spelling, "None"]
    return words
