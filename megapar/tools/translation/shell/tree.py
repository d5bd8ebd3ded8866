"""Syntax tree of a shell script, and its parser."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megapar.tools.translation.shell.words import Lexer, Operator, SyntaxProblem, Token, Word


@dataclass(frozen=True)
class Simple:
    """A simple command.

    Attributes:
        words: The words, assignments included.
        document: The here-document after ``<<`` in its last line.
    """

    words: tuple[Word, ...]
    at: int
    document: Word | None = None


@dataclass(frozen=True)
class Condition:
    """The tokens inside ``[[ ... ]]`` or ``(( ... ))``."""

    tokens: tuple[Token, ...]
    at: int
    arithmetic: bool = False


@dataclass(frozen=True)
class Joined:
    """List of commands.

    Attributes:
        commands: (``&&``, ``||`` or ``|`` in front of the command, "" for the first; command).
        negated: ``!`` precedes the list.
    """

    commands: tuple[tuple[str, Command], ...]
    at: int
    negated: bool = False


@dataclass(frozen=True)
class If:
    """Branches of (condition, body); the condition of ``else`` is empty."""

    branches: tuple[tuple[Block, Block], ...]
    at: int


@dataclass(frozen=True)
class Loop:
    """A ``for`` loop with a name and words, or a ``while`` loop with a condition; ``until`` is ``negated``."""

    body: Block
    at: int
    name: str = ""
    words: tuple[Word, ...] | None = None
    condition: Block = ()
    negated: bool = False


@dataclass(frozen=True)
class Case:
    """A ``case`` command: a word, and branches of (patterns, body)."""

    word: Word
    branches: tuple[tuple[tuple[Word, ...], Block], ...]
    at: int


@dataclass(frozen=True)
class Function:
    """A function definition."""

    name: str
    body: Block


@dataclass(frozen=True)
class Grouped:
    """``{ ... }`` or ``( ... )``."""

    body: Block


Command = Simple | Condition | Joined | If | Loop | Case | Function | Grouped
Block = tuple[Command, ...]


def parse(text: str, first_line: int = 1) -> Block:
    """Parse a script into commands. Raises SyntaxProblem if it is not valid."""
    lexer = Lexer(text, first_line)
    parser = _Parser(lexer.tokens(), lexer.documents)
    block = parser.block(())
    if parser.token is not None:
        raise SyntaxProblem(parser.token.at, f"{parser.shown} where a command is expected")
    return block


class _Parser:
    """Recursive-descent parser over the tokens."""

    def __init__(self, tokens: list[Token], documents: Mapping[int, Word]) -> None:
        self.tokens = tokens
        self.documents = documents
        self.place = 0

    @property
    def token(self) -> Token | None:
        """Next token; None at the end."""
        return self.tokens[self.place] if self.place < len(self.tokens) else None

    @property
    def shown(self) -> str:
        """Next token as a string, for messages and comparisons: an operator or a plain word."""
        token = self.token
        if token is None:
            return "the end"
        return token.text if isinstance(token, Operator) else token.plain

    def take(self, *texts: str) -> bool:
        """Take the next token if it is one of these."""
        if self.token is not None and self.shown in texts:
            self.place += 1
            return True
        return False

    def need(self, text: str, at: int) -> None:
        """Take ``text``. Raises SyntaxProblem if the next token is something else."""
        while self.take("\n", ";"):
            pass
        if not self.take(text):
            raise SyntaxProblem(at, f"{text} is missing for the command that begins here, before {self.shown!r}")

    def block(self, ends: tuple[str, ...]) -> Block:
        """Parse commands up to one of ``ends``, which is not taken."""
        found: list[Command] = []
        while True:
            while self.take("\n", ";", "&"):
                pass
            if self.token is None or self.shown in ends:
                return tuple(found)
            if self.shown in (")", ";;"):
                return tuple(found)
            found.append(self.joined())

    def joined(self) -> Command:
        """Parse commands that are joined by ``&&``, ``||`` or ``|``."""
        at = self.token.at if self.token is not None else 0
        negated = self.take("!")
        commands = [("", self.command())]
        while isinstance(self.token, Operator) and self.shown in ("&&", "||", "|", "|&"):
            operator = self.shown
            self.place += 1
            while self.take("\n"):
                pass
            commands.append((operator, self.command()))
        return commands[0][1] if len(commands) == 1 and not negated else Joined(tuple(commands), at, negated)

    def command(self) -> Command:
        """Parse one command."""
        token = self.token
        assert token is not None
        at, shown = token.at, self.shown
        builders = {"if": self._if, "for": self._for, "while": self._while, "until": self._while, "case": self._case}
        if shown in builders and isinstance(token, Word):
            return builders[shown](at)
        if shown in ("[[", "((") and self.take("[[", "(("):
            return self._test(shown, at)
        if self.take("{"):
            body = self.block(("}",))
            self.need("}", at)
            return Grouped(body)
        if self.take("("):
            body = self.block((")",))
            self.need(")", at)
            return Grouped(body)
        if self.take("function"):
            return self._function(at)
        if self._is_function():
            return self._function(at)
        return self._simple(at)

    def _is_function(self) -> bool:
        following = self.tokens[self.place + 1 : self.place + 3]
        return isinstance(self.token, Word) and [getattr(t, "text", "") for t in following] == ["(", ")"]

    def _function(self, at: int) -> Command:
        name = self.shown
        self.place += 1
        if self.take("("):
            self.need(")", at)
        while self.take("\n"):
            pass
        body = self.command()
        return Function(name, (body,))

    def _simple(self, at: int) -> Command:
        words: list[Word] = []
        while isinstance(self.token, Word):
            words.append(self.token)
            self.place += 1
        if not words:
            raise SyntaxProblem(at, f"{self.shown!r} where a command is expected")
        return Simple(tuple(words), at, self.documents.get(words[-1].at))

    def _test(self, opening: str, at: int) -> Command:
        found: list[Token] = []
        while self.token is not None:
            if opening == "[[" and self.take("]]"):
                return Condition(tuple(found), at)
            if opening == "((" and self.shown == ")" and self.take(")"):
                self.need(")", at)
                return Condition(tuple(found), at, arithmetic=True)
            found.append(self.token)
            self.place += 1
        raise SyntaxProblem(at, f"{opening} has no end")

    def _if(self, at: int) -> Command:
        branches: list[tuple[Block, Block]] = []
        self.take("if")
        while True:
            condition = self.block(("then",))
            self.need("then", at)
            branches.append((condition, self.block(("elif", "else", "fi"))))
            if self.take("elif"):
                continue
            if self.take("else"):
                branches.append(((), self.block(("fi",))))
            self.need("fi", at)
            return If(tuple(branches), at)

    def _for(self, at: int) -> Command:
        self.take("for")
        name = self.shown
        self.place += 1
        words: list[Word] | None = None
        if name == "((":
            while self.token is not None and not self.take(")"):
                self.place += 1
            self.take(")")
            name = ""
        elif self.take("in"):
            words = []
            while isinstance(self.token, Word):
                words.append(self.token)
                self.place += 1
        self.need("do", at)
        body = self.block(("done",))
        self.need("done", at)
        return Loop(body, at, name, None if words is None else tuple(words))

    def _while(self, at: int) -> Command:
        negated = self.shown == "until"
        self.place += 1
        condition = self.block(("do",))
        self.need("do", at)
        body = self.block(("done",))
        self.need("done", at)
        return Loop(body, at, condition=condition, negated=negated)

    def _case(self, at: int) -> Command:
        self.take("case")
        word = self.token
        if not isinstance(word, Word):
            raise SyntaxProblem(at, "case has no word")
        self.place += 1
        self.need("in", at)
        branches: list[tuple[tuple[Word, ...], Block]] = []
        while True:
            while self.take("\n", ";", ";;"):
                pass
            if self.take("esac"):
                return Case(word, tuple(branches), at)
            self.take("(")
            patterns = []
            while self.token is not None and not self.take(")"):
                if isinstance(self.token, Word):
                    patterns.append(self.token)
                self.place += 1
            if self.token is None:
                raise SyntaxProblem(at, "case has no esac")
            branches.append((tuple(patterns), self.block((";;", "esac"))))
