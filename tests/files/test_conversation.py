"""Records of the three forms, and what is wrong in others, by field."""

from __future__ import annotations

import json
from typing import Any

import pytest

from megapar.errors import DataError
from megapar.files.conversation import conversation_of
from tests.support.chat import turns

CALL = {"name": "look", "arguments": {"at": 1}}
ASKED, SAID = turns("Hi", "Hello")


def test_the_three_forms_give_the_same_messages() -> None:
    sharegpt = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]
    expected = tuple(turns("Hi", "Hello", system="Be brief."))
    for record in (
        {"messages": list(expected), "tools": None},
        {"conversations": sharegpt, "system": "Be brief."},
        {"instruction": "Hi", "input": "", "output": "Hello", "system": "Be brief."},
    ):
        assert conversation_of(json.dumps(record)).messages == expected
    joined = conversation_of('{"instruction": "Add", "input": "1, 2", "output": "3"}').messages
    assert joined == tuple(turns("Add\n\n1, 2", "3"))


def test_parts_of_text_are_joined_and_tool_calls_get_one_form() -> None:
    parts = {"role": "user", "content": [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]}
    answer = {"role": "assistant", "content": None}
    for calls in ([CALL], CALL, [{**CALL, "arguments": '{"at": 1}'}], [{"type": "function", "function": CALL}]):
        record = {"messages": [parts, {**answer, "tool_calls": calls}], "tools": '[{"name": "look"}]'}
        made = conversation_of(json.dumps(record))
        assert made.messages[0]["content"] == "Hi"
        assert made.messages[1]["tool_calls"][0]["function"] == CALL
        assert made.tools == [{"name": "look"}]


def test_reasoning_has_every_name_that_templates_read() -> None:
    made = conversation_of(json.dumps({"messages": [ASKED, {**SAID, "reasoning": "Hm."}]})).messages[1]
    assert made["reasoning_content"] == made["thinking"] == "Hm."


BAD: dict[str, Any] = {
    "the record is not JSON": "{",
    "of type list, not an object": "[]",
    "no conversation; the record has 'text'": {"text": "a"},
    "messages is empty": {"messages": []},
    "messages is of type str": {"messages": "Hi"},
    r"messages\[1\] is of type str": {"messages": [ASKED, "Hello"]},
    r"messages\[0\].role is 'bot', not one of system": {"messages": [{"role": "bot", "content": "a"}]},
    r"messages\[0\].role is None": {"messages": [{"content": "a"}]},
    r"conversations\[0\].from is 'robot'": {"conversations": [{"from": "robot", "value": "a"}]},
    r"messages\[0\].content\[0\] is of type 'image_url'": {
        "messages": [{"role": "user", "content": [{"type": "image_url"}]}, SAID]
    },
    r"messages\[0\].content is of type int": {"messages": [{"role": "user", "content": 3}, SAID]},
    r"messages\[1\].content is empty": {"messages": [ASKED, {"role": "assistant", "content": " "}]},
    r"messages\[0\] is of the assistant, but a user": {"messages": [SAID, ASKED]},
    r"messages\[1\] is a second message of the user": {"messages": [ASKED, ASKED, SAID]},
    "no message of the assistant": {"messages": [ASKED]},
    r"messages\[1\].weight is 0": {"messages": [ASKED, {**SAID, "weight": 0}]},
    r"tool_calls\[0\].function.arguments is not JSON": {
        "messages": [ASKED, {**SAID, "tool_calls": [{**CALL, "arguments": "{"}]}]
    },
    r"tool_calls\[0\].function.arguments is of type list": {
        "messages": [ASKED, {**SAID, "tool_calls": [{**CALL, "arguments": "[]"}]}]
    },
    r"tool_calls\[0\] has no function": {"messages": [ASKED, {**SAID, "tool_calls": ["look"]}]},
    "tool_calls is not JSON": {"messages": [ASKED, {**SAID, "tool_calls": "look"}]},
    "tools is not JSON": {"messages": [ASKED, SAID], "tools": "{"},
    "tools is of type dict, not a list": {"messages": [ASKED, SAID], "tools": {"a": 1}},
    "instruction is of type int": {"instruction": 3, "output": "a"},
    "output.content is of type int": {"instruction": "a", "output": 3},
}


@pytest.mark.parametrize("message", BAD)
def test_a_bad_record_is_refused_by_its_field(message: str) -> None:
    record = BAD[message]
    with pytest.raises(DataError, match=f"^: .*{message}"):
        conversation_of(record if isinstance(record, str) else json.dumps(record))
