"""Conversations as records, checked by field, in the one form that chat templates take.

    messages    {"messages": [{"role": "user", "content": ..}, ..], "tools": [..]}
    ShareGPT    {"conversations": [{"from": "human", "value": ..}, ..], "system": ..}
    Alpaca      {"instruction": .., "input": .., "output": ..}

Records of the last two forms become messages.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import Any

from megapar.errors import DataError

FORMS = ("messages", "conversations", "instruction")  # a field of each form, by which it is known

_ROLES = ("system", "developer", "user", "assistant", "tool")
_SHAREGPT: Mapping[str, str] = MappingProxyType(
    {"human": "user", "gpt": "assistant", "observation": "tool", "function_response": "tool"}
    | {role: role for role in _ROLES}
)
_FORMS = "messages, conversations (ShareGPT) or instruction and output (Alpaca)"
_REASONING = ("reasoning_content", "thinking", "reasoning")

Message = dict[str, Any]


class Arguments(dict[str, Any]):
    """Arguments of a tool call: an object to templates that serialize it, and its JSON text to those that join it."""

    def __str__(self) -> str:
        return json.dumps(self, ensure_ascii=False)

    def __add__(self, text: str) -> str:
        return str(self) + text

    def __radd__(self, text: str) -> str:
        return text + str(self)


@dataclass(frozen=True)
class Conversation:
    """A checked conversation.

    Attributes:
        messages: In a possible order; contents are strings, or None with tool calls. Arguments of calls are objects.
        tools: Schemas of the functions that may be called, for the template; None if there are none.
    """

    messages: tuple[Message, ...]
    tools: list[Any] | None = None


def conversation_of(record: str | bytes | Mapping[str, Any]) -> Conversation:
    """Return the conversation of a line of JSONL or a row of a table.

    Raises DataError, whose message begins with ``: `` and names a field.
    """
    if isinstance(record, str | bytes):
        record = _json("the record", record.removeprefix("\ufeff") if isinstance(record, str) else record)
    fields: dict[str, Any] = _typed("the record", record, dict, f"an object with {_FORMS}")
    named = list(_named(fields))
    for name, message in named:
        _check(name, message)
    roles = [message["role"] for _, message in named]
    first = next((number for number, role in enumerate(roles) if role not in ("system", "developer")), 0)
    if roles[first] == "assistant":
        raise DataError(f": {named[first][0]} is of the assistant, but a user has to speak first")
    for number, pair in enumerate(pairwise(roles), 1):
        if pair == ("user", "user"):
            raise DataError(f": {named[number][0]} is a second message of the user in a row; join them")
    if "assistant" not in roles:
        raise DataError(": no message of the assistant, so there is nothing to learn")
    tools = _typed("tools", _json("tools", fields.get("tools")) or [], list, "a list of schemas of functions")
    return Conversation(tuple(message for _, message in named), tools or None)


def _typed(name: str, value: Any, kind: type, what: str) -> Any:
    if not isinstance(value, kind):
        raise DataError(f": {name} is of type {type(value).__name__}, not {what}")
    return value


def _json(name: str, value: Any) -> Any:
    """Return a value that may be given as its JSON text; empty text is None."""
    try:
        return (json.loads(value) if value.strip() else None) if isinstance(value, str | bytes) else value
    except (ValueError, RecursionError) as error:
        raise DataError(f": {name} is not JSON ({error}); repair or remove it") from error


def _named(record: Mapping[str, Any]) -> Iterator[tuple[str, Message]]:
    """Yield each message with the name of its field in the record."""
    if record.get("messages") is not None:
        for name, message in _listed("messages", record):
            if message.get("role") not in _ROLES:
                raise DataError(f": {name}.role is {message.get('role')!r}, not one of {', '.join(_ROLES)}")
            if message.get("weight") not in (None, 1):
                raise DataError(f": {name}.weight is {message['weight']!r}; weights of messages are not built")
            # Tables give every record the fields of any.
            yield name, {key: item for key, item in message.items() if item is not None}
        return
    if record.get("system"):
        yield "system", {"role": "system", "content": record["system"]}
    if record.get("conversations") is not None:
        for name, turn in _listed("conversations", record):
            role = _SHAREGPT.get(str(turn.get("from")))
            if role is None:
                raise DataError(f": {name}.from is {turn.get('from')!r}, not one of {', '.join(_SHAREGPT)}")
            yield name, {"role": role, "content": turn.get("value")}
    elif record.get("instruction") is not None and record.get("output") is not None:
        texts = [_typed(name, record[name], str, "a string") for name in ("instruction", "input") if record.get(name)]
        yield "instruction", {"role": "user", "content": "\n\n".join(texts)}
        yield "output", {"role": "assistant", "content": record["output"]}
    else:
        names = ", ".join(map(repr, list(record)[:8])) or "no fields"
        raise DataError(f": no conversation; the record has {names}. It needs {_FORMS}")


def _listed(field: str, record: Mapping[str, Any]) -> Iterator[tuple[str, Message]]:
    if record[field] == []:
        raise DataError(f": {field} is empty, not a list of messages")
    for number, message in enumerate(_typed(field, record[field], list, "a list of messages")):
        yield f"{field}[{number}]", _typed(f"{field}[{number}]", message, dict, "an object")


def _check(name: str, message: Message) -> None:
    """Check a message, whose content and tool calls get the form that templates take."""
    reasoning = next((message[key] for key in _REASONING if message.get(key)), None)
    if reasoning is not None:  # templates read it by different names
        message.update(reasoning_content=reasoning, thinking=reasoning)
    if calls := _json(f"{name}.tool_calls", message.pop("tool_calls", None)):
        calls = [calls] if isinstance(calls, dict) else _typed(f"{name}.tool_calls", calls, list, "a list of calls")
        message["tool_calls"] = [_call(f"{name}.tool_calls[{number}]", call) for number, call in enumerate(calls)]
    content = _text(f"{name}.content", message.get("content"))
    if not (content or "").strip() and message["role"] != "tool" and "tool_calls" not in message:
        raise DataError(f": {name}.content is empty; remove the message, or its record")
    message["content"] = "" if content is None and message["role"] == "tool" else content


def _text(name: str, content: Any) -> str | None:
    """Return a content, a string or parts of text, as a string; None for no content."""
    if isinstance(content, list):
        for number, part in enumerate(content):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            if kind != "text" or not isinstance(part.get("text"), str):
                raise DataError(f": {name}[{number}] is of type {kind!r}; only parts of text can be learned")
        return "".join(part["text"] for part in content)
    return None if content is None else str(_typed(name, content, str, "a string"))


def _call(name: str, call: Any) -> dict[str, Any]:
    """Return a tool call whose arguments are an object, given as one or as the text of one."""
    inner = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(inner, dict) or not isinstance(inner.get("name"), str):
        raise DataError(f": {name} has no function with a name")
    name = f"{name}.function.arguments"
    given = _json(name, inner.get("arguments"))
    arguments = {} if given is None else _typed(name, given, dict, "an object")
    return {**call, "type": "function", "function": {**inner, "arguments": Arguments(arguments)}}
