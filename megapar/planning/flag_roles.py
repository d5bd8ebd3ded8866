"""Flags by their role in a search (``schema/role.py``): the knobs that it tries, and what it drops or leaves out."""

from __future__ import annotations

from megapar.config.config import FLAGS
from megapar.schema.role import OUTSIDE, TRIED


def _with(kind: str) -> tuple[str, ...]:
    return tuple(name for name, flag in FLAGS.items() if flag.role.kind == kind)


KNOBS = _with(TRIED)
"""Flags that a search tries."""

WITHOUT_EFFECT = _with(OUTSIDE)
"""Flags that change neither time nor memory of a step in the plan."""

DROPPED = (
    *(name for name in KNOBS if name not in ("sharding_segment_strategy", "segment_broadcast_mb")),
    *("use_nanopipe", "gradient_merge_acc_step", "adaptive_recompute_device_size"),
)
"""Flags whose values in files a search drops. Segments stay: any size, even the default, selects a strategy."""
