"""Chat templates, in the sandbox of transformers, with limits of time and of output."""

from __future__ import annotations

import re
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import date
from typing import Any, NamedTuple

from megapar.errors import DataError
from megapar.files.conversation import Message
from megapar.files.regular_file import read_regular_text

SECONDS = 10.0  # time limit of one rendering

MOST_CHARACTERS = 1 << 24  # maximum characters of one rendering

_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
_DATE = "strftime_now"


class Rendered(NamedTuple):
    """A conversation as text, with the characters [begin, end) of its generation blocks, in order."""

    text: str
    marks: tuple[tuple[int, int], ...]


class ChatTemplate:
    """A template of a tokenizer or of a file.

    Attributes:
        text: Its source.
        marked: It has generation blocks, ``{% generation %}``, which say what is learned.
    """

    def __init__(self, text: str, variables: Mapping[str, str], day: str | None = None) -> None:
        """Compile a template.

        Raises DataError if it is not one.

        Args:
            variables: The tokenizer's special tokens, by the names that templates use.
            day: The day that ``strftime_now`` answers, YYYY-MM-DD; needed by templates that call it.
        """
        from jinja2 import TemplateError
        from transformers.utils.chat_template_utils import _compile_jinja_template

        self.text, self.marked = text, _MARK.search(text) is not None
        self._variables: dict[str, Any] = dict(variables)
        if dated(text):
            assert day is not None
            self._variables[_DATE] = date.fromisoformat(day).strftime
        try:
            self._compiled = _compile_jinja_template(text)
        except TemplateError as error:
            raise DataError(f"the chat template cannot be compiled: {error}") from error

    def render(self, messages: Sequence[Message], tools: Any = None, *, prompt: bool = False) -> Rendered:
        """Return the text of a conversation, with the prompt of an answer after it if ``prompt``.

        Raises DataError, whose message begins with ``: ``, if the template refuses it or exceeds a limit.
        """
        blocks: list[str] = []
        marks: list[tuple[int, int]] = []
        size = 0
        try:
            with _limited(), self._compiled.environment.activate_tracker(blocks, marks):
                for block in self._compiled.generate(
                    messages=list(messages),
                    tools=tools,
                    add_generation_prompt=prompt,
                    documents=None,
                    **self._variables,
                ):
                    blocks.append(block)
                    size += len(block)
                    if size > MOST_CHARACTERS:
                        raise DataError(f": the chat template writes more than {MOST_CHARACTERS:,} characters")
        except DataError:
            raise
        except Exception as error:  # a template runs arbitrary expressions on the record
            raise DataError(f": the chat template fails ({type(error).__name__}: {error})") from error
        return Rendered("".join(blocks), tuple((begin, end) for begin, end in marks if begin < end))


def template_of(path: str) -> str:
    """Return the template in a file. Raises DataError if it cannot be read."""
    try:
        return read_regular_text(path)
    except (OSError, ValueError) as error:
        raise DataError(f"--chat-template {path} cannot be read: {error}") from error


def dated(text: str) -> bool:
    """Return True if what a template writes may depend on the day."""
    return _DATE in text


@contextmanager
def _limited() -> Iterator[None]:
    """End a rendering after SECONDS, in a main thread: processes that encode have no other."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(*_: object) -> None:
        raise DataError(f": the chat template takes more than {SECONDS:g} seconds")

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
