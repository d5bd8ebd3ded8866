"""Rows of the embedding without --vocab-size: tokenizers' files are counted as their own library counts them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from megapar.arguments import Config, parse
from megapar.data.tokenizers.load import load_tokenizer
from megapar.data.tokenizers.sentencepiece_tokenizer import SentencePieceTokenizer, train
from megapar.errors import ConfigError
from megapar.files.tokenizer_files import BadTokenizer, vocabulary_of
from megapar.planning.devices import device_kind
from megapar.planning.plan import Plan
from megapar.planning.text import describe

WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b", "##c")


@pytest.fixture(scope="module")
def model() -> bytes:
    return train([f"word {i} and another one of {i * 7}" for i in range(400)], 300)


def _write(folder: Path, name: str, content: Any) -> None:
    text = content if isinstance(content, str) else json.dumps(content)
    (folder / name).write_text(text, encoding="utf-8")


BERT = {"tokenizer_class": "BertTokenizer"}
LLAMA = {"additional_special_tokens": ["<x>", "<y>"], "pad_token": "<pad>", "tokenizer_class": "LlamaTokenizer"}
FILES: dict[str, dict[str, Any]] = {
    "bert": {"vocab.txt": "\n".join(WORDS) + "\n", "tokenizer_config.json": BERT},
    "odd newlines": {
        "vocab.txt": "\n".join((*WORDS, "\u0085", "\u2028", "x\u2028y")) + "\n",
        "tokenizer_config.json": BERT,
    },
    # [PAD] gets an id behind the others.
    "ernie": {"vocab.txt": "\n".join(WORDS[1:]) + "\n", "config.json": {"model_type": "ernie"}},
    "gpt2": {
        "vocab.json": {"a": 0, "b": 1, "ab": 2},
        "merges.txt": "#version: 0.2\na b\n",
        "tokenizer_config.json": {"tokenizer_class": "GPT2Tokenizer"},
    },
    "llama": {"tokenizer.model": None, "tokenizer_config.json": LLAMA},  # a sentencepiece model
    "fast": {},
    "fast with added tokens": {},
    "fast with tokens named beside": {},
    "fast with a list of tokens": {},
    "fast with named tokens": {},
}
BESIDE: dict[str, dict[str, Any]] = {
    "fast with tokens named beside": {},
    "fast with a list of tokens": {"extra_special_tokens": ["<video>", "<audio>"]},  # in place of the older name
    "fast with named tokens": {"extra_special_tokens": {"video_token": "<video>"}},
}


def _fast(folder: Path, model: bytes, kind: str) -> None:
    SentencePieceTokenizer(model).save_hf(folder)
    (folder / "tokenizer.model").unlink()
    if kind == "fast with added tokens":
        tokenizer = AutoTokenizer.from_pretrained(str(folder))
        tokenizer.add_tokens(["<new>", "<newer>"])
        tokenizer.add_special_tokens({"additional_special_tokens": ["<special>"]})
        shutil.rmtree(folder)
        tokenizer.save_pretrained(str(folder))
    elif kind in BESIDE:
        config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        _write(folder, "tokenizer_config.json", {**config, "additional_special_tokens": ["<image>"], **BESIDE[kind]})


@pytest.mark.parametrize("kind", FILES)
def test_a_folder_is_counted_as_transformers_counts_it(kind: str, tmp_path: Path, model: bytes) -> None:
    if kind.startswith("fast"):
        _fast(tmp_path, model, kind)
    for name, content in FILES[kind].items():
        (tmp_path / name).write_bytes(model) if content is None else _write(tmp_path, name, content)
    tokenizer, found = load_tokenizer(tmp_path), vocabulary_of(tmp_path)
    assert found.size == tokenizer.size
    assert found.mask == (tokenizer.special.mask is not None)
    if (tmp_path / "tokenizer.json").exists():
        alone = vocabulary_of(tmp_path / "tokenizer.json")
        assert alone.size == load_tokenizer(tmp_path / "tokenizer.json").size


def test_a_sentencepiece_model_is_counted_without_its_library(tmp_path: Path, model: bytes) -> None:
    path = tmp_path / "t.model"
    path.write_bytes(model)
    found = vocabulary_of(path)
    assert (found.size, found.mask) == (SentencePieceTokenizer(model).size, True)
    path.write_bytes(model[:-3])  # another file under the same name
    with pytest.raises(BadTokenizer, match="not a sentencepiece model"):
        vocabulary_of(path)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("tokenizer.json", '{"model": "x"}'),
        ("tokenizer.json", '{"model": {"vocab": {"a": 0}}, "added_tokens": ["b"]}'),
        ("tokenizer.json", '{"model": {"vocab": [1]}}'),
        ("tokenizer.json", "[" * 200_000),
        ("vocab.json", '{"a": 1e999}'),
        ("vocab.json", '{"a": null}'),
        ("tokenizer_config.json", '{"added_tokens_decoder": ["b"]}'),
        ("tokenizer_config.json", '{"additional_special_tokens": 3}'),
        ("special_tokens_map.json", "[]"),
        ("vocab.txt", ""),
    ],
)
def test_an_odd_file_is_refused_with_its_name(tmp_path: Path, name: str, text: str) -> None:
    _write(tmp_path, "vocab.json", {"a": 0})
    _write(tmp_path, name, text)
    if name == "vocab.txt":
        (tmp_path / "vocab.json").unlink()
    with pytest.raises(ConfigError, match=rf"\[tokenizer\] --tokenizer-model {tmp_path} cannot be read: ") as caught:
        _config("--tokenizer-model", str(tmp_path))
    assert str(caught.value).count(str(tmp_path)) > 1 or name == "vocab.txt"


def test_a_folder_that_only_its_own_library_reads_asks_for_the_number(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_text("IQ== 0\nIg== 1\n", encoding="utf-8")
    assert vocabulary_of(tmp_path) is None
    with pytest.raises(ConfigError, match=r"its files do not contain the number of its ids. Set --vocab-size"):
        _config("--tokenizer-model", str(tmp_path))
    assert _config("--tokenizer-model", str(tmp_path), "--vocab-size", "9").model.vocab_size == 9


def _config(*flags: str) -> Config:
    return parse("moe", flags, {})


def test_the_embedding_has_the_tokenizer_s_rows_unless_it_is_told_otherwise(tmp_path: Path, model: bytes) -> None:
    path = tmp_path / "t.model"
    path.write_bytes(model)
    size = SentencePieceTokenizer(model).size
    config = _config("--tokenizer-model", str(path))
    assert (config.model.vocab_size, config.origins["vocab_size"]) == (size, "derived")
    for more in ((), ("--data-path", "mock")):
        config = _config(*more)
        assert (config.model.vocab_size, config.origins["vocab_size"]) == (4096, "derived")
    config = _config("--tokenizer-model", str(path), "--vocab-size", "512")
    assert (config.model.vocab_size, config.origins["vocab_size"]) == (512, "flag")
    with pytest.raises(ConfigError, match=f"has {size} ids, more than the 10 rows"):
        _config("--tokenizer-model", str(path), "--vocab-size", "10")


def test_a_checkpoint_keeps_its_rows(tmp_path: Path, model: bytes) -> None:
    """Of a run from before, say, whose tokenizer has fewer ids than the 4,096 rows that it began with."""
    path, step = tmp_path / "t.model", tmp_path / "run" / "iter_0000005"
    path.write_bytes(model)
    step.mkdir(parents=True)
    facts = json.dumps(_config("--vocab-size", "777").model.facts(), sort_keys=True)
    _write(step, "layout.json", f'{{"sha256": "",\n"version": 1,\n"model": {facts},\n')
    _write(tmp_path / "run", "latest", "iter_0000005\n")
    load = ("--load", str(tmp_path / "run"), "--tokenizer-model", str(path))
    assert _config(*load).model.vocab_size == 777
    other = tmp_path / "other"
    other.mkdir()
    (other / "tokenizer.model").write_text("IQ== 0\n", encoding="utf-8")
    assert _config(*load[:2], "--tokenizer-model", str(other)).model.vocab_size == 777
    assert _config(*load, "--ckpt-step", "5", "--finetune").model.vocab_size == 777
    assert _config(*load, "--vocab-size", "800").model.vocab_size == 800  # which the checkpoint refuses
    first = ("--load", str(tmp_path / "new"), "--save", str(tmp_path / "new"), "--tokenizer-model", str(path))
    assert _config(*first).model.vocab_size == SentencePieceTokenizer(model).size


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ((), "4,096 rows (the default for a tokenizer that is trained on the data)"),
        (("--data-path", "mock"), "4,096 rows (the default for random tokens)"),
        (("--vocab-size", "64"), "64 rows (--vocab-size)"),
        (("--tokenizer-model", "t.model"), "{size} rows (--tokenizer-model t.model)"),
        (("--tokenizer-model", "none"), "4,096 rows (assumed, because --tokenizer-model none cannot be read here)"),
    ],
)
def test_a_plan_says_where_its_vocabulary_is_from(
    flags: tuple[str, ...], said: str, tmp_path: Path, model: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.model").write_bytes(model)
    lines = describe(Plan(_config(*flags, "--rules-only"), device_kind("cpu"))).splitlines()
    assert (
        next(line for line in lines if line.startswith("vocabulary"))
        == f"vocabulary: {said.format(size=SentencePieceTokenizer(model).size)}"
    )
