"""The learned tokens of conversations, one by one: by marks as transformers has them, elsewhere as written by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import date
from typing import Any

import numpy as np
import pytest

from megapar.data.chat.chat_encoder import ChatEncoder, ChatSettings, EncodedConversation
from megapar.data.chat.spans import ALL, LAST, targets_of, trimmed
from megapar.data.tokenizers.huggingface_tokenizer import HuggingFaceTokenizer
from megapar.errors import DataError
from megapar.files.conversation import Conversation
from tests.support.chat import turns

Published = Callable[[str], HuggingFaceTokenizer]
DAY = "2026-07-26"
TWO = turns("Hi", "Hello there", "And now?", "Good bye", system="Be brief.")
CALL = {"type": "function", "function": {"name": "look", "arguments": {"at": "a river"}}}


def encoded(
    tokenizer: HuggingFaceTokenizer, messages: Sequence[dict[str, Any]], turns: str = ALL
) -> EncodedConversation:
    template = tokenizer.chat_template
    assert template is not None
    day = DAY if "strftime_now" in template else None
    return ChatEncoder(tokenizer, ChatSettings(template, day, turns)).encode(Conversation(tuple(messages)))


def learned(tokenizer: HuggingFaceTokenizer, made: EncodedConversation) -> list[str]:
    """The text of each run of targets."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], made.targets.astype(int), [0]])))
    return [tokenizer.shown(made.ids[begin:end]) for begin, end in edges.reshape(-1, 2)]


@pytest.mark.parametrize("messages", [TWO, turns("Hi", "So ünïcödé 👩‍👩‍👧!"), turns("a", " b ", "c", "\n\nd\n")])
def test_marks_give_the_mask_of_transformers(published: Published, messages: list[dict[str, Any]]) -> None:
    tokenizer = published("qwen3_training")
    made = encoded(tokenizer, messages)
    theirs = tokenizer._inner.apply_chat_template(
        messages, return_assistant_tokens_mask=True, return_dict=True, add_generation_prompt=False
    )
    assert made.ids.tolist() == theirs["input_ids"]
    assert made.targets.astype(int).tolist() == theirs["assistant_masks"]
    assert made.targets.sum() > 2


# The template, its messages, the turns, and every run of targets. What follows the token that ends an answer is none.
BY_HAND = [
    ("llama3", TWO, ALL, ["Hello there<|eot_id|>", "Good bye<|eot_id|>"]),
    ("llama3", TWO, LAST, ["Good bye<|eot_id|>"]),
    ("llama3_2", TWO, ALL, ["Hello there<|eot_id|>", "Good bye<|eot_id|>"]),
    ("ernie_form", TWO, ALL, ["Hello there<|end_of_sentence|>", "Good bye<|end_of_sentence|>"]),
    ("qwen3", turns("Hi", "Hello"), ALL, ["<think>\n\n</think>\n\nHello<|im_end|>"]),
    ("qwen3", TWO, LAST, ["<think>\n\n</think>\n\nGood bye<|im_end|>"]),
    (
        "qwen3",
        [*turns("Hi"), {"role": "assistant", "content": "Hello", "reasoning_content": "Hm."}],
        ALL,
        ["<think>\nHm.\n</think>\n\nHello<|im_end|>"],
    ),
    ("gptoss", turns("Hi", "Hello"), ALL, ["<|channel|>final<|message|>Hello<|return|>"]),
    ("gptoss", TWO, LAST, ["<|channel|>final<|message|>Good bye<|return|>"]),
]


@pytest.mark.parametrize(("name", "messages", "which", "expected"), BY_HAND)
def test_turns_without_marks(
    published: Published, name: str, messages: list[dict[str, Any]], which: str, expected: list[str]
) -> None:
    tokenizer = published(name)
    made = encoded(tokenizer, messages, which)
    assert learned(tokenizer, made) == expected
    theirs = tokenizer._inner.apply_chat_template(messages, tokenize=False)
    for form in ("%d %b %Y", "%Y-%m-%d"):  # the day that the template asks for
        theirs = theirs.replace(date.today().strftime(form), date.fromisoformat(DAY).strftime(form))
    assert made.text == theirs


@pytest.mark.parametrize(
    ("name", "messages", "reason"),
    [
        ("qwen3", TWO, "message 2, the assistant's, cannot be known.*up to it differently.*--sft-turns last"),
        ("gptoss", TWO, "message 2.*up to it differently"),
        ("deepseekv3", turns("Hi", "Hello"), "message 1.*before it differently.*generation blocks$"),
    ],
)
def test_a_template_that_rewrites_what_was_said_is_refused(
    published: Published, name: str, messages: list[dict[str, Any]], reason: str
) -> None:
    with pytest.raises(DataError, match=reason):
        encoded(published(name), messages)


def test_tool_calls_are_learned_and_their_results_are_not(published: Published) -> None:
    tokenizer = published("qwen3")
    called = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    messages = [*turns("Hi"), called, {"role": "tool", "content": "wet"}, {"role": "assistant", "content": "Wet."}]
    assert learned(tokenizer, encoded(tokenizer, messages, LAST)) == ["<think>\n\n</think>\n\nWet.<|im_end|>"]
    tokenizer = published("qwen3_training")
    first, second = learned(tokenizer, encoded(tokenizer, messages))
    assert '<tool_call>\n{"name": "look", "arguments": {"at": "a river"}}\n</tool_call><|im_end|>' in first
    assert second.endswith("Wet.<|im_end|>\n")


def test_a_conversation_without_a_target_is_refused(published: Published) -> None:
    tokenizer = published("llama3")
    silent = ChatSettings("{% for m in messages %}{{ m.content if m.role == 'user' }}{% endfor %}", None, ALL)
    with pytest.raises(DataError, match="no token of the conversation is learned"):
        ChatEncoder(tokenizer, silent).encode(Conversation(tuple(TWO)))


def test_text_that_is_not_unicode_is_refused(published: Published) -> None:
    with pytest.raises(DataError, match=r"^: its text is not valid Unicode"):
        encoded(published("llama3"), turns("Hi", "\ud800"))


def test_a_token_is_a_target_if_any_of_its_characters_is() -> None:
    offsets = np.array([[0, 2], [2, 4], [4, 4], [4, 6], [6, 9], [9, 10]])
    assert targets_of([(3, 5), (9, 12)], offsets).tolist() == [False, True, False, True, False, True]
    assert targets_of([], offsets).tolist() == [False] * 6


def test_what_follows_the_end_of_a_turn_is_cut_only_if_it_is_white_space() -> None:
    offsets = np.array([[0, 1], [1, 2], [2, 3], [3, 4]])
    special = np.array([False, True, False, False])
    assert trimmed("a$ \n", [(0, 4)], offsets, special) == [(0, 2)]
    assert trimmed("a$b\n", [(0, 4)], offsets, special) == [(0, 4)]
    assert trimmed("abc\n", [(0, 4)], offsets, np.zeros(4, dtype=bool)) == [(0, 4)]
