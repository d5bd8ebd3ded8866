"""The samples of a fine-tuning run: each conversation whole, apart and once an epoch, its targets with weights."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megapar.data.conversation_blend import ChatOptions
from megapar.data.corpus import Corpus, of_conversations
from megapar.data.sampling.packs import CONVERSATION, PAD, TOKEN
from megapar.data.sampling.samples import NO_LOSS
from megapar.data.tokens.conversations import DROP, STOP, TRUNCATE
from megapar.data.tokens.prepare import prepare
from megapar.errors import DataError
from tests.support.chat import conversations, save_tokenizer, turns, write_conversations

S = 256
DAY = "2026-07-26"
WHOLE: Any = {"split": "100,0", "eval_data_path": ()}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(folder)
    return str(folder)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_conversations(tmp_path_factory.mktemp("data") / "chat.jsonl", 60, words=6))


def corpus(tokenizer: str, path: Any, *, chat: ChatOptions | None = None, **more: Any) -> Corpus:
    settings = {"vocab_size": 400, "seq_length": S, "seed": 5, **more}
    paths = (path,) if isinstance(path, str) else path
    return of_conversations(chat or ChatOptions(day=DAY), data_path=paths, tokenizer_model=tokenizer, **settings)


def read(made: Corpus, number: int) -> list[tuple[tuple[int, ...], tuple[float, ...]]]:
    """The conversations of a sample: their inputs and the weights of their labels."""
    sample = made.train[number]
    labels = sample["labels"]
    weights = sample.get("weights", (labels != NO_LOSS).astype(np.float32))
    begins = [0, *sample["ends"][:-1].tolist()]
    valid = int(sample.get("valid", np.ones(S, dtype=bool)).sum())
    found = []
    for begin, end in zip(begins, sample["ends"].tolist(), strict=True):
        end = min(end, valid)
        assert sample["positions"][begin:end].tolist() == list(range(end - begin))
        predicted = np.flatnonzero(labels[begin:end] != NO_LOSS)
        following = np.append(sample["tokens"][begin + 1 : end], labels[end - 1])
        assert (labels[begin:end][predicted] == following[predicted]).all()
        found.append((tuple(sample["tokens"][begin:end].tolist()), tuple(weights[begin:end].tolist())))
    return found


def epoch(made: Corpus, number: int = 0) -> list[tuple[tuple[int, ...], tuple[float, ...]]]:
    packs = len(made.train)
    return [one for pack in range(number * packs, (number + 1) * packs) for one in read(made, pack)]


@pytest.mark.parametrize("loss", [TOKEN, CONVERSATION])
def test_packs_contain_the_conversations_of_padded_samples(tokenizer: str, data: str, loss: str) -> None:
    packed = corpus(tokenizer, data, chat=ChatOptions(day=DAY, loss=loss), **WHOLE)
    padded = corpus(tokenizer, data, chat=ChatOptions(day=DAY, loss=loss, packing=PAD), **WHOLE)
    assert len(padded.train) == 60
    assert len(packed.train) < 30
    # the last token of a pack is only a label, so that a pack's last conversation may lack its last input
    targets = [Counter(tuple(w for w in weights if w) for _, weights in epoch(one)) for one in (packed, padded)]
    assert targets[0] == targets[1]
    assert sum(targets[0].values()) == 60
    shares = [sum(weights) for _, weights in epoch(padded)]
    assert np.allclose(shares, 1) == (loss == CONVERSATION)


def test_an_epoch_has_each_conversation_once_in_another_order(tokenizer: str, data: str) -> None:
    made = corpus(tokenizer, data, **WHOLE)
    first, second = (epoch(made, number) for number in (0, 1))
    assert first != second
    assert Counter(first) == Counter(second)


def test_the_split_holds_conversations_out_and_a_seed_moves_none(tokenizer: str, data: str) -> None:
    made, other = (corpus(tokenizer, data, split="80,20", seed=seed) for seed in (5, 6))
    assert made.conversations is not None
    assert made.conversations.heldout is not None
    counts = [len(side.sources[0].store.numbers) for side in (made.conversations.train, made.conversations.heldout)]
    assert sum(counts) == 60
    assert 4 <= counts[1] <= 24
    assert other.heldout is not None
    assert made.heldout is not None
    assert (made.heldout[0]["tokens"] == other.heldout[0]["tokens"]).all()
    assert str(made.contents[0]).startswith(f"{data}: {counts[0]} conversations, ")


def test_a_mixture_reads_its_sources_by_weight(tokenizer: str, data: str, tmp_path: Path) -> None:
    other = str(write_conversations(tmp_path / "other.jsonl", 20, seed=9, words=6))
    made = corpus(tokenizer, ("0.75", data, "0.25", other), **WHOLE)
    own = set(epoch(corpus(tokenizer, other, **WHOLE)))
    from_other = [any(one in own for one in read(made, number)) for number in range(40)]
    assert sum(from_other) == 10


def test_conversations_that_are_too_long(tokenizer: str, tmp_path: Path) -> None:
    path = tmp_path / "long.jsonl"
    long = "river " * 60
    records = [turns("Hi", "Hello"), turns("Hi", long), turns(long, "Hello")]
    path.write_text("\n" + "".join(json.dumps({"messages": messages}) + "\n" for messages in records))
    options = {overlong: ChatOptions(day=DAY, overlong=overlong) for overlong in (STOP, DROP, TRUNCATE)}
    with pytest.raises(
        DataError, match=r"training: 2 conversations have more than 65 tokens; .*long.jsonl, line 3, has"
    ):
        corpus(tokenizer, str(path), chat=options[STOP], seq_length=64, **WHOLE)
    dropped = corpus(tokenizer, str(path), chat=options[DROP], seq_length=64, **WHOLE)
    assert dropped.notes == (f"{path}, training: of conversations with more than 65 tokens, 2 dropped",)
    truncated = corpus(tokenizer, str(path), chat=options[TRUNCATE], seq_length=64, **WHOLE)
    assert truncated.notes == (
        f"{path}, training: of conversations with more than 65 tokens, 1 truncated and 1 dropped",
    )
    assert truncated.conversations is not None
    assert truncated.conversations.train.sources[0].store.numbers.tolist() == [0, 1]
    apart = corpus(tokenizer, str(path), chat=options[TRUNCATE], seq_length=64, eval_data_path=[str(path)])
    assert [note.partition(": ")[0] for note in apart.notes] == [f"{path}, training", f"{path}, held-out"]


def test_bad_records_stop_with_their_line_or_are_skipped(tokenizer: str, data: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    lines = Path(data).read_text().splitlines()
    bad = [json.dumps({"messages": [{"role": "bot", "content": "a"}]}), json.dumps({"messages": turns("Hi")})]
    path.write_text("\n".join([*lines[:7], bad[0], *lines[7:], bad[1]]) + "\n")
    with pytest.raises(DataError, match=r"bad.jsonl, line 8: messages\[0\].role is 'bot'"):
        corpus(tokenizer, str(path), **WHOLE)
    made = corpus(tokenizer, str(path), **WHOLE, skip_bad=True)
    assert "2 broken records were skipped" in made.notes[0]
    assert "line 62: no message of the assistant" in made.notes[0]


@pytest.mark.parametrize("workers", [1, 3])
def test_prepared_conversations_give_the_same_samples(tokenizer: str, data: str, tmp_path: Path, workers: int) -> None:
    from megapar.data.chat.chat_encoder import chat_tokenizer
    from megapar.data.tokenizers.load import load_tokenizer

    settings = ChatOptions(day=DAY).settings(chat_tokenizer(load_tokenizer(tokenizer)))
    prefix = str(tmp_path / "chat")
    done = prepare(prefix, [data], tokenizer, workers=workers, chat=settings)
    assert done.documents == 60
    made, again = corpus(tokenizer, data), corpus(tokenizer, prefix)
    assert epoch(made) == epoch(again)
    assert made.chat_facts()["packs"] == again.chat_facts()["packs"]


def test_held_out_conversations_that_were_overwritten_are_found(tokenizer: str, data: str, tmp_path: Path) -> None:
    from megapar.data.chat.chat_encoder import chat_tokenizer
    from megapar.data.tokenizers.load import load_tokenizer

    settings = ChatOptions(day=DAY).settings(chat_tokenizer(load_tokenizer(tokenizer)))
    prefix = str(tmp_path / "chat")
    prepare(prefix, [data], tokenizer, workers=1, chat=settings)
    made = corpus(tokenizer, data, eval_data_path=[prefix])
    made.check_files()
    with Path(f"{prefix}.bin").open("ab") as file:
        file.write(b"more")
    with pytest.raises(DataError, match="was overwritten"):
        made.check_files()


def test_text_is_not_taken_for_conversations(tokenizer: str, data: str, tmp_path: Path) -> None:
    prefix = str(tmp_path / "text")
    (tmp_path / "text.jsonl").write_text('{"text": "a river"}\n')
    prepare(prefix, [str(tmp_path / "text.jsonl")], tokenizer, workers=1)
    with pytest.raises(DataError, match="megapar data prepare --task sft"):
        corpus(tokenizer, prefix)
    with pytest.raises(DataError, match="line 1: no conversation; the record has 'text'"):
        corpus(tokenizer, str(tmp_path / "text.jsonl"))


def test_conversations_of_parquet_files_and_datasets_are_those_of_jsonl(tokenizer: str, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    records = [*conversations(12, words=6), {"messages": [*turns("Hi"), {"role": "assistant", "tool_calls": "[]"}]}]
    records[-1]["messages"][1] |= {"content": None, "tool_calls": '[{"name": "look", "arguments": {"at": 1}}]'}
    path = tmp_path / "chat.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    table = datasets.Dataset.from_list(records)
    table.to_parquet(tmp_path / "chat.parquet", batch_size=5)
    table.save_to_disk(tmp_path / "saved")
    template = tmp_path / "template.jinja"
    template.write_text("{% for m in messages %}{{ m.role }}: {{ m.content or m.tool_calls[0].function }};{% endfor %}")
    chat = ChatOptions(day=DAY, template=str(template))
    saved = {"dataset": str(tmp_path / "saved"), "chat": chat.settings_of(tokenizer)}
    done = prepare(str(tmp_path / "p"), (), tokenizer, workers=1, **saved)
    assert done.documents == len(records)
    want, *others = (
        corpus(tokenizer, str(tmp_path / name), chat=chat, **WHOLE) for name in ("chat.jsonl", "chat.parquet", "p")
    )
    for other in others:
        assert [epoch(other, number) for number in (0, 1)] == [epoch(want, number) for number in (0, 1)]
    table.add_column("x", [1] * len(records)).remove_columns("messages").to_parquet(tmp_path / "bad.parquet")
    with pytest.raises(DataError, match=r"bad\.parquet, row 0: no conversation; the record has 'x'"):
        corpus(tokenizer, str(tmp_path / "bad.parquet"), chat=chat, **WHOLE)
