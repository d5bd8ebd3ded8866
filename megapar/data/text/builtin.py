"""The built-in text: the documentation that every CPython carries, as documents.

About 2 MB of English that needs no download: the language reference of ``pydoc_data.topics`` and the
docstrings of the standard library. Source files are parsed, never imported, so nothing in them runs.
The documents and their order depend only on the Python version and on which of these files it is packaged with.
"""

from __future__ import annotations

import ast
import os
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from megapar.errors import DataError

VERSION = 1  # increased whenever the documents made here change, so that no cache of older ones is used

ABOUT_BYTES = 2_000_000
SKIPPED_FOLDERS = frozenset(
    {"test", "tests", "idlelib", "idle_test", "lib2to3", "turtledemo", "site-packages", "dist-packages"}
)
SHORTEST_DOCUMENT = 120  # characters; a shorter docstring adds little to its name
SHORTEST_WRAPPED_LINE = 50  # characters; a line this long that stops before its paragraph does was wrapped
SMALLEST_CORPUS = 500_000  # characters; less means an installation without its source files

_Definition = ast.FunctionDef | ast.AsyncFunctionDef
_HOLDS_STATEMENTS = (ast.stmt, ast.excepthandler, ast.match_case)


def documents() -> Iterator[str]:
    """Yield the built-in text's documents: topics, then modules by path. Raises DataError if Python has none."""
    characters = 0
    for text in _all_documents():
        characters += len(text)
        yield text
    if characters < SMALLEST_CORPUS:
        raise DataError(
            f"this Python carries only {characters} characters of documentation (its standard library has no "
            "source files?); set --data-path to a text, JSONL or parquet file"
        )


def _all_documents() -> Iterator[str]:
    for text in (*_topics(), *_modules(Path(sysconfig.get_paths()["stdlib"]))):
        text = unwrap(text)
        if len(text) >= SHORTEST_DOCUMENT:
            yield text


def _topics() -> Iterator[str]:
    try:
        from pydoc_data.topics import topics
    except ImportError:  # some distributions package it separately; the docstrings may still be enough
        return
    for name in sorted(topics):
        yield topics[name]


def _modules(root: Path) -> Iterator[str]:
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(f for f in folders if f not in SKIPPED_FOLDERS and not f.startswith("config-"))
        for name in sorted(files):
            if name.endswith(".py"):
                yield from module_documents(Path(folder) / name)


def module_documents(path: Path) -> Iterator[str]:
    """Yield the docstrings of one source file: the module with its functions, then each class with its methods."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, OSError):  # files kept broken on purpose, such as bad encodings
        return
    yield _described("", tree)
    for statement in _statements(tree):
        if isinstance(statement, ast.ClassDef):
            yield _described(f"class {statement.name}", statement)


def _statements(tree: ast.Module) -> Iterator[ast.AST]:
    """Yield nodes level by level like ``ast.walk``, but no expressions: they are most of a tree and hold no class."""
    level: list[ast.AST] = [tree]
    while level:
        yield from level
        below = (child for node in level for child in ast.iter_child_nodes(node))
        level = [child for child in below if isinstance(child, _HOLDS_STATEMENTS)]


def _described(heading: str, owner: ast.Module | ast.ClassDef) -> str:
    """Return the owner's docstring and those of its direct functions, each under its name."""
    own = ast.get_docstring(owner)
    parts = [part for part in (heading if own else "", own) if part]
    for node in owner.body:
        if isinstance(node, _Definition) and (text := ast.get_docstring(node)):
            parts += [f"{node.name}()", text]
    return "\n\n".join(parts)


def unwrap(text: str) -> str:
    """Join the lines of wrapped paragraphs, with one space between sentences; code keeps its lines."""
    lines: list[str] = []
    previous = ""
    for raw in text.strip().splitlines():
        line = raw.expandtabs(4).rstrip()
        if _continues(previous, line):
            lines[-1] += " " + line.strip()
        elif line or (lines and lines[-1]):  # several blank lines are one
            lines.append(line)
        previous = line
    return re.sub(r"(?<=[.?!:])  (?=\S)", " ", "\n".join(lines))


def _continues(previous: str, line: str) -> bool:
    """Return True if ``line`` continues a sentence that was wrapped after ``previous``."""
    body = line.lstrip()
    same_indent = len(line) - len(body) == len(previous) - len(previous.lstrip())
    prose = body[:1].isalpha() or body[:1] in "(\"'`*"
    return bool(body) and same_indent and prose and len(previous) >= SHORTEST_WRAPPED_LINE
