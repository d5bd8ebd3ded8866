"""Conversations as tokens and targets: rendered by the chat template, tokenized once as a whole."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from megapar.data.cache import hash_parts
from megapar.data.chat.chat_template import ChatTemplate
from megapar.data.chat.spans import rendered_spans, targets_of, trimmed
from megapar.data.lazy_numpy import np
from megapar.data.text.chunks import BadRecords, LineNumbers, TextChunk
from megapar.data.tokenizers.huggingface_tokenizer import HuggingFaceTokenizer
from megapar.data.tokenizers.ids import facts_of
from megapar.data.tokenizers.tokenizer import Tokenizer
from megapar.errors import DataError
from megapar.files.conversation import Conversation, conversation_of
from megapar.files.data_files import too_long

VERSION = 1
"""Increased whenever a conversation may get other tokens or targets, so that no older cache entry is read."""


@dataclass(frozen=True)
class ChatSettings:
    """Everything besides the tokenizer that decides the tokens and targets of a conversation.

    Attributes:
        template: Source of the chat template.
        day: The day that the template sees, YYYY-MM-DD; None if it does not ask.
        turns: The learned turns, see ``spans``.
    """

    template: str
    day: str | None
    turns: str

    def facts(self, tokenizer: Tokenizer) -> dict[str, str | None]:
        """Return what decides tokens and targets, in short, as prepared conversations record it."""
        ids = str((facts_of(tokenizer) or {}).get("ids"))[:16]
        return {"tokenizer": ids, "template": hash_parts(self.template)[:16], "turns": self.turns, "day": self.day}


class EncodedConversation(NamedTuple):
    """A conversation as text, its ids [T] int64, and [T] bool, True for targets."""

    text: str
    ids: np.ndarray
    targets: np.ndarray


class ChatEncoder:
    """Encodes conversations. Raises DataError for a tokenizer or a template that cannot be used."""

    def __init__(self, tokenizer: Tokenizer, settings: ChatSettings) -> None:
        self._tokenizer = chat_tokenizer(tokenizer)
        self._template = ChatTemplate(settings.template, self._tokenizer.template_variables, settings.day)
        self._turns = settings.turns

    def encode(self, conversation: Conversation) -> EncodedConversation:
        """Return tokens and targets. Raises DataError, whose message begins with ``: ``, e.g. without any target.

        The first token is not a target, because nothing predicts it.
        """
        text, spans = rendered_spans(self._template, conversation, self._turns)
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise DataError(f": its text is not valid Unicode ({error})") from error
        ids, offsets = self._tokenizer.encode_with_offsets(text)
        if not self._template.marked:
            spans = trimmed(text, spans, offsets, np.isin(ids, self._tokenizer.special_ids))
        targets = targets_of(spans, offsets)
        targets[:1] = False
        if not targets.any():
            raise DataError(": no token of the conversation is learned: the template writes nothing for the assistant")
        return EncodedConversation(text, ids, targets)

    def read(
        self, chunk: TextChunk, bad: BadRecords, numbers: LineNumbers | None = None
    ) -> Iterator[EncodedConversation]:
        """Yield the conversations of a chunk of JSONL or rows. The arguments are those of ``TextChunk.documents``."""
        for record, placed in chunk.records(numbers):
            try:
                if record is None:
                    raise too_long("")
                if isinstance(record, dict) or record.strip():
                    yield self.encode(conversation_of(record))
            except DataError as error:
                bad.add(placed(error))


def chat_tokenizer(tokenizer: Tokenizer) -> HuggingFaceTokenizer:
    """Return the tokenizer. Raises DataError if it is not of the kind that says the characters of a token."""
    if isinstance(tokenizer, HuggingFaceTokenizer):
        return tokenizer
    raise DataError(
        "fine-tuning needs a Hugging Face tokenizer, which says the characters that a token is from; pass the folder "
        "of one as --tokenizer-model, such as that of --save-hf or of megapar data train-tokenizer --hf"
    )
