"""Which table answers for an argument of which framework."""

from __future__ import annotations

from collections.abc import Mapping

from megapar.tools.translation import deepspeed, megatron, mindspeed, paddle
from megapar.tools.translation.verdict import Foreign

# Extensions of Megatron-LM take its arguments as well; where both have a row, their own wins.
FOREIGN: Mapping[str, Mapping[str, Foreign]] = {
    "megatron": megatron.ROWS,
    "mindspeed": {**megatron.ROWS, **mindspeed.ROWS},
    "deepspeed": {**megatron.ROWS, **deepspeed.ROWS},
    "paddle": paddle.ROWS,
}
ALL: Mapping[str, Foreign] = {**deepspeed.ROWS, **mindspeed.ROWS, **megatron.ROWS}
