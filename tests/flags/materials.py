"""Files that rows of the table name: text, lexicons, a tokenizer, datasets, checkpoints and a published model."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.flags.observe import Seen, observe
from tests.flags.table import COMMON, SMALL
from tests.fuzz.option import spell_all
from tests.support.chat import CHATML, conversations, save_tokenizer

WORDS = ("red", "green", "blue", "river", "stone", "ancient", "quickly", "walks", "sees", "under", "mountain", "paper")
SAVED = 4


def make(folder: Path) -> None:
    """Everything that has a name in braces, but ``{new}``, which is each run's own."""
    folder.mkdir(parents=True, exist_ok=True)
    _text(folder / "text.jsonl", seed=1)
    _text(folder / "other.jsonl", seed=2)
    lines = (folder / "text.jsonl").read_text().splitlines()
    (folder / "broken.jsonl").write_text("\n".join([*lines[:20], "{not json", *lines[20:]]) + "\n")
    (folder / "texts").mkdir()
    for number, line in enumerate(lines):
        (folder / "texts" / f"{number}.txt").write_text("\n\n".join(json.loads(line).values()))
    (folder / "phrases.txt").write_text("\n".join(f"{one} {other}" for one in WORDS for other in WORDS) + "\n")
    _triples(folder / "triples.tsv", seed=3)
    _triples(folder / "other_triples.tsv", seed=4)
    (folder / "three.yaml").write_text("num_layers: 3\n")
    _datasets(folder)
    _tokenizer(folder)
    talks = (
        {**talk, "text": " ".join(one["content"] for one in talk["messages"])} for talk in conversations(8, words=4)
    )
    (folder / "chat.jsonl").write_text("".join(json.dumps(talk) + "\n" for talk in talks))
    (folder / "quiz.jsonl").write_text(json.dumps({"context": "a", "completion": " b"}))
    (folder / "dated.jinja").write_text("{{ strftime_now('%d %B %Y') }}" + CHATML)
    save_tokenizer(folder / "chat_tokenizer")
    _runs(folder)


def _text(path: Path, seed: int) -> None:
    draw = random.Random(seed)
    with path.open("w") as file:
        for _ in range(200):
            texts = ("\n".join(" ".join(draw.choices(WORDS, k=6)) + "." for _ in range(5)) for _ in range(2))
            file.write(json.dumps(dict(zip(("text", "title"), texts, strict=True))) + "\n")


def _triples(path: Path, seed: int) -> None:
    draw = random.Random(seed)
    rows = []
    for _ in range(60):
        head, relation, tail = draw.sample(WORDS, 3)
        rows.append("\t".join((head, relation, tail, f"the {head} {relation} the {tail}.")))
    path.write_text("\n".join(rows) + "\n")


def _datasets(folder: Path) -> None:
    for name, source in (("dataset", "text.jsonl"), ("another_dataset", "other.jsonl")):
        (folder / name).mkdir()
        shutil.copy(folder / source, folder / name / "train.jsonl")


def _tokenizer(folder: Path) -> None:
    from megapar.tools.main import main

    target = folder / "tokenizer.model"
    argv = ["data", "train-tokenizer", "--input", str(folder / "other.jsonl"), "--vocab-size", "280"]
    assert main([*argv, "--output", str(target)]) == 0
    assert target.exists()


def _runs(folder: Path) -> None:
    """A run's checkpoints of steps 2 and 4, the same with the last one damaged, and its exported model."""
    save, published = str(folder / "checkpoints"), str(folder / "published")
    flags = {"save": save, "save_interval": 2, "save_hf": published, "train_iters": SAVED, "lr_decay_iters": 6}
    seen = observe(1, "moe", line("moe", {**flags, "seed": 5}, folder), folder / "run")
    assert not seen.error, seen.error
    shutil.copytree(save, folder / "damaged")
    shard = max((folder / "damaged" / f"iter_{SAVED:07d}").glob("*.safetensors"), key=lambda path: path.stat().st_size)
    data = bytearray(shard.read_bytes())
    data[-5] ^= 1
    shard.write_bytes(bytes(data))


def line(kind: str, flags: Mapping[str, Any], materials: Path, new: Path | None = None) -> list[str]:
    """The small model's command line with these flags, names in braces as paths."""
    values = {**SMALL[kind], **COMMON, **flags}
    return spell_all({name: _placed(value, materials, new) for name, value in values.items()})


def _placed(value: Any, materials: Path, new: Path | None) -> Any:
    if isinstance(value, tuple):
        return tuple(_placed(item, materials, new) for item in value)
    if not isinstance(value, str) or not value.removeprefix("a=").startswith("{"):
        return value
    label, _, named = value.partition("{")
    name, _, rest = named.partition("}")
    return label + str((new or materials) if name == "new" else materials / name) + rest


def seen_of(world: int, kind: str, flags: Mapping[str, Any], materials: Path, folder: Path) -> Seen:
    """What a run with these flags shows; ``{new}`` is its folder."""
    return observe(world, kind, line(kind, flags, materials, folder), folder)
