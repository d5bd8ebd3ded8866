"""Blocks of a YAML file: the groups of flags, and the blocks of PaddlePaddle's strategies for the same settings."""

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
"""Names of blocks, in their normal form. A key in a block means the same as at the left margin."""

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
# Keys of blocks that are accepted and ignored with these values, because they request what megapar always does.
_IGNORED: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "enable": TRUE,  # the block's feature
        "avg": TRUE,  # gradients of merged micro-batches are averaged
        "sep-degree": ("1",),
        "use-calc-stream": FALSE,
        "enable-tuning": FALSE,
    }
)


class Pairs(list[tuple[str, Any]]):
    """Keys and values of a mapping in file order, with repeated keys; a value may be Pairs itself."""

    def plain(self) -> dict[str, Any]:
        """Return nested dicts, for settings that refuse a mapping."""
        return {key: value.plain() if isinstance(value, Pairs) else value for key, value in self}


@dataclass(frozen=True)
class Leaf:
    """Setting of a file.

    Attributes:
        name: Name to look up, in its normal form.
        shown: Key as written, with its blocks.
        value: Value as read.
    """

    name: str
    shown: str
    value: Any


@dataclass(frozen=True)
class Strange:
    """Block of an unknown name.

    Attributes:
        shown: Key as written, with its blocks.
        keys: Keys in the block.
    """

    shown: str
    keys: Sequence[str]


def leaves(pairs: Iterable[tuple[str, Any]], known: Mapping[str, Any], *within: str) -> Iterator[Leaf | Strange]:
    """Yield the settings of a file, including those in known blocks. ``known``: names that are settings."""
    items = list(pairs)
    blocks = {normal(key).lstrip("-") for key, value in items if isinstance(value, Pairs)}
    for key, value in items:
        name = normal(key).lstrip("-")
        shown = ".".join((*within, key))
        if isinstance(value, Pairs) and name in BLOCKS:  # optimizer is a flag, too, which takes no mapping
            yield from leaves(value, known, *within, key)
            continue
        if isinstance(value, Pairs) and name not in known:
            yield Strange(shown, [inner for inner, _ in value])
            continue
        if value in (None, "None") and name in BLOCKS:
            continue  # an empty block
        if within:
            name = _SHORT.get(normal(within[-1]), {}).get(name, name)
            if name not in known and str(value).lower() in _IGNORED.get(name, ()):
                continue
        if name not in known and f"{name}-configs" in blocks and str(value).lower() in TRUE:
            continue  # PaddlePaddle's switch for a block that the file contains
        yield Leaf(name, shown, value.plain() if isinstance(value, Pairs) else value)
