"""What encoded prepared conversations, compared with what a run would encode them with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megapar.data.conversation_blend import ChatOptions
from megapar.data.corpus import of_conversations
from megapar.data.tokens.prepare import prepare
from megapar.data.tokens.prepared import CHAT
from megapar.errors import DataError
from tests.support.chat import CHATML, save_tokenizer, write_conversations

DATED = CHATML + "{# {{ strftime_now('%Y') }} #}"


@pytest.fixture
def prepared(tmp_path: Path) -> tuple[str, str]:
    """A tokenizer and the prefix of conversations that it encoded."""
    tokenizer, prefix = str(tmp_path / "tokenizer"), str(tmp_path / "chat")
    save_tokenizer(tmp_path / "tokenizer", DATED)
    source = str(write_conversations(tmp_path / "chat.jsonl", 20, words=4))
    prepare(prefix, [source], tokenizer, workers=1, chat=ChatOptions(day="2026-07-26").settings_of(tokenizer))
    return tokenizer, prefix


def notes(prefix: str, tokenizer: str, **options: str) -> tuple[str, ...]:
    """What a run says of the prepared conversations."""
    chat = ChatOptions(**{"day": "2026-07-26", **options})
    sizes = {"vocab_size": 400, "seq_length": 256, "seed": 5, "split": "100,0"}
    return of_conversations(chat, data_path=(prefix,), eval_data_path=(), tokenizer_model=tokenizer, **sizes).notes


def test_the_run_that_prepared_them_takes_them(prepared: tuple[str, str], tmp_path: Path) -> None:
    tokenizer, prefix = prepared
    assert notes(prefix, tokenizer) == notes(f"{prefix}.idx", tokenizer) == ()
    record = json.loads(Path(prefix + CHAT).read_text())
    assert set(record) == {"index", "tokenizer", "template", "turns", "day"}
    assert (record["turns"], record["day"]) == ("all", "2026-07-26")
    save_tokenizer(tmp_path / "bare", None)  # reads what is encoded, and has no template to compare
    assert notes(prefix, str(tmp_path / "bare")) == ()


def test_other_templates_turns_and_tokenizers_are_refused(prepared: tuple[str, str], tmp_path: Path) -> None:
    tokenizer, prefix = prepared
    (tmp_path / "other.jinja").write_text(CHATML)
    with pytest.raises(DataError, match=r"template \w{16}, where the run has \w{16}.*; pass the --tokenizer-model"):
        notes(prefix, tokenizer, template=str(tmp_path / "other.jinja"))
    with pytest.raises(DataError, match=r"chat\.chat: .* encoded with turns all, where the run has last; pass"):
        notes(prefix, tokenizer, turns="last")
    save_tokenizer(tmp_path / "small", DATED, vocab_size=300)
    with pytest.raises(DataError, match=r"encoded with tokenizer \w{16}, where the run has \w{16}; pass"):
        notes(prefix, str(tmp_path / "small"))


def test_another_day_and_older_files_are_taken_with_a_note(prepared: tuple[str, str]) -> None:
    tokenizer, prefix = prepared
    said = notes(prefix, tokenizer, day="2026-07-27")
    assert said == (f"{prefix}.chat: the conversations were encoded with day 2026-07-26, where the run has 2026-07-27",)
    Path(prefix + CHAT).unlink()
    assert notes(prefix, tokenizer, turns="last")[0].startswith(f"{prefix}.chat is missing, so ")


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"index": "1", "tokenizer": {}}'])
def test_a_damaged_record_or_that_of_another_index_is_refused(prepared: tuple[str, str], content: str) -> None:
    tokenizer, prefix = prepared
    Path(prefix + CHAT).write_text(content)
    with pytest.raises(DataError, match=r"chat\.chat cannot be read|encoded with index [N1].*; pass the .* again"):
        notes(prefix, tokenizer)


def test_text_in_the_place_of_conversations_has_no_record(prepared: tuple[str, str], tmp_path: Path) -> None:
    tokenizer, prefix = prepared
    (tmp_path / "text.jsonl").write_text('{"text": "a river"}\n')
    prepare(prefix, [str(tmp_path / "text.jsonl")], tokenizer, workers=1, overwrite=True)
    assert not Path(prefix + CHAT).exists()
