"""Every function that a table may name: ``@name``."""

from __future__ import annotations

from collections.abc import Mapping

from megapar.tools.translation import decided, mindspeed, of_mindspeed, of_paddle, of_paddle_model, paddle
from megapar.tools.translation.neutral import Function

FUNCTIONS: Mapping[str, Function] = {
    **decided.DECIDED,
    **mindspeed.FUNCTIONS,
    **of_mindspeed.FUNCTIONS,
    **paddle.FUNCTIONS,
    **of_paddle.FUNCTIONS,
    **of_paddle_model.FUNCTIONS,
}
# Those whose argument decides what is trained, so that a value that a script leaves open does as well.
DECIDING = decided.DECIDING | (
    frozenset(FUNCTIONS) - frozenset(decided.DECIDED) - of_mindspeed.HARMLESS - of_paddle.HARMLESS
)
