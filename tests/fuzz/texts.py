"""Small corpora and tokenizers, made once on a machine, at paths that a printed case can name again.

Text is that of ``pydoc_data.topics``, which every CPython carries: documents of a line to several pages.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from pydoc_data.topics import topics

from megapar.data.tokenizers.sentencepiece_tokenizer import train
from tests.support.chat import MARKED, save_tokenizer, write_conversations

FOLDER = Path(tempfile.gettempdir()) / f"megapar-fuzz-{os.getuid()}-2"  # the last number: of what is in it
LONG, SHORT, LINES = (str(FOLDER / name) for name in ("long.jsonl", "short.jsonl", "lines.txt"))
PIECES, BYTES = (str(FOLDER / name) for name in ("pieces.model", "bytes.json"))
CHATS, ASKED, CHATTER = (str(FOLDER / name) for name in ("chats.jsonl", "asked.jsonl", "chatter"))
HELD_OUT = {size: str(FOLDER / f"held-{size}.jsonl") for size in (60, 500, 4000)}  # by characters, about
SMALLEST_VOCABULARY = 400
LONGEST_CHAT = 112  # tokens, at most
LONGEST = 5000  # characters of a document


@functools.cache
def prepare() -> None:
    """Make the folder, if it is not there."""
    if FOLDER.exists():
        return
    made = Path(tempfile.mkdtemp(dir=FOLDER.parent))
    texts = [topics[name][:LONGEST] for name in sorted(topics)]
    by_length = sorted(texts, key=len)
    _write(made / Path(LONG).name, texts[::2])
    _write(made / Path(SHORT).name, [*by_length[:20], "x", "", "two words"])
    (made / Path(LINES).name).write_text("\n\n".join(texts[1::4]), encoding="utf-8")
    for size, path in HELD_OUT.items():
        _write(made / Path(path).name, [text[: size // 4] for text in texts[3:35:8]])
    (made / Path(PIECES).name).write_bytes(train(texts, SMALLEST_VOCABULARY))
    write_conversations(made / Path(CHATS).name, 60, seed=1, words=3)
    write_conversations(made / Path(ASKED).name, 25, seed=2, words=1)
    save_tokenizer(made / Path(CHATTER).name, MARKED)
    _save_byte_level(texts, made / Path(BYTES).name)
    try:
        made.rename(FOLDER)
    except OSError:  # another process was first
        shutil.rmtree(made)


def _write(path: Path, texts: Sequence[str]) -> None:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")


def _save_byte_level(texts: Sequence[str], path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=SMALLEST_VOCABULARY - 40, special_tokens=["</s>"], show_progress=False, initial_alphabet=alphabet
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(path))
