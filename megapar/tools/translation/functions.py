"""Registry of the functions that a table refers to as ``@name``."""

from __future__ import annotations

from collections.abc import Mapping

from megapar.tools.translation import decided, mindspeed, of_mindspeed, of_paddle, of_paddle_model, paddle
from megapar.tools.translation.neutral import Function, case

FUNCTIONS: Mapping[str, Function] = {
    **decided.DECIDED,
    **mindspeed.FUNCTIONS,
    **of_mindspeed.FUNCTIONS,
    **paddle.FUNCTIONS,
    **of_paddle.FUNCTIONS,
    **of_paddle_model.FUNCTIONS,
}
# Functions whose argument affects the training. If the script leaves its value open, the training is undecided.
DECIDING = decided.DECIDING | (
    frozenset(FUNCTIONS) - frozenset(decided.DECIDED) - of_mindspeed.HARMLESS - of_paddle.HARMLESS
)


def function(name: str) -> Function:
    """Return the function of a cell ``@name``, or of a cell ``@CONDITION: ..`` (``case``)."""
    return FUNCTIONS[name] if name in FUNCTIONS else case(name)
