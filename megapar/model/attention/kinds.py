"""Registry of the kinds of attention."""

from __future__ import annotations

from collections.abc import Mapping

from megapar.model.attention.grouped_query import GROUPED_QUERY
from megapar.model.attention.kind import AttentionKind
from megapar.model.attention.latent import MULTI_LATENT
from megapar.model.attention_sizes import AttentionSizes

_KINDS = (GROUPED_QUERY, MULTI_LATENT)

ATTENTION_KINDS: Mapping[str, AttentionKind] = {kind.name: kind for kind in _KINDS}


def kind_of(sizes: AttentionSizes) -> AttentionKind:
    """Return the kind of an attention of these sizes. Raises KeyError for a kind that is not registered."""
    return ATTENTION_KINDS[sizes.kind]
