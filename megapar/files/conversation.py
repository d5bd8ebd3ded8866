"""Conversations as records of JSON, checked by field, in the one form that chat templates take.

    messages    {"messages": [{"role": "user", "content": ..}, ..], "tools": [..]}
    ShareGPT    {"conversations": [{"from": "human", "value": ..}, ..], "system": ..}
    Alpaca      {"instruction": .., "input": .., "output": ..}

Records of the last two forms become messages.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from megapar.errors import DataError

ROLES = ("system", "developer", "user", "assistant", "tool")
_SHAREGPT: Mapping[str, str] = MappingProxyType(
    {"human": "user", "gpt": "assistant", "observation": "tool", "function_response": "tool"}
    | {role: role for role in ROLES}
)
_FORMS = "messages, conversations (ShareGPT) or instruction and output (Alpaca)"
_REASONING = ("reasoning_content", "thinking", "reasoning")

Message = dict[str, Any]


@dataclass(frozen=True)
class Conversation:
    """A checked conversation.

    Attributes:
        messages: Roles of ROLES in a possible order; contents are strings, or None beside tool calls. Arguments of tool
            calls are objects.
        tools: Schemas of the functions that may be called, for the template; None if there are none.
    """

    messages: tuple[Message, ...]
    tools: list[Any] | None = None


def conversation_of(line: str | bytes) -> Conversation:
    """Return the conversation of a line of JSONL. Raises DataError, whose message begins with ``: `` and a field."""
    try:
        record = json.loads(line.removeprefix("\ufeff") if isinstance(line, str) else line)
        line.encode() if isinstance(line, str) else None
    except (ValueError, RecursionError) as error:
        raise DataError(f": not a JSON record ({error}); repair or remove the line") from error
    if not isinstance(record, dict):
        raise DataError(f": the record is of type {type(record).__name__}, not an object with {_FORMS}")
    messages = _messages(record)
    for number, (name, message) in enumerate(messages):
        _check(name, message)
        _check_order(name, message["role"], [before["role"] for _, before in messages[:number]])
    if not any(message["role"] == "assistant" for _, message in messages):
        raise DataError(": no message of the assistant, so there is nothing to learn")
    return Conversation(tuple(message for _, message in messages), _tools(record.get("tools")))


def check_conversation(line: bytes, place: str) -> None:
    """Raise DataError, with ``place`` in front of its message, unless a line of JSONL is a conversation."""
    try:
        conversation_of(line)
    except DataError as error:
        raise DataError(f"{place}{error}") from error


def _messages(record: Mapping[str, Any]) -> list[tuple[str, Message]]:
    """Return each message with the name of its field in the record."""
    if record.get("messages") is not None:
        return _plain(record["messages"])
    if record.get("conversations") is not None:
        return _system(record) + _sharegpt(record["conversations"])
    if record.get("instruction") is not None and record.get("output") is not None:
        texts = [record["instruction"], *([record["input"]] if record.get("input") else [])]
        for name, text in zip(("instruction", "input"), texts, strict=False):
            if not isinstance(text, str):
                raise DataError(f": {name} is of type {type(text).__name__}, not a string")
        asked, answer = {"role": "user", "content": "\n\n".join(texts)}, {"role": "assistant"}
        return [*_system(record), ("instruction", asked), ("output", {**answer, "content": record["output"]})]
    names = ", ".join(map(repr, list(record)[:8])) or "no fields"
    raise DataError(f": no conversation; the record has {names}. It needs {_FORMS}")


def _system(record: Mapping[str, Any]) -> list[tuple[str, Message]]:
    return [("system", {"role": "system", "content": record["system"]})] if record.get("system") else []


def _listed(name: str, value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise DataError(f": {name} is {'empty' if value == [] else type(value).__name__}, not a list of messages")
    for number, message in enumerate(value):
        if not isinstance(message, dict):
            raise DataError(f": {name}[{number}] is of type {type(message).__name__}, not an object")
    return value


def _plain(value: Any) -> list[tuple[str, Message]]:
    """Return messages without their empty fields, which tables such as parquet files give every record."""
    listed = _listed("messages", value)
    messages = [{key: item for key, item in message.items() if item is not None} for message in listed]
    for number, message in enumerate(messages):
        role = message.get("role")
        if role not in ROLES:
            raise DataError(f": messages[{number}].role is {role!r}, not one of {', '.join(ROLES)}")
        if message.get("weight", 1) != 1:
            raise DataError(f": messages[{number}].weight is {message['weight']!r}; weights of messages are not built")
    return [(f"messages[{number}]", message) for number, message in enumerate(messages)]


def _sharegpt(value: Any) -> list[tuple[str, Message]]:
    messages = []
    for number, turn in enumerate(_listed("conversations", value)):
        name, role = f"conversations[{number}]", _SHAREGPT.get(str(turn.get("from")))
        if role is None:
            raise DataError(f": {name}.from is {turn.get('from')!r}, not one of {', '.join(_SHAREGPT)}")
        messages.append((name, {"role": role, "content": turn.get("value")}))
    return messages


def _check(name: str, message: Message) -> None:
    """Check a message, whose content and tool calls get the form that templates take."""
    reasoning = next((message[key] for key in _REASONING if message.get(key)), None)
    if reasoning is not None:  # templates read it by different names
        message.update(reasoning_content=reasoning, thinking=reasoning)
    if "tool_calls" in message:
        message["tool_calls"] = _calls(f"{name}.tool_calls", message["tool_calls"])
        if not message["tool_calls"]:
            del message["tool_calls"]
    content = message["content"] = _text(f"{name}.content", message.get("content"))
    speaks = content is not None and content.strip()
    if not speaks and message["role"] != "tool" and "tool_calls" not in message:
        raise DataError(f": {name}.content is empty; remove the message, or its record")
    if content is None and message["role"] == "tool":
        message["content"] = ""


def _text(name: str, content: Any) -> str | None:
    """Return a content, a string or parts of text, as a string; None for no content."""
    if isinstance(content, list):
        for number, part in enumerate(content):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            if kind != "text" or not isinstance(part.get("text"), str):
                raise DataError(f": {name}[{number}] is of type {kind!r}; only parts of text can be learned")
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str | None):
        raise DataError(f": {name} is of type {type(content).__name__}, not a string")
    try:
        (content or "").encode()
    except UnicodeEncodeError as error:
        raise DataError(f": {name} is not valid Unicode ({error.reason})") from error
    return content


def _calls(name: str, calls: Any) -> list[dict[str, Any]]:
    """Return tool calls whose arguments are objects, given as objects or as the text of one."""
    if isinstance(calls, dict):
        calls = [calls]
    if not isinstance(calls, list):
        raise DataError(f": {name} is of type {type(calls).__name__}, not a list of calls")
    return [_call(f"{name}[{number}]", call) for number, call in enumerate(calls)]


def _call(name: str, call: Any) -> dict[str, Any]:
    inner = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(inner, dict) or not isinstance(inner.get("name"), str):
        raise DataError(f": {name} has no function with a name")
    arguments = inner.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except ValueError as error:
            raise DataError(f": {name}.function.arguments is not JSON ({error})") from error
    if not isinstance(arguments, dict):
        raise DataError(f": {name}.function.arguments is of type {type(arguments).__name__}, not an object")
    return {"type": "function", **call, "function": {**inner, "arguments": arguments}}


def _check_order(name: str, role: str, before: Sequence[str]) -> None:
    spoken = [other for other in before if other not in ("system", "developer")]
    if role == "assistant" and not spoken:
        raise DataError(f": {name} is of the assistant, but a user has to speak first")
    if role == "user" and before and before[-1] == "user":
        raise DataError(f": {name} is a second message of the user in a row; join them")


def _tools(tools: Any) -> list[Any] | None:
    if isinstance(tools, str) and tools:
        try:
            tools = json.loads(tools)
        except ValueError as error:
            raise DataError(f": tools is not JSON ({error})") from error
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise DataError(": tools is not a list of schemas of functions")
    return tools
