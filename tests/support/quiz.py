"""Text with a tokenizer, and an evaluation task of choices and completions of many lengths."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megapar.data.tokenizers.sentencepiece_tokenizer import train as train_tokenizer

TEXT = "a rank holds a part of every layer and sends the rest of its rows to the others in turn"
WORDS = TEXT.split()
SIZES = ("--seq-length", "48", "--vocab-size", "90", "--dtype", "fp64", "--init-std", "0.2")


class Files:
    """The files in a folder."""

    def __init__(self, folder: Path) -> None:
        texts = [" ".join(WORDS[(7 * i + j * (1 + i % 5)) % len(WORDS)] for j in range(30)) for i in range(60)]
        self.data, self.model, self.task = folder / "my.jsonl", folder / "my.model", folder / "quiz.jsonl"
        self.data.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        self.model.write_bytes(train_tokenizer(texts, 90))
        records: list[Any] = [{"context": "", "choices": [" rank", " part", " turn"], "gold": 1}]
        for i in range(13):
            context = " ".join(WORDS[i : i + 1 + 2 * i])
            choices = [" rank", "every layer", " to the others"]
            records += [{"context": f"{context} " if i % 2 else context, "choices": choices, "gold": i % 3}]
            records += [{"context": context, "completion": " " + " ".join(WORDS[i : i + 2])}]
        self.task.write_text("\n".join(map(json.dumps, records)))

    def flags(self, *more: str) -> tuple[str, ...]:
        data = ("--data-path", str(self.data), "--split", "80,20", "--tokenizer-model", str(self.model))
        batch = ("--micro-batch-size", "2", "--global-batch-size", "8", "--train-iters", "2", "--eval-interval", "2")
        return (*SIZES, *data, *batch, "--eval-tasks", str(self.task), *more)
