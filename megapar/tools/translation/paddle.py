"""What becomes of arguments of Paddle Fleet, PaddleNLP and PaddleFormers: rows as in ``megatron``."""

from __future__ import annotations

from megapar.tools.translation.verdict import Foreign

ROWS: dict[str, Foreign] = {}
