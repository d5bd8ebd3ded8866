"""The characters of a conversation that are learned, and the tokens that they make targets.

A template with generation blocks marks them. Of another one, the turn of message i follows from three renderings, if
the first two are how the third one begins:

    messages[:i], with the prompt of an answer    <|user|>hello<|end|><|assistant|>
    messages[:i + 1]                              <|user|>hello<|end|><|assistant|>hi<|end|>\n
    all messages                                  <|user|>hello<|end|><|assistant|>hi<|end|>\n<|user|>bye ..
                                                                               ^^^^^^^^^
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megapar.data.chat.chat_template import ChatTemplate
from megapar.data.lazy_numpy import np
from megapar.errors import DataError
from megapar.files.conversation import Conversation

ALL, LAST = "all", "last"
"""The turns of the assistant that are learned."""

Span = tuple[int, int]


def rendered_spans(template: ChatTemplate, conversation: Conversation, turns: str) -> tuple[str, list[Span]]:
    """Return the text of a conversation, and the characters [begin, end) of its learned turns, in order.

    A turn contains what follows its end-of-turn token; ``trimmed`` cuts that off. Raises DataError if the characters
    of a turn cannot be known.
    """
    messages, tools = conversation.messages, conversation.tools
    whole = template.render(messages, tools)
    if template.marked:
        return whole.text, list(whole.marks if turns == ALL else whole.marks[-1:])
    spans = []
    spoken = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    for number in spoken if turns == ALL else spoken[-1:]:
        before = template.render(messages[:number], tools, prompt=True).text
        after = template.render(messages[: number + 1], tools).text
        for text, what in ((before, "before"), (after, "up to")):
            if not whole.text.startswith(text):
                raise DataError(_unknown(number, what, text, whole.text, number == spoken[-1]))
        if len(after) > len(before):
            spans.append((len(before), len(after)))
    return whole.text, spans


def _unknown(number: int, what: str, text: str, whole: str, last: bool) -> str:
    place = next((i for i, (a, b) in enumerate(zip(text, whole, strict=False)) if a != b), min(len(text), len(whole)))
    there, here = (repr(one[place : place + 20]) for one in (text, whole))
    fix = "pass a --chat-template with generation blocks" + ("" if last else ", or set --sft-turns last")
    return (
        f": the tokens of message {number}, the assistant's, cannot be known: the chat template writes the messages "
        f"{what} it differently when others follow ({there} becomes {here} at character {place}); {fix}"
    )


def trimmed(text: str, spans: Sequence[Span], offsets: np.ndarray, special: np.ndarray) -> list[Span]:
    """Return the spans up to their last special token, if only white space follows it there.

    Args:
        offsets: [T, 2], the characters [begin, end) of each token.
        special: [T] bool, the special tokens.
    """
    kept = []
    for begin, end in spans:
        inside = np.flatnonzero(special & (offsets[:, 0] >= begin) & (offsets[:, 1] <= end))
        stop = int(offsets[inside[-1], 1]) if len(inside) else end
        kept.append((begin, end if text[stop:end].strip() else stop))
    return kept


def targets_of(spans: Sequence[Span], offsets: np.ndarray) -> np.ndarray:
    """Return [T] bool, True for each token with a character in a span. Spans are in order and do not overlap."""
    if not spans:
        return np.zeros(len(offsets), dtype=bool)
    edges: Any = np.array(spans)
    nearest = np.searchsorted(edges[:, 1], offsets[:, 0], side="right").clip(max=len(edges) - 1)
    begin, end = edges[nearest].T
    return (offsets[:, 0] < end) & (offsets[:, 1] > begin) & (offsets[:, 1] > offsets[:, 0])
