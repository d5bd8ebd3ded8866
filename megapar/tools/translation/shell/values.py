"""Expansion of the words of a script: variables, arrays, defaults, arithmetic and conditions, without running it.

Values that the script does not contain become marks (``open_values``).
"""

from __future__ import annotations

import ast
import fnmatch
import operator
import re
from collections.abc import Callable, Mapping, Sequence

from megapar.tools.translation import open_values
from megapar.tools.translation.shell.words import ARITHMETIC, COMMAND, TEXT, Fragment, Word, words_of

Value = str | list[str]
_PARAMETER = re.compile(r"(#?)([A-Za-z_]\w*|[0-9]+|[@*#?$!-])(?:\[([^]]*)\])?(.*)", re.DOTALL)
_DEFAULT = re.compile(r"(:?)([-=+?])(.*)", re.DOTALL)
_TRIM = re.compile(r"(%%|%|##|#)(.*)", re.DOTALL)
_NAMED = re.compile(r"\$\{?(\w+)\}?|\b([A-Za-z_]\w*)\b")
_INTEGERS: Mapping[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: lambda a, b: abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1),  # toward zero, like a shell
    ast.Mod: lambda a, b: a - b * int(a / b),
    ast.Pow: lambda a, b: a**b if 0 <= b < 64 else _refuse(),
}
_COMPARED: Mapping[str, Callable[[int, int], bool]] = {
    **dict.fromkeys(("Lt", "-lt"), operator.lt),
    **dict.fromkeys(("LtE", "-le"), operator.le),
    **dict.fromkeys(("Gt", "-gt"), operator.gt),
    **dict.fromkeys(("GtE", "-ge"), operator.ge),
    **dict.fromkeys(("Eq", "-eq"), operator.eq),
    **dict.fromkeys(("NotEq", "-ne"), operator.ne),
}
_UNARY = ("-z", "-n", "-v")
_FILES = ("-f", "-d", "-e", "-s", "-r", "-x", "-L", "-h")


def _refuse() -> int:
    raise ValueError("too large")


class Values:
    """Variables of a script by name, and its positional arguments."""

    def __init__(self, assigned: Mapping[str, str], positional: Sequence[str]) -> None:
        self.named: dict[str, Value] = dict(assigned)
        self.positional = list(positional)
        self.skipped: set[str] = set()  # variables for options that only branches not taken set: empty

    def fields(self, word: Word) -> list[str]:
        """Expand a word into fields: none, one or, if a variable is not quoted, several."""
        found: list[str] = []
        current: str | None = None
        for part in word.parts:
            pieces, whole = self._part(part)
            if whole:
                current = (current or "") + (pieces[0] or "")
                continue
            if pieces[0] is not None:
                current = (current or "") + pieces[0]
            for piece in pieces[1:]:
                if current is not None:
                    found.append(current)
                current = piece
        return found if current is None else [*found, current]

    def text(self, word: Word) -> str:
        """Expand a word without splitting, as in an assignment."""
        texts = []
        for part in word.parts:
            value = self._value(part)
            texts.append(" ".join(value) if isinstance(value, list) else value)
        return "".join(texts)

    def _part(self, part: Fragment) -> tuple[list[str | None], bool]:
        """Return (pieces, True if they are not split). None at an end is a blank before or after this part."""
        value = self._value(part)
        if isinstance(value, str):
            if part.quoted or part.kind == TEXT:
                return [value], True
            return self._split(value), False
        if part.quoted:
            return [*value] or [None], False
        return [piece for element in value for piece in _fields(element)] or [None], False

    @staticmethod
    def _split(value: str) -> list[str | None]:
        pieces: list[str | None] = [*_fields(value)]
        if not pieces:
            return [None]
        return [*([None] if value[0].isspace() else []), *pieces, *([None] if value[-1].isspace() else [])]

    def _value(self, part: Fragment) -> Value:
        if part.kind == TEXT:
            return part.text
        if part.kind == ARITHMETIC:
            return self.arithmetic(part.text)
        if part.kind == COMMAND:
            return open_values.mark(f"`{part.text.strip()}`")
        return self._parameter(part.text)

    def get(self, name: str) -> Value | None:
        """Return a variable or an argument of the script; None if the script does not contain it."""
        if name in ("@", "*"):
            return list(self.positional)
        if name == "#":
            return str(len(self.positional))
        if name.isdigit() and name != "0":
            number = int(name)
            return self.positional[number - 1] if number <= len(self.positional) else None
        return self.named.get(name)

    def _parameter(self, text: str) -> Value:
        found = _PARAMETER.fullmatch(text)
        if found is None:
            return open_values.mark(f"${{{text}}}")
        counted, name, index, rest = found.groups()
        if name == "!" and rest:  # indirect: another variable contains the name
            other = self.get(rest)
            known = isinstance(other, str) and other.isidentifier()
            return self._parameter(str(other)) if known else open_values.mark(f"${{{text}}}")
        if counted and not rest:
            value = self.get(name)
            unknown = open_values.is_open(value) if isinstance(value, str) else any("`" in one for one in value or ())
            if value is None or unknown:
                return open_values.mark(f"${{{text}}}")
            return str(len(value))
        value = self.get(name)
        if index in ("@", "*"):
            value = [value] if isinstance(value, str) else value
        elif isinstance(value, list) and name not in ("@", "*"):
            place = int(index) if (index or "").isdigit() else 0
            value = value[place] if place < len(value) else None
        elif index and value is not None and index != "0":
            value = None
        return self._modified(text, name, value, rest)

    def _modified(self, text: str, name: str, value: Value | None, rest: str) -> Value:
        default = _DEFAULT.fullmatch(rest)
        if default is not None:
            empty = value is None or (bool(default[1]) and not value)
            if default[2] == "+":
                return "" if empty else self._inner(default[3])
            if not empty and value is not None:
                return value
            if default[2] == "?":
                return open_values.mark(f"${name}")
            chosen = self._inner(default[3])
            if default[2] == "=":
                self.named[name] = chosen
            return chosen
        if value is None:
            return "" if name in self.skipped else open_values.mark(f"${name}")
        if not rest:
            return value
        trim = _TRIM.fullmatch(rest)
        if trim is not None and isinstance(value, str) and not open_values.is_open(value):
            return _trimmed(value, trim[1], self._inner(trim[2]))
        return open_values.mark(f"${{{text}}}")

    def _inner(self, text: str) -> str:
        """Expand the text of a default."""
        return " ".join(self.text(word) for word in words_of(text))

    def arithmetic(self, text: str) -> str:
        """Evaluate an integer expression."""
        missing = False

        def number(found: re.Match[str]) -> str:
            nonlocal missing
            value = self.get(found[1] or found[2])
            if isinstance(value, str) and re.fullmatch(r"\s*-?\d+\s*", value):
                return f"({value.strip()})"
            missing = True
            return "0"

        expression = _NAMED.sub(number, text).strip()
        try:
            return open_values.mark(f"$(({text}))") if missing else str(_counted(expression))
        except (ValueError, SyntaxError, ZeroDivisionError, KeyError, RecursionError):
            return open_values.mark(f"$(({text}))")


def _fields(text: str) -> list[str]:
    """Split at blanks, but not inside marks."""
    marks = open_values.marks(text)
    for place, one in enumerate(marks):
        text = text.replace(one, f"\ue002{place}\ue002", 1)
    pieces = text.split()
    return [re.sub("\ue002(\\d+)\ue002", lambda found: marks[int(found[1])], piece) for piece in pieces]


def _trimmed(value: str, operator: str, pattern: str) -> str:
    """Remove the shortest (one character) or longest match of the pattern, at the front (#) or at the end (%)."""
    places = range(len(value) + 1)
    if operator[0] == "#":
        fits = [place for place in places if fnmatch.fnmatchcase(value[:place], pattern)]
        return value[(max(fits) if len(operator) == 2 else min(fits)) :] if fits else value
    fits = [place for place in places if fnmatch.fnmatchcase(value[place:], pattern)]
    return value[: (min(fits) if len(operator) == 2 else max(fits))] if fits else value


def _counted(expression: str) -> int:
    """Evaluate integers and operators. Raises ValueError, KeyError or SyntaxError for other expressions."""
    return _node(ast.parse(expression.replace("/", "//"), mode="eval").body)


def _node(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.UAdd)):
        return _node(node.operand) * (-1 if isinstance(node.op, ast.USub) else 1)
    if isinstance(node, ast.BinOp):
        return _INTEGERS[type(node.op)](_node(node.left), _node(node.right))
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        return int(_COMPARED[type(node.ops[0]).__name__](_node(node.left), _node(node.comparators[0])))
    raise ValueError(ast.dump(node))


def holds(words: Sequence[str]) -> bool | None:
    """Return True if ``[ words ]`` holds; None if it depends on something that the script does not contain.

    Files are assumed to exist, because scripts that check for a file usually continue only if it exists.
    """
    for joint, decided in (("||", True), ("-o", True), ("&&", False), ("-a", False)):
        if joint in words:
            place = len(words) - 1 - list(words)[::-1].index(joint)
            sides = [holds(words[:place]), holds(words[place + 1 :])]
            return decided if decided in sides else None if None in sides else not decided
    if words and words[0] == "!":
        inner = holds(words[1:])
        return None if inner is None else not inner
    if len(words) > 2 and words[0] == "(" and words[-1] == ")":
        return holds(words[1:-1])
    return _one(words)


def taken_as_empty(words: Sequence[str]) -> list[str]:
    """Return the unset variables that ``words`` compare."""
    compared = [word for before, word in zip(["", *words], words, strict=False) if before not in _UNARY]
    return [open_values.as_written(word) for word in compared if open_values.is_variable(word)]


def _empty(word: str) -> bool | None:
    """Return True for an unset variable, too; None for the output of a command, which may be empty."""
    unset = open_values.is_variable(word)
    if not unset and open_values.marks(word) == [word]:
        return None
    return unset or word == ""


def _one(words: Sequence[str]) -> bool | None:
    if len(words) == 2 and words[0] in _FILES:
        return True
    if len(words) == 2 and words[0] in _UNARY:
        empty = _empty(words[1])
        return None if empty is None else empty == (words[0] == "-z")
    words = ["" if open_values.is_variable(word) else word for word in words]
    if any(open_values.is_open(word) for word in words):
        return None
    if len(words) < 2:
        return bool(words and words[0])
    if len(words) != 3:
        return None
    left, test, right = words
    if test.startswith("-") and test in _COMPARED:
        try:
            return bool(_COMPARED[test](int(left), int(right)))
        except ValueError:
            return None
    if test in ("=", "=="):
        return fnmatch.fnmatchcase(left, right)
    if test == "!=":
        return not fnmatch.fnmatchcase(left, right)
    return None
