"""ERNIE 3.0 has no published class in transformers."""

from __future__ import annotations

from megapar.schema.published import PublishedForms

PUBLISHED = PublishedForms()
