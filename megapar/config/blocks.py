"""Blocks of a YAML file: the groups of flags, and those in which PaddlePaddle's strategies write the same settings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from megapar.config.config import GROUPS
from megapar.config.values import FALSE, TRUE
from megapar.schema.flag import normal

_PADDLE = (
    *("strategy", "dist-strategy", "hybrid-configs", "sharding-configs", "mp-configs", "pp-configs"),
    *("tensor-parallel-configs", "pipeline-configs", "gradient-merge", "gradient-merge-configs", "recompute-configs"),
)
BLOCKS = frozenset((*GROUPS, *_PADDLE))
"""Names of blocks, in their normal form: what stands in them means what it means at the left margin."""

_SHORT: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "gradient-merge": {"k-steps": "gradient-merge-acc-step"},
        "gradient-merge-configs": {"k-steps": "gradient-merge-acc-step"},
        "pipeline": {"schedule-mode": "pp-schedule"},
        "pipeline-configs": {"schedule-mode": "pp-schedule"},
        "sharding": {"degree": "sharding-degree", "stage": "sharding-stage"},
        "sharding-configs": {"stage": "sharding-stage"},
    }
)
# Keys of blocks that say what is the case here anyway: the values with which they do.
_ANYWAY: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "enable": TRUE,  # the block's feature
        "avg": TRUE,  # gradients of merged micro-batches are averaged
        "sep-degree": ("1",),
        "use-calc-stream": FALSE,
        "enable-tuning": FALSE,
    }
)


class Pairs(list[tuple[str, Any]]):
    """Keys and values of a mapping as they stand, repeated keys included; a value may be Pairs."""

    def plain(self) -> dict[str, Any]:
        """For what takes no mapping, and says so."""
        return {key: value.plain() if isinstance(value, Pairs) else value for key, value in self}


@dataclass(frozen=True)
class Leaf:
    """A setting of a file. name: that is to be looked up, in its normal form. shown: as it stands, with its blocks."""

    name: str
    shown: str
    value: Any


@dataclass(frozen=True)
class Strange:
    """A block that nobody knows. keys: what stands in it."""

    shown: str
    keys: Sequence[str]


def leaves(pairs: Iterable[tuple[str, Any]], known: Mapping[str, Any], *within: str) -> Iterator[Leaf | Strange]:
    """The settings of a file, those of blocks it knows one by one. known: names that are settings themselves."""
    found = list(pairs)
    blocks = {normal(key).lstrip("-") for key, value in found if isinstance(value, Pairs)}
    for key, value in found:
        name = normal(key).lstrip("-")
        shown = ".".join((*within, key))
        if isinstance(value, Pairs) and name not in known:
            if name in BLOCKS:
                yield from leaves(value, known, *within, key)
            else:
                yield Strange(shown, [inner for inner, _ in value])
            continue
        if value in (None, "None") and name in BLOCKS and name not in known:
            continue  # a block in which nothing is set
        if within:
            name = _SHORT.get(normal(within[-1]), {}).get(name, name)
            if name not in known and str(value).lower() in _ANYWAY.get(name, ()):
                continue
        if name not in known and f"{name}-configs" in blocks and str(value).lower() in TRUE:
            continue  # PaddlePaddle's switch beside the block, which is there
        yield Leaf(name, shown, value.plain() if isinstance(value, Pairs) else value)
