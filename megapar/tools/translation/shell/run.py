"""Interpreter of shell scripts that records the commands instead of running them."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from megapar.tools.translation import open_values
from megapar.tools.translation.shell.tree import (
    Block,
    Case,
    Command,
    Condition,
    Function,
    Grouped,
    If,
    Joined,
    Loop,
    Simple,
    parse,
)
from megapar.tools.translation.shell.values import Value, Values, holds, taken_as_empty
from megapar.tools.translation.shell.words import Word

_MOST_TURNS = 1000
_MOST_CALLS = 50
_DECLARES = ("export", "local", "declare", "readonly", "typeset")
_LOCAL = ("local", "declare", "typeset")  # in a function
_CHANGE = re.compile(r"\s*([A-Za-z_]\w*)\s*(\*\*|[-+*/%]|)=(?!=)(.*)", re.DOTALL)
_CHANGED = re.compile(r"([A-Za-z_]\w*)\s*(?:<<|>>|\*\*|[-+*/%&|^])?=(?!=)")
_STEP = re.compile(r"\s*(?:([A-Za-z_]\w*)\s*(\+\+|--)|(\+\+|--)\s*([A-Za-z_]\w*))\s*")
_STEPS = re.compile(r"([A-Za-z_]\w*)\s*(?:\+\+|--)|(?:\+\+|--)\s*([A-Za-z_]\w*)")
_SHELLS = ("bash", "sh", "zsh")


@dataclass(frozen=True)
class Commands:
    """Commands of a script.

    Attributes:
        commands: (line, words) in the order of execution.
        remarks: Assumptions that were made, with their lines.
    """

    commands: tuple[tuple[int, tuple[str, ...]], ...]
    remarks: tuple[str, ...]


def read(text: str, assigned: Mapping[str, str], positional: Sequence[str]) -> Commands:
    """Return the commands of a script, with expanded words. Raises SyntaxProblem if it cannot be parsed.

    Values that the script does not contain become marks (``open_values``).

    Args:
        assigned: Variables that are set from outside; assignments of the script do not change them.
        positional: Arguments of the script: $1, $2, ...
    """
    reader = _Reader(Values(assigned, positional), frozenset(assigned))
    reader.block(parse(text))
    return Commands(tuple(reader.commands), tuple(dict.fromkeys(reader.remarks)))


class _Reader:
    """State of the interpreter."""

    def __init__(self, values: Values, fixed: frozenset[str]) -> None:
        self.values = values
        self.fixed = fixed  # variables of the caller, which the script does not change
        self.commands: list[tuple[int, tuple[str, ...]]] = []
        self.remarks: list[str] = []
        self.functions: dict[str, Block] = {}
        self.locals: list[dict[str, Value | None]] = []  # values that the variables of each call had before it
        self.depth = 0

    def block(self, block: Block) -> bool | None:
        """Interpret commands. Return the outcome of the last one, or None if it cannot be known."""
        outcome: bool | None = True
        for command in block:
            outcome = self.command(command)
        return outcome

    def command(self, command: Command) -> bool | None:
        """Interpret one command and return its outcome."""
        if isinstance(command, Simple):
            return self._simple(command)
        if isinstance(command, Condition):
            return self._test(command)
        if isinstance(command, Joined):
            return self._joined(command)
        if isinstance(command, If):
            return self._if(command)
        if isinstance(command, Loop):
            return self._loop(command)
        if isinstance(command, Case):
            return self._case(command)
        if isinstance(command, Function):
            self.functions[command.name] = command.body
            return True
        assert isinstance(command, Grouped)
        return self.block(command.body)

    def _joined(self, joined: Joined) -> bool | None:
        outcome: bool | None = True
        for operator, command in joined.commands:
            if outcome is None and operator in ("&&", "||"):
                self._assume_false(joined.at)
            if (operator == "&&" and not outcome) or (operator == "||" and outcome):
                self._skip((command,))
                continue
            outcome = self.command(command)
        return outcome if not joined.negated or outcome is None else not outcome

    def _assume_false(self, at: int) -> None:
        self.remarks.append(f"line {at}: a condition is assumed to be false; the script alone does not decide it")

    def _holds(self, words: Sequence[str], at: int) -> bool | None:
        for name in taken_as_empty(words):
            self.remarks.append(f"line {at}: {name} is assumed to be empty in a condition; the script does not set it")
        return holds(words)

    def _if(self, command: If) -> bool | None:
        self._skip([part for _, body in command.branches for part in body])
        for condition, body in command.branches:
            outcome = self.block(condition) if condition else True
            if outcome is None:
                self._assume_false(command.at)
            if outcome:
                return self.block(body)
        return True

    def _skip(self, block: Sequence[Command]) -> None:
        """Remember the variables that these commands would set to options: unless others set them, they are empty."""
        for command in block:
            if isinstance(command, Simple):
                for word in command.words:
                    text = "".join(part.text for part in word.parts).partition("=")[2]
                    if word.array is not None or text.strip().startswith("-"):
                        self.values.skipped.add(word.name or self._assigned(word))
            elif isinstance(command, (If, Case)):
                self._skip([part for _, body in command.branches for part in body])
            elif isinstance(command, Joined):
                self._skip([part for _, part in command.commands])
            elif isinstance(command, (Loop, Grouped)):
                self._skip(command.body)

    def _loop(self, loop: Loop) -> bool | None:
        if loop.condition:
            for _ in range(_MOST_TURNS):
                outcome = self.block(loop.condition)
                if outcome is None:
                    self.remarks.append(f"line {loop.at}: a loop is skipped; the script alone does not decide it")
                if outcome is None or outcome == loop.negated:
                    return True
                self.block(loop.body)
            return True
        if not loop.name:
            self.remarks.append(f"line {loop.at}: a loop is skipped")
            return True
        words = loop.words
        values = list(self.values.positional) if words is None else [v for w in words for v in self.values.fields(w)]
        for value in values[:_MOST_TURNS]:
            self.values.named[loop.name] = value
            self.block(loop.body)
        return True

    def _case(self, case: Case) -> bool | None:
        value = self.values.text(case.word)
        if open_values.is_open(value):
            self.remarks.append(f"line {case.at}: case {open_values.as_written(value)}: no branch is taken")
            return True
        self._skip([part for _, body in case.branches for part in body])
        for patterns, body in case.branches:
            if any(fnmatch.fnmatchcase(value, self.values.text(pattern)) for pattern in patterns):
                return self.block(body)
        return True

    def _test(self, test: Condition) -> bool | None:
        if test.arithmetic:
            text = "".join(self.values.text(token) if isinstance(token, Word) else token.text for token in test.tokens)
            value = self._arithmetic(text)
            return None if open_values.is_open(value) else value != "0"
        words = [self.values.text(token) if isinstance(token, Word) else token.text for token in test.tokens]
        return self._holds(words, test.at)

    def _arithmetic(self, text: str) -> str:
        """Return the value of an arithmetic command and carry out its assignments, as marks if they are complex."""
        value = ""
        for part in open_values.as_written(text).split(","):
            step, change = _STEP.fullmatch(part), _CHANGE.fullmatch(part)
            if step is not None:
                name, sign = step[1] or step[4], (step[2] or step[3])[0]
                after = self.values.arithmetic(f"{name} {sign} 1")
                value = self.values.arithmetic(name) if step[1] else after
                self._set(name, after)
            elif change is not None and not _CHANGE.search(change[3]) and not _STEPS.search(change[3]):
                name, operator, operand = change.groups()
                value = self.values.arithmetic(f"{name} {operator} ({operand})" if operator else operand)
                self._set(name, value)
            else:
                value = self.values.arithmetic(part)
                for match in (*_CHANGED.finditer(part), *_STEPS.finditer(part)):
                    name = next(filter(None, match.groups()))
                    self._set(name, open_values.mark(f"${name}"))
        return value

    def _simple(self, command: Simple) -> bool | None:
        rest = list(command.words)
        assignments = []
        while rest and (rest[0].array is not None or self._assigned(rest[0])):
            assignments.append(rest.pop(0))
        if not rest or rest[0].plain in _DECLARES:
            for word in assignments:
                self._assign(word)
            everywhere = any(re.fullmatch(r"-\w*g\w*", word.plain or "") for word in rest)
            for word in rest[1:]:
                name = word.name or self._assigned(word) or word.plain
                if self.locals and name and rest[0].plain in _LOCAL and not everywhere:
                    self.locals[-1].setdefault(name, self.values.named.get(name))
                self._declare(word, command.at)
            return True
        fields = tuple(field for word in rest for field in self.values.fields(word))
        if fields and fields[0] == "read" and command.document is not None:
            self._read(fields, self.values.text(command.document), command.at)
            return True
        return self._run(fields, command.at) if fields else True

    def _read(self, fields: tuple[str, ...], text: str, at: int) -> None:
        """Interpret ``read NAME <<``: the whole here-document with -d '', otherwise its first line."""
        if fields[-1].isidentifier() and fields[1:-1] in (("-r", "-d", ""), ("-d", "", "-r"), ("-rd", ""), ("-d", "")):
            self._set(fields[-1], text.strip())
        elif fields[-1].isidentifier() and fields[1:-1] in ((), ("-r",)):
            self._set(fields[-1], text.partition("\n")[0].strip())
        else:
            self.remarks.append(f"line {at}: the values read from the text after << are left open")

    @staticmethod
    def _assigned(word: Word) -> str:
        """Return the name of the variable that a word assigns; "" if it assigns none."""
        first = word.parts[0] if word.parts else None
        if first is None or first.quoted or first.kind != "text" or "=" not in first.text:
            return ""
        name = first.text.partition("=")[0].removesuffix("+")
        return name if name.isidentifier() else ""

    def _assign(self, word: Word) -> None:
        if word.array is not None:
            elements = [field for element in word.array for field in self.values.fields(element)]
            before = self.values.named.get(word.name, []) if word.more else []
            self._set(word.name, [*([before] if isinstance(before, str) else before), *elements])
        elif self._assigned(word):
            name, _, text = self.values.text(word).partition("=")
            before = self.values.named.get(name.removesuffix("+"), "") if name.endswith("+") else ""
            name = name.removesuffix("+")
            if isinstance(before, list):
                self._set(name, [f"{before[0]}{text}" if before else text, *before[1:]])
            else:
                self._set(name, before + text)

    def _declare(self, word: Word, at: int) -> None:
        """Carry out an assignment after export or similar; its name may be quoted or in a variable."""
        name, equals, text = self.values.text(word).partition("=")
        if word.array is not None or self._assigned(word) or not equals:
            self._assign(word)
        elif name.isidentifier():
            self._set(name, text)
        else:
            shown = open_values.as_written(f"{name}={text}")
            self.remarks.append(f"line {at}: the name in {shown} is unknown: pass it as NAME=VALUE before --")

    def _set(self, name: str, value: Value) -> None:
        if name not in self.fixed:
            self.values.named[name] = value

    def _run(self, fields: tuple[str, ...], at: int) -> bool | None:
        name = fields[0]
        if name in ("[", "test"):
            return self._holds(fields[1:-1] if name == "[" else fields[1:], at)
        if name in ("true", "false", ":"):
            return name != "false"
        if name == "shift":
            del self.values.positional[: int(fields[1]) if len(fields) > 1 and fields[1].isdigit() else 1]
        elif name == "set":
            if "--" in fields:
                self.values.positional = list(fields[fields.index("--") + 1 :])
        elif name == "unset":
            for variable in fields[1:]:
                self.values.named.pop(variable, None)
        elif name == "let":
            for field in fields[1:]:
                self._arithmetic(field)
        elif name == "eval":
            self._interpret(" ".join(fields[1:]), at)
        elif name in ("source", "."):
            self.remarks.append(f"line {at}: {' '.join(map(open_values.as_written, fields[:2]))} is not read")
        elif name in self.functions:
            self._call(name, fields[1:], at)
        elif not self._shell_commands(fields, at):
            self.commands.append((at, fields))
        return True

    def _call(self, name: str, arguments: Sequence[str], at: int) -> None:
        if self.depth >= _MOST_CALLS:
            self.remarks.append(f"line {at}: {name} calls itself more than {_MOST_CALLS} times; the rest is skipped")
            return
        before, self.values.positional = self.values.positional, list(arguments)
        self.depth += 1
        self.locals.append({})
        self.block(self.functions[name])
        for variable, value in self.locals.pop().items():
            if value is None:
                self.values.named.pop(variable, None)
            else:
                self.values.named[variable] = value
        self.depth -= 1
        self.values.positional = before

    def _shell_commands(self, fields: tuple[str, ...], at: int) -> bool:
        """Record the commands of srun bash -c "...", each after the words before the shell; False for other words."""
        place = next((i for i, field in enumerate(fields) if PurePosixPath(field).name in _SHELLS), None)
        if place is None:
            return False
        option = next((i for i in range(place + 1, len(fields)) if fields[i] in ("-c", "-lc", "-cl", "-exc")), None)
        if option is None or option + 1 >= len(fields):
            return False
        count = len(self.commands)
        self._interpret(fields[option + 1], at)
        self.commands[count:] = [(line, (*fields[:place], *words)) for line, words in self.commands[count:]]
        return True

    def _interpret(self, text: str, at: int) -> None:
        """Interpret the commands in a string; marks in it are kept."""
        if self.depth < _MOST_CALLS:
            self.depth += 1
            self.block(parse(text, at))
            self.depth -= 1
