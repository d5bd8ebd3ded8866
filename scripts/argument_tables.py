#!/usr/bin/env python3
"""Extract the arguments that a framework declares into a table for tests/tools/translation/tables: facts, not source.

    python scripts/argument_tables.py --repository NVIDIA/Megatron-LM --commit HASH --date YYYY-MM-DD \
        CHECKOUT/megatron/training/arguments.py CHECKOUT/megatron/training/config/*.py > table.tsv

Files are parsed, never imported: calls of ``add_argument``, and the fields of dataclasses that a file turns into
arguments (``ArgumentGroupFactory(CLASS, exclude=[...])``, or --fields CLASS). A line contains name, default, choices
and kind, separated by tabs. The kind is ``value``, ``on`` or ``off`` (the effect of a switch), or ``both`` (--x and
--no-x). The default of a switch is the state without it. A default that is not a constant is ``?``.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple


class Argument(NamedTuple):
    """One line of a table; ``kind`` is value, on, off or both."""

    name: str
    default: str
    choices: str
    kind: str


UNKNOWN = "?"


def constant(node: ast.expr | None) -> str:
    """Return a constant as text: numbers (also products and powers), words, or lists of them; "" for None."""
    if node is None:
        return ""
    try:
        found = ast.literal_eval(node)
    except ValueError:
        return _computed(node)
    if found is None:
        return ""
    if isinstance(found, (list, tuple)):
        return ",".join(str(item) for item in found) if found else "[]"
    return str(found)


def _computed(node: ast.expr) -> str:
    if isinstance(node, ast.BinOp):
        left, right = constant(node.left), constant(node.right)
        if left.isdigit() and right.isdigit():
            made = {ast.Pow: int(left) ** int(right), ast.Mult: int(left) * int(right)}.get(type(node.op))
            return UNKNOWN if made is None else str(made)
    if isinstance(node, ast.Attribute):  # a member of an enumeration
        return node.attr
    return UNKNOWN


def _added(call: ast.Call) -> Iterator[Argument]:
    """Yield the arguments of one ``add_argument`` call."""
    given = {word.arg: word.value for word in call.keywords if word.arg is not None}
    action = constant(given.get("action")) if "action" in given else ""
    kind = {"store_true": "on", "store_false": "off"}.get(action, "value")
    if isinstance(given.get("action"), ast.Attribute):  # argparse.BooleanOptionalAction
        kind = "both"
    default = {"on": "off", "off": "on"}.get(kind, constant(given.get("default")))
    if kind == "both":
        default = "on" if default == "True" else "off"
    choices = given.get("choices")
    for name in call.args:
        if isinstance(name, ast.Constant) and isinstance(name.value, str) and name.value.startswith("--"):
            yield Argument(name.value[2:], default, constant(choices) if choices is not None else "", kind)


def _field(statement: ast.AnnAssign) -> Iterator[Argument]:
    """Yield the arguments of a dataclass field; fields that are true become --no-x and --disable-x."""
    assert isinstance(statement.target, ast.Name)
    value, given = statement.value, {}
    if isinstance(value, ast.Call):
        given = {word.arg: word.value for word in value.keywords if word.arg is not None}
        value = given.get("default", given.get("default_factory"))
        if isinstance(value, ast.Name) and value.id in ("list", "dict"):
            value = ast.List(elts=[])
    if constant(given.get("init")) == "False":
        return
    meta = _meta(given.get("metadata"))
    name = statement.target.id.replace("_", "-")
    text = ast.unparse(statement.annotation)
    default = constant(meta.get("default", value))
    if text in ("bool", "Optional[bool]", "bool | None") and default in ("True", "False"):
        off = default == "True"
        names = _words(meta.get("arg_names")) or ([f"no-{name}", f"disable-{name}"] if off else [name])
        yield from (Argument(each, "on" if off else "off", "", "off" if off else "on") for each in names)
        return
    for each in _words(meta.get("arg_names")) or [name]:
        yield Argument(each, default, _literals(statement.annotation), "value")


def _meta(node: ast.expr | None) -> Mapping[str, ast.expr]:
    """Return the names and default of ``metadata={"argparse_meta": {...}}``."""
    found = _pairs(_pairs(node).get("argparse_meta"))
    return {name: value for name, value in found.items() if name in ("arg_names", "default")}


def _pairs(node: ast.expr | None) -> dict[str, ast.expr]:
    if not isinstance(node, ast.Dict):
        return {}
    pairs = zip(node.keys, node.values, strict=True)
    return {str(key.value): value for key, value in pairs if isinstance(key, ast.Constant)}


def _words(node: ast.expr | None) -> list[str]:
    if not isinstance(node, ast.List):
        return []
    return [str(item.value).removeprefix("--") for item in node.elts if isinstance(item, ast.Constant)]


def _literals(annotation: ast.expr) -> str:
    """Return the values of a Literal anywhere in the annotation."""
    for node in ast.walk(annotation):
        if isinstance(node, ast.Subscript) and ast.unparse(node.value).endswith("Literal"):
            items = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
            return ",".join(constant(item) for item in items)
    return ""


def _turned(trees: Iterable[ast.Module]) -> dict[str, set[str]]:
    """Return the classes that become arguments, with the fields that are excluded."""
    found: dict[str, set[str]] = {}
    for tree in trees:
        lists = {
            target.id: set(_words(node.value))
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("ArgumentGroupFactory"):
                left_out = next((word.value for word in node.keywords if word.arg == "exclude"), None)
                named = lists.get(left_out.id, set()) if isinstance(left_out, ast.Name) else set(_words(left_out))
                found[ast.unparse(node.args[0])] = named
    return found


def arguments(sources: Sequence[str], fields: Sequence[str] = ()) -> list[Argument]:
    """Return all arguments in these sources, sorted by name, the first of each name, with fields of base classes."""
    trees = [ast.parse(source) for source in sources]
    found = [
        item
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument"
        for item in _added(node)
    ]
    classes = {node.name: node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    for name, left_out in {**_turned(trees), **{name: set() for name in fields}}.items():
        for owner in _bases(name, classes):
            for statement in owner.body:
                if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                    found += _field(statement) if statement.target.id not in left_out else ()
    first: dict[str, Argument] = {}
    for item in found:
        first.setdefault(item.name, item)
    return sorted(first.values())


def _bases(name: str, classes: Mapping[str, ast.ClassDef]) -> list[ast.ClassDef]:
    if name not in classes:
        return []
    owner = classes[name]
    return [owner, *(found for base in owner.bases for found in _bases(ast.unparse(base), classes))]


def table(found: Iterable[Argument], heads: Iterable[str]) -> str:
    """Return the text of a table: its origin, then a line per argument."""
    lines = [f"# {head}" for head in heads]
    return "\n".join([*lines, "# name\tdefault\tchoices\tkind", *("\t".join(item) for item in found)]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--repository", required=True)
    parser.add_argument("--commit", required=True)
    parser.add_argument("--date", required=True)
    parser.add_argument(
        "--fields", nargs="*", default=[], metavar="CLASS", help="dataclasses whose fields are arguments"
    )
    options = parser.parse_args()
    found = arguments([path.read_text(encoding="utf-8") for path in options.files], options.fields)
    read = f"extracted by scripts/argument_tables.py from {', '.join(path.name for path in options.files)}"
    sys.stdout.write(table(found, [f"{options.repository}, {options.commit}, {options.date}, {read}"]))


if __name__ == "__main__":
    main()
