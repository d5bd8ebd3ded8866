"""ERNIE 3.0 has no published class in transformers. Standard library only.

Tested in ``tests/model/test_architectures.py``.
"""

from __future__ import annotations

from megapar.schema.published import PublishedForms

PUBLISHED = PublishedForms()
