"""Limits of templates, the day that they see, and tool calls as they take them."""

from __future__ import annotations

import pytest

from megapar.data.chat import chat_template
from megapar.data.chat.chat_template import ChatTemplate, dated
from megapar.errors import DataError
from megapar.files.conversation import conversation_of
from tests.support.chat import turns

CALL = {"type": "function", "function": {"name": "look", "arguments": {"at": 1}}}
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% set x = i * j %}{% endfor %}{% endfor %}"


def test_an_endless_template_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "SECONDS", 0.05)
    with pytest.raises(DataError, match=r"more than 0\.05 seconds"):
        ChatTemplate(ENDLESS, {}).render(turns("Hi"))


def test_a_template_that_writes_too_much_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MOST_CHARACTERS", 1000)
    with pytest.raises(DataError, match="more than 1,000 characters"):
        ChatTemplate("{% for i in range(9999) %}{{ messages[0].content }}{% endfor %}", {}).render(turns("Hi"))


def test_the_day_is_the_given_one() -> None:
    text = "{{ strftime_now('%d %B %Y') }}"
    assert dated(text)
    assert ChatTemplate(text, {}, "2024-02-29").render(turns("Hi")).text == "29 February 2024"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% for m in messages[1:] %}{{ m.tool_calls[0].function.arguments | tojson }}{% endfor %}", '{"at": 1}'),
        ("{% for m in messages[1:] %}{{ '=' + m.tool_calls[0].function.arguments + '=' }}{% endfor %}", '={"at": 1}='),
        ("{% for m in messages[1:] %}{{ m.tool_calls[0].function.arguments + '=' }}{% endfor %}", '{"at": 1}='),
        ("{% for m in messages[1:] %}{{ m.tool_calls[0].function.arguments ~ '=' }}{% endfor %}", '{"at": 1}='),
    ],
)
def test_arguments_have_the_form_that_a_template_takes(template: str, expected: str) -> None:
    made = conversation_of({"messages": [*turns("Hi"), {"role": "assistant", "content": "", "tool_calls": [CALL]}]})
    assert ChatTemplate(template, {}).render(made.messages).text == expected


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('no such role') }}", "TemplateError: no such role"),
        ("{{ messages[7].content + 'a' }}", "UndefinedError"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{{ ''.__class__.__mro__ }}", "SecurityError"),
    ],
)
def test_what_a_template_refuses_or_may_not_do_is_an_error_of_the_record(template: str, message: str) -> None:
    with pytest.raises(DataError, match=f"^: the chat template fails .*{message}"):
        ChatTemplate(template, {}).render(turns("Hi"))


def test_a_broken_template_is_refused() -> None:
    with pytest.raises(DataError, match="cannot be compiled"):
        ChatTemplate("{% for %}", {})
