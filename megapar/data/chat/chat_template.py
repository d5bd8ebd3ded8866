"""Chat templates, in the sandbox of transformers, with limits of time and of output."""

from __future__ import annotations

import json
import re
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import date
from typing import Any, NamedTuple

from megapar.errors import DataError
from megapar.files.conversation import Message
from megapar.files.regular_file import read_regular_text

SECONDS = 10.0
"""Time limit of one rendering."""

MOST_CHARACTERS = 1 << 24
"""Maximum characters of one rendering."""

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
        self._text_arguments: bool | None = None

    def render(self, messages: Sequence[Message], tools: Any = None, *, prompt: bool = False) -> Rendered:
        """Return the text of a conversation, with the prompt of an answer after it if ``prompt``.

        Raises DataError, whose message begins with ``: ``, if the template refuses it or exceeds a limit.
        """
        if self._text_arguments is None and any("tool_calls" in message for message in messages):
            self._text_arguments = self._joins_arguments()
        plain = [_with_text_arguments(one) if self._text_arguments else dict(one) for one in messages]
        return self._rendered(plain, tools, prompt)

    def _rendered(self, messages: list[Message], tools: Any, prompt: bool) -> Rendered:
        blocks: list[str] = []
        marks: list[tuple[int, int]] = []
        size, until = 0, time.monotonic() + SECONDS
        try:
            with _limited(), self._compiled.environment.activate_tracker(blocks, marks):
                for block in self._compiled.generate(
                    messages=messages, tools=tools, documents=None, add_generation_prompt=prompt, **self._variables
                ):
                    blocks.append(block)
                    size += len(block)
                    if size > MOST_CHARACTERS:
                        raise DataError(f": the chat template writes more than {MOST_CHARACTERS:,} characters")
                    if time.monotonic() > until:
                        raise _too_slow()
        except DataError:
            raise
        except Exception as error:  # a template runs arbitrary expressions on the record
            raise DataError(f": the chat template fails ({type(error).__name__}: {error})") from error
        return Rendered("".join(blocks), tuple((begin, end) for begin, end in marks if begin < end))

    def _joins_arguments(self) -> bool:
        """Return True if arguments of tool calls must be text: the template joins them to strings."""
        call = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
        asked: Message = {"role": "user", "content": "a"}
        probe = [asked, {"role": "assistant", "content": "b", "tool_calls": [call]}]
        try:
            self._rendered(probe, None, False)
        except DataError as error:
            return isinstance(error.__cause__, TypeError)
        return False


def template_of(path: str) -> str:
    """Return the template in a file: its text, or the ``chat_template`` of a JSON file, as tokenizers have it.

    Raises DataError if it cannot be read.
    """
    try:
        text = read_regular_text(path)
        value = json.loads(text)["chat_template"] if path.endswith(".json") else text
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"--chat-template {path} cannot be read: {error}") from error
    if not isinstance(value, str) or not value.strip():
        raise DataError(f"--chat-template {path} has no template")
    return value


def dated(text: str) -> bool:
    """Return True if what a template writes may depend on the day."""
    return _DATE in text


def _with_text_arguments(message: Message) -> Message:
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
        for call in message.get("tool_calls", ())
    ]
    return {**message, "tool_calls": calls} if calls else dict(message)


def _too_slow() -> DataError:
    return DataError(f": the chat template takes more than {SECONDS:g} seconds")


@contextmanager
def _limited() -> Iterator[None]:
    """End a rendering after SECONDS. Elsewhere than in the main thread only between two blocks of output."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(*_: object) -> None:
        raise _too_slow()

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
