"""What ``import megapar`` promises: the names of the list in docs/python.md, each of which costs its import only."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import megapar

ROOT = Path(__file__).parents[1]


def test_the_page_lists_what_is_public() -> None:
    page = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    table = page.partition("## The public interface")[2]
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    listed = [name for cell in cells for name in re.findall(r"`(\w+)`", cell)]
    assert sorted(listed) == sorted(megapar.__all__)


def test_what_the_examples_import_is_public() -> None:
    page = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    imported = re.findall(r"^from (megapar\S*) import (.+)$", page, flags=re.MULTILINE)
    assert {module for module, _ in imported} == {"megapar"}
    assert {name.strip() for _, names in imported for name in names.split(",")} <= set(megapar.__all__)


@pytest.mark.parametrize("name", megapar.__all__)
def test_every_public_name_is_there_with_its_documentation(name: str) -> None:
    value = getattr(megapar, name)
    assert name == "__version__" or value.__doc__


def test_other_names_are_not() -> None:
    with pytest.raises(AttributeError, match="module 'megapar' has no attribute 'nothing'"):
        _ = megapar.nothing


def test_parsing_does_not_import_torch() -> None:
    code = """
import sys
from megapar import ConfigError, parse
assert parse("moe", ["--data-path", "mock"]).kind == "moe"
print(sorted({"torch", "numpy"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.strip() == "[]", done.stderr
