"""What becomes of arguments of MindSpeed and MindSpeed-LLM that are no flags here: rows as in ``megatron``."""

from __future__ import annotations

from megapar.tools.translation.verdict import Foreign

ROWS: dict[str, Foreign] = {}

# What differs from Megatron-LM's where a script says nothing: `defaults`, with the same keys.
DEFAULTS: dict[str, Foreign] = {}
