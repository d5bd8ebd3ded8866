"""Check that the oldest supported torch has all names of torch that megapar and its GPU day use.

    python -m scripts.gpu_day.torch_names                         compare the code with torch_names.txt
    python -m scripts.gpu_day.torch_names --write --reference W   rewrite that file from W

W is a folder with an unpacked wheel of torch 2.11. It is not executed, so the wheel of any platform works; the small
ones do not contain CUDA:

    pip download --no-deps --only-binary=:all: --platform macosx_11_0_arm64 --python-version 3.12 torch==2.11.0

A line of torch_names.txt contains a name, the keywords of its calls, and the source in 2.11: ``python`` (defined in a
module), ``stub`` (in a .pyi for C++ definitions) or ``operators`` (native_functions.yaml). The code accesses newer
features with ``getattr`` and a string, which does not count as a name. Methods of tensors are not checked.
"""

from __future__ import annotations

import argparse
import ast
import functools
import importlib
import inspect
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch.distributed as dist

ROOT = Path(__file__).parents[2]
FILE = Path(__file__).with_suffix(".txt")
WALKED = ("megapar", "scripts/gpu_day", "scripts/tracing", "benchmarks/throughput", "benchmarks/support")
OLDEST = "2.11.0"
# Never run with torch 2.11: files that need the vendor's wheel, and peers that are raced on two CPU cores.
LEFT_OUT = ("megapar/core/device/ascend.py", "megapar/core/device/npu.py", "benchmarks/throughput/deepspeed_rank.py")
NCCL = "torch.distributed.ProcessGroupNCCL"
OWN = "torch.ops.megapar"  # operators that megapar registers
Names = dict[str, frozenset[str]]  # dotted name -> keywords of its calls


def used(paths: Iterable[Path]) -> Names:
    """Return every dotted name that starts with torch, as written or as imported."""
    found: Names = {}
    for path in paths:
        for name, keywords in _of_file(ast.parse(path.read_text(encoding="utf-8"))):
            found[name] = found.get(name, frozenset()) | keywords
    return found


def walked() -> list[Path]:
    """Return the files to check."""
    files = (path for folder in WALKED for path in sorted((ROOT / folder).rglob("*.py")))
    return [path for path in files if path.relative_to(ROOT).as_posix() not in LEFT_OUT]


def _of_file(tree: ast.Module) -> Iterator[tuple[str, frozenset[str]]]:
    aliases: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for item in node.names:
                if item.name.split(".")[0] == "torch":
                    aliases[item.asname or "torch"] = item.name if item.asname else "torch"
                    yield item.name, frozenset()
        elif isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] == "torch":
            for item in node.names:
                aliases[item.asname or item.name] = f"{node.module}.{item.name}"
                yield f"{node.module}.{item.name}", frozenset()
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    called = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if id(node) in inner or not isinstance(node, ast.Attribute | ast.Name):
            continue
        name = _dotted(node, aliases)
        if name is not None and not name.startswith(OWN):
            call = called.get(id(node))
            yield name, frozenset(k.arg for k in call.keywords if k.arg) if call else frozenset()


def _dotted(node: ast.expr, aliases: Mapping[str, str]) -> str | None:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.insert(0, node.attr)
        node = node.value
    if isinstance(node, ast.Name) and node.id in aliases:
        return ".".join((aliases[node.id], *parts))
    return None


def missing_here(names: Names) -> list[str]:
    """Return the names that the torch of this process lacks, and keywords that its signatures do not accept.

    Names that only builds with NCCL have are not checked on other builds.
    """
    expected = {name: keywords for name, keywords in names.items() if NCCL not in name or dist.is_nccl_available()}
    return [problem for name, keywords in expected.items() for problem in _missing(name, keywords)]


def _missing(name: str, keywords: frozenset[str]) -> Iterator[str]:
    try:
        value = _find(name)
    except (AttributeError, ImportError) as error:
        yield f"{name}: {error}"
        return
    try:
        parameters = inspect.signature(value).parameters  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        yield from (f"{name}: takes no {keyword}" for keyword in sorted(keywords - set(parameters)))


def _find(name: str) -> object:
    """Return the object of a dotted name, from its longest prefix that is a module."""
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            value: object = importlib.import_module(".".join(parts[:cut]))
        except ImportError:
            continue
        for part in parts[cut:]:
            value = getattr(value, part)
        return value
    raise ImportError(name)


class Wheel:
    """The files of an unpacked wheel of torch."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        operators = (folder / "torchgen/packaged/ATen/native/native_functions.yaml").read_text(encoding="utf-8")
        # Operators of other namespaces: those that fake tensors mention, and those that are defined in Python.
        self._named = (folder / "torch/_subclasses/fake_tensor.py").read_text(encoding="utf-8")
        defined = (folder / "torch/distributed/_symmetric_memory/__init__.py").read_text(encoding="utf-8")
        (space,) = re.findall(r'Library\("(\w+)", "DEF"\)', defined)[:1]
        schemas = re.findall(r'lib\.define\(\s*"(\w+)\((.*?)\) ->', defined, re.DOTALL)
        self._defined = {f"torch.ops.{space}.{operator}": arguments for operator, arguments in schemas}
        self._found: dict[tuple[str, frozenset[str]], str] = {}
        self._operators = dict(re.findall(r"^- func: (\w+)[.\w]*\((.*)\) ->", operators, re.MULTILINE))

    def has(self, name: str, keywords: frozenset[str]) -> str:
        """Return the source of a name: python, stub or operators; "" if the name or a keyword is missing."""
        if name in self._defined:
            return "python" if all(f" {word} " in self._defined[name] for word in keywords) else ""
        if name.startswith("torch.ops."):
            parts = name.split(".")
            known = parts[3:4] == [] or parts[3] in self._operators if parts[2] == "aten" else name in self._named
            return "operators" if known else ""
        key = name, keywords
        if key not in self._found:
            self._found[key] = ""  # modules import each other in cycles
            self._found[key] = self._look(name.split("."), keywords)
        return self._found[key]

    def _look(self, parts: list[str], keywords: frozenset[str]) -> str:
        for cut in range(len(parts), 0, -1):
            files = {where: self._file(parts[:cut], suffix) for suffix, where in ((".py", "python"), (".pyi", "stub"))}
            for where, file in files.items():
                if file is not None and self._defines(file, parts[cut:], keywords):
                    return where
            if any(files.values()):
                break
        # Names that C++ adds to torch itself are in its stubs.
        stubs = ("torch/_C/_VariableFunctions.pyi", "torch/_C/__init__.pyi", "torch/_C/_nn.pyi")
        rest = parts[1:]
        if any(self._defines(self._folder / stub, rest[-1:], keywords) for stub in stubs) and len(rest) < 4:
            return "stub"
        return ""

    def _file(self, parts: list[str], suffix: str) -> Path | None:
        base = self._folder.joinpath(*parts)
        found = [path for path in (base.with_suffix(suffix), base / f"__init__{suffix}") if path.is_file()]
        return found[0] if found else None

    def _defines(self, file: Path, rest: list[str], keywords: frozenset[str]) -> bool:
        if not rest:
            return True
        found = False
        for node in _definitions(file, rest[0]):
            if isinstance(node, ast.ImportFrom):
                module = self._imported(file, node)
                if module.split(".")[0] != "torch":
                    found = True
                    continue
                real = next((item.name for item in node.names if (item.asname or item.name) == rest[0]), rest[0])
                found |= bool(self.has(".".join((module, real, *rest[1:])), keywords))
            elif isinstance(node, ast.Import):
                found |= True
            elif isinstance(node, ast.ClassDef) and len(rest) > 1:
                found |= any(rest[1] in ast.unparse(part) for part in node.body) or bool(node.bases)
            elif isinstance(node, ast.FunctionDef):
                found |= _takes(node, keywords)
            else:
                found = True
        return found

    def _imported(self, file: Path, node: ast.ImportFrom) -> str:
        package = list(file.relative_to(self._folder).with_suffix("").parts[:-1])
        base = package[: len(package) - node.level + 1] if node.level else []
        return ".".join((*base, *([node.module] if node.module else [])))


@functools.cache
def _tree(file: Path) -> dict[str, list[ast.stmt]]:
    """Return everything that a module binds at any depth, because many of torch's names are inside an if."""
    bound: dict[str, list[ast.stmt]] = {}
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            bound.setdefault(node.name, []).append(node)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for name in (n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)):
                bound.setdefault(name, []).append(node)
        elif isinstance(node, ast.ImportFrom | ast.Import):
            for item in node.names:
                bound.setdefault(item.asname or item.name.split(".")[0], []).append(node)
    return bound


def _definitions(file: Path, name: str) -> list[ast.stmt]:
    bound = _tree(file)
    return [*bound.get(name, []), *(node for node in bound.get("*", []) if node not in bound.get(name, []))]


def _takes(function: ast.FunctionDef, keywords: frozenset[str]) -> bool:
    given = function.args
    names = {item.arg for item in (*given.posonlyargs, *given.args, *given.kwonlyargs)}
    return given.kwarg is not None or keywords <= names


def read() -> dict[str, str]:
    """Return the committed list: "name" or "name(keywords)" -> source in 2.11."""
    lines = (line.split() for line in FILE.read_text(encoding="utf-8").splitlines() if line and line[0] != "#")
    return {parts[0]: parts[1] if len(parts) > 1 else "" for parts in lines}


def written(name: str, keywords: frozenset[str]) -> str:
    """Return a name in the format of the list."""
    return f"{name}({','.join(sorted(keywords))})" if keywords else name


def main() -> int:
    """Check or write the list. Return 1 if it does not match the code or torch lacks a name."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="rewrite the list; needs --reference")
    parser.add_argument("--reference", type=Path, help="an unpacked wheel of torch 2.11")
    options = parser.parse_args()
    if options.write != (options.reference is not None):
        parser.error("--write and --reference go together")
    names = used(walked())
    if options.write:
        wheel = Wheel(options.reference)
        places = {written(name, keywords): wheel.has(name, keywords) for name, keywords in names.items()}
        head = f"# Written by scripts/gpu_day/torch_names.py: names of torch in use, and where torch {OLDEST} has them."
        FILE.write_text(
            "\n".join([head, *(f"{name} {place}".strip() for name, place in sorted(places.items()))]) + "\n"
        )
    listed, now = read(), {written(*item) for item in names.items()}
    problems = [f"not in the list: {name}" for name in sorted(now - set(listed))]
    problems += [f"no longer used: {name}" for name in sorted(set(listed) - now)]
    problems += [f"not in torch {OLDEST}: {name}" for name, place in listed.items() if not place]
    problems += [f"not in this torch: {problem}" for problem in missing_here(names)]
    print("\n".join(problems) or f"{len(listed)} names, all in torch {OLDEST} and in this one")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
