"""The built-in text: what is a document, how its lines are joined, that nothing is run to get it."""

from __future__ import annotations

from pathlib import Path

import pytest

from megapar.data.text import builtin
from megapar.data.text.source import all_documents, open_sources
from megapar.data.tokens.split import place_of
from megapar.errors import DataError


def test_module_and_classes_are_documents_and_nothing_is_run(tmp_path: Path) -> None:
    source = tmp_path / "module.py"
    source.write_text(
        '"""About the module."""\nraise SystemExit("imported")\n'
        'def f():\n    """Does f."""\n'
        "def silent(): pass\n"
        'class A:\n    """Is an A."""\n    def m(self):\n        """Does m."""\n'
    )
    assert list(builtin.module_documents(source)) == [
        "About the module.\n\nf()\n\nDoes f.",
        "class A\n\nIs an A.\n\nm()\n\nDoes m.",
    ]


def test_a_file_that_does_not_parse_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("def (:\n")
    assert list(builtin.module_documents(tmp_path / "bad.py")) == []


def test_unwrap_joins_wrapped_prose_and_keeps_the_rest() -> None:
    text = (
        "A paragraph whose first line was long enough to be\n"
        "wrapped.  It ends here.\n"
        "\n\n"
        "    >>> code that is a line of more than fifty characters, too\n"
        "    >>> more\n"
        "short\n"
        "lines\n"
    )
    assert builtin.unwrap(text) == (
        "A paragraph whose first line was long enough to be wrapped. It ends here.\n"
        "\n"
        "    >>> code that is a line of more than fifty characters, too\n"
        "    >>> more\n"
        "short\n"
        "lines"
    )


def test_it_is_two_megabytes_of_documents_the_same_every_time() -> None:
    first, second = list(builtin.documents()), list(all_documents(open_sources(["builtin"])))
    assert first == second
    assert 1_500_000 < sum(map(len, first)) < 4_000_000
    assert len(first) > 800
    assert min(map(len, first)) >= builtin.SHORTEST_DOCUMENT
    assert 0.02 < sum(place_of(text) >= 0.95 for text in first) / len(first) < 0.09


def test_a_stripped_python_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builtin, "_modules", lambda root: iter(()))
    monkeypatch.setattr(builtin, "_topics", lambda: iter(["A topic of a few words. " * 20]))
    with pytest.raises(DataError, match="characters of documentation"):
        list(builtin.documents())
