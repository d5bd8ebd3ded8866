"""Registry of attention kinds: the only module that names their classes.

Tested in ``tests/model/layers/test_self_attention.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from megapar.core.context_parallel.method import ContextParallel
from megapar.core.tensor_parallel.layers import LayerOptions
from megapar.model.attention_sizes import AttentionSizes
from megapar.model.layers.grouped_query_attention import GroupedQueryAttention
from megapar.model.layers.self_attention import SelfAttention

if TYPE_CHECKING:
    from typing_extensions import Unpack

ATTENTION_KINDS: Mapping[str, type[SelfAttention]] = MappingProxyType(
    {
        "grouped_query": GroupedQueryAttention,
    }
)


def make_attention(
    sizes: AttentionSizes, layer: int, *, cp: ContextParallel, **options: Unpack[LayerOptions]
) -> SelfAttention:
    """Build the attention of layer ``layer``. Raises KeyError for a kind that is not registered."""
    return ATTENTION_KINDS[sizes.kind](sizes, layer, cp=cp, **options)
