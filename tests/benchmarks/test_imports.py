"""What benchmarks and scripts import of the repository exists, also in those that no test runs."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[2]
OURS = ("megapar", "benchmarks", "scripts", "tests")


@cache
def defined(module: str) -> frozenset[str]:
    """Names that a module or package has at its top level, without running it."""
    spec = find_spec(module)
    assert spec is not None, module
    path = None if spec.origin is None else Path(spec.origin)
    found = {name.stem for place in spec.submodule_search_locations or () for name in Path(place).iterdir()}
    if path is not None:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                found.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif isinstance(node, ast.alias):
                found.add(node.asname or node.name)
    return frozenset(found)


def imported(path: Path) -> Iterator[tuple[str, str]]:
    """Yield (module, name) of each import from the repository's packages."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in OURS:
            yield from ((str(node.module), alias.name) for alias in node.names)


def test_imported_names_exist() -> None:
    files = [path for folder in ("benchmarks", "scripts") for path in sorted((ROOT / folder).rglob("*.py"))]
    found = [(path.relative_to(ROOT), module, name) for path in files for module, name in imported(path)]
    assert len(found) > 300
    assert [(str(path), module, name) for path, module, name in found if name not in defined(module)] == []
