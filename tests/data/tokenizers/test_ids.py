"""What a checkpoint keeps of a tokenizer: another one is told from the same one in another form."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from megapar.data.tokenizers.ids import facts_of, known_facts, same_ids
from megapar.data.tokenizers.load import load_tokenizer
from megapar.data.tokenizers.sentencepiece_tokenizer import train
from megapar.data.tokenizers.tokenizer import MockTokenizer, NoTokenizer

WORDS = ("river", "stone", "ancient", "quickly", "walks", "sees", "under", "mountain")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tokenizer in Hugging Face's form."""
    vocabulary = {word: number for number, word in enumerate(("[UNK]", "</s>", *WORDS))}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="[UNK]", eos_token="</s>")
    fast.save_pretrained(str(tmp_path / "hf"))
    return tmp_path / "hf"


def _facts(path: Path) -> dict[str, Any]:
    return facts_of(load_tokenizer(path), str(path))


def test_the_same_ids_in_another_form_are_the_same_tokenizer(folder: Path, tmp_path: Path, fresh_cache: Path) -> None:
    assert known_facts(str(folder)) is None  # its library would have to run
    facts = _facts(folder)
    assert known_facts(str(folder)) == facts
    load_tokenizer(folder).save_hf(tmp_path / "again")
    assert same_ids(facts, {**_facts(tmp_path / "again"), "fingerprint": "of another version of the library"})
    other = Path(shutil.copytree(folder, tmp_path / "other"))
    content = json.loads((other / "tokenizer.json").read_text())
    ids = content["model"]["vocab"]
    ids["river"], ids["stone"] = ids["stone"], ids["river"]
    (other / "tokenizer.json").write_text(json.dumps(content))
    assert not same_ids(facts, _facts(other))


def _bpe(path: Path, *merges: tuple[str, str]) -> dict[str, Any]:
    tokens = ("[UNK]", "</s>", *"qzj", "qz", "zj")
    Tokenizer(models.BPE({one: number for number, one in enumerate(tokens)}, list(merges))).save(str(path))
    return _facts(path)


def _unigram(path: Path, score: float) -> dict[str, Any]:
    Tokenizer(models.Unigram([("[UNK]", 0.0), ("q", -1.0), ("z", -2.0), ("qz", score)], unk_id=0)).save(str(path))
    return _facts(path)


def test_merges_in_another_order_and_other_scores_are_another_tokenizer(tmp_path: Path, fresh_cache: Path) -> None:
    """None of the texts that are tried holds these tokens."""
    merges = ("q", "z"), ("z", "j")
    one, other = _bpe(tmp_path / "a.json", *merges), _bpe(tmp_path / "b.json", *reversed(merges))
    ids = [load_tokenizer(tmp_path / name).encode("qzj") for name in ("a.json", "b.json")]
    assert ids[0] != ids[1]
    assert one["ids"] == other["ids"]
    assert not same_ids(one, other)
    content = json.loads((tmp_path / "a.json").read_text())
    content["model"]["merges"] = ["q z", "z j"]  # as older libraries write them
    (tmp_path / "c.json").write_text(json.dumps(content))
    assert same_ids(one, {**_facts(tmp_path / "c.json"), "fingerprint": "of another version of the library"})
    before = {name: value for name, value in other.items() if name != "joins"}
    assert same_ids(before, one)
    assert same_ids(one, before)
    assert known_facts(str(tmp_path / "b.json")) == other
    scores = [_unigram(tmp_path / f"{name}.json", score) for name, score in (("d", -1.5), ("e", -9.0))]
    assert not same_ids(*scores)


def test_a_sentencepiece_model_is_known_by_its_bytes(tmp_path: Path) -> None:
    path = tmp_path / "t.model"
    path.write_bytes(train(iter([" ".join(WORDS)] * 40), 60))
    facts, known = _facts(path), known_facts(str(path))
    assert same_ids(facts, known)
    assert not same_ids(facts, {"fingerprint": "another", "ids": None, "size": facts["size"]})


def test_weights_beside_a_tokenizer_are_not_read(folder: Path, fresh_cache: Path) -> None:
    weights = folder / "model-00001-of-00001.safetensors"
    with weights.open("wb") as file:
        file.truncate(1 << 40)  # of holes
    facts = _facts(folder)
    assert known_facts(str(folder)) == facts
    (folder / "bpe.codes").write_text("a small file of any name may be a tokenizer's")
    assert known_facts(str(folder)) is None


def test_a_large_file_of_a_tokenizer_is_read(folder: Path, fresh_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megapar.data.tokenizers.ids._LARGE_BYTES", 10, raising=False)
    facts = _facts(folder)
    assert known_facts(str(folder)) == facts
    content = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(content.replace("river", "rover"))
    assert known_facts(str(folder)) is None


def test_without_text_there_is_no_tokenizer_to_compare() -> None:
    assert facts_of(MockTokenizer(100)) is None
    assert facts_of(NoTokenizer(100)) is None
