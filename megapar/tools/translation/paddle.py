"""What becomes of arguments of Paddle Fleet, PaddleNLP and PaddleFormers: rows as in ``megatron``."""

from __future__ import annotations

from collections.abc import Mapping

from megapar.tools.translation.verdict import Foreign

ROWS: dict[str, Foreign] = {}

# Where a script says nothing and Paddle means something else than trainers here: `defaults`.
DEFAULTS: dict[str, Foreign] = {}


def model_of(given: Mapping[str, str]) -> str:
    """Which of our trainers is for a script with these arguments, moe or ernie; empty where none is."""
    name = " ".join(given.get(key, "") for key in ("model-type", "model-name-or-path", "architecture")).lower()
    encoder = "ernie" in name and "4.5" not in name and "4_5" not in name and "45" not in name
    return "ernie" if encoder else "moe"
