"""Changes of one line of the package, and the draw of some of them by a seed.

Left out: annotations, decorators, type variables, what is asserted, raised or logged, texts, ``__repr__``, and what no
test without an accelerator can reach: the files ``core/device/triton_*`` and the functions named ``..._cuda``.
"""

from __future__ import annotations

import ast
import hashlib
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle, pairwise
from pathlib import Path

FOLDERS = ("core", "moe", "model", "training/step", "data/sampling")  # of the package
NOT_REACHED = re.compile(r"core/device/triton_")
NOT_A_NAME = re.compile(r"_cuda$|^__repr__$|^__str__$")
NOT_A_CALL = re.compile(r"(logging|logger|warnings|print|TypeVar|cast)\b")
SAME_EITHER_WAY = re.compile(r"(.*\.)?(max|min|maximum|minimum|isinstance|equal|transpose|swapaxes)\(")
A_TYPE = re.compile(r"(Callable|dict|tuple|Mapping|OrderedDict|defaultdict|Iterator|Generator)\[")
COMPARED = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "is": "is not", "is not": "is"}
COMPARED |= {"in": "not in", "not in": "in", "and": "or", "or": "and"}
COMPUTED = {"+": "-", "-": "+", "*": "+", "/": "*", "//": "*", "%": "//", "**": "*", "&": "|", "|": "&", "<<": ">>"}

Node = ast.expr | ast.stmt


@dataclass(frozen=True)
class Mutant:
    """A change of one line.

    Attributes:
        path: The file, from the root of the tree.
        line: Number of the line, from 1.
        kind: What is changed.
        old: The line as it is.
        new: The line as it becomes.
        function: The class and the function that it stands in, joined by dots.
        first: First line of the statement that is changed; of a compound one, of its head.
        last: Its last line.
        at_import: It runs when the module is imported.
        nth: How many alike stand above it.
    """

    path: str
    line: int
    kind: str
    old: str
    new: str
    function: str
    first: int
    last: int
    at_import: bool
    nth: int = 0

    @property
    def name(self) -> str:
        """A name that stays while the line stays as it is, wherever it moves inside its function."""
        return self.rank("name")[:8]

    def rank(self, seed: object) -> str:
        """Return its place in a draw, which does not depend on the other mutants."""
        text = f"{seed}|{self.path}|{self.function}|{self.old.strip()}|{self.new.strip()}|{self.nth}"
        return hashlib.sha256(text.encode()).hexdigest()

    def apply(self, tree: Path) -> None:
        """Change the file of a tree."""
        path = tree / self.path
        lines = path.read_text("utf-8").splitlines(keepends=True)
        assert lines[self.line - 1].rstrip("\n") == self.old, f"{self.path}:{self.line} is another line"
        lines[self.line - 1] = f"{self.new}\n"
        path.unlink()  # it may be a link to the file of another tree
        path.write_text("".join(lines), "utf-8")


class _Reader(ast.NodeVisitor):
    """Collects the mutants of a file."""

    def __init__(self, path: str, text: str) -> None:
        self.path, self.text, self.lines = path, text, text.splitlines()
        self.scope: list[str] = []
        self.functions = 0  # that the node is in
        self.span = (1, 1)
        self.found: list[Mutant] = []
        self.seen: Counter[tuple[str, str, str]] = Counter()

    def add(self, kind: str, node: Node, new: str, end: Node | None = None) -> None:
        """Add the mutant in which the text of a node, or up to that of a later one, is another, if it is one line."""
        last = end or node
        if node.lineno == last.end_lineno:
            self.replace(kind, node.lineno, node.col_offset, last.end_col_offset, new)

    def replace(self, kind: str, line: int, start: int, stop: int, new: str) -> None:
        """Add the mutant with other text at bytes ``start`` to ``stop`` of a line."""
        old = self.lines[line - 1]
        encoded = old.encode()
        changed = (encoded[:start] + new.encode() + encoded[stop:]).decode()
        function = ".".join(self.scope)
        nth = self.seen[function, old.strip(), changed.strip()]
        self.seen[function, old.strip(), changed.strip()] += 1
        self.found.append(Mutant(self.path, line, kind, old, changed, function, *self.span, not self.functions, nth))

    def source(self, node: Node) -> str:
        """Return the text of a node, or its first line."""
        first = self.lines[node.lineno - 1].encode()[node.col_offset :]
        return (first[: node.end_col_offset - node.col_offset] if node.lineno == node.end_lineno else first).decode()

    def visit(self, node: ast.AST) -> None:
        """Visit a node, and its parts unless they are annotations, decorators or left out."""
        if isinstance(node, ast.stmt):
            body = getattr(node, "body", None) or getattr(node, "cases", None)
            self.span = (node.lineno, max(node.lineno, body[0].lineno - 1) if body else node.end_lineno or node.lineno)
        super().visit(node)

    def _inside(self, node: ast.ClassDef | ast.FunctionDef) -> None:
        if NOT_A_NAME.search(node.name):
            return
        if isinstance(node, ast.FunctionDef):
            for default in (*node.args.defaults, *filter(None, node.args.kw_defaults)):
                self.visit(default)
        self.scope.append(node.name)
        self.functions += isinstance(node, ast.FunctionDef)
        for child in node.body:
            self.visit(child)
        self.functions -= isinstance(node, ast.FunctionDef)
        self.scope.pop()

    visit_ClassDef = visit_FunctionDef = _inside

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self.functions += 1
        self.visit(node.body)
        self.functions -= 1

    def _leave_out(self, node: ast.AST) -> None:
        pass

    visit_Raise = visit_Assert = visit_JoinedStr = visit_Import = visit_ImportFrom = _leave_out

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value:
            self.visit(node.value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.add("dropped statement", node, "pass")
        self._operator(node.target, node.value, COMPUTED, "arithmetic", "=")
        self.visit(node.value)

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call) and not NOT_A_CALL.match(self.source(node.value)):
            self.add("dropped statement", node, "pass")
            if node.lineno != node.end_lineno:
                self.replace("dropped statement", node.lineno, node.col_offset, node.col_offset, "0 and ")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if NOT_A_CALL.match(self.source(node)):
            return
        if not SAME_EITHER_WAY.match(self.source(node)):
            self._swap("swapped arguments", node.args)
        self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        if A_TYPE.match(self.source(node)):
            return
        if isinstance(node.slice, ast.Tuple):
            self._swap("swapped axes", node.slice.elts)
        self.generic_visit(node)

    def _swap(self, kind: str, parts: list[ast.expr]) -> None:
        for one, other in pairwise(parts):
            between = self.text_between(one, other)
            if between is not None and not {type(one), type(other)} & {ast.Starred, ast.GeneratorExp}:
                axes = all(re.fullmatch(r"-?\d|\w*dim\w*|\w*axis\w*", self.source(part)) for part in (one, other))
                new = f"{self.source(other)}{between}{self.source(one)}"
                self.add("swapped axes" if axes else kind, one, new, end=other)

    def text_between(self, one: Node, other: Node) -> str | None:
        """Return the text from the end of a node to the beginning of the next, if they are on one line."""
        if one.end_lineno != other.lineno:
            return None
        return self.lines[other.lineno - 1].encode()[one.end_col_offset : other.col_offset].decode()

    def _operator(self, left: Node, right: Node, table: dict[str, str], kind: str, after: str = "") -> None:
        between = self.text_between(left, right)
        found = re.fullmatch(rf"([\s)]*)([^\s()]+?(?: not| in)?)({re.escape(after)}[\s(]*)", between or "")
        if found and found[2] in table:
            start = left.end_col_offset + len(found[1])
            self.replace(kind, right.lineno, start, start + len(found[2]), table[found[2]])

    def _compared(self, node: ast.Compare | ast.BoolOp) -> None:
        for left, right in pairwise(node.values if isinstance(node, ast.BoolOp) else [node.left, *node.comparators]):
            self._operator(left, right, COMPARED, "comparison")
        self.generic_visit(node)

    visit_Compare = visit_BoolOp = _compared

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if not isinstance(node.left, ast.JoinedStr) and not isinstance(node.right, ast.JoinedStr):
            self._operator(node.left, node.right, COMPUTED, "arithmetic")
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            self.add("comparison", node, self.source(node.operand))
        elif isinstance(node.op, ast.USub):
            kind = "constant" if isinstance(node.operand, ast.Constant) else "arithmetic"
            self.add(kind, node, self.source(node.operand))
        self.generic_visit(node)

    def visit_keyword(self, node: ast.keyword) -> None:
        if node.arg != "strict":  # of zip: an assertion
            self.visit(node.value)

    def visit_Constant(self, node: ast.Constant) -> None:
        value = node.value
        if isinstance(value, bool):
            self.add("constant", node, str(not value))
        elif isinstance(value, int):
            for other in {0: (1,), 1: (0, 2)}.get(value, (value - 1, value + 1)):
                self.add("constant", node, str(other))
        elif isinstance(value, float):
            self.add("constant", node, "1.0" if value == 0 else "0.0" if value == 1 else f"-{self.source(node)}")

    def _branch(self, node: ast.If | ast.IfExp) -> None:
        if "TYPE_CHECKING" not in self.source(node.test):
            self.add("swapped branches", node.test, f"not ({self.source(node.test)})")
        self.generic_visit(node)

    visit_If = visit_IfExp = _branch


def mutants_of(path: str, text: str) -> list[Mutant]:
    """Return all mutants of a file. Some are no programs, or the same one: see ``differs``."""
    reader = _Reader(path, text)
    reader.visit(ast.parse(text))
    return reader.found


def differs(mutant: Mutant, text: str) -> bool:
    """Return True if the file is another program with the change."""
    lines = text.splitlines()
    lines[mutant.line - 1] = mutant.new
    try:
        return ast.dump(ast.parse("\n".join(lines))) != ast.dump(ast.parse(text))
    except SyntaxError:
        return False


def candidates(tree: Path) -> Iterator[Mutant]:
    """Yield all mutants of the folders that are drawn from."""
    for folder in FOLDERS:
        for path in sorted((tree / "megapar" / folder).rglob("*.py")):
            name = path.relative_to(tree).as_posix()
            if not NOT_REACHED.search(name):
                yield from mutants_of(name, path.read_text("utf-8"))


def draw(tree: Path, seed: int, number: int) -> list[Mutant]:
    """Return ``number`` mutants, as many of each kind. A draw of more begins with those of a draw of fewer."""
    kinds = defaultdict(list)
    for one in sorted(candidates(tree), key=lambda one: one.rank(seed)):
        kinds[one.kind].append(one)
    drawn: list[Mutant] = []
    for kind in cycle(sorted(kinds)):
        while kinds[kind]:
            one = kinds[kind].pop(0)
            if differs(one, (tree / one.path).read_text("utf-8")):
                drawn.append(one)
                break
        if len(drawn) == number or not any(kinds.values()):
            return drawn
    return drawn
