"""Which tables answer for an argument of which framework, and what its scripts mean where they say nothing."""

from __future__ import annotations

from collections.abc import Mapping

from megapar.tools.translation import deepspeed, defaults, megatron, mindspeed, paddle
from megapar.tools.translation.verdict import Foreign

NAMES: Mapping[str, str] = {
    "megatron": "Megatron-LM",
    "mindspeed": "MindSpeed",
    "deepspeed": "Megatron-DeepSpeed",
    "paddle": "Paddle",
}
# Extensions of Megatron-LM take its arguments as well; where several have a row, their own wins.
FOREIGN: Mapping[str, Mapping[str, Foreign]] = {
    "megatron": {**deepspeed.ROWS, **mindspeed.ROWS, **megatron.ROWS},
    "mindspeed": {**deepspeed.ROWS, **megatron.ROWS, **mindspeed.ROWS},
    "deepspeed": {**mindspeed.ROWS, **megatron.ROWS, **deepspeed.ROWS},
    "paddle": paddle.ROWS,
}
DEFAULTS: Mapping[str, Mapping[str, Foreign]] = {
    "megatron": defaults.MEGATRON,
    "mindspeed": {**defaults.MEGATRON, **mindspeed.DEFAULTS},
    "deepspeed": {**defaults.MEGATRON, **deepspeed.DEFAULTS},
    "paddle": paddle.DEFAULTS,
}
_ROWS = {"mindspeed": mindspeed.ROWS, "deepspeed": deepspeed.ROWS, "paddle": paddle.ROWS}
# Arguments that only one of them has: by these a line is recognised.
OWN: Mapping[str, frozenset[str]] = {
    name: frozenset(rows).difference(megatron.ROWS, *(theirs for other, theirs in _ROWS.items() if other != name))
    for name, rows in _ROWS.items()
}


def model_of(framework: str, given: Mapping[str, str]) -> str:
    """Which of our trainers is for a script with these arguments, moe or ernie; empty where none is."""
    return paddle.model_of(given) if framework == "paddle" else "moe"
