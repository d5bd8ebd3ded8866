"""Tokenizers and chat templates of the tests of conversations."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from megapar.data.tokenizers.huggingface_tokenizer import HuggingFaceTokenizer
from tests.support.chat import TEMPLATES, save_tokenizer


@pytest.fixture(scope="session")
def published(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], HuggingFaceTokenizer]:
    """A byte-level tokenizer with the chat template of a name in ``templates/``."""
    made: dict[str, HuggingFaceTokenizer] = {}

    def make(name: str) -> HuggingFaceTokenizer:
        if name not in made:
            folder: Path = tmp_path_factory.mktemp(name)
            save_tokenizer(folder, (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8"))
            made[name] = HuggingFaceTokenizer(folder)
        return made[name]

    return make
