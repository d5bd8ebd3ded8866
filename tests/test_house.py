"""The house rules that no linter knows: one meaning for each name, the field's words, and a test for each module."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import pytest
import yaml

from megapar.config.read import spellings
from scripts.trace_cuda_budgets import BUDGETS, COPIES, FP64, WAITS

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "megapar"
MODULES = tuple(sorted(PACKAGE.rglob("*.py")))
WRITTEN = (*MODULES, *sorted((ROOT / "benchmarks").rglob("*.py")), *sorted((ROOT / "scripts").rglob("*.py")))
FOLDERS = {path.name for path in PACKAGE.rglob("*") if path.is_dir()} | {"megapar", "lint"}
Documented = ast.Module | ast.ClassDef | ast.FunctionDef

WORDS = """
activation checkpointing | all-gather | all-to-all | bucket | callback | capacity factor | column parallel
context parallel | data parallel | device mesh | distributed optimizer | elastic | expert parallel | flight recorder
found_inf | fsdp | fused | gradient accumulation | gradient clipping | grouped gemm | grouped-query attention
hybrid sharding | in flight | interleaved | load balancing loss | loss scaling | master weights | micro-batch
mixture of experts | multi-token prediction | optimizer state | pipeline bubble | prefetch | reduce-scatter | reshard
ring attention | rotary | row parallel | sequence parallel | shard | straggler | token dispatcher | top-k
unshard | vocab parallel | warmup | zero bubble | zero
"""


@cache
def tree(path: Path) -> ast.Module:
    """The syntax tree of a module."""
    return ast.parse(path.read_text(encoding="utf-8"))


def documented(path: Path) -> Iterator[Documented]:
    """The module itself, and each class and function in it."""
    for node in ast.walk(tree(path)):
        if isinstance(node, Documented):
            yield node


def plain(text: str) -> str:
    """Lower case, with camel case, hyphens, underscores and line ends as single spaces."""
    apart = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", text)
    return " ".join(re.sub(r"[-_\s]+", " ", apart).lower().split())


@cache
def names_of(module: str) -> set[str] | None:
    """The names that a module of ours has; None if it is not there."""
    folder = ROOT / module.replace(".", "/")
    inside = {entry.stem for entry in folder.iterdir()} if folder.is_dir() else set()
    files = (folder / "__init__.py", folder.with_suffix(".py"))
    path = next((file for file in files if file.is_file()), None)
    if path is None:
        return inside or None
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            inside.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            inside |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            inside.add(node.id)
    return inside


def test_what_is_imported_is_there() -> None:
    """Also in functions and in tests that are drawn, which may not run for days."""
    missing = []
    for path in (*WRITTEN, *sorted((ROOT / "tests").rglob("*.py"))):
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.ImportFrom) and not node.level:
                module = node.module or ""
                if module.partition(".")[0] in ("megapar", "tests", "scripts", "benchmarks"):
                    there = names_of(module)
                    missing += [
                        f"{path.relative_to(ROOT)}: {module} has no {alias.name}"
                        for alias in node.names
                        if there is None or alias.name not in there
                    ]
    assert missing == []


def test_a_class_name_has_one_meaning() -> None:
    places = defaultdict(list)
    for path in MODULES:
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


def test_a_file_name_occurs_at_most_twice() -> None:
    places = defaultdict(list)
    for path in MODULES:
        model = path.parent.parent == PACKAGE / "model" and path.parent.name not in ("layers", "hugging_face")
        if path.name != "__init__.py" and not model:
            places[path.name].append(str(path.relative_to(ROOT)))
    assert {name: where for name, where in places.items() if len(where) > 2} == {}


@cache
def defined() -> tuple[str, ...]:
    """The name and the docstring of each definition, in plain form."""
    found = []
    for path in MODULES:
        for node in documented(path):
            name = path.stem if isinstance(node, ast.Module) else node.name
            found.append(f"{plain(name)}\n{plain(ast.get_docstring(node) or '')}")
    return tuple(found)


@pytest.mark.parametrize(
    "word", [word.strip() for line in WORDS.split("\n") for word in line.split("|") if word.strip()]
)
def test_the_fields_words_are_found(word: str) -> None:
    wanted = re.compile(rf"\b{re.escape(plain(word))}(s|ed|es)?\b")
    assert any(wanted.search(text) for text in defined())


def test_each_module_has_a_test_file_in_its_place_or_in_the_map() -> None:
    listed = yaml.safe_load((ROOT / "tests" / "map.yaml").read_text(encoding="utf-8"))
    alone = {
        str(path.relative_to(PACKAGE))
        for path in MODULES
        if path.name != "__init__.py"
        and not (ROOT / "tests" / path.relative_to(PACKAGE).parent / f"test_{path.name}").exists()
    }
    assert listed.keys() == alone, "tests/map.yaml names the tests of modules without a test file of their name"
    assert [test for tests in listed.values() for test in tests.split() if not (ROOT / test).exists()] == []
    assert all(listed.values())


OPENINGS = re.compile(r"(What|How|Whether|Where|Which|Who|Whose|Whom|Why|That|Of|From|By|To)\b")


def test_a_docstring_begins_with_a_verb_or_a_noun() -> None:
    wrong = []
    for path in WRITTEN:
        for node in documented(path):
            text = ast.get_docstring(node)
            if text is not None and OPENINGS.match(text):
                wrong.append(f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}: {text.splitlines()[0]}")
    assert wrong == []


FOREIGN = re.compile(r"(?<!here )\b(is|are) no (?!longer|more)\w+|\b(anew|nobody|somebody|whoever|of its own|told)\b")


def test_the_english_is_plain() -> None:
    wrong = []
    for path in WRITTEN:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            if found := FOREIGN.search(line):
                wrong.append(f"{path.relative_to(ROOT)}:{number}: {found.group()}")
    assert wrong == []


def test_nothing_in_the_package_mocks() -> None:
    assert [path for path in MODULES if "unittest.mock" in path.read_text(encoding="utf-8")] == []


def test_models_are_told_apart_in_few_places() -> None:
    models = re.compile(r"isinstance\([^\n]*\b(Decoder|Ernie|Ernie3|DecoderSizes|ErnieSizes|Ernie3Sizes)\b")
    found = [path for path in MODULES for line in path.read_text(encoding="utf-8").splitlines() if models.search(line)]
    assert len(found) <= 6, found


def quoted_here(page: str) -> Iterator[str]:
    """The words in backticks of a page that are this repository's: of a table of other names only the right column."""
    elsewhere = False
    for line in page.splitlines():
        elsewhere = line.startswith("| elsewhere") or (elsewhere and line.startswith("|"))
        yield from re.findall(r"`([^`]+)`", line.split(" | ", 1)[1] if elsewhere and " | " in line else line)


def exists(word: str) -> bool:
    """Whether a flag, a path or a dotted name exists; other quoted text is not judged."""
    first = word.split()[0]
    if first.startswith("--"):
        return any(fnmatch(spelling, first[2:]) for spelling in spellings())
    if "/" in first or first.endswith((".py", ".sh", ".md")):
        pattern = first.replace("<name>", "*").rstrip("/")
        return any(any(folder.rglob(pattern)) for folder in (PACKAGE, ROOT / "scripts")) or (ROOT / pattern).exists()
    if re.fullmatch(r"[A-Za-z_]\w*(\.\w+)*(\(.*)?", first):
        owner, _, name = first.partition("(")[0].rpartition(".")
        if owner in members():
            return name in members()[owner]
        return name in names() or name in FOLDERS
    return True


@cache
def members() -> dict[str, set[str]]:
    """Class -> names of its methods and attributes."""
    found: dict[str, set[str]] = {}
    for path in MODULES:
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.ClassDef):
                own = {one.name for one in ast.walk(node) if isinstance(one, ast.FunctionDef)}
                names = {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}
                found[node.name] = own | names | {one.attr for one in ast.walk(node) if isinstance(one, ast.Attribute)}
    return found


@cache
def names() -> set[str]:
    """Names that the package defines, assigns or calls."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in MODULES)
    return set(re.findall(r"\b(?:class|def) (\w+)", text)) | set(re.findall(r"\b(\w+) *[:=(]", text))


def test_what_the_map_names_exists() -> None:
    page = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    assert [word for word in quoted_here(page) if not exists(word)] == []


def test_the_functions_that_budgets_name_exist() -> None:
    named = {*COPIES, *FP64, *WAITS, *(row.label for row in BUDGETS if "*" not in row.label)} - {"backward"}
    assert sorted(name for name in named if not exists(name)) == []


TESTS = ROOT / "tests"
REFUSALS = {"raises", "warns", "fail"}
"""What pytest has in an ``assert``'s place."""


@cache
def functions(path: Path) -> dict[str, tuple[Path, ast.FunctionDef]]:
    """The functions of a module of tests/, and those that it imports from others, by the names that it has for them."""
    found = {}
    for node in tree(path).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tests."):
            module = ROOT / f"{(node.module or '').replace('.', '/')}.py"
            known = functions(module) if module.exists() else {}
            found |= {one.asname or one.name: known[one.name] for one in node.names if one.name in known}
        elif isinstance(node, ast.FunctionDef):
            found[node.name] = (path, node)
    return found


def asserts(path: Path, node: ast.FunctionDef, above: tuple[ast.FunctionDef, ...] = ()) -> bool:
    """Return True if a function has an assertion, or one does that it calls or passes on."""
    calls = [one.func for one in ast.walk(node) if isinstance(one, ast.Call)]
    called = {one.attr if isinstance(one, ast.Attribute) else getattr(one, "id", "") for one in calls}
    if any(isinstance(one, ast.Assert) for one in ast.walk(node)) or called & REFUSALS:
        return True
    known, above = functions(path), (*above, node)
    named = [known[one.id] for one in ast.walk(node) if isinstance(one, ast.Name) and one.id in known]
    helpers = [helper for helper in named if helper[1] not in above]
    return any(name.startswith("assert_") for name in called) or any(asserts(*one, above) for one in helpers)


def test_each_test_asserts_something() -> None:
    """In its code, or in that of a function of tests/ that it names."""
    without = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {node.name}"
        for path in sorted(TESTS.rglob("test_*.py"))
        for node in ast.walk(tree(path))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_") and not asserts(path, node)
    ]
    assert without == []
