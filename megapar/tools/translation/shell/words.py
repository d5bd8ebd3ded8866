"""Lexer of shell scripts: words with their quoted parts and expansions."""

from __future__ import annotations

import re
from dataclasses import dataclass

from megapar.tools.translation import open_values

TEXT, PARAMETER, COMMAND, ARITHMETIC = "text", "parameter", "command", "arithmetic"
_OPERATORS = ("&&", "||", ";;", "|&", "((", "\n", ";", "&", "|", "(", ")")
_REDIRECTION = re.compile(r"(?:\d*|&)(?:>>|>\||>&|<&|<>|<<<|>|<)&?")
_HERE = re.compile(r"\d*<<(-?)[ \t]*(\\?[\w.]+|'[^'\n]*'|\"[^\"\n]*\")")
_ARRAY = re.compile(r"([A-Za-z_]\w*)(\+?)=\(")
_NAME = re.compile(r"[A-Za-z_]\w*|[0-9@*#?$!-]")
_BREAKS = " \t\n;&|()<>"


class SyntaxProblem(ValueError):
    """The script cannot be parsed, starting at line ``at``."""

    def __init__(self, at: int, message: str) -> None:
        super().__init__(f"line {at}: {message}")


@dataclass(frozen=True)
class Fragment:
    """Part of a word. ``kind`` is literal text or one of the expansions with ``$``."""

    kind: str
    text: str
    quoted: bool


@dataclass(frozen=True)
class Word:
    """A word of a command.

    Attributes:
        array: Elements of ``name=(...)``, or of ``name+=(...)`` if ``more``; None for other words.
        more: The elements are appended.
    """

    parts: tuple[Fragment, ...]
    at: int
    array: tuple[Word, ...] | None = None
    name: str = ""
    more: bool = False

    @property
    def plain(self) -> str:
        """Text of a word that consists of unquoted literal text only; empty for other words."""
        one = len(self.parts) == 1 and self.parts[0].kind == TEXT and not self.parts[0].quoted
        return self.parts[0].text if one and self.array is None else ""


@dataclass(frozen=True)
class Operator:
    """Separator between commands."""

    text: str
    at: int


Token = Word | Operator


class Lexer:
    """Converts a script to tokens. Redirections and comments are dropped; here-documents are kept separately."""

    def __init__(self, text: str, first_line: int = 1) -> None:
        self.text = text.replace("\r\n", "\n").replace("\\\n", "\x00")  # a NUL only counts the line
        self.place = 0
        self.line = first_line
        self.pending: list[tuple[int, str, bool, bool]] = []  # line, delimiter, strips tabs, is literal
        self.documents: dict[int, Word] = {}  # line with << -> here-document

    def tokens(self, end: str = "") -> list[Token]:
        """Return the tokens up to the end of the script or to an unquoted ``end``, which is taken."""
        found: list[Token] = []
        while self.place < len(self.text):
            char = self.text[self.place]
            if char in " \t\x00":
                self._step()
            elif char == "#":
                self._skip_comment()
            elif end and char == end:
                self._step()
                return found
            else:
                token = self._token()
                if token is not None:
                    found.append(token)
        if end:
            raise SyntaxProblem(self.line, f"{end} is missing")
        return found

    def _step(self, count: int = 1) -> None:
        for char in self.text[self.place : self.place + count]:
            self.line += char in "\n\x00"
        self.place += count

    def _skip_comment(self) -> None:
        while self.place < len(self.text) and self.text[self.place] not in "\n\x00":
            self.place += 1
        if self.text.startswith("\x00", self.place):  # a backslash in a comment does not continue it
            self.text = self.text[: self.place] + "\n" + self.text[self.place + 1 :]

    def _token(self) -> Token | None:
        here = _HERE.match(self.text, self.place)
        if here is not None and not self.text.startswith("<<<", self.place):
            self.pending.append((self.line, here[2].strip("\\'\""), here[1] == "-", here[2][0] in "\\'\""))
            self._step(len(here[0]))
            return None
        redirected = _REDIRECTION.match(self.text, self.place)
        if redirected is not None:
            self._skip_target(redirected[0])
            return None
        for text in _OPERATORS:
            if self.text.startswith(text, self.place):
                operator = Operator(text, self.line)
                self._step(len(text))
                if text == "\n":
                    self._skip_documents()
                return operator
        return self._word()

    def _skip_target(self, operator: str) -> None:
        self._step(len(operator))
        while self.text.startswith((" ", "\t"), self.place):
            self._step()
        if self.place < len(self.text) and self.text[self.place] not in "\n;|)":
            self._word()

    def _skip_documents(self) -> None:
        for at, mark, tabs, plain in self.pending:
            lines: list[str] = []
            while self.place < len(self.text):
                line = self.text[self.place :].partition("\n")[0]
                self._step(len(line) + 1)
                lines.append(line.lstrip("\t") if tabs else line)
                if lines[-1].replace("\x00", "") == mark:
                    lines.pop()
                    break
            self.documents[at] = _document("\n".join(lines), at, plain)
        self.pending = []

    def _word(self) -> Word:
        at = self.line
        array = _ARRAY.match(self.text, self.place)
        if array is not None:
            self._step(len(array[0]))
            elements = tuple(token for token in self.tokens(")") if isinstance(token, Word))
            return Word((), at, elements, array[1], bool(array[2]))
        parts: list[Fragment] = []
        while self.place < len(self.text) and self.text[self.place] not in _BREAKS:
            if self.text[self.place] == "\x00":  # the word may continue on the next line
                self._step()
            else:
                parts += self._piece(quoted=False)
        return Word(tuple(parts), at)

    def _piece(self, quoted: bool) -> list[Fragment]:
        """Return the fragments that begin here, at least one character."""
        char = self.text[self.place]
        if char == "'" and not quoted:
            return [Fragment(TEXT, self._until("'"), True)]
        if char == '"' and not quoted:
            return self._quoted()
        if char == "\\":
            self._step()
            escaped = self.text[self.place : self.place + 1]
            self._step()
            kept = escaped if not quoted or escaped in '$`"\\' else "\\" + escaped
            return [Fragment(TEXT, kept, True)]
        if open_values.is_open(char):  # from a command that is parsed again
            whole = open_values.marks(self.text[self.place :])[0]
            self._step(len(whole))
            return [Fragment(TEXT, whole, True)]
        if char == "$":
            return [self._dollar(quoted)]
        if char == "`":
            return [Fragment(COMMAND, self._until("`"), quoted)]
        end = self.place + 1
        stops = open_values.BEGIN + ('"\\$`' if quoted else "'\"\\$`" + _BREAKS)
        while end < len(self.text) and self.text[end] not in stops:
            end += 1
        text = self.text[self.place : end]
        self._step(end - self.place)
        return [Fragment(TEXT, text.replace("\x00", ""), quoted)]

    def _quoted(self) -> list[Fragment]:
        at = self.line
        self._step()
        parts: list[Fragment] = []
        while self.place < len(self.text):
            if self.text[self.place] == '"':
                self._step()
                return parts or [Fragment(TEXT, "", True)]
            parts += self._piece(quoted=True)
        raise SyntaxProblem(at, 'the quotation that begins here does not end (")')

    def _until(self, mark: str) -> str:
        at, end = self.line, self.text.find(mark, self.place + 1)
        if end < 0:
            raise SyntaxProblem(at, f"the quotation that begins here does not end ({mark})")
        text = self.text[self.place + 1 : end]
        self._step(end + 1 - self.place)
        return text.replace("\x00", "\\\n" if mark == "'" else "")

    def _dollar(self, quoted: bool) -> Fragment:
        for opening, kind, closing in (("$((", ARITHMETIC, "))"), ("$(", COMMAND, ")"), ("${", PARAMETER, "}")):
            if self.text.startswith(opening, self.place):
                return Fragment(kind, self._nested(opening, closing), quoted)
        name = _NAME.match(self.text, self.place + 1)
        if name is None:
            self._step()
            return Fragment(TEXT, "$", True)
        self._step(1 + len(name[0]))
        return Fragment(PARAMETER, name[0], quoted)

    def _nested(self, opening: str, closing: str) -> str:
        at, depth = self.line, 0
        start = place = self.place + len(opening)
        left, right = opening[-1], closing[-1]
        while place < len(self.text):
            if depth == 0 and self.text.startswith(closing, place):
                self._step(place + len(closing) - self.place)
                return self.text[start:place].replace("\x00", "")
            depth += (self.text[place] == left) - (self.text[place] == right)
            place += 2 if self.text[place] == "\\" else 1
        raise SyntaxProblem(at, f"{opening} has no {closing}")


def _document(text: str, at: int, plain: bool) -> Word:
    """Return the word for a here-document; variables in it are expanded unless it is ``plain``."""
    if plain:
        return Word((Fragment(TEXT, text.replace("\x00", "\\\n"), True),), at)
    try:
        (word,) = words_of('"' + text.replace('"', '\\"') + '"')
    except ValueError:  # a SyntaxProblem, or several words
        return Word((Fragment(TEXT, open_values.mark("<<"), True),), at)
    return word


def words_of(text: str) -> list[Word]:
    """Return the words of a part of a script, such as the default of a variable."""
    return [token for token in Lexer(text).tokens() if isinstance(token, Word)]
